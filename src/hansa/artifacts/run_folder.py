"""The run folder: metrics as JSON lines, checkpoints by atomic rename, the final model.

A checkpoint stores the length of the metrics file, so that a run that was killed continues from where both agree.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hansa.plumbing import codec, disk
from hansa.plumbing.errors import ConfigError, DataError

METRICS, CHECKPOINT, MODEL = "metrics.jsonl", "checkpoint.safetensors", "model.safetensors"
EXPERIMENT, SUMMARY, REPORT, LOCK = "experiment.json", "summary.json", "report.html", ".lock"
# `model.json` says what a model needs to predict; `personal.safetensors` has the parties' own parts of the model.
SERVING, PERSONAL = "model.json", "personal.safetensors"
# All files of a run. A folder with the last one holds a run.
FILES = (METRICS, CHECKPOINT, MODEL, SERVING, PERSONAL, SUMMARY, REPORT, EXPERIMENT)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new content, never a part."""
    disk.put(path, [data], mode=disk.SHARED)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def beside(model: Path) -> Path:
    """The file next to a model file that says what the model needs to predict."""
    return model.with_suffix(".json")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        inside = sorted(path.parent.glob(f"*/{path.name}"), key=lambda file: file.stat().st_mtime)
        hint = f"; the latest of the {len(inside)} runs in it is {inside[-1].parent}" if inside else ""
        raise ConfigError(f"{path.parent} is not a run folder: it has no {path.name}{hint}") from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent} is a file; expected a run folder") from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._metrics: Any = None
        self._lock: Any = None

    def lock(self) -> None:
        """Keep other processes from working on this run until this process ends, and remove unfinished files that a
        killed process has left."""
        self._make()
        refusal = f"another process is at work on the run {self.path}; wait for it, or stop it"
        self._lock = disk.lock(self.path / LOCK, refusal)
        for name in FILES:
            if name != REPORT:  # it is written after the lock is released
                disk.sweep(self.path, name)

    def create(self, experiment: dict[str, Any]) -> None:
        """Begin a new run in this folder; a ConfigError if it holds a run already."""
        if (self.path / EXPERIMENT).exists():
            if (self.path / SUMMARY).exists():
                raise ConfigError(
                    f"{self.path} already holds a run that has finished (`hansa show {self.path}` prints it); choose "
                    "another folder"
                )
            raise ConfigError(
                f"{self.path} already holds a run that is not finished; continue it with `hansa resume {self.path}`, "
                "or choose another folder"
            )
        self._make()
        write_json(self.path / EXPERIMENT, experiment)

    def remove(self) -> None:
        """Remove the run of this folder, if there is one and no process is at work on it; other files stay."""
        if not (self.path / EXPERIMENT).exists():
            return
        self.lock()
        self.close()
        for path in (*(self.path / name for name in FILES), *self.path.glob("memories-*.log")):
            path.unlink(missing_ok=True)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {self.path}: {error.strerror}; choose another folder") from None

    def experiment(self) -> dict[str, Any]:
        value: dict[str, Any] = read_json(self.path / EXPERIMENT)
        if not isinstance(value, dict) or not {"algorithm", "run", "plan", "experiment", "hansa"} <= set(value):
            raise DataError(f"{self.path / EXPERIMENT} is damaged: it does not describe a run")
        return value

    def append(self, line: dict[str, Any]) -> None:
        """Append a metrics line."""
        if self._metrics is None:
            self._metrics = open(self.path / METRICS, "ab")  # noqa: SIM115 (kept open for the whole run)
        self._metrics.write(json.dumps(line).encode() + b"\n")
        self._metrics.flush()

    def checkpoint(self, tree: dict[str, Any]) -> None:
        """Save the state of the run and the length of its metrics."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
        path = self.path / METRICS
        length = path.stat().st_size if path.exists() else 0
        write_atomic(self.path / CHECKPOINT, codec.encode({**tree, "metrics_length": length}))

    def restore(self) -> dict[str, Any] | None:
        """Read the last checkpoint and cut the metrics back to it; None (and no metrics) if there is none yet."""
        metrics = self.path / METRICS
        path = self.path / CHECKPOINT
        try:
            tree: dict[str, Any] | None = codec.decode(path.read_bytes()) if path.exists() else None
        except DataError as error:
            raise DataError(f"{path} is damaged: {error}") from None
        if metrics.exists():
            length = int(tree["metrics_length"]) if tree is not None else 0
            if metrics.stat().st_size < length:
                raise DataError(
                    f"{metrics} is shorter than when the checkpoint was made: it was changed; begin a new run"
                )
            os.truncate(metrics, length)
        return tree

    def history(self) -> list[dict[str, Any]]:
        """The metrics lines, one per round, without a last line that a crash cut short."""
        path = self.path / METRICS
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")
        try:
            return [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}") from None

    def close(self) -> None:
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()
        self._metrics = self._lock = None

    def finish(self, model: dict[str, Any], about: dict[str, Any], summary: dict[str, Any]) -> None:
        """Write the final model, its description for predictions, and the summary."""
        write_atomic(self.path / MODEL, codec.encode(model))
        write_json(self.path / SERVING, about)
        write_json(self.path / SUMMARY, summary)
