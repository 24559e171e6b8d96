"""Trackers that write files and lines: what they write can be read back, after a kill as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import experiment_file, run

from hansa.cli import main
from hansa.track import track_folder


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_whole_and_say_everything_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    result = run(track=f"jsonl:{path}", run_dir=tmp_path / "run")
    found = events(path)
    assert [e["event"] for e in found] == ["start", *["round"] * 4, "finish"]
    assert {e["run"] for e in found} == {"run"} and len({e["mark"] for e in found}) == 1
    assert found[0]["params"]["algorithm.local.lr"] == "0.1" and found[0]["tags"]["hansa.algorithm"] == "fedavg"
    assert [e["accuracy"] for e in found[1:5]] == [line["accuracy"] for line in result.history]
    assert found[5]["summary"] == result.summary
    run(track=f"jsonl:{path}")  # another run in the same file
    assert len(events(path)) == 12 and len({e["mark"] for e in events(path)}) == 2


def test_json_lines_of_a_resumed_run_repeat_no_round_and_drop_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def stop(line: dict[str, object]) -> None:
        if line["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(track=f"jsonl:{path}", run_dir=tmp_path / "run", on_round=stop, checkpoint_seconds=10)
    cut = path.read_bytes().rsplit(b'{"run"', 1)[0]  # without the last event, and with half of another
    path.write_bytes(cut + b'{"run": "run", "rou')
    run(run_dir=tmp_path / "run", resume=True)
    found = events(path)
    assert [e["event"] for e in found] == ["start", *["round"] * 4, "finish"]
    assert [e["round"] for e in found[1:5]] == [1, 2, 3, 4]


def test_a_finished_folder_is_tracked_afterwards_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run(run_dir=tmp_path / "run")
    assert track_folder(tmp_path / "run", f"jsonl:{path}") == []
    before = path.read_bytes()
    assert track_folder(tmp_path / "run", f"jsonl:{path}") == [] and track_folder(tmp_path / "run") == []
    assert path.read_bytes() == before and len(before.splitlines()) == 6


@pytest.mark.slow
def test_console_says_a_round_a_line_and_the_last_line_is_still_the_json_object(tmp_path: Path) -> None:
    path = experiment_file(tmp_path)
    command = [sys.executable, "-m", "hansa.cli", "run", str(path), "--json", "--track", "console", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 3
    assert [line.split(",")[0] for line in done.stderr.splitlines()] == [
        "out: round 1 of 3", "out: round 2 of 3", "out: round 3 of 3", "out: finished (all rounds done)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "small.toml", "--track", "tensorbord"],
            "--track: unknown tracker 'tensorbord'; did you mean 'tensorb",
        ),
        (["track", "nowhere", "--track", "console"], "nowhere is not a run folder: it has no experiment.json"),
    ],
)
def test_the_command_line_refuses_in_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    experiment_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hansa", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and sentence in said and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_tensorboard_reads_back_every_round_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra hansa[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def stop(line: dict[str, object]) -> None:
        if line["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(track="tensorboard", run_dir=tmp_path / "run", on_round=stop, checkpoint_seconds=10)
    result = run(run_dir=tmp_path / "run", resume=True)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    for name in ("accuracy", "loss", "train_loss", "bytes_up", "simulated_seconds"):
        scalars = found.Scalars(name)
        assert [e.step for e in scalars] == [1, 2, 3, 4], name
        assert [e.value for e in scalars] == pytest.approx([line[name] for line in result.history], rel=1e-6)
    picture = found.Images("partition")[0]
    assert picture.width > 500 and picture.encoded_image_string.startswith(b"\x89PNG")
    assert found.Scalars("final/accuracy")[0].value == pytest.approx(result.summary["accuracy"])
    assert "_hparams_/session_start_info" in found.Tags()["tensors"] or "hparams" in str(found.summary_metadata)
