"""Which fields of a part have an effect beside its other fields, and the refusal of those that have none.

A class states it as a table from a field to a condition, or to a tuple of conditions that must all hold:

    applies = {"epochs": Unless("steps"), "batch": If("variant", "cpow-d")}

A field whose condition does not hold must keep its default. The constructor of a part checks this, so that Python,
files and the command line refuse the same settings with the same sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hansa.plumbing.errors import ConfigError


class If:
    """The field applies if the field `switch` has one of `values`; without values, if it differs from its default."""

    negated = False

    def __init__(self, switch: str, *values: Any) -> None:
        self.switch, self.values = switch, values

    def holds(self, value: Any, default: Any) -> bool:
        """Whether the condition holds for a value of the switch."""
        return (value in self.values if self.values else value != default) is not self.negated

    def advice(self, default: Any) -> str:
        """How to make the field apply, where the switch has this default."""
        if not self.values:
            return f"set {self.switch} too"
        return f"set {self.switch} to {' or '.join(map(_shown, self.values))}"


class Unless(If):
    """The field applies unless the field `switch` has one of `values`; without values, unless it is set."""

    negated = True

    def advice(self, default: Any) -> str:
        if self.values:
            return f"change {self.switch}"
        return f"leave {self.switch} out" if default is not None else f"set {self.switch} to 'none'"


Applies = Mapping[str, If | tuple[If, ...]]


def conditions(cls: type[Any]) -> Iterator[tuple[str, If]]:
    """The fields of a class that apply only under a condition, each with that condition."""
    table: Applies = getattr(cls, "applies", {})
    for field, stated in table.items():
        for condition in stated if isinstance(stated, tuple) else (stated,):
            yield field, condition


def defaults(cls: type[Any]) -> dict[str, Any]:
    """The defaults of the fields that a class's conditions name."""
    named = {name for field, condition in conditions(cls) for name in (field, condition.switch)}
    return {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            for f in dataclasses.fields(cls) if f.name in named}  # fmt: skip


def idle(cls: type[Any], values: Mapping[str, Any]) -> dict[str, If]:
    """The fields with another value than the default that have no effect, each with the condition that fails."""
    default = defaults(cls) if getattr(cls, "applies", None) else {}
    return {field: condition for field, condition in conditions(cls)
            if values[field] != default[field]
            and not condition.holds(values[condition.switch], default[condition.switch])}  # fmt: skip


def check_applies(part: Any) -> None:
    """Raise a ConfigError for a field that is set although other fields leave it without effect."""
    for field, condition in idle(type(part), vars(part)).items():
        switch = condition.switch
        value, other = getattr(part, field), getattr(part, switch)
        unset = other is None or other == () or other == ""
        raise ConfigError(
            f"{field} = {_shown(value)} has no effect while {switch} is {'not set' if unset else _shown(other)}; leave "
            f"{field} out, or {condition.advice(defaults(type(part))[switch])}"
        )


def _shown(value: Any) -> str:
    """A value for a message."""
    value = list(value) if isinstance(value, tuple) else getattr(value, "name", "none" if value is None else value)
    return str(value).lower() if isinstance(value, bool) else repr(value)
