"""Every registered transform keeps its promises, and the suite finds one that does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from own_transforms import Carry, Halves
from torch import Tensor

from hansa.core.op import Op, Party, Shape
from hansa.core.registry import register, registered
from hansa.testing import PartyPool, check_transform
from hansa.transforms import (
    QSGD,
    ByLayer,
    Clip,
    ErrorFeedback,
    IdentityTransform,
    Int8,
    Packed,
    RandK,
    Sign,
    StochasticRounding,
    TopK,
    Transform,
)
from hansa.transforms.transform import Kept

OURS = [name for name, part in registered("transform").items() if part.__module__.startswith("hansa.")]


def test_the_transforms_of_hansa_are_these() -> None:
    assert OURS == [
        "accumulated-top-k", "by-layer", "clip", "error-feedback", "identity", "int8", "qsgd", "rand-k", "sign",
        "stochastic-rounding", "top-k",
    ]  # fmt: skip


@pytest.mark.thin(1)
@pytest.mark.parametrize("name", OURS)
def test_every_registered_transform_keeps_the_promises(name: str, pool: PartyPool) -> None:
    transform = registered("transform")[name]()
    assert isinstance(transform, Transform)
    check_transform(transform, pool)


OTHERS = [
    Clip(0.01),
    Int8(block=7),
    Halves(),
    Carry(),
    Carry(split=True),
    QSGD(bits=3, bucket=7),
    QSGD(bits=2, elias=True),
    StochasticRounding(step=0.5, bits=2, bucket=7),
    TopK(k=3),
    TopK(share=0.5),
    RandK(share=0.2, shared=True),
    RandK(k=5, scaled=False),
    ErrorFeedback(Sign()),
    ErrorFeedback(RandK(share=0.3, scaled=False, shared=True)),
    ErrorFeedback(IdentityTransform()),
    ByLayer(transforms=(ErrorFeedback(),)),
]


@pytest.mark.slow
@pytest.mark.parametrize("transform", OTHERS, ids=str)
def test_other_settings_and_transforms_with_parts_that_add_or_with_a_memory_keep_them(transform: Transform) -> None:
    check_transform(transform)


def _nudged(codes: Tensor) -> Tensor:
    """Codes that PyTorch's global generator changes by 0 or 1."""
    return (codes + torch.randint(0, 2, codes.shape, dtype=torch.int8)).clamp(-127, 127)


class OfGlobalState(Int8):
    """Rounds by PyTorch's global generator."""

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        parts, kept = super().pack(party, name, value, memory)
        return {**parts, "codes": _nudged(parts["codes"])}, kept


class AnnouncesLess(Int8):
    def packed(self, shape: Shape) -> dict[str, Shape]:
        return {name: like for name, like in super().packed(shape).items() if name == "codes"}


class ChangesTheVector(Int8):
    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        found = super().pack(party, name, value, memory)
        value.add_(1.0)
        return found


class SaysThatCodesAdd(Int8):
    adds: ClassVar[bool] = True


class SaysThatRoundedHalvesAdd(Halves):
    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return super().open(parts, shape).round()


class OpensToFloat32(Int8):
    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return super().open(parts, shape).float()


class OpensToInfinity(Int8):
    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return super().open(parts, shape) * 1e300 * 1e300


class OpensZerosToOnes(Halves):
    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return super().open(parts, shape) + 1


class OtherRows(Int8):
    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        if len(parties) == 1:
            return super().pack_rows(parties, name, values, memories)
        return super().pack_rows([parties[0]] * len(parties), name, values, memories)


class OtherOpenedRows(Halves):
    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return super().open_rows(parts, shape) * 2


class ForgetsTheRest(Halves):
    def around(self, op: Op, label: str = "") -> Op:
        return _Forgetful(op, self)


@register("test-forgetful")
@dataclass(frozen=True)
class _Forgetful(Packed):
    def after(self, party, payload, reply, memory):  # type: ignore[no-untyped-def]
        found, _ = super().after(party, payload, reply, memory)
        return found, {"other": torch.zeros(2)}


for number, broken in enumerate((OfGlobalState, AnnouncesLess, ChangesTheVector, SaysThatCodesAdd, OpensToFloat32,
                                 SaysThatRoundedHalvesAdd, OpensToInfinity, OpensZerosToOnes, OtherRows,
                                 OtherOpenedRows, ForgetsTheRest)):  # fmt: skip
    register(f"test-broken-{number}")(broken)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (OfGlobalState(), "the same party, name and vector give other parts"),
        (AnnouncesLess(), "and announces"),
        (ChangesTheVector(), "pack changes the vector"),
        (SaysThatCodesAdd(), "not floating-point numbers cannot be added"),
        (SaysThatRoundedHalvesAdd(), "the sum of parts opens to another vector"),
        (OpensToFloat32(), "it opens to"),
        (OpensToInfinity(), "opens to values that are not"),
        (OpensZerosToOnes(), "a vector of zeros opens to other numbers"),
        (OtherRows(), "pack_rows and pack give other bits"),
        (OtherOpenedRows(), "open_rows and open give other bits"),
        (ForgetsTheRest(), "it loses entries of the party's memory"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Transform) else "",
)
def test_a_broken_promise_is_found(transform: Transform, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_transform(transform)
