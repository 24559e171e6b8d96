"""Base of drifts: what changes about the parties of a simulation from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.core.quantities import Count, Fraction, Round
from hansa.core.registry import Part
from hansa.plumbing.errors import ConfigError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Drift(Part):
    """Base of drifts. Gama et al. 2014 survey concept drift.

    A drift begins in round `start`; rounds count from 1, as in the metrics lines. Its members are the share `fraction`
    of all parties (by default all; rounded down), drawn by the run's seed, or the `parties` listed by name or number.
    Subclasses are frozen dataclasses and override `rows` or `features` (data), or `away` (presence). They keep no
    state: what holds in a round follows from the round and the seed alone, so a resumed run continues with it.
    """

    start: Round
    fraction: Fraction | None = None
    parties: tuple[str | int, ...] = ()
    kind: ClassVar[str] = "drift"

    def __post_init__(self) -> None:
        if self.parties and self.fraction is not None:
            raise ConfigError("give fraction or parties, not both")

    @property
    def done(self) -> int:
        """The round in which the drift is complete."""
        return self.start

    def away(self, round: int) -> str | None:
        """Why members cannot take part in a round (from 1); None if they can."""
        return None


class Concept(NamedTuple):
    """The samples that a drift of labels chooses from: all labels `y`, and the rows of each class."""

    y: Tensor
    by_class: list[Array]


@dataclass(frozen=True, kw_only=True)
class DataDrift(Drift):
    """Base of drifts of the members' samples. The drift grows in equal steps for `over` rounds, until it is complete.

    The aggregator's test set follows the parties: the share of its samples that drifts is the members' share of all
    training samples.
    """

    over: Count = 1

    @property
    def done(self) -> int:
        return self.start + self.over - 1

    def amount(self, round: int) -> float:
        """How far the drift has gone in a round (from 1): 0 before `start`, 1 when it is complete."""
        return min(max((round - self.start + 1) / self.over, 0.0), 1.0)

    def check(self, shape: tuple[int, ...], dtype: torch.dtype, classes: int | None, prepared: bool) -> None:
        """Raise a ConfigError if the drift cannot apply to samples of this shape, type and number of classes."""

    def needs(self, classes: int) -> list[int]:
        """The classes of which there must be samples."""
        return []

    def rows(self, own: Array, concept: Concept, amount: float, key: int) -> Array | None:
        """The rows that take the places of a member's rows `own`; None if the member has nothing to show yet."""
        return own

    def features(self, x: Tensor, amount: float, key: int) -> Tensor:
        """The features of a member's samples."""
        return x


def check_classes(classes: int | None) -> int:
    """The number of classes; a ConfigError if the targets are numbers."""
    if classes is None:
        raise ConfigError("it changes the classes of samples, and the targets of this task are numbers; leave it out")
    return classes
