"""The number of samples of each class: an op for class weights and for trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from hansa.core.entries import Sizes, check_size, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import SIZED
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.plumbing.errors import PartyError

CLASSES = 2**20  # classes that a party counts at most


@register("class-counts")
@dataclass(frozen=True)
class ClassCounts(Op):
    """The number of the party's samples of each class."""

    classes: Annotated[int, Meta(ge=0, le=CLASSES), SIZED] = 0
    per_sample: ClassVar[Bounds] = {"counts": PerSample(over=(-1,))}
    entries = stated()

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "classes", self.classes, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        y = party.rows("statistics")[1]
        if y.dim() != 1 or y.is_floating_point() or int(y.min()) < 0 or int(y.max()) >= self.classes:
            raise PartyError("its targets are not one class number per sample, within the job's classes")
        return Reply({"counts": torch.bincount(y.cpu(), minlength=self.classes)}, weight=len(y)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"counts": ((self.classes,), torch.int64)}
