"""The table `[approve]` of `party.toml`: who approves the manifest of a job, and by which rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from msgspec import Meta

from hansa.core.data_op import DataOp
from hansa.core.delivery import Deliver
from hansa.core.op import Op
from hansa.core.plain_data import check_numbers, field_types, fill
from hansa.core.predictor import Evaluate
from hansa.core.quantities import Count, Epsilon
from hansa.core.registry import registered
from hansa.core.route_op import Receiving
from hansa.core.wrapper import Wrapper
from hansa.local.delegating import Delegating
from hansa.local.sgd import SGD
from hansa.net.transport.manifest import AllowedOp, Manifest
from hansa.plumbing.errors import ConfigError

# The ops of a masked sum with signatures: those with a field `active`, and those that follow them.
SIGNING, SIGNED = ("secure-keys", "secure-shares"), ("secure-masked", "secure-consistent", "secure-unmask")
INNER = (Wrapper.budget, Delegating.budget, Receiving.budget)  # of ops whose budget is that of the op inside them
HUGE = 1e300  # work beyond it cannot be printed
DELTA = 1e-5  # the largest delta at which the rule `epsilon` approves, unless the owner sets another


@dataclass(frozen=True)
class Approve:
    """Who approves a job before its first ask.

    With the mode "always" every job is approved, and asks are compared with the party's policy alone. With "ask" the
    owner approves each job (`hansa approve`). With "rules" a job whose manifest meets every rule that is set is
    approved by itself, and any other job waits for the owner. Each rule is a bound on what the manifest allows: the
    names of jobs, models, algorithms and fellow parties; the most rounds, epochs, steps and epsilon; the fewest parties
    and the smallest cohort; a secure sum, and one with signatures (`active`). An epsilon says nothing at a large delta,
    so the rule `epsilon` counts at a delta of at most `delta`, by default 1e-5.
    """

    mode: Literal["always", "ask", "rules"] = "always"
    jobs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    parties: tuple[str, ...] = ()
    min_parties: Count | None = None
    min_cohort: Count | None = None
    rounds: Count | None = None
    epochs: Count | None = None
    steps: Count | None = None
    epsilon: Epsilon | None = None
    delta: Annotated[float, Meta(gt=0)] | None = None
    secure: bool = False
    active: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.mode == "rules" and not self.rules:
            raise ConfigError("mode = 'rules' needs a rule, such as rounds = 100; without one it would approve any job")
        if self.mode != "rules" and self.rules:
            raise ConfigError(
                f"{self.rules[0]} is a rule, and mode is {self.mode!r}; set mode = 'rules', or leave it out"
            )
        if self.delta is not None and self.epsilon is None:
            raise ConfigError("delta is that of the rule epsilon; set epsilon too")

    @property
    def needed(self) -> bool:
        """Whether a job needs an approval, and its asks are compared with its manifest."""
        return self.mode != "always"

    @property
    def rules(self) -> list[str]:
        """The rules that are set."""
        return [field.name for field in fields(self) if field.name != "mode" and getattr(self, field.name)]

    def unmet(self, manifest: Manifest) -> list[str]:
        """Why the rules do not approve a manifest, one sentence for each rule that it does not meet."""
        if manifest.ops is None:  # nothing in it bounds what the aggregator may ask
            return ["the manifest allows any op; rules approve no such job"]
        return [*self._names(manifest), *self._numbers(manifest), *self._protection(manifest)]

    def _names(self, manifest: Manifest) -> Iterator[str]:
        task = manifest.task
        several = task["models"].values() if isinstance(task.get("models"), dict) else ()
        models = [_name(model) for model in (*several, task.get("model")) if model is not None]
        if self.models and task.get("other_model"):
            yield "models lists the models of tasks, and messages of the job may describe others"
        for rule, patterns, names in (("jobs", self.jobs, [manifest.name]), ("models", self.models, models),
                                      ("algorithms", self.algorithms, [_name(manifest.algorithm)]),
                                      ("parties", self.parties, manifest.names)):  # fmt: skip
            for name in names if patterns else ():
                if not any(fnmatchcase(name, pattern) for pattern in patterns):
                    yield f"{rule} does not list {name!r}"

    def _numbers(self, manifest: Manifest) -> Iterator[str]:
        if self.min_parties is not None and len(manifest.parties) < self.min_parties:
            yield f"min_parties is {self.min_parties}, and the job has {len(manifest.parties)} parties"
        if self.min_cohort is not None and manifest.min_cohort < self.min_cohort:
            yield f"min_cohort is {self.min_cohort}, and the job allows cohorts of {manifest.min_cohort}"
        if self.rounds is not None and manifest.rounds > self.rounds:
            yield f"rounds is {self.rounds}, and the job has {manifest.rounds}"
        if self.rounds is not None and manifest.trainings is None and any(map(_trains, manifest.ops or ())):
            yield f"rounds is {self.rounds}, and the job may ask to train any number of times per round"
        for rule in ("epochs", "steps"):
            limit, most = getattr(self, rule), _most(manifest, rule)
            if limit is not None and most > limit:
                yield f"{rule} is {limit}, and the job allows {most:g}"
        if self.epochs is not None and self.steps is None and _allows(manifest, "steps"):  # steps override epochs
            yield f"epochs is {self.epochs}, and the job counts its work in steps; the rule steps bounds them"
        if self.steps is not None and self.epochs is None and _allows(manifest, "epochs"):
            yield f"steps is {self.steps}, and the job may count its work in epochs; the rule epochs bounds them"

    def _protection(self, manifest: Manifest) -> Iterator[str]:
        divided = next((op.name for op in manifest.ops or () if getattr(_class(op), "divides", False)), None)
        if divided is not None and (self.active or (self.min_cohort or 1) > 1):
            rule = "active" if self.active else "min_cohort"
            yield f"{rule} is a rule, and {divided!r} tells clusters apart, perhaps of one party"
        hidden = any(name.startswith("secure-") for name in manifest.protected)
        if (self.secure or self.active) and not hidden:
            yield "the rules require a secure sum, and the job has none"
        elif self.active and (unsigned := _unsigned(manifest.ops or ())):
            yield f"the rules require sums with signatures (privacy.active), and the job allows {unsigned} without them"
        if self.epsilon is not None:
            yield from _epsilon(manifest.ops or (), self.epsilon, DELTA if self.delta is None else self.delta)


def _name(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("name")) if isinstance(part, dict) else str(part)


def _most(manifest: Manifest, field: str) -> float:
    """The largest value of a field of the local solvers that the manifest allows, with all phases of a solver."""
    values: list[float | None] = [manifest.work[field][1]] if field in manifest.work else [0.0]
    for op in manifest.ops or ():
        if field in op.fixed and op.fixed[field] is not None:
            values.append(op.fixed[field])
        elif field in op.ranges:
            values.append(op.ranges[field][1])
        elif field in op.open:
            values.append(None)
    numbers = [value for value in values if isinstance(value, (int, float))]
    most = math.inf if len(numbers) < len(values) else max(numbers)
    for op in manifest.ops or ():
        most = _with_phases(op, field, most)
    return most if most < HUGE else math.inf  # infinite for what is no number, too


def _with_phases(op: AllowedOp, field: str, most: float) -> float:
    """The work of an op whose inner solver does at most this work: a solver may train in several phases."""
    cls = _class(op)
    if cls is None or not issubclass(cls, Delegating) or cls.plan is Delegating.plan or not 1 <= most < HUGE:
        return most
    try:
        inner = SGD().at({field: math.ceil(most)})
        epochs, steps, _, _ = fill(cls, {**op.fixed, "inner": inner}, op.name).plan
    except ConfigError:  # no ask can have these fields
        return math.inf
    return math.inf if op.ranges or op.open else steps if field == "steps" else epochs


def _allows(manifest: Manifest, field: str) -> bool:
    """Whether the manifest lets epochs, or steps, be the work of a local solver."""
    if field in manifest.work:
        return True
    for op in manifest.ops or ():
        fixed = op.fixed.get(field) is not None
        if field == "epochs":
            fixed = fixed and op.fixed.get("steps") is None
        if fixed or field in op.ranges or field in op.open:
            return True
    return False


def _unsigned(ops: Sequence[AllowedOp]) -> str | None:
    """An op of a secure sum that the manifest allows without signatures; None if there is none.

    A manifest may list an op several times, and an ask needs to match one of them, so all must have signatures.
    """
    sums = [op for op in ops if op.name.startswith("secure-")]
    weak = (op.name for op in sums if op.name not in SIGNED and not (op.name in SIGNING and _active(op)))
    if not any(map(_active, sums)):
        return "sums"
    return next(map(repr, weak), None)


def _active(op: AllowedOp) -> bool:
    return op.fixed.get("active") is True


def _at_most(value: Any, limit: float) -> bool:
    return isinstance(value, (int, float)) and value <= limit


def _epsilon(ops: Sequence[AllowedOp], limit: float, delta: float) -> Iterator[str]:
    """Why replies of the allowed ops may cost more than an epsilon. It is read from the ops, which asks must match."""
    for op in ops:
        if "delta" in op.open or "delta" in op.ranges or not _at_most(op.fixed.get("delta", 0.0), delta):
            yield f"delta is at most {delta:g}, and {op.name!r} has {op.fixed.get('delta', 'no limit')}"
        epsilon, cls = op.fixed.get("epsilon"), _class(op)
        if cls is not None and "epsilon" in field_types(cls):  # a manifest may list fields that an op does not have
            if not _at_most(epsilon, limit):
                yield f"epsilon is {limit:g}, and {op.name!r} has {'no limit' if epsilon is None else epsilon}"
        elif _reads_samples(op):
            yield f"epsilon is {limit:g}, and the replies of {op.name!r} are not differentially private"


def _class(op: AllowedOp) -> type[Op] | None:
    """The class of an op or a local solver; None for transforms, and for a part of somebody's own."""
    cls = registered("local").get(op.name) or registered("op").get(op.name)
    return cls if cls is not None and issubclass(cls, Op) else None


def _trains(op: AllowedOp) -> bool:
    """Whether an op trains. Of an op around another one, the manifest lists the inner one too."""
    if op.name in registered("transform"):
        return False
    cls = _class(op)
    return cls is None or op.name in registered("local") or (not issubclass(cls, Wrapper) and cls.update is not None)


def _reads_samples(op: AllowedOp) -> bool:
    """Whether an op reads training samples without the budget of the op inside it."""
    if op.name in registered("transform"):
        return False
    cls = _class(op)
    if cls is None:  # a part of somebody's own
        return True
    if issubclass(cls, DataOp):
        return cls.learns
    return not (cls.serves is True or cls.budget in INNER or issubclass(cls, (Evaluate, Deliver))
                or op.name == "describe")  # fmt: skip
