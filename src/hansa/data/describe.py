"""What an aggregator must know of the parties' data before a job: the shape of a sample, the number of classes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hansa.core.errors import ConfigError, DataError, PartyError
from hansa.core.losses import named_loss
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register

T = TypeVar("T")
DIMENSIONS = 8  # of a sample, at most
NUMBERS = 2**31  # of a sample, at most
CLASSES = 2**20  # at most
FEW, TIMES = 1024, 64  # so many classes anybody may name; beyond, no more than so many times what is usual
KINDS = ("none", "real", "class")  # of targets; none where there is no sample


@register("describe")
@dataclass(frozen=True)
class Describe(Op):
    """Say how samples are shaped, and of which kind the targets are.

    Also how many classes they name (0 for other targets), whether the party has test samples of its own, and whether
    values are missing. Nothing of any sample is sent, nor how many there are. Where the loss is known, it decides the
    kind.
    """

    loss: str | None = None

    def __post_init__(self) -> None:
        if self.loss is not None:
            named_loss(self.loss)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.train
        shape = tuple(x.shape[1:])
        if len(shape) > DIMENSIONS:
            raise PartyError(f"its samples have {len(shape)} dimensions, and at most {DIMENSIONS} are supported")
        kind, classes = self._targets(y)
        missing = x.is_floating_point() and bool(x.isnan().any())
        about = [len(shape), *shape, *[0] * (DIMENSIONS - len(shape)), classes, KINDS.index(kind),
                 party.test is not None, missing]  # fmt: skip
        return Reply({"about": torch.tensor(about, dtype=torch.int64)}), memory

    def _targets(self, y: Tensor) -> tuple[str, int]:
        """The kind of the targets, and the number of classes."""
        if y.numel() == 0:
            return "none", 0
        if self.loss not in (None, "cross_entropy"):
            return "real", 0
        if y.is_floating_point():
            if self.loss is None:
                return "real", 0
            if not torch.equal(y, y.round()):
                raise PartyError("its targets are not whole class numbers, which cross_entropy needs")
        return "class", int(min(max(float(y.max()) + 1, 1), CLASSES + 1))

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"about": ((DIMENSIONS + 5,), torch.int64)}


@dataclass(frozen=True)
class Description:
    """What one party said of its data."""

    shape: tuple[int, ...]
    classes: int
    kind: str
    tests: bool
    missing: bool

    @classmethod
    def of(cls, reply: Reply) -> Description:
        """What a reply says; a DataError where it says nothing possible."""
        dims, *rest = (int(value) for value in reply.tensors["about"])
        classes, kind, tests, missing = rest[DIMENSIONS:]
        shape = tuple(rest[: max(dims, 0)])
        if not 0 <= dims <= DIMENSIONS or min(shape, default=1) < 1 or not 0 <= kind < len(KINDS):
            raise DataError("it describes its data in an impossible way")
        if math.prod(shape) > NUMBERS:
            raise DataError(f"it describes samples of {math.prod(shape)} numbers, and at most {NUMBERS} are supported")
        if classes < 0 or (classes > 0) != (KINDS[kind] == "class"):
            raise DataError("it describes its targets in an impossible way")
        if classes > CLASSES:
            raise DataError(f"its targets name more than {CLASSES} classes; for numbers, set task.loss = 'mse'")
        return cls(shape, classes, KINDS[kind], bool(tests), bool(missing))


def agreed(said: Mapping[str, Description], classes: int | None = None,
           prepared: bool = False) -> tuple[Description, dict[str, str]]:  # fmt: skip
    """What the data of most parties have in common, and why the other parties are left out, by name.

    `classes` is the number of classes where it is known; else no party alone may raise it beyond what is usual.
    Missing values are a matter of the job, unless few parties have them and nothing fills them in (`prepared`).
    Parties without samples fit every job. A ConfigError where there is nothing that most have in common.
    """
    out: dict[str, str] = {}
    left = {name: one for name, one in said.items() if one.kind != "none"}
    if not left:
        raise ConfigError("none of the parties has a sample")

    def leave(reasons: dict[str, str]) -> None:
        out.update(reasons)
        for name in reasons:
            del left[name]

    shape = _most({name: one.shape for name, one in left.items()}, "samples differ in shape")
    leave({
        name: f"its samples are {one.shape}, those of most parties {shape}"
        for name, one in left.items() if one.shape != shape
    })  # fmt: skip
    kind = _most({name: one.kind for name, one in left.items()}, "targets are of different kinds")
    words = {"class": "class numbers", "real": "real numbers"}
    leave({
        name: f"its targets are {words[one.kind]}, those of most parties {words[kind]}; task.loss would decide"
        for name, one in left.items() if one.kind != kind
    })  # fmt: skip
    limit = classes or max(FEW, TIMES * statistics.median_low(one.classes for one in left.values()))
    leave({
        name: f"its targets name {one.classes} classes, and at most {limit} are possible"
        + ("" if classes else ", by what the other parties name")
        for name, one in left.items() if one.classes > limit
    })  # fmt: skip
    odd = [name for name, one in left.items() if one.missing]
    if not prepared and 2 * len(odd) < len(left):
        leave(dict.fromkeys(odd, "its features have missing values; set task.prepare = 'standardise'"))
    if not left:
        raise ConfigError(f"the data of no party fit: {out}")
    return Description(
        shape,
        max(one.classes for one in left.values()),
        kind,
        any(one.tests for name, one in said.items() if name not in out),
        any(one.missing for one in left.values()),
    ), out


def _most(values: Mapping[str, T], what: str) -> T:
    """The value that most parties have."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        raise ConfigError(f"the parties' {what}, and no side has the majority: {dict(values)}")
    return counts[0][0]
