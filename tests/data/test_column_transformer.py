"""Tables: what the federation learns is what scikit-learn learns of pooled data, for any partition."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer as Pooled
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, StandardScaler

import hansa
from hansa.data.apply_table import ApplyTable, TablePlan
from hansa.data.cells import text_code
from hansa.data.table_ops import TableNames
from hansa.experiment.settings import Run
from hansa.models import Logistic
from hansa.plumbing.errors import ConfigError, DataError
from hansa.privacy import privacy
from hansa.run.simulated_table import prepare_table

pd = pytest.importorskip("pandas")
N = 120


def people(seed: int = 0, rows: int = N) -> Any:
    """A table with numbers of very different sizes, texts, dates and missing values."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "age": rng.integers(17, 90, rows).astype(float),
        "weight": rng.lognormal(12, 2, rows),
        "small": rng.normal(1e-7, 1e-9, rows),
        "city": rng.choice(["Köln", "Lübeck", "Riga", "Visby"], rows, p=[0.5, 0.3, 0.15, 0.05]),
        "ship": rng.choice(["cog", "hulk", "holk"], rows),
        "seen": pd.Timestamp("2019-05-01") + pd.to_timedelta(rng.integers(0, 2000, rows), unit="D"),
    })  # fmt: skip
    for name in ("age", "weight", "city"):
        frame.loc[rng.random(rows) < 0.1, name] = np.nan
    return frame


def pairs(frame: Any, cuts: list[int]) -> list[tuple[Any, np.ndarray]]:
    """The rows of a frame divided among parties, with targets."""
    ends = [0, *sorted(cuts), len(frame)]
    parts = [frame.iloc[a:b] for a, b in itertools.pairwise(ends)]
    return [(part, np.arange(len(part)) % 2) for part in parts]


def learned(frame: Any, cuts: list[int], protection: Any = None, **options: Any) -> tuple[Any, TablePlan]:
    """The features of all rows, in their order, and the plan, as parties learn it."""
    prepare = hansa.ColumnTransformer(**options)
    task = hansa.Task(None, parties=pairs(frame, cuts), prepare=prepare, classes=2)
    made, prepared = prepare_table(hansa.FedAvg(), task, Run(), privacy(protection), None)
    assert prepared is not None
    return made.parties[0].numpy(), TablePlan.of(prepared.learned[1])


def scaled() -> Any:
    return make_pipeline(SimpleImputer(), StandardScaler())


def pooled(frame: Any, min_count: int) -> np.ndarray:
    """What scikit-learn makes of the same table at one place."""
    seen = frame["seen"].dt
    frame = frame.assign(year=seen.year, month=seen.month, weekday=seen.day_of_week)
    hot = OneHotEncoder(min_frequency=min_count, handle_unknown="infrequent_if_exist", sparse_output=False)
    cities = hot.fit_transform(frame.loc[frame["city"].notna(), ["city"]])
    city = np.zeros((len(frame), cities.shape[1]))
    city[frame["city"].notna()] = cities
    numbers = scaled().fit_transform(frame[["age", "weight", "small"]])
    ship = OneHotEncoder(min_frequency=min_count, sparse_output=False).fit_transform(frame[["ship"]])
    dates = scaled().fit_transform(frame[["year", "month", "weekday"]])
    return np.concatenate([numbers, city, ship, dates], axis=1)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 5), st.lists(st.integers(0, N), max_size=6))
def test_any_partition_learns_what_scikit_learn_learns_of_pooled_data(seed: int, cuts: list[int]) -> None:
    frame = people(seed)
    features, plan = learned(frame, cuts)
    expected = pooled(frame, 5)
    assert plan.width == expected.shape[1]
    np.testing.assert_allclose(features, expected, rtol=1e-9, atol=1e-9)


