"""Detectors of drift: a party's loss against its own past."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from msgspec import Meta

from hansa.core.quantities import NotNegative, Positive
from hansa.core.registry import Part, register

LEAST = 3  # losses of its own past that a party needs before its next loss is judged
FLOOR = 0.01  # smallest standard deviation, as a share of the mean loss: smaller changes are no drift


class Watch(NamedTuple):
    """What a detector remembers of one party: its last losses, and the statistic of the test."""

    losses: tuple[float, ...] = ()
    statistic: float = 0.0

    def tree(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "statistic": self.statistic}

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Watch:
        return cls(tuple(tree["losses"]), tree["statistic"])


class Detector(Part):
    """Base of detectors. Subclasses are frozen dataclasses; what they remember is a `Watch` per party."""

    kind: ClassVar[str] = "detector"

    def hear(self, watch: Watch, loss: float) -> tuple[Watch, str | None]:
        """Compare a loss with a party's past; return what to remember, and a reason for an alarm."""
        raise TypeError(f"the detector {self.name!r} does not define hear()")


@register("page-hinkley")
@dataclass(frozen=True)
class PageHinkley(Detector):
    """The test of Page 1954 and Hinkley 1971 on standardised losses: an alarm if a party's loss has risen.

    Let m and s be the mean and the standard deviation of the party's last n losses (at most `window`), and t = (loss -
    m) / (s sqrt(1 + 1/n)). If the losses are independent and normal with the same mean and variance, t has Student's
    distribution with n - 1 degrees of freedom, and the transformed q is standard normal (Quesenberry 1991; q by the
    formula of Wallace 1959). The test adds up S <- max(0, S + q - `delta`), and gives an alarm if S > `threshold`. Then
    the party's past begins anew.

    Under these conditions the defaults give one false alarm in about 3,000 evaluations of a party, and find a step of
    five standard deviations, after ten evaluations without a change, within five evaluations in 95 of 100 cases.
    Losses that fall, as they do while a model learns, give fewer alarms; losses that wander slowly give more. A
    standard deviation below a hundredth of the mean loss counts as that.
    """

    delta: NotNegative = 0.5
    threshold: Positive = 5.0
    window: Annotated[int, Meta(ge=LEAST, description="losses")] = 10

    def hear(self, watch: Watch, loss: float) -> tuple[Watch, str | None]:
        if not math.isfinite(loss):
            return Watch(), "its loss is not finite"
        past, n = np.array(watch.losses), len(watch.losses)
        if n < LEAST:
            return Watch((*watch.losses, loss)), None
        mean = float(past.mean())
        spread = max(float(past.std(ddof=1)), FLOOR * abs(mean), math.ulp(mean))
        statistic = max(0.0, watch.statistic + as_normal((loss - mean) / (spread * math.sqrt(1 + 1 / n)), n - 1)
                        - self.delta)  # fmt: skip
        if statistic > self.threshold:
            return Watch((loss,)), f"its loss is {loss:.4g}, and that of its last {n} evaluations was {mean:.4g}"
        return Watch((*watch.losses, loss)[-self.window :], statistic), None


def as_normal(t: float, degrees: int) -> float:
    """The standard normal number with the same probability as a number of Student's distribution (Wallace 1959)."""
    size = math.sqrt(degrees * math.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(size, t)
