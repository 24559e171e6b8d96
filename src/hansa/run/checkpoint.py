"""What a run saves to continue after a crash: its progress, the aggregator's state, the runtime's snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hansa.core.algorithm import State
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError
from hansa.select import SelectorState


class Snapshots(Protocol):
    """A runtime that can save and restore the state of its parties."""

    def snapshot(self) -> dict[str, Any]: ...
    def saved(self) -> None: ...
    def restore(self, tree: dict[str, Any]) -> None: ...


class Records(Protocol):
    """Storage for the metrics lines and the checkpoints of a run."""

    def append(self, line: dict[str, Any]) -> None: ...
    def checkpoint(self, tree: dict[str, Any]) -> None: ...
    def restore(self) -> dict[str, Any] | None: ...
    def history(self) -> list[dict[str, Any]]: ...


@dataclass
class Progress:
    """The progress of a run; a checkpoint holds every field."""

    round: int = 0  # rounds done
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    best: float | None = None  # value of the metric that stopping rules look at
    stale: int = 0  # evaluations since the best one
    stopped: str | None = None  # why the run stopped
    called: str | None = None  # why a callback stopped the run
    kept: dict[str, Any] = field(default_factory=dict)  # the best state so far, with `run.keep = "best"`
    kept_round: int | None = None  # its round
    pace: dict[str, Any] = field(default_factory=dict)  # memory of the pace
    selection: SelectorState = field(default_factory=dict)  # state of the selector
    privacy: dict[str, Any] = field(default_factory=dict)  # memory of central differential privacy: spending, clip
    downlink: dict[str, Any] = field(default_factory=dict)  # memory of the transform of models: the aggregator's errors
    epsilon: float = 0.0  # the largest epsilon that a party has spent
    epsilons: dict[str, float] = field(default_factory=dict)  # by party name, if the parties are few
    concepts: dict[str, float] = field(default_factory=dict)  # the best accuracy on each concept, by its first round
    watches: dict[str, Any] = field(default_factory=dict)  # what a detector remembers of each party, by its number
    exhausted: dict[str, bool] = field(default_factory=dict)  # numbers of the parties whose budget is spent


def save(records: Records, runtime: Snapshots, state: State, progress: Progress) -> None:
    """Write a checkpoint."""
    tree = {"state": state.tree(), "progress": vars(progress), "runtime": runtime.snapshot()}
    records.checkpoint({**tree, "devices": codec.devices(tree)})
    runtime.saved()


def restore(records: Records, runtime: Snapshots, state: State, progress: Progress,
            device: torch.device) -> tuple[State, Progress] | None:  # fmt: skip
    """Read the last checkpoint and restore the runtime; None if there is no checkpoint yet.

    `state` and `progress` are those before the first round: the checkpoint must fit their model.
    """
    tree = records.restore()
    if tree is None:
        return None
    placed = {name: tree[name] for name in ("state", "progress", "runtime")}
    if device.type != "cpu":
        placed = codec.place(placed, tree["devices"], device)
    restored = State.of_tree(placed["state"])
    if any(old.shape != new.shape for old, new in zip(restored.params, state.params, strict=True)):
        raise ConfigError("the checkpoint is of another model, or of another version of hansa; begin a new run")
    runtime.restore(placed["runtime"])
    return restored, Progress(**{"privacy": progress.privacy, **placed["progress"]})