def test_a_secure_sum_learns_the_same_but_for_rounding() -> None:
    frame, cuts, numbers = people(1), [30, 75], ("fill", "centre", "scale")
    plain, plan = learned(frame, cuts)
    masked, hidden = learned(frame, cuts, {"secure": "masking"})
    for one, other in zip(plan.steps, hidden.steps, strict=True):
        mine = {name: getattr(one, name) for name in numbers if isinstance(getattr(one, name, None), float)}
        assert dataclasses.replace(other, **mine) == one  # type: ignore[type-var]
        assert [getattr(other, name) for name in mine] == pytest.approx(list(mine.values()), rel=1e-15)
    np.testing.assert_allclose(masked, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("protection", [None, {"secure": "masking"}])
@pytest.mark.parametrize("apart", [1e-12, 1e-3, 1.0])
def test_columns_far_from_zero_keep_their_deviation(apart: float, protection: Any) -> None:
    """The mean is 10^6 to 10^14 deviations from zero: deviations of the floats that parties hold, and of their mean."""
    draws, far = np.random.default_rng(3), (0.0, 1e6, 1e8, 1e9, 1e10, 1e14)
    frame = pd.DataFrame({f"at {at:g}": apart * (at + draws.normal(size=N)) for at in far})
    frame.loc[::7, "at 1e+08"] = np.nan
    features, plan = learned(frame, [50], protection)
    for k, (name, at) in enumerate(zip(frame, far, strict=True)):
        held = [Fraction(value) for value in frame[name].dropna()]
        mean = sum(held) / len(held)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in held) / N)  # missing values are the mean
        assert plan.steps[k].scale == pytest.approx(deviation, rel=1e-9), at  # type: ignore[union-attr]
        assert features[:, k].std() == pytest.approx(1, rel=1e-9), at
        assert abs(features[:, k].mean()) < 1e-15 * max(at, 10), at  # the mean is a float too


def test_an_empty_party_and_an_order_of_parties_change_nothing() -> None:
    frame = people(2)
    _, plan = learned(frame, [40])
    _, with_empty = learned(frame, [0, 40, 40])
    assert with_empty == plan
    _, turned = learned(pd.concat([frame.iloc[40:], frame.iloc[:40]]), [80])
    assert turned == plan


def test_imputation_and_bins_are_those_of_scikit_learn() -> None:
    frame = people(3)
    columns = {
        "age": {"bins": 5, "bounds": [17, 89], "spacing": "uniform", "impute": "mean"},
        "weight": {"impute": 7.5},
        "small": {"scale": "none"},
        "city": {"impute": "most_frequent", "min_count": 1},
        "ship": "drop",
        "seen": {"parts": ["days"], "scale": "none", "reference": "2019-01-01"},
    }
    features, plan = learned(frame, [11, 60], columns=columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edges = KBinsDiscretizer(5, encode="onehot-dense", strategy="uniform", quantile_method="averaged_inverted_cdf")
        bins = edges.fit(np.array([[17.0], [89.0]])).transform(SimpleImputer().fit_transform(frame[["age"]]))
    weight = make_pipeline(SimpleImputer(strategy="constant", fill_value=7.5), StandardScaler())
    cities = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(sparse_output=False))
    transformer = Pooled([("w", weight, ["weight"]), ("s", "passthrough", ["small"]), ("c", cities, ["city"])])
    expected = transformer.fit_transform(frame)
    days = (frame["seen"] - pd.Timestamp("2019-01-01")).dt.total_seconds().to_numpy()[:, None] / 86_400
    np.testing.assert_allclose(features, np.concatenate([bins, expected, days], axis=1), rtol=1e-9, atol=1e-9)
    assert plan.names[-1] == "seen.days"


def test_quantile_bins_are_exact_to_a_cell() -> None:
    frame = people(4, 600)[["age"]].dropna()
    _, plan = learned(frame, [100], columns={"age": {"bins": 4, "bounds": [0, 100]}})
    edges = plan.steps[0].edges  # type: ignore[union-attr]
    expected = np.quantile(frame["age"], [0.25, 0.5, 0.75], method="inverted_cdf")
    np.testing.assert_allclose(edges, expected, atol=100 / 4096 * 1.001)


def test_rare_categories_become_other_and_are_never_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    answer = TableNames.run

    def watched(op: TableNames, party: Any, payload: Any, memory: Any) -> Any:
        asked.update(payload["prefix"].tolist())
        return answer(op, party, payload, memory)

    monkeypatch.setattr(TableNames, "run", watched)
    frame = pd.DataFrame({"drug": ["a"] * 6 + ["b"] * 4 + ["secret"] * 2 + [None] * 3, "n": range(15)})
    features, plan = learned(frame, [4, 9], min_count=4)
    assert plan.names == ["drug=a", "drug=b", "drug=(other)", "n"]
    assert features[:, :3].sum(0).tolist() == [6, 4, 2]
    assert not features[12:, :3].any()  # missing: all zero
    assert asked == {text_code(text) >> 16 for text in "ab"}


