"""Ops that a part of a run declares in advance, so that a party's owner can approve them before the first ask.

An algorithm, a selector, a preparation and a secure sum each name the ops that they ask for. Some fields of such an op
are known in advance; others are decided during the run, such as the number of features or the cut of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hansa.core.plain_data import to_config
from hansa.core.registry import Part


@dataclass(frozen=True)
class OpenOp:
    """An op by name whose fields are decided during the run, except those in `fixed`, within those of `ranges`.

    `largest` is the largest value of its replies, if it has one (`Op.largest`).
    """

    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    largest: float | None = None

    @classmethod
    def of(cls, name: str, part: Part, *fields: str) -> OpenOp:
        """An op that has these fields, with the same values, in common with the part that asks for it."""
        config = to_config(part)
        return cls(name, {each: config[each] for each in fields})


# The ops of a part: an `OpenOp`, or an op whose fields are all known. None: the part does not declare its ops.
DeclaredOps = tuple[OpenOp | Part, ...] | None
