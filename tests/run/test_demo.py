from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from hansa import FedAvg, Standardise, Task, build, simulate
from hansa.demo import hospitals as demonstration
from hansa.demo.hospitals import CANDIDATES, REGIMES, ROUNDS, Demo, hospitals, picture, split, tables
from hansa.demo.report import findings
from hansa.plumbing.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return hospitals(tmp_path_factory.mktemp("demo"), seeds=2)


def test_the_demonstration_scores_every_hospital_under_every_regime(demo: Demo) -> None:
    assert [h.name for h in demo.hospitals] == ["Cleveland", "Hungary", "Switzerland", "VA"]
    assert sum(h.patients for h in demo.hospitals) == 920
    assert {"local-only", "federated", "fine-tuned", "chosen", "centralised"} <= set(REGIMES)
    for regime in REGIMES:
        assert demo.scores["loss"][regime].shape == (2, 4)
        assert ((demo.scores["loss"][regime] > 0) & (demo.scores["loss"][regime] < 1.5)).all()
        for score in ("auc", "accuracy"):
            assert demo.scores[score][regime].shape == (2, 4)
            assert ((demo.scores[score][regime] > 0.4) & (demo.scores[score][regime] <= 1)).all()
    assert demo.report.is_file()


def test_a_hospital_s_chosen_scores_are_those_of_the_method_that_it_chose(demo: Demo) -> None:
    assert np.shape(demo.chosen) == (2, 4)
    for seed, row in enumerate(demo.chosen):
        for k, name in enumerate(row):
            assert name in CANDIDATES and "centralised" not in CANDIDATES
            assert demo.scores["loss"]["chosen"][seed, k] == demo.scores["loss"][name][seed, k]


def test_the_choice_looks_at_validation_patients_alone() -> None:
    data = build("dataset", "heart").load(None)
    trial = demonstration._Trial(data, None, 1)
    trial.run(0)
    train, validation, test = split(data, seed=0)
    models = trial._candidates(train, test, 0)
    losses = {name: [m["loss"] for m in model.measure(validation)] for name, model in models.items()}
    assert trial.chosen == [[min(CANDIDATES, key=lambda name: losses[name][k]) for k in range(4)]]


def test_fine_tuned_scores_are_those_of_the_run_s_own_report(demo: Demo) -> None:
    data = build("dataset", "heart").load(None)
    trial = demonstration._Trial(data, None, 1)
    trial.run(0)
    after = trial.federated[0].summary["finetuned"]["after"]["parties"]
    reported = [after[name]["loss"] for name in data.party_names or ()]
    np.testing.assert_allclose(demo.scores["loss"]["fine-tuned"][0], reported, rtol=1e-6)


def test_the_curves_end_where_the_federated_scores_are(demo: Demo) -> None:
    for score in ("auc", "accuracy"):
        assert demo.curves[score].shape == (2, ROUNDS)
        np.testing.assert_allclose(demo.curves[score][:, -1], demo.by_seed(score, "federated"), rtol=1e-9)


def test_every_round_and_the_preparation_cost_bytes(demo: Demo) -> None:
    assert len(demo.bytes_up) == len(demo.bytes_down) == ROUNDS
    assert min(demo.bytes_up.min(), demo.bytes_down.min(), *demo.prepared) > 0


