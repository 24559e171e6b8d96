"""Callbacks after rounds, early stopping with a margin, and the best model as the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from hansa.local import SGD
from hansa.plumbing.errors import ConfigError
from quadratics import Scalar

X, ONE = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)


def descent(lr: float = 0.25, far: float = 1.0, test: bool = True, **settings: Any) -> hansa.Result:
    """w goes to 1 on mse; with lr = 0.25 its error halves every round. The test set wants `far`."""
    task = hansa.Task(Scalar, "mse", [(X, ONE)] * 2, test=(X, far * ONE) if test else None)
    return hansa.simulate(hansa.FedAvg(local=SGD(lr=lr, batch=None)), task, **{"rounds": 8, **settings})


def test_callbacks_see_every_round_and_the_model_so_far() -> None:
    seen: list[tuple[int, float, int]] = []

    class Note(hansa.Callback):
        ended: hansa.Result | None = None

        def round(self, line: dict[str, Any], result: hansa.Result) -> None:
            seen.append((line["round"], float(result.params["w"]), len(result.history)))
            line["loss"] = -1.0  # a copy: the run's own line stays

        def end(self, result: hansa.Result) -> None:
            self.ended = result

    note = Note()
    result = descent(rounds=3, callbacks=[note, lambda line, result: None])
    assert seen == [(1, 0.5, 0), (2, 0.75, 1), (3, 0.875, 2)]
    assert note.ended is result and result.history[-1]["loss"] == pytest.approx(0.125**2)


def test_a_callback_stops_a_run_with_its_reason_and_the_last_model_is_evaluated() -> None:
    result = descent(eval_every=5, callbacks=[lambda line, result: "enough" if line["round"] == 3 else None])
    assert result.summary["rounds"] == 3 and result.summary["stopped"] == "enough"
    assert result.history[-1]["loss"] == pytest.approx(0.125**2)


def test_a_run_that_a_callback_stopped_does_not_go_on_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enough(line: dict[str, Any], result: hansa.Result) -> str | None:
        return "enough" if line["round"] == 2 else None

    from hansa.run.recorder import Recorder

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Recorder, "finish", lambda *_: (_ for _ in ()).throw(MemoryError))
        descent(callbacks=enough, run_dir=tmp_path / "run", checkpoint_seconds=0.0)
    result = descent(run_dir=tmp_path / "run", checkpoint_seconds=0.0, resume=True)
    assert result.summary["rounds"] == 2 and result.summary["stopped"] == "enough"


@pytest.mark.parametrize("wrong", [3, "text", hansa.Callback, [None]])
def test_what_is_no_callback_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks: expected objects of hansa\.Callback"):
        descent(callbacks=wrong)


def test_a_callback_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="return None, or the reason to stop as a text"):
        descent(callbacks=[lambda line, result: True])


def test_only_an_improvement_beyond_the_margin_counts() -> None:
    """Losses are 0.25, 0.0625, 0.0156, 0.0039: improvements of 0.1875, 0.047, 0.012."""
    result = descent(patience=2, min_delta=0.04)
    assert result.summary["rounds"] == 5
    assert result.summary["stopped"] == "loss did not improve in 2 evaluations"
    assert descent(patience=2, min_delta=0.011).summary["rounds"] == 6


def test_the_best_model_may_be_the_result(tmp_path: Path) -> None:
    """The test set wants 0.5, which the model passes in round 1 on its way to 1."""
    result = descent(far=0.5, keep="best", patience=3, run_dir=tmp_path / "run")
    assert float(result.params["w"]) == 0.5 and result.summary["kept_round"] == 1 and result.summary["rounds"] == 4
    assert result.summary["loss"] == 0.0 and result.history[-1]["loss"] > 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["kept_round"] == 1
    assert float(hansa.load(tmp_path / "run").params["w"]) == 0.5
    assert float(descent(far=0.5, patience=3).params["w"]) > 0.9


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown metric 'lss'; did you mean 'loss'"):
        descent(metric="lss", patience=2)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_best_model_survives_a_resume_at_any_round(at: int, tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["round"] == at:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"far": 0.8, "keep": "best", "rounds": 5, "run_dir": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        descent(on_round=stop, **settings)
    resumed, whole = descent(resume=True, **settings), descent(far=0.8, keep="best", rounds=5)
    assert torch.equal(resumed.params["w"], whole.params["w"]) and resumed.summary["kept_round"] == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"keep": "best", "test": False}, "target, patience and keep need a test set"),
        ({"patience": 2, "test": False}, "target, patience and keep need a test set"),
        ({"min_delta": 0.1}, "min_delta applies to patience and keep"),
        ({"min_delta": -0.1, "patience": 1}, "min_delta must be at least 0"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        descent(**settings)


def test_models_of_the_parties_own_are_not_kept_by_round() -> None:
    task = hansa.Task(Scalar, "mse", [(X, ONE)] * 2, party_tests=[(X, ONE)] * 2)
    with pytest.raises(ConfigError, match="each party has a model of its own, which is not kept by round"):
        hansa.simulate(hansa.build("algorithm", "ditto"), task, rounds=2, keep="best")
