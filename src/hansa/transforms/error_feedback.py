"""Error feedback around another transform (Seide et al. 2014; Stich, Cordonnier and Jaggi 2018)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.errors import ConfigError
from hansa.core.op import Party, Shape, like
from hansa.core.registry import register
from hansa.transforms.top_k import TopK
from hansa.transforms.transform import Kept, Layers, RowTransform, Transform


@register("error-feedback")
@dataclass(frozen=True)
class ErrorFeedback(RowTransform):
    """Another transform, to which the sender adds what the last message left out. Stich, Cordonnier and Jaggi 2018.

    The sender packs z = e + update by the transform `inner`, and remembers e = z - (what z opens to). So what is left
    out now is sent later: the sum of all opened messages is the sum of all updates, up to the last e. A party keeps e
    only if its reply was fused. The inner transform must be a contraction, or e grows without bound.
    """

    inner: Transform = TopK()

    def __post_init__(self) -> None:
        if isinstance(self.inner, ErrorFeedback):
            raise ConfigError("error-feedback around error-feedback would count each error twice; leave one out")
        if not self.inner.packs:
            raise ConfigError(f"error-feedback: {self.inner.name} keeps the form of a reply; leave one of them out")
        if not self.inner.contracts:
            raise ConfigError(
                f"error-feedback: the error of {self.inner.name} can exceed the vector, so errors would grow without "
                "bound; use a contraction: top-k, rand-k with scaled = false, sign, int8, or qsgd with more bits or a "
                "smaller bucket"
            )

    @property
    def adds(self) -> bool:  # type: ignore[override]
        return self.inner.adds

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        return self.inner.sparse

    @property
    def lengthens(self) -> bool:
        return True  # by what was left out before

    def of_model(self, layers: Layers) -> Transform:
        return dataclasses.replace(self, inner=self.inner.of_model(layers))

    def in_round(self, draw: int) -> Transform:
        return dataclasses.replace(self, inner=self.inner.in_round(draw))

    def packed(self, shape: Shape) -> dict[str, Shape]:
        return self.inner.packed(shape)

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        whole = _with_error(value, memory)
        parts, _ = self.inner.pack(party, name, whole, None)
        return parts, whole - self.inner.open(parts, like(whole))

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        whole = torch.stack([_with_error(*pair) for pair in zip(values, memories, strict=True)])
        parts, _ = self.inner.pack_rows(parties, name, whole, [None] * len(parties))
        return parts, list(whole - self.inner.open_rows(parts, like(whole[0])))

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return self.inner.open_rows(parts, shape)


def _with_error(value: Tensor, memory: Kept) -> Tensor:
    """A vector, and the error of the last message; vectors of another length begin anew."""
    if not isinstance(memory, Tensor) or memory.shape != value.shape:
        return value
    return value + memory.to(value)
