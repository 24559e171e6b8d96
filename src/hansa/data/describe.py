"""What an aggregator must know of the parties' data before a job: the shape of a sample, the number of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hansa.core.errors import ConfigError, DataError, PartyError
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register

DIMENSIONS = 8  # of a sample, at most


@register("describe")
@dataclass(frozen=True)
class Describe(Op):
    """Say how samples are shaped, how many classes the targets name (0 for other targets), whether the party has test
    samples of its own, and whether values are missing. Nothing of any sample is sent, nor how many there are."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.train
        shape = tuple(x.shape[1:])
        if len(shape) > DIMENSIONS:
            raise PartyError(f"its samples have {len(shape)} dimensions, and at most {DIMENSIONS} are supported")
        classes = int(y.max()) + 1 if not y.is_floating_point() and y.numel() else 0
        missing = x.is_floating_point() and bool(x.isnan().any())
        about = [len(shape), *shape, *[0] * (DIMENSIONS - len(shape)), classes, party.test is not None, missing]
        return Reply({"about": torch.tensor(about, dtype=torch.int64)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"about": ((DIMENSIONS + 4,), torch.int64)}


@dataclass(frozen=True)
class Description:
    """What one party said of its data."""

    shape: tuple[int, ...]
    classes: int
    tests: bool
    missing: bool

    @classmethod
    def of(cls, reply: Reply) -> Description:
        """What a reply says; a DataError where it says nothing possible."""
        dims, *rest = (int(value) for value in reply.tensors["about"])
        if not 0 <= dims <= DIMENSIONS or min(rest) < 0:
            raise DataError("it describes its data in an impossible way")
        return cls(tuple(rest[:dims]), rest[DIMENSIONS], bool(rest[-2]), bool(rest[-1]))


def agreed(parties: Sequence[str], descriptions: Sequence[Description]) -> Description:
    """What the parties' data have in common; a ConfigError that names two parties where they do not fit together."""
    first = descriptions[0]
    for name, other in zip(parties, descriptions, strict=True):
        if other.shape != first.shape:
            raise ConfigError(
                f"the parties' samples differ in shape: those of {parties[0]} are {first.shape}, those of {name} "
                f"{other.shape}"
            )
        if (other.classes == 0) != (first.classes == 0):
            raise ConfigError(
                f"the targets of {parties[0]} and {name} are of different kinds: class numbers and others"
            )
    return Description(
        first.shape,
        max(d.classes for d in descriptions),
        any(d.tests for d in descriptions),
        any(d.missing for d in descriptions),
    )