def test_an_unseen_category_is_other_where_there_is_one_and_zero_elsewhere() -> None:
    frame = pd.DataFrame({"a": ["x"] * 6 + ["rare"], "b": ["y"] * 7, "n": range(7)})
    _, plan = learned(frame, [3], columns={"n": "drop"})
    new = ApplyTable().prepared({"a": ["never"], "b": ["never"]}, plan.tree(), torch.device("cpu"), None)
    assert dict(zip(plan.names, new[0].tolist(), strict=True)) == {"a=x": 0, "a=(other)": 1, "b=y": 0}


def test_an_indicator_says_where_a_value_was_missing() -> None:
    frame = people(5)
    features, plan = learned(frame, [50], columns={"age": {"indicator": True}})
    at = plan.names.index("age=(missing)")
    assert np.array_equal(features[:, at] == 1, frame["age"].isna())


def test_bounds_and_listed_categories_need_no_answers_and_hashes_no_categories() -> None:
    frame = people(6)[["age", "city", "ship", "seen"]]
    columns = {"age": {"bounds": [20, 80]}, "city": {"categories": ["Riga", "Köln"]}, "ship": {"hash": 4},
               "seen": {"parts": ["year", "month"], "bounds": [2019, 2025]}}  # fmt: skip
    prepare = hansa.ColumnTransformer(columns=columns)
    task = hansa.Task(Logistic((4,), 2), parties=pairs(frame, [40, 80]), prepare=prepare, classes=2)
    made, prepared = prepare_table(hansa.FedAvg(), task, Run(), privacy({"dp": {"kind": "central", "clip": 1.0,
                                                                                "sigma": 1.0}}), None)  # fmt: skip
    assert prepared is not None and prepared.bytes_up < 1000
    x = made.parties[0]
    assert float(x[:, 0].abs().max()) <= 1
    assert made.model.inputs == (x.shape[1],) == (1 + 2 + 4 + 2,)
    with pytest.raises(ConfigError, match=r"without noise over the parties' data \(age"):
        prepare_table(hansa.FedAvg(), dataclasses.replace(task, prepare=hansa.ColumnTransformer()), Run(),
                      privacy({"dp": {"kind": "central", "clip": 1.0, "sigma": 1.0}}), None)  # fmt: skip


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(0, 20), max_size=3), st.sampled_from([0.1, 1 / 3, 2024.7, -1e10 / 7]))
def test_a_constant_column_becomes_zero_for_any_partition(cuts: list[int], value: float) -> None:
    frame = pd.DataFrame({"same": [value] * 20, "gaps": [value, None] * 10})
    for options in ({}, {"columns": {"gaps": {"impute": value}}}):
        features, plan = learned(frame, cuts, **options)
        assert not features.any() and {step.scale for step in plan.steps} == {1.0}  # type: ignore[union-attr]


def test_a_constant_column_and_one_without_values_are_named(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"one": [3.0] * 8, "none": [None] * 8, "n": range(8)})
    features, _ = learned(frame, [4], columns={"none": "number"})
    assert not features[:, :2].any()
    assert "'one' is constant" in caplog.text and "'none' has no value at any party" in caplog.text


