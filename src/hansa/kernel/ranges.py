"""The owner's ranges for the numbers that a request chooses: the table `[ranges]` of `party.toml`.

An aggregator chooses every field of an op, of the ops inside it, and of their transforms, schedules and metrics, and
the numbers of the payload. The type of a field says which range a party allows by default, or why it needs none
(`core.fields.Owner`); so does the statement of a payload entry. The defaults are wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hansa.core.entries import Number
from hansa.core.fields import REQUESTED, Owner, owner_of, stated_types, statements
from hansa.core.op import Op, Payload
from hansa.core.plain_data import field_types
from hansa.core.registry import Part, registered
from hansa.plumbing.errors import ConfigError, nearest

Bounds = tuple[float, float]
HUGE = 1e300  # whole numbers beyond it cannot be printed as floats


@dataclass(frozen=True)
class Ranges:
    """The owner's own ranges, by the name of a field (`clip`) or of a part and its field (`dp-sgd.clip`).

    Every number of a request must lie in the owner's range for its part, else in the owner's for its field, else in
    that of its type. A batch is compared as it is at this party: at most all samples, which are never too few. So is
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

    def refuses(self, op: Part, n: int, payload: Payload) -> str | None:
        """Why a number of a request (an op, or the transform of its model) is out of range at n samples, or None."""
        work = payload.get("work") or {}
        for part in nested_parts(op):
            for name, hint in stated_types(type(part)).items():
                value, owner = getattr(part, name), owner_of(hint)
                refused = self._refuses(part.name, name, value, n, owner)
                if refused is None and isinstance(work, Mapping) and name in work:
                    refused = self._refuses(part.name, name, work[name], n, owner)
                if refused is not None:
                    return refused
            if isinstance(part, Op) and "batch" in {name.rpartition(".")[2] for name in self.own}:
                last = part.last_batch(n, work)
                refused = None if last is None else self._refuses(part.name, "batch", last, n, None)
                if refused is not None:
                    return f"{refused}; the last batch of an epoch may be left out (local.drop_last)"
        owners = dict(_entry_owners(op))
        numbers = ((name, value) for name, value in payload.items() if _is_number(value))
        refusals = (self._refuses(op.name, name, value, n, owners.get(name)) for name, value in numbers)
        return next((refused for refused in refusals if refused is not None), None)

    def _refuses(self, part: str, name: str, value: Any, n: int, owner: Owner | None) -> str | None:
        setting = f"{part}.{name}" if f"{part}.{name}" in self.own else name
        bounds = self.own.get(setting)
        if bounds is None and owner is not None and not owner.harmless:
            bounds = (owner.least, owner.most)
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


def _entry_owners(op: Part) -> Iterator[tuple[str, Owner]]:
    """What the payload entries of an op, and of the ops inside it, say about the owner's range of a number."""
    for part in nested_parts(op):
        for name, entry in (getattr(part, "entries", None) or {}).items():
            if isinstance(entry, Number) and entry.owner is not None:
                yield name, entry.owner


def _check_known(name: str, where: str) -> None:
    part, dot, _ = name.rpartition(".")
    parts = [(kind_name, cls) for kind in REQUESTED for kind_name, cls in registered(kind).items()]
    fields = {(of, each) for of, cls in parts for each, hint in stated_types(cls).items() if any(statements(hint))}
    stated = [entries for _, cls in parts if isinstance(entries := getattr(cls, "entries", None), Mapping)]
    entries = {name for one in stated for name, entry in one.items() if isinstance(entry, Number)}
    known = {f"{one}.{each}" for one, each in fields} if dot else {each for _, each in fields} | entries
    if name not in known and ":" not in part:  # a part of the owner's own is loaded only when a job names it
        raise ConfigError(f"{where}: no part of a request has a number {name!r}{nearest(name, sorted(known))}")
