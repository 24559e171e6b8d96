"""One run of a study (a cell), and the key that identifies its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hansa
from hansa.core.plain_data import from_config, to_config
from hansa.core.registry import Part
from hansa.experiment.config import Experiment, parse
from hansa.plumbing.errors import ConfigError, HansaError, UnsuitedError
from hansa.plumbing.functions import reference_of
from hansa.run.plan import NUMERICS
from hansa.study.inputs import inputs

KEY_VERSION = 2  # increase when the form of the key changes, so that runs with old keys are not reused
# The fields of an experiment that are not part of the key, with the reason; all other fields are.
LEFT_OUT = {
    "tree": "repeats the other fields as the user wrote them",
    "folder": "its files count by content; the key has it as `place` if a function may read other files",
    "track": "decides where metrics are reported",
    "name": "is the name of the experiment's file",
    "task.data_dir": "says where files are; files count by content",
    "run.checkpoint_seconds": "decides how often a checkpoint is written",
}


@dataclass(frozen=True)
class Cell:
    """One run of a study: its labels, and the complete experiment as plain data."""

    algorithm: str
    partition: str
    adversary: str  # "" without an adversary
    variant: str  # values of the other axes, such as "run.cohort=0.1"; "" without other axes
    seed: int
    tree: dict[str, Any] = field(hash=False)  # the configuration that `hansa run` would read
    place: str = "."  # relative paths and modules in `tree` start from this folder

    @property
    def setting(self) -> str:
        """Partition, adversary and variant in one label: algorithms are compared within a setting."""
        return ", ".join(part for part in (self.partition, self.adversary, self.variant) if part)

    @property
    def label(self) -> str:
        return f"{self.algorithm}, {self.setting}, seed {self.seed}"

    @cached_property
    def experiment(self) -> Experiment:
        """The parsed and checked experiment; error messages name the run."""
        try:
            return parse(self.tree, self.place)
        except UnsuitedError as error:
            raise UnsuitedError(str(error)) from None
        except HansaError as error:
            raise ConfigError(f"the run ({self.label}): {error}") from None

    @cached_property
    def key(self) -> str:
        """Hash of the experiment with all defaults filled in, and of everything else that its result depends on: the
        user's own modules, data files, versions."""
        return key_of(self.experiment)

    def plain(self) -> dict[str, Any]:
        """Return the cell as plain data, with its key."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"key": self.key}

    @classmethod
    def of_plain(cls, tree: dict[str, Any]) -> Cell:
        """Restore a cell from `plain`, with the key stored there."""
        cell = cls(**{f.name: tree[f.name] for f in dataclasses.fields(cls)})
        cell.__dict__["key"] = tree["key"]
        return cell


def key_of(experiment: Experiment, without: Collection[str] = ()) -> str:
    """Hash the canonical form of an experiment, without the dotted fields in `without`."""
    tree = canonical(experiment)
    for dotted in without:
        table, _, name = dotted.partition(".")
        del tree["experiment"][table][name]
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def canonical(experiment: Experiment) -> dict[str, Any]:
    """Canonical form of an experiment: all defaults filled in, and everything else that its result depends on.

    Two configurations with the same meaning have the same canonical form."""
    tree = _plain(experiment)
    for kind in ("dataset", "model"):
        named = tree["task"][kind]
        if named is not None and reference_of(named) is None:
            tree["task"][kind] = to_config(from_config(kind, named, where=f"task.{kind}"))
    settings = (experiment.task.dataset, experiment.task.model)
    beside = any(reference_of(setting) is not None for setting in settings)  # may read other files
    device = experiment.run.device
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") and torch.cuda.is_available() else None
    return {
        "version": KEY_VERSION,
        "experiment": tree,
        "place": str(Path(experiment.folder).resolve()) if beside else None,
        "inputs": inputs(experiment),
        "bits": {"hansa": hansa.__version__, "numerics": NUMERICS, "torch": torch.__version__, "numpy": np.__version__,
                 "cpu": torch.backends.cpu.get_cpu_capability(), "gpu": card},
    }  # fmt: skip


def _plain(value: Any, at: str = "") -> Any:
    """Settings as plain data, without the fields in LEFT_OUT."""
    if isinstance(value, Part):
        return to_config(value)
    if isinstance(value, (list, tuple)):
        return [_plain(inner, at) for inner in value]
    if dataclasses.is_dataclass(value):
        names = {field.name: f"{at}{field.name}" for field in dataclasses.fields(value)}
        return {name: _plain(getattr(value, name), f"{dotted}.")
                for name, dotted in names.items() if dotted not in LEFT_OUT}  # fmt: skip
    return value
