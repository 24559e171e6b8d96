"""One run of a study, and the key under which it is never run twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import hansa
from hansa.core.errors import ConfigError, HansaError
from hansa.core.registry import Part, from_config, to_config
from hansa.run.config import Experiment, is_function, parse
from hansa.run.simulate import NUMERICS
from hansa.study.inputs import inputs

# What does not change a run's numbers: where its files lie, and how often it saves.
NO_MATTER = ("task.data_dir", "run.checkpoint_seconds")


@dataclass(frozen=True)
class Cell:
    """One run of a study: the labels that say which, and the whole experiment as plain data."""

    algorithm: str
    partition: str
    adversary: str  # "" where there is none
    variant: str  # values of the other axes, as in "run.cohort=0.1"; "" where there are none
    seed: int
    tree: dict[str, Any] = field(hash=False)  # what `hansa run` would be given
    place: str = "."  # the folder that files and modules in it are beside

    @property
    def setting(self) -> str:
        """Partition, adversary and variant in one label: algorithms are compared within a setting."""
        return ", ".join(part for part in (self.partition, self.adversary, self.variant) if part)

    @property
    def label(self) -> str:
        return f"{self.algorithm}, {self.setting}, seed {self.seed}"

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment, read and checked; a mistake in it names the run."""
        try:
            return parse(self.tree, self.place)
        except HansaError as error:
            raise ConfigError(f"the run ({self.label}): {error}") from None

    @cached_property
    def key(self) -> str:
        """A hash of the experiment with all defaults filled in, and of what else decides the bits of its result: the
        user's own modules, files of data, versions."""
        return key_of(self.experiment)

    def plain(self) -> dict[str, Any]:
        """As plain data, with the key."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"key": self.key}

    @classmethod
    def of_plain(cls, tree: dict[str, Any]) -> Cell:
        """The cell that `plain` describes; its key is the one it had then."""
        cell = cls(**{f.name: tree[f.name] for f in dataclasses.fields(cls)})
        cell.__dict__["key"] = tree["key"]
        return cell


def key_of(experiment: Experiment, without: Collection[str] = ()) -> str:
    """A hash of an experiment in its one canonical form, less the dotted fields in `without`."""
    tree = canonical(experiment)
    for dotted in (*NO_MATTER, *without):
        table, _, name = dotted.partition(".")
        tree[table].pop(name, None)
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def canonical(experiment: Experiment) -> dict[str, Any]:
    """An experiment with all defaults filled in, so that two ways to say the same are one."""
    task = _fields(experiment.task)
    for kind in ("dataset", "model"):
        if task[kind] is not None and not is_function(task[kind]):
            task[kind] = to_config(from_config(kind, task[kind], where=f"task.{kind}"))
    beside = is_function(task["dataset"]) or is_function(task["model"])  # which may read files of their own
    device = experiment.run.device
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") and torch.cuda.is_available() else None
    return {
        "task": task,
        "place": str(Path(experiment.folder).resolve()) if beside else None,
        "partition": None if experiment.partition is None else to_config(experiment.partition),
        "algorithm": to_config(experiment.algorithm),
        "adversary": [to_config(group) for group in experiment.adversary],
        "run": _fields(experiment.run),
        "inputs": inputs(experiment),
        "bits": {"hansa": hansa.__version__, "numerics": NUMERICS, "torch": torch.__version__,
                 "cpu": torch.backends.cpu.get_cpu_capability(), "gpu": card},
    }  # fmt: skip


def _fields(table: Any) -> dict[str, Any]:
    values = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    return {name: to_config(value) if isinstance(value, Part) else value for name, value in values.items()}
