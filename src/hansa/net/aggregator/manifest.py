"""Make the manifest of a job from its experiment: the ops that its parts declare, and the limits of its asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hansa.core.algorithm import Algorithm
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.plain_data import field_types, to_config
from hansa.core.registry import Part, lookup
from hansa.experiment.config import Experiment
from hansa.experiment.settings import Run
from hansa.net.transport.manifest import AllowedOp, Manifest, Range
from hansa.plumbing.errors import ConfigError

KINDS = ("op", "local", "transform")  # what a message may name
ALWAYS = ("describe", "deliver")  # the ops before the first and after the last round of every job
ROUTE = ("route-keys", "route-send", "route-receive", "route-session")


def make_manifest(federation: str, job: str, name: str, experiment: Experiment, loss: str | None, classes: int | None,
                  parties: Sequence[tuple[str, str | None]]) -> Manifest:  # fmt: skip
    """The manifest of a job of these parties, each with the fingerprint of its certificate.

    `loss` and `classes` are None where the parties' data decide them.
    """
    algorithm, run, privacy, table = experiment.algorithm, experiment.run, experiment.privacy, experiment.task
    task = {
        "model": table.model, "models": table.models, "dtype": table.dtype, "loss": loss, "classes": classes,
        "party_test": table.party_test, "seed": run.seed, "bf16": run.precision == "bf16", "augment": table.augment,
        "public": table.public is not None, "other_model": type(algorithm).model is not Algorithm.model,
    }  # fmt: skip
    counted = algorithm.sums > 0 and not algorithm.verbs & {"submit", "route"}
    return Manifest(
        federation, job, name, task, _ops(experiment, len(parties)), _protected(experiment), _work(run), run.rounds,
        algorithm.sums if counted else None, run.min_cohort, to_config(algorithm), privacy.tree(), tuple(parties),
        experiment.audit.keep_replies,
    )  # fmt: skip


def _protected(experiment: Experiment) -> tuple[str, ...]:
    """The ops around every update of a model, outermost first."""
    privacy = experiment.privacy
    hides = (privacy.secure.hides,) if privacy.secure is not None and privacy.secure.hides is not None else ()
    return (*hides, *(("contribution",) if privacy.dp is not None else ()),
            *(("clip",) if privacy.bound is not None else ()))  # fmt: skip


def _ops(experiment: Experiment, parties: int) -> tuple[AllowedOp, ...] | None:
    """All ops of a job; None if one of its parts does not declare them."""
    algorithm, run, task, privacy = experiment.algorithm, experiment.run, experiment.task, experiment.privacy
    declared: list[DeclaredOps] = [
        tuple(map(OpenOp, ALWAYS)), algorithm.ops, tuple(_fields(algorithm)), run.select.ops,
        tuple(part for part in (algorithm.parts().local, run.compress, run.compress_down) if part is not None),
    ]  # fmt: skip
    if run.eval_parties:
        declared.append((OpenOp("evaluate"), OpenOp("evaluate-metrics")))
    if run.finetune.epochs:
        declared.append((OpenOp("finetune"), run.finetune.solver))
    if "route" in algorithm.verbs:
        declared.append(tuple(map(OpenOp, ROUTE)))
    if task.prepare is not None:
        declared.append(task.prepare.ops)
    if task.class_weight is not None:
        declared.append((OpenOp("class-counts"), OpenOp("weigh-classes")))
    if privacy.secure is not None:
        declared.append(privacy.secure.ops)
    if any(ops is None for ops in declared):
        return None
    out: list[AllowedOp] = []
    for op in (op for ops in declared for op in ops or ()):
        out += _open(op) if isinstance(op, OpenOp) else _fixed(op)
    largest = {getattr(op, "largest", None) for ops in declared for op in ops or ()} - {None}
    updates = [op for op in out if {"range", "bits"} <= {*op.fixed}]  # secure sums of updates
    out += [AllowedOp(op.name, {**op.fixed, "range": most}, op.ranges, op.open) for op in updates for most in largest]
    if privacy.bound is not None:
        out.append(AllowedOp("clip", {"clip": privacy.bound}))
    if privacy.dp is not None:
        out.append(_contribution(privacy.dp))
    distinct = {(op.name, repr(op)): op for op in out}
    noise = _least_noise(experiment, parties)
    return tuple(_bounded(op, noise, parties) for _, op in sorted(distinct.items()))


def _fields(part: Part) -> Iterator[Part]:
    """The ops and transforms in the fields of a part."""
    for name in field_types(type(part)):
        value = getattr(part, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Part) and inner.kind in KINDS:
                yield inner


def _fixed(part: Part) -> list[AllowedOp]:
    """An op with all its fields, and the ops inside it."""
    inner, config, varies = list(_fields(part)), to_config(part), getattr(part, "varies", ())
    nested = {name for name in field_types(type(part)) if _nests(getattr(part, name))}
    fixed = {name: config[name] for name in field_types(type(part)) if name not in nested and name not in varies}
    return [AllowedOp(part.name, fixed, {}, tuple(varies)), *(op for each in inner for op in _fixed(each))]


def _nests(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, Part) and each.kind in KINDS for each in values)


def _open(op: OpenOp) -> list[AllowedOp]:
    """An op by name: its other fields than `fixed` and `ranges` are open, except `inner`, an op with its own entry."""
    listed = {*op.fixed, *op.ranges, "inner"}
    names = [name for name in field_types(_class(op.name)) if name not in listed]
    return [AllowedOp(op.name, dict(op.fixed), dict(op.ranges), tuple(names))]


def _class(name: str) -> type[Part]:
    for kind in KINDS:
        try:
            return lookup(kind, name)
        except ConfigError:
            continue
    raise ConfigError(f"a part of the job declares the op {name!r}, which is not registered")


def _contribution(dp: Any) -> AllowedOp:
    fixed, open = {"cap": dp.weight_cap}, ("unit", "sigma", "size", "parties")
    return AllowedOp("contribution", fixed, {}, (*open, "clip")) if dp.quantile is not None else AllowedOp(
        "contribution", {**fixed, "clip": dp.clip}, {}, open)  # fmt: skip


def _bounded(op: AllowedOp, noise: float | None, parties: int) -> AllowedOp:
    """An op of a secure sum, with the least noise of a party and the most parties of a sum."""
    if not op.name.startswith("secure-"):
        return op
    ranges: dict[str, Range] = dict(op.ranges)
    if "parties" in op.open:
        ranges["parties"] = (1, parties)
    if "noise" in op.open:
        ranges["noise"] = (noise, None) if noise is not None else (0.0, 0.0)
    return AllowedOp(op.name, op.fixed, ranges, tuple(name for name in op.open if name not in ranges))


def _least_noise(experiment: Experiment, parties: int) -> float | None:
    """The least noise that a party adds in a secure sum; None if it adds none, 0 if the clip follows a quantile."""
    algorithm, run, privacy = experiment.algorithm, experiment.run, experiment.privacy
    dp, secure = privacy.dp, privacy.secure
    if dp is None or secure is None or not dp.by_parties(secure):
        return None
    if dp.quantile is not None or dp.clip is None:
        return 0.0
    guard = privacy.guard(algorithm, run, parties, run.size(parties))
    assert guard is not None
    sigma = guard.sigma(guard.begin())
    return guard.tight(sigma) * dp.clip / math.sqrt(secure.least(parties)) * (1 - 1e-9)  # rounding


def _work(run: Run) -> dict[str, Range]:
    """The fields of the local solver that messages may set, and their ranges."""
    ranges: dict[str, Range] = {}
    if run.pace.sets is not None:
        ranges[run.pace.sets] = run.pace.span
    for table in run.own.values():
        for name, value in table.items():
            low, high = ranges.get(name, (value, value))
            ends = (low, high, value)
            least = None if None in (low, value) else min(end for end in ends if end is not None)
            ranges[name] = (least, None if None in (high, value) else max(end for end in ends if end is not None))
    return ranges