def test_a_column_that_is_all_missing_at_one_party_takes_the_kind_of_the_others() -> None:
    frame = people(7)
    frame.loc[: N // 2, "city"] = np.nan
    frame.loc[: N // 2, "age"] = np.nan
    features, plan = learned(frame, [N // 4])
    assert np.isfinite(features).all() and "city=Riga" in plan.names


@pytest.mark.parametrize(("change", "options", "message"), [
    ({"age": ["4"] * 5 + ["old"] * 2}, {"age": "number"}, r"row \d, column 'age': expected a number, got 'old'"),
    ({"age": ["2020-01-01"] * 6 + ["soon"]}, {"age": "date"}, r"row \d, column 'age': expected a date .* got 'soon'"),
    ({"age": [1.0] * 6 + [np.inf]}, {}, r"row \d, column 'age': expected a number, got inf"),
    ({}, {"heigth": "number"}, "no party has a column 'heigth'"),
    ({}, {"city": {"bins": 4, "bounds": [0, 1]}}, "expected a number, got 'Riga'"),
    ({}, {"age": {"categories": ["1"], "bounds": [0, 1]}}, "does not apply to a column of"),
    ({}, {"age": {"bins": 4}}, "bins needs bounds"),
    ({}, {"age": 3}, "expected a table of options, a kind or 'drop', got 3"),
    ({}, {"age": {"kind": "numbr"}}, "columns.age.kind: expected one of 'number', 'text'"),
    ({}, {"age": "drop", "city": "drop"}, "all columns are dropped"),
])  # fmt: skip
def test_a_wrong_table_or_option_is_named_in_one_sentence(change: Any, options: Any, message: str) -> None:
    frame = pd.DataFrame({"age": [float(k) for k in range(7)], "city": ["Riga"] * 7} | change)
    with pytest.raises((ConfigError, DataError), match=message):
        learned(frame, [5], columns=options)


def test_duplicate_columns_and_different_columns_are_refused() -> None:
    twice = pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"])
    with pytest.raises(DataError, match="two columns are called 'a'"):
        learned(twice, [1])
    parties = [(pd.DataFrame({"a": [1, 2]}), [0, 1]), (pd.DataFrame({"b": [1, 2]}), [0, 1])]
    task = hansa.Task(None, parties=parties, prepare=hansa.ColumnTransformer(), names=["north", "south"])
    with pytest.raises(DataError, match=r"south.*lack 'a' and have besides 'b'"):
        prepare_table(hansa.FedAvg(), task, Run(), privacy(None), None)


def test_a_column_of_mixed_kinds_at_parties_is_a_text_or_names_the_odd_party() -> None:
    parties = [(pd.DataFrame({"zip": values}), [0, 1]) for values in ([1, 2], [3, 4], ["5a", "6b"])]
    task = hansa.Task(None, parties=parties, prepare=hansa.ColumnTransformer(), names=["a", "b", "c"])
    with pytest.raises(DataError, match=r"c.*its column 'zip' holds texts, and that of most parties numbers"):
        prepare_table(hansa.FedAvg(), task, Run(), privacy(None), None)
    as_text = dataclasses.replace(task, prepare=hansa.ColumnTransformer(columns={"zip": "text"}, min_count=1))
    _, prepared = prepare_table(hansa.FedAvg(), as_text, Run(), privacy(None), None)
    assert prepared is not None
    assert TablePlan.of(prepared.learned[1]).names == [f"zip={zip}" for zip in ("1", "2", "3", "4", "5a", "6b")]


def test_ten_thousand_categories_are_refused_by_name_or_hashed_by_choice() -> None:
    frame = pd.DataFrame({"user": [f"u{k % 10_000}" for k in range(20_000)], "n": 0.0})
    with pytest.raises(ConfigError, match="column 'user' has too many categories: more than 256"):
        learned(frame, [9000], min_count=2)
    features, _ = learned(frame, [9000], columns={"user": {"hash": 16}})
    assert features.shape == (20_000, 17) and features[:, :16].sum() == 20_000
    features, plan = learned(frame, [9000])  # all are rarer than 5 samples
    assert plan.names == ["user=(other)", "n"]


def test_long_texts_and_odd_letters_keep_their_own_categories() -> None:
    texts = ["ä" * 60 + "1", "ä" * 60 + "2", "tab\tand\nline", "x\0y"] * 6
    _, plan = learned(pd.DataFrame({"t": texts, "n": range(24)}), [7])
    assert plan.width == 4 + 1


def test_words_for_missing_values_can_be_chosen() -> None:
    frame = pd.DataFrame({"a": ["1", "2", "unknown", "4", "NA"], "n": range(5)})
    _, plan = learned(frame, [2], missing=["unknown", "NA"])
    assert plan.layout.columns[0] == ("a", "number")


def test_a_saved_model_takes_raw_rows_and_gives_the_same_bits(tmp_path: Any) -> None:
    frame = people(8)
    task = hansa.Task(Logistic((6,), 2), parties=pairs(frame, [40, 80]),
                      prepare=hansa.ColumnTransformer(columns={"ship": "drop"}),
                      test=(frame.iloc[:20], np.arange(20) % 2), classes=2)  # fmt: skip
    result = hansa.simulate(hansa.FedAvg(), task, rounds=2, engine="reference", run_dir=tmp_path / "run")
    model = hansa.load(tmp_path / "run")
    rows = frame.head(5)
    expected = result.predict(rows)
    assert expected.shape == (5, 2)
    assert torch.equal(model.predict(rows), expected)
    shuffled = rows[list(rows.columns)[::-1]].assign(extra=1)  # columns by name, others ignored
    assert torch.equal(model.predict(shuffled), expected)
    as_rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    assert torch.equal(model.predict(as_rows), expected)
    with pytest.raises(DataError, match="there is no column 'age'"):
        model.predict(rows.drop(columns="age"))
    with pytest.raises(DataError, match="expected a table with the columns age, weight"):
        model.predict(torch.zeros(1, 3))
