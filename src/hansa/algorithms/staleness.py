"""Staleness functions: the weight of an update by its age in server steps (Xie, Koyejo and Gupta 2019, section 5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.quantities import AnyCount, Positive
from hansa.core.registry import Part, register


class Staleness(Part):
    """Base of staleness functions: s(0) = 1, and s does not increase with the age."""

    kind: ClassVar[str] = "staleness"

    def weight(self, age: int) -> float:
        """The factor s(age) in (0, 1] for an update that is `age` server steps old."""
        raise TypeError(f"the staleness function {self.name!r} does not define weight()")


@register("constant")
@dataclass(frozen=True)
class ConstantStaleness(Staleness):
    """s = 1: an old update counts as much as a new one."""

    def weight(self, age: int) -> float:
        return 1.0


@register("polynomial")
@dataclass(frozen=True)
class PolynomialStaleness(Staleness):
    """s = (age + 1)^-a."""

    a: Positive = 0.5

    def weight(self, age: int) -> float:
        return float((age + 1) ** -self.a)


@register("hinge")
@dataclass(frozen=True)
class HingeStaleness(Staleness):
    """s = 1 up to the age b, then 1 / (a (age - b) + 1)."""

    a: Positive = 10.0
    b: AnyCount = 4

    def weight(self, age: int) -> float:
        return 1.0 if age <= self.b else 1.0 / (self.a * (age - self.b) + 1.0)
