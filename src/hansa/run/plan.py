"""What the bits of a run depend on: its plan, its settings and its data. A resumed run must have the same."""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import numpy as np
import torch

import hansa
from hansa.adversary import Adversary
from hansa.core.algorithm import Algorithm
from hansa.core.plain_data import fill, from_config, to_config
from hansa.core.registry import Part, check_name
from hansa.core.task import Holdings
from hansa.drift import Drift
from hansa.experiment.settings import Run
from hansa.numerics.weights import class_weights
from hansa.plumbing.determinism import card
from hansa.plumbing.errors import ConfigError
from hansa.privacy import Privacy
from hansa.sim.engine import ReferenceEngine

NUMERICS = 4  # version of the random streams and of the order of samples; another version gives other bits
# Settings that a resumed run may change: when it stops, how often it saves, and where its parties train. What the bits
# depend on of an engine is in the plan.
CHANGEABLE = ("rounds", "target", "metric", "patience", "min_delta", "byte_budget", "time_budget",
              "checkpoint_seconds", "baselines", "engine")  # fmt: skip


def plan(engine: ReferenceEngine, device: str) -> dict[str, Any]:
    """The software and hardware that the bits of a run depend on."""
    models = engine.holdings.models
    base = engine.objective.base if models is None else models.bases
    here = card(engine.objective.device)  # an engine on other machines names their cards itself
    return {
        "torch": torch.__version__, "numpy": np.__version__, "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device, "numerics": NUMERICS, **here, **engine.plan(), **({"frozen": base} if base else {}),
        **({"models": list(models.turn)} if models is not None else {}),
    }  # fmt: skip


def fingerprint(holdings: Holdings, class_weight: Any = None) -> str:
    """A checksum of the parties' training samples and weights, of the aggregator's trusted and of public samples."""
    check = zlib.crc32(holdings.train.offsets.tobytes())
    if class_weight is not None:
        check = zlib.crc32(repr(class_weights(class_weight)).encode(), check)
    public = () if holdings.public is None else holdings.public.tree().values()
    for tensor in (*holdings.train.tensors(), *(holdings.trusted or ()), *public):
        flat = tensor.detach().cpu().contiguous().view(-1)
        check = zlib.crc32(flat.view(torch.uint8).numpy().data if flat.numel() else b"", check)
    return f"{check:08x}"


def describe(algorithm: Algorithm, run: Run, engine: ReferenceEngine, experiment: dict[str, Any] | None,
             groups: tuple[Adversary, ...], privacy: Privacy,
             drifts: tuple[Drift, ...] = ()) -> dict[str, Any]:  # fmt: skip
    """The record of a run, as `experiment.json` stores it."""
    return {
        "hansa": hansa.__version__, "algorithm": to_config(algorithm), "run": run_settings(run),
        "plan": plan(engine, run.device), "experiment": experiment, "adversary": [to_config(group) for group in groups],
        "privacy": privacy.tree(), "drift": [to_config(drift) for drift in drifts],
    }  # fmt: skip


def run_settings(run: Run) -> dict[str, Any]:
    """The settings of a run as plain data."""
    settings = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    settings |= {name: to_config(value) for name, value in settings.items() if isinstance(value, Part)}
    return settings | {"metrics": [to_config(metric) for metric in run.metrics]}


def check_same_run(before: dict[str, Any], now: dict[str, Any], force: bool) -> None:
    """Refuse to resume a run with another plan, algorithm, data or settings, unless forced.

    The kind of differential privacy never changes: the epsilon of a run covers all of its rounds.
    """
    check_name("algorithm", before["algorithm"]["name"], "algorithm")
    if _private(before) != _private(now):
        raise ConfigError(
            "this run was begun with differential privacy of another kind, or without: its epsilon would not cover all "
            "of its rounds; begin a new run"
        )
    if before.get("data") != now["data"] and not force:
        raise ConfigError("the data are not those this run was begun with; use --force (force=True) to continue anyway")
    # A run of an earlier version has no settings that came later, and the names of parts that have become tables.
    # The code of a script is not recorded, and a resumed run may import the script as a module.
    code = {**now["code"], **{name: old for name, old in before.get("code", {}).items() if name in now["code"]}}
    before = {**before, "code": code, "run": run_settings(fill(Run, before["run"], where="run"))}
    for part, changeable in (("plan", ()), ("algorithm", ()), ("adversary", ()), ("drift", ()), ("privacy", ()),
                             ("code", ()), ("run", CHANGEABLE)):  # fmt: skip
        old, new = (_fields(json.loads(json.dumps(record.get(part, []), sort_keys=True))) for record in (before, now))
        changed = [f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in sorted({*old, *new})
                   if old.get(name) != new.get(name) and name not in changeable]  # fmt: skip
        if changed and not force:
            raise ConfigError(
                f"this run was begun with another {part} ({'; '.join(changed)}), so its numbers could not be "
                "replayed; use --force (force=True) to continue anyway"
            )


def _private(record: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the sums of a run are differentially private, and whether its parties' replies are."""
    local = record["algorithm"].get("local")
    solver: Any = from_config("local", local, where="algorithm.local") if isinstance(local, dict) else None
    return record.get("privacy", {}).get("dp") is not None, solver is not None and solver.budget is not None


def _fields(part: Any) -> dict[str, Any]:
    """The fields of a part of a record; of a list, its entries by number."""
    return part if isinstance(part, dict) else {f"group {number}": entry for number, entry in enumerate(part)}