def test_the_same_seed_gives_the_same_numbers(demo: Demo, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    again = hospitals(tmp_path, seeds=1, on_progress=lambda done, total: seen.append((done, total)))
    for regime in REGIMES:
        np.testing.assert_array_equal(again.scores["auc"][regime][0], demo.scores["auc"][regime][0])
    assert seen == [(done, 7) for done in range(8)]


def test_scaling_learned_by_federated_sums_is_that_of_the_pooled_patients() -> None:
    train, _, test = split(build("dataset", "heart").load(None), seed=0)
    task = Task(lambda: nn.Linear(22, 2).double(), "cross_entropy", train, party_tests=test, prepare=Standardise())
    holdings = simulate(FedAvg(), task, rounds=1).training.holdings
    pooled, held = (np.concatenate([x.double().numpy() for x, _ in pairs]) for pairs in (train, test))
    mean, std = np.nanmean(pooled, axis=0), np.nanstd(pooled, axis=0)
    assert holdings.tests is not None
    for ours, raw in ((holdings.train.x, pooled), (holdings.tests.x, held)):
        np.testing.assert_allclose(ours.numpy(), np.nan_to_num((raw - mean) / std), atol=1e-9, rtol=0)


def test_a_split_holds_out_patients_of_both_kinds_for_the_test_and_for_the_choice() -> None:
    data = build("dataset", "heart").load(None)
    train, validation, test = split(data, seed=3)
    for (x, y), (_, chosen_y), (held_x, held_y) in zip(train, validation, test, strict=True):
        assert len(x) == len(y) and len(held_x) == len(held_y)
        for kind in (0, 1):
            held, chosen, left = (int((each == kind).sum()) for each in (held_y, chosen_y, y))
            assert held == round(0.25 * (left + chosen + held)) > 0
            assert chosen == round(0.2 * (left + chosen)) > 0
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(test, split(data, seed=4)[2], strict=True))


def test_the_table_fits_eighty_columns(demo: Demo) -> None:
    console = Console(width=80, record=True, force_terminal=False)
    console.print(*tables(demo), sep="\n")
    text = console.export_text()
    assert "…" not in text
    for word in ("Cleveland", "Hungary", "Switzerland", "VA", "mean", *REGIMES):
        assert word in text


def test_an_undefined_auc_is_left_out_and_said(demo: Demo) -> None:
    gaps = {regime: demo.scores["auc"][regime].copy() for regime in REGIMES}
    for values in gaps.values():
        values[0, 2] = np.nan
    partial = dataclasses.replace(demo, scores={**demo.scores, "auc": gaps})
    assert partial.cell("auc", "federated", 2)[0] == gaps["federated"][1, 2]
    assert np.isfinite(partial.cell("auc", "federated")[0])
    assert any("undefined at Switzerland on 1 of 2 splits" in sentence for sentence in findings(partial))
    for values in gaps.values():
        values[:, 2] = np.nan
    assert np.isnan(partial.cell("auc", "federated", 2)[0])
    assert np.isfinite(partial.cell("auc", "federated")[0])
    assert findings(partial)


def test_prevalence_is_named_as_the_reason_only_where_the_loss_is_there(demo: Demo) -> None:
    def told(changes: list[float]) -> str:
        alone = np.full((2, 4), 0.8)
        accuracy = {regime: alone for regime in REGIMES} | {"federated": alone + np.array(changes)}
        changed = dataclasses.replace(demo, scores={**demo.scores, "accuracy": accuracy})
        return next(sentence for sentence in findings(changed) if sentence.startswith("Mean accuracy"))

    assert "93% of Switzerland's patients" in told([0.01, -0.01, -0.1, 0.02])
    assert "Switzerland" not in told([-0.1, -0.1, -0.05, 0.0])
    assert "Switzerland" not in told([0.1, 0.0, -0.05, 0.0])


def test_the_picture_is_a_small_png(demo: Demo, tmp_path: Path) -> None:
    picture(demo, tmp_path / "demo.png")
    raw = (tmp_path / "demo.png").read_bytes()
    assert raw.startswith(b"\x89PNG") and len(raw) < 200_000


def test_a_demonstration_without_seeds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        hospitals(tmp_path, seeds=0)


def test_show_prints_the_table_and_where_the_report_is(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demonstration, "hospitals", lambda out, seeds, on_progress: demo)
    demonstration.show(demo.report.parent, 2)
    printed = capsys.readouterr().out
    assert "Switzerland" in printed and "Mean AUC" in printed and str(demo.report) in printed
