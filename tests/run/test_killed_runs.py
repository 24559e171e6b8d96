"""A killed run resumes to the same bits; under another plan it is not resumed unless forced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from doomed import CASES, EXPERIMENTS, case_folder

import hansa
from hansa.artifacts.run_folder import RunFolder
from hansa.plumbing import codec, disk

ALL = [(name, case) for name, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def graveyard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every run of `doomed.CASES`, killed."""
    root = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("doomed.py")
    done = subprocess.run(
        [sys.executable, str(script), str(root)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # it computes gradients before it forks (plumbing.forking)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder, ends in json.loads(done.stdout).items():
        assert set(ends) == {"killed"}, folder
    moments = [moment(case_folder(root, name, case)) for name, case in ALL]
    (root / "moments.json").write_text(json.dumps(moments))
    return root


def moment(folder: Path) -> dict[str, Any]:
    """The state that a killed run left: a checkpoint, the actual and the recorded length of its metrics, memory
    logs."""
    checkpoint, metrics = folder / "checkpoint.safetensors", folder / "metrics.jsonl"
    known = int(codec.decode(checkpoint.read_bytes())["metrics_length"]) if checkpoint.exists() else 0
    length = metrics.stat().st_size if metrics.exists() else 0
    logs = sorted(path.name for path in folder.glob("memories-*.log"))
    return {"checkpoint": checkpoint.exists(), "metrics": length, "known": known, "logs": logs}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, hansa.Result]:
    return {name: run() for name, run in EXPERIMENTS.items()}


def untimed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in history]


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, tensors included."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), ALL, ids=str)
def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(
    name: str, case: Any, graveyard: Path, undisturbed: dict[str, hansa.Result]
) -> None:
    folder, whole = case_folder(graveyard, name, case), undisturbed[name]
    found = EXPERIMENTS[name](run_dir=folder, resume=True, checkpoint_seconds=0)
    assert same(found.params, whole.params)
    assert same(found.memories, whole.memories)
    assert same(found.state.tree(), whole.state.tree())
    assert untimed(found.history) == untimed(whole.history)
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert untimed(written) == untimed(whole.history)
    for total in ("bytes_up", "bytes_down", "rounds", "stopped", "accuracy", "loss"):
        assert found.summary[total] == whole.summary[total]
    saved = codec.decode((folder / "model.safetensors").read_bytes())
    assert same(saved["params"], whole.params)
    assert not list(folder.glob("*.part"))


@pytest.mark.slow
def test_the_kills_left_runs_at_different_moments(graveyard: Path) -> None:
    """The cases are useful only if they differ."""
    moments = json.loads((graveyard / "moments.json").read_text())
    assert any(not moment["checkpoint"] for moment in moments)
    assert any(moment["checkpoint"] and moment["metrics"] > moment["known"] for moment in moments)
    assert any(moment["checkpoint"] and moment["metrics"] == moment["known"] for moment in moments)
    assert len({moment["known"] for moment in moments}) > 3
    assert {len(moment["logs"]) for moment in moments} == {0, 1, 2}  # two while memories move to a new log


def stopped(folder: Path, engine: str = "reference", rounds: int = 2) -> None:
    """A run that stopped after some of its rounds, with a checkpoint."""

    class Enough(Exception):
        pass

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == rounds:
            raise Enough

    with pytest.raises(Enough):
        run(folder, engine, on_round=stop)


def run(folder: Path | None, engine: str = "reference", **settings: Any) -> hansa.Result:
    from doomed import task

    given = {"rounds": 4, "engine": engine, "run_dir": folder, "checkpoint_seconds": 0, **settings}
    return hansa.simulate(hansa.FedAvg(), task(), **given)


def test_resuming_under_another_engine_is_refused_unless_forced(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    with pytest.raises(hansa.ConfigError, match=r"another plan .*engine was 'reference' and is 'stacked'.*force=True"):
        run(tmp_path / "run", "stacked", resume=True)
    forced = run(tmp_path / "run", "stacked", resume=True, force=True)
    assert [line["round"] for line in forced.history] == [1, 2, 3, 4]
    assert torch.allclose(forced.state.params.w, run(None).state.params.w, atol=1e-4)


def test_a_run_is_resumed_by_another_engine_with_the_same_plan(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    resumed = run(tmp_path / "run", "auto", resume=True)  # which keeps the engine of the plan
    assert torch.equal(resumed.state.params.w, run(None).state.params.w)


def test_a_line_of_metrics_that_was_torn_is_cut(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"round": 3, "asked": 5, "repl')
    found = run(tmp_path / "run", resume=True)
    assert untimed(found.history) == untimed(run(None).history)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert untimed([json.loads(line) for line in lines]) == untimed(found.history)


def test_metrics_that_were_cut_by_hand_are_noticed(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:10])
    with pytest.raises(hansa.DataError, match="shorter than when the checkpoint was made"):
        run(tmp_path / "run", resume=True)


def test_a_checkpoint_that_was_damaged_is_noticed(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-50])
    with pytest.raises(hansa.DataError, match="not a valid message"):
        run(tmp_path / "run", resume=True)


def test_a_folder_that_holds_a_run_is_not_overwritten_and_one_that_does_not_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(hansa.ConfigError, match="already holds a run"):
        run(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(hansa.ConfigError, match=r"is not a run folder: it has no experiment\.json"):
        run(tmp_path / "other", resume=True)


def test_resuming_a_finished_run_gives_its_result(tmp_path: Path) -> None:
    first = run(tmp_path / "run")
    again = run(tmp_path / "run", resume=True)
    assert same(again.params, first.params)
    assert untimed(again.history) == untimed(first.history)


def test_without_a_checkpoint_the_run_starts_again(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(line: dict[str, Any]) -> None:
        raise Enough

    with pytest.raises(Enough):
        run(tmp_path / "run", on_round=stop, checkpoint_seconds=10)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
    found = run(tmp_path / "run", resume=True)
    assert untimed(found.history) == untimed(run(None).history)


def test_only_who_has_the_run_removes_what_a_killed_writer_left_and_only_of_the_runs_own_files(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    left = [tmp_path / "run" / f".{name}.{'0a' * 8}.part" for name in ("checkpoint.safetensors", "experiment.json")]
    others = [tmp_path / "run" / name for name in (f".report.html.{'0a' * 8}.part", ".checkpoint.safetensors.old.part")]
    for path in (*left, *others):
        path.write_bytes(b"half")
    working = RunFolder(tmp_path / "run")
    with disk.lock(tmp_path / "run" / ".lock", "taken"):
        with pytest.raises(hansa.ConfigError, match="another process is at work"):
            working.lock()
        assert all(path.exists() for path in left)
    run(tmp_path / "run", resume=True)
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)


def test_a_run_is_kept_from_others_until_its_last_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = RunFolder.finish

    def finishing(store: RunFolder, *given: Any) -> None:
        with pytest.raises(hansa.ConfigError, match="another process is at work"):
            RunFolder(store.path).lock()
        finish(store, *given)
        finished.append(store.path)

    finished: list[Path] = []
    monkeypatch.setattr(RunFolder, "finish", finishing)
    run(tmp_path / "run")
    assert finished == [tmp_path / "run"]
    after = RunFolder(tmp_path / "run")
    after.lock()
    after.close()
