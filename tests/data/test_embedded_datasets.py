"""Data sets that need no file: heart, digits, breast-cancer, synthetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.data import HEART_FEATURES, BreastCancer, Data, Dataset, Digits, Heart, Synthetic, table
from hansa.data.dataset import stratified_split
from hansa.plumbing.errors import ConfigError, DataError

EMBEDDED: list[Dataset] = [Heart(), Digits(), BreastCancer(), Synthetic()]


def is_sound(data: Data) -> bool:
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    assert len(data.x) == len(data.y) > 0
    assert data.classes is not None and data.y.unique().tolist() == list(range(data.classes))
    if data.test is not None:
        assert data.test[0].shape[1:] == data.x.shape[1:] and len(data.test[0]) == len(data.test[1])
    if data.parties is not None:
        assert data.party_names is not None and len(data.party_names) == len(data.parties)
        assert np.array_equal(np.sort(np.concatenate(data.parties)), np.arange(len(data.x)))
    return True


@pytest.mark.parametrize("dataset", EMBEDDED, ids=lambda d: d.name)
def test_embedded_data_sets_are_sound_and_the_same_twice(dataset: Dataset) -> None:
    first, again = dataset.load(), build("dataset", dataset.name).load()
    assert is_sound(first)
    assert torch.equal(first.x.nan_to_num(-1), again.x.nan_to_num(-1)) and torch.equal(first.y, again.y)


def test_the_known_data_sets_are_registered() -> None:
    assert set(registered("dataset")) >= {
        "adult", "breast-cancer", "cifar10", "digits", "fashion-mnist", "heart", "mnist", "shakespeare", "synthetic",
    }  # fmt: skip


def test_heart_has_the_counts_that_uci_publishes() -> None:
    heart = Heart().load()
    assert heart.parties is not None and heart.party_names == ("cleveland", "hungary", "switzerland", "va")
    assert [len(rows) for rows in heart.parties] == [303, 294, 123, 200]
    assert [int(heart.y[rows].sum()) for rows in heart.parties] == [139, 106, 115, 149]
    assert heart.x.shape == (920, len(HEART_FEATURES)) == (920, 22)


def test_heart_marks_missing_values_as_nan_and_imputes_nothing() -> None:
    heart = Heart().load()
    assert heart.parties is not None
    swiss = heart.x[heart.parties[2]]
    assert swiss[:, HEART_FEATURES.index("chol")].isnan().all()  # published as 0
    for column in ("chol", "trestbps"):
        assert not (heart.x[:, HEART_FEATURES.index(column)] == 0).any()
    for group in ("cp", "restecg", "slope", "thal"):
        columns = [i for i, name in enumerate(HEART_FEATURES) if name.startswith(f"{group}=")]
        total = heart.x[:, columns].sum(dim=1)
        assert ((total == 1) | total.isnan()).all()


def test_heart_starts_with_the_first_patient_of_cleveland() -> None:
    row = dict(zip(HEART_FEATURES, Heart().load().x[0].tolist(), strict=True))
    assert row["age"] == 63 and row["trestbps"] == 145 and row["chol"] == 233 and row["thalach"] == 150
    assert row["cp=1"] == row["restecg=2"] == row["slope=3"] == row["thal=6"] == 1
    assert row["oldpeak"] == pytest.approx(2.3)


def test_digits_are_images_between_0_and_1() -> None:
    digits = Digits().load()
    assert digits.x.shape == (1438, 1, 8, 8) and digits.test is not None and len(digits.test[1]) == 359
    assert digits.x.min() == 0 and digits.x.max() == 1


def test_what_is_read_from_scikit_learns_files_is_what_it_loads_itself() -> None:
    from sklearn.datasets import load_breast_cancer, load_digits

    for dataset, loaded, scale in ((Digits(), load_digits(), 16), (BreastCancer(), load_breast_cancer(), 1)):
        data = dataset.load()
        assert data.test is not None
        train, test = stratified_split(loaded.target, 0.2, seed=0)
        for part, (x, y) in ((train, (data.x, data.y)), (test, data.test)):
            assert np.array_equal(x.flatten(1).numpy(), (loaded.data[part] / scale).astype(np.float32))
            assert np.array_equal(y.numpy(), loaded.target[part])


def test_a_scikit_learn_without_its_files_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.data.scikit.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"digits\.csv\.gz: not found in scikit-learn; install scikit-learn 1\.5"):
        Digits().load()


def test_a_stratified_split_takes_the_same_fraction_of_each_class() -> None:
    y = np.repeat([0, 1, 2], [50, 100, 10])
    train, test = stratified_split(y, 0.2, seed=3)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(160))
    assert np.bincount(y[test]).tolist() == [10, 20, 2]


def test_synthetic_parties_have_the_same_labels_only_when_iid() -> None:
    def distance_to_all(dataset: Synthetic) -> float:
        data = dataset.load()
        assert data.parties is not None
        counts = np.array(table(data.parties, data.y, 10))
        shares, overall = counts / counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
        return float(np.abs(shares - overall).sum(axis=1).mean() / 2)

    assert distance_to_all(Synthetic(iid=True)) < 0.25 < 0.5 < distance_to_all(Synthetic(1.0, 1.0))


def test_synthetic_iid_takes_neither_alpha_nor_beta() -> None:
    for name in ("alpha", "beta"):
        with pytest.raises(ConfigError, match=f"{name} = 5.0 has no effect while iid is true"):
            Synthetic(iid=True, **{name: 5.0})


def test_synthetic_beta_moves_features_and_alpha_no_label() -> None:
    plain, alpha, beta = (Synthetic(a, b).load() for a, b in ((0.0, 0.0), (3.0, 0.0), (0.0, 3.0)))
    assert beta.x.std() > 2 * plain.x.std()
    assert torch.equal(plain.y, alpha.y)  # alpha shifts all scores of a sample alike


def test_synthetic_features_spread_as_the_paper_says() -> None:
    x = Synthetic(iid=True, parties=100).load().x
    assert x.std(dim=0)[[0, 9, 59]].numpy() == pytest.approx(np.array([1.0, 10**-0.6, 60**-0.6]), rel=0.05)


def test_synthetic_parties_stay_the_same_when_more_join() -> None:
    few, many = Synthetic(parties=3).load(), Synthetic(parties=6).load()
    assert torch.equal(few.x, many.x[: len(few.x)])
    assert few.parties is not None and min(len(rows) for rows in few.parties) >= 40


def test_synthetic_refuses_what_is_no_deviation() -> None:
    with pytest.raises(ConfigError, match="alpha must be at least 0"):
        Synthetic(alpha=-1.0)
    with pytest.raises(ConfigError, match="parties must be at least 1"):
        Synthetic(parties=0)
