"""The owner's ranges for the numbers that a request chooses: the table `[ranges]` of `party.toml`.

An aggregator chooses every field of an op, of the ops inside it, and of their transforms, schedules and metrics, and
the numbers of the payload. `RANGES` has the default range of each field that could turn a request into a question about
few samples, into too much work, or into numbers that overflow. The defaults are wide. `HARMLESS` has the other fields,
each with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from hansa.core.op import Op, Payload
from hansa.core.registry import Part, field_types, registered
from hansa.plumbing.errors import ConfigError, nearest

Bounds = tuple[float, float]
KINDS = ("op", "local", "transform", "schedule", "metric", "fusion")  # of the parts that a request is made of
MOST = 1e6  # of factors and rates
COUNT = 10**9  # of samples, parties and places
HUGE = 1e300  # whole numbers beyond it cannot be printed as floats
RANGES: Mapping[str, Bounds] = {
    # training: few samples per step, few steps and a large rate make a reply a question about single samples
    "batch": (1, COUNT), "microbatch": (1, COUNT), "head_epochs": (0, 10_000), "base_epochs": (0, 10_000),
    "lr": (0, MOST), "top_lr": (0, MOST), "rate": (0, MOST), "alpha_lr": (0, MOST), "h": (0, MOST), "momentum": (0, 1),
    "weight_decay": (0, MOST), "held_out": (0, 1), "q": (0, 1000), "temperature": (0, MOST), "max_score": (0, MOST),
    "alpha": (0, MOST), "lam": (0, MOST), "mu": (0, MOST), "rho": (0, MOST), "per_samples": (0, COUNT),
    "gamma": (0, 1e9), "fixed": (0, 1), "l2": (0, MOST), "scale": (0, MOST), "repeats": (1, 1_000_000),
    "sharpest": (0, 2.0**60), "iterations": (1, 100_000), "sweeps": (0, 10_000), "log": (1, 10_000),
    # protection: what clips, how much noise, how a sum is rounded, how large its keys and cohorts are
    "clip": (1e-9, 1e9), "sigma": (0, MOST), "delta": (0, 1), "cap": (1, 2**53), "unit": (0, 1e9),
    # the range of a sum is that of updates (16) or of statistics (2^30); far beyond, values are cut off or round to 0
    "range": (2.0**-20, 2.0**40), "statistics": (2.0**-20, 2.0**40), "max_weight": (1, 2**53), "noise": (0, 2.0**60),
    "key_bits": (1024, 16_384), "threshold": (0, 1), "needed": (1, 1000), "least": (1, COUNT),
    # trees: fewer rows per node, a narrower bound and more trees tell more about each row
    "min_rows": (0, COUNT), "min_samples": (0, COUNT), "bound": (0, 2.0**100), "sample": (0, 1), "held": (0, 1),
    "trees": (0, 100_000), "count": (0, 100_000), "max_depth": (0, 64), "power": (-1100, 1100),
    "min_weight": (0, COUNT), "most_bins": (0, 100_000),
    # the size of a reply
    "k": (1, COUNT), "share": (0, 1), "fourier": (0, 100_000), "components": (1, 100_000), "bits": (1, 64),
    "block": (1, COUNT), "bucket": (1, COUNT), "size": (1, COUNT), "step": (0, 1e9), "columns": (0, COUNT),
    "layers": (0, 100_000), "stage": (0, 100_000), "total": (0, 1000), "rounds": (1, COUNT),
}  # fmt: skip
WORKLOAD = "counted by [limits] before the work begins"
SIZED = "its reply is measured before the work begins (limits.memory)"
CHECKED = "the part itself refuses other values"
METRIC = "evaluate.numbers and evaluate.groups bound the numbers of an evaluation"
SEEDED = "it seeds draws of samples or places; with a privacy floor a party draws its samples by a secret of its own"
HARMLESS: Mapping[str, str] = {
    "epochs": WORKLOAD, "steps": WORKLOAD, "parties": WORKLOAD, "neighbours": WORKLOAD, "samples": WORKLOAD,
    "align": WORKLOAD, "slots": CHECKED, "width": SIZED, "length": SIZED, "classes": SIZED,
    "features": SIZED, "nodes": SIZED, "categories": SIZED, "spans": CHECKED, "shift": CHECKED, "grid": CHECKED,
    "beta1": CHECKED, "beta2": CHECKED, "decay": CHECKED, "floor": CHECKED, "at": CHECKED, "hashes": CHECKED,
    "eps": "it only makes steps of Adam shorter",
    "key": SEEDED, "draw": SEEDED, "first": SEEDED, "ask": "it numbers the asks of a tree, each with its own noise",
    "epsilon": "the job's own budget; privacy.epsilon is the owner's",
    "centre": "it shifts sums of targets by a known number",
    **dict.fromkeys(("tolerance", "tolerances", "patience"), "it ends the party's own work sooner or later"),
    **dict.fromkeys(("b", "beta", "f", "m"), "the fusion itself refuses values that do not fit the number of models"),
    "bins": METRIC, "by": METRIC, "edges": METRIC, "groups": METRIC, "positive": METRIC,
}  # fmt: skip


@dataclass(frozen=True)
class Ranges:
    """The owner's own ranges, by the name of a field (`clip`) or of a part and its field (`dp-sgd.clip`).

    Every number of a request must lie in the owner's range for its part, else in the owner's for its field, else in
    that of `RANGES`. A batch is compared as it is at this party: at most all samples, which are never too few. So is
    the last batch of an epoch, if the owner has a range.
    """

    own: Mapping[str, Bounds] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str) -> Ranges:
        """Read the table; a ConfigError for an unknown field or a malformed range."""
        own: dict[str, Bounds] = {}
        for name, bounds in table.items():
            _check_known(name, where)
            numbers = bounds if isinstance(bounds, list) and len(bounds) == 2 else []
            if not all(map(_is_number, numbers)) or not numbers or not numbers[0] <= numbers[1]:
                raise ConfigError(f"{where}.{name}: expected a range of two numbers such as [0.1, 10.0], got {bounds}")
            own[name] = (float(numbers[0]), float(numbers[1]))
        return cls(own)

    def refuses(self, op: Op, n: int, payload: Payload) -> str | None:
        """Why a number of a request to a party with n samples is out of range, or None."""
        work = payload.get("work") or {}
        for part in nested_parts(op):
            for name in field_types(type(part)):
                value = getattr(part, name)
                refused = self._refuses(part.name, name, value, n)
                if refused is None and isinstance(work, Mapping) and name in work:
                    refused = self._refuses(part.name, name, work[name], n)
                if refused is not None:
                    return refused
            if isinstance(part, Op) and "batch" in {name.rpartition(".")[2] for name in self.own}:
                last = part.last_batch(n, work)
                refused = None if last is None else self._refuses(part.name, "batch", last, n)
                if refused is not None:
                    return f"{refused}; the last batch of an epoch may be left out (local.drop_last)"
        numbers = ((name, value) for name, value in payload.items() if _is_number(value))
        refusals = (self._refuses(op.name, name, value, n) for name, value in numbers)
        return next((refused for refused in refusals if refused is not None), None)

    def _refuses(self, part: str, name: str, value: Any, n: int) -> str | None:
        setting = f"{part}.{name}" if f"{part}.{name}" in self.own else name
        bounds = self.own.get(setting, RANGES.get(name))
        if bounds is None:
            return None
        low, high = bounds
        if name == "batch" and (value is None or _is_number(value)):
            value, low = (n if value is None else min(value, n)), min(low, n)
        for number in _numbers(value):
            if not low <= number <= high:
                chosen = f"{number:g}" if abs(number) < HUGE else "a larger one"
                return (
                    f"its policy requires a {name} of {low:g} to {high:g}, and the job has {chosen} in {part!r}; see "
                    f"ranges.{setting} in party.toml"
                )
        return None


def nested_parts(part: Part) -> Iterator[Part]:
    """Yield a part and all parts in its fields, recursively."""
    yield part
    for name in field_types(type(part)):
        value = getattr(part, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Part):
                yield from nested_parts(inner)


def _numbers(value: Any) -> Iterator[float]:
    """The numbers of a field: one, those of a tuple, or none."""
    if isinstance(value, tuple):
        for inner in value:
            yield from _numbers(inner)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def holds_numbers(hint: Any) -> bool:
    """Whether a field of this type holds a number, or a tuple of numbers."""
    return hint in (int, float) or any(map(holds_numbers, get_args(hint)))


def _check_known(name: str, where: str) -> None:
    part, dot, _ = name.rpartition(".")
    fields = {
        (kind_name, each)
        for kind in KINDS
        for kind_name, kind_part in registered(kind).items()
        for each, hint in field_types(kind_part).items()
        if holds_numbers(hint)
    }
    known = {f"{one}.{each}" for one, each in fields} if dot else {each for _, each in fields} | set(RANGES)
    if name not in known and ":" not in part:  # a part of the owner's own is loaded only when a job names it
        raise ConfigError(f"{where}: no part of a request has a number {name!r}{nearest(name, sorted(known))}")
