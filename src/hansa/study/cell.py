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
from hansa.core.functions import is_function
from hansa.core.registry import Part, from_config, to_config
from hansa.experiment.config import Experiment, parse
from hansa.run.plan import NUMERICS
from hansa.study.inputs import inputs

KEY_VERSION = 2  # raised where the key's form changes, so that runs under keys of the old form are not taken
# The fields of an experiment that are not in the key, with the reason; all others are.
LEFT_OUT = {
    "tree": "says the same as the other fields, in the user's own way",
    "folder": "files in it count by their content; it is in the key as `place` where a function may read others",
    "track": "says who is told of the numbers",
    "name": "is the name of the experiment's file",
    "task.data_dir": "says where files lie, which count by their content",
    "run.checkpoint_seconds": "says how often a run is saved",
}


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
    for dotted in without:
        table, _, name = dotted.partition(".")
        del tree["experiment"][table][name]
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def canonical(experiment: Experiment) -> dict[str, Any]:
    """An experiment with all defaults filled in, so that two ways to say the same are one, and what else decides the
    bits of its result."""
    tree = _plain(experiment)
    for kind in ("dataset", "model"):
        named = tree["task"][kind]
        if named is not None and not is_function(named):
            tree["task"][kind] = to_config(from_config(kind, named, where=f"task.{kind}"))
    beside = is_function(experiment.task.dataset) or is_function(experiment.task.model)  # may read files of their own
    device = experiment.run.device
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") and torch.cuda.is_available() else None
    return {
        "version": KEY_VERSION,
        "experiment": tree,
        "place": str(Path(experiment.folder).resolve()) if beside else None,
        "inputs": inputs(experiment),
        "bits": {"hansa": hansa.__version__, "numerics": NUMERICS, "torch": torch.__version__,
                 "cpu": torch.backends.cpu.get_cpu_capability(), "gpu": card},
    }  # fmt: skip


def _plain(value: Any, at: str = "") -> Any:
    """Settings as plain data, without what LEFT_OUT names."""
    if isinstance(value, Part):
        return to_config(value)
    if isinstance(value, (list, tuple)):
        return [_plain(inner, at) for inner in value]
    if dataclasses.is_dataclass(value):
        names = {field.name: f"{at}{field.name}" for field in dataclasses.fields(value)}
        return {name: _plain(getattr(value, name), f"{dotted}.")
                for name, dotted in names.items() if dotted not in LEFT_OUT}  # fmt: skip
    return value
