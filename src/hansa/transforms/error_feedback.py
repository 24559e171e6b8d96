"""Error feedback around another transform (Seide et al. 2014; Stich, Cordonnier and Jaggi 2018)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.registry import register
from hansa.plumbing.errors import ConfigError
from hansa.transforms.top_k import TopK, read_places
from hansa.transforms.transform import Kept, Layers, RowTransform, Transform

ERROR, VALUES, PLACES = "error", "values", "places"  # the memory of `AccumulatedTopK`


@register("error-feedback")
@dataclass(frozen=True)
class ErrorFeedback(RowTransform):
    """Another transform, to which the sender adds what the last message left out. Stich, Cordonnier and Jaggi 2018.

    The sender packs z = e + update by the transform `inner`, and remembers e = z - (what z opens to). So what is left
    out now is sent later: the sum of all opened messages is the sum of all updates, up to the last e. A party keeps e
    only if its reply was fused. The inner transform must be a contraction, or e grows without bound.
    """

    inner: Transform = TopK()
    remembers: ClassVar[bool] = True

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
        whole = with_error(value, memory)
        parts, _ = self.inner.pack(party, name, whole, None)
        rows = {part: value.unsqueeze(0) for part, value in parts.items()}
        return parts, self.inner.left_out(whole.unsqueeze(0), rows)[0]

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        whole = torch.stack([with_error(*pair) for pair in zip(values, memories, strict=True)])
        parts, _ = self.inner.pack_rows(parties, name, whole, [None] * len(parties))
        return parts, list(self.inner.left_out(whole, parts))

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return self.inner.open_rows(parts, shape)


def with_error(value: Tensor, memory: Kept) -> Tensor:
    """A vector, and the error of the last message; vectors of another length begin anew."""
    if not isinstance(memory, Tensor) or memory.shape != value.shape:
        return value
    return value + memory.to(value)


@register("accumulated-top-k")
@dataclass(frozen=True)
class AccumulatedTopK(TopK):
    """Top-k of all that a party has not sent yet; the party also remembers what it sent. Han, Wang and Leung 2020.

    The algorithm `adaptive-top-k` uses part of what parties send, and tells them which part: a party then takes the
    rest back. As `run.compress` it is `error-feedback` around `top-k`, with more memory.
    """

    contracts: ClassVar[bool] = False  # it has an error feedback of its own
    remembers: ClassVar[bool] = True

    @property
    def lengthens(self) -> bool:
        return True

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        errors = [memory.get(ERROR) if isinstance(memory, dict) else None for memory in memories]
        whole = torch.stack([with_error(*pair) for pair in zip(values, errors, strict=True)])
        parts, _ = super().pack_rows(parties, name, whole, memories)
        places = read_places(parts["places"], parts["values"].shape[1], whole[0].numel())
        sent = zip(self.left_out(whole, parts), parts["values"], places, strict=True)
        return parts, [{ERROR: error, VALUES: value, PLACES: at} for error, value, at in sent]


def returned(memory: Mapping[str, Tensor], used: Tensor) -> dict[str, Tensor]:
    """A party's memory of `AccumulatedTopK` after only the places `used` were used: the rest goes back to its error."""
    values, places = memory[VALUES], memory[PLACES]
    back = ~torch.isin(places, used.to(places.device))
    error = memory[ERROR].index_add(0, places[back], values[back])
    return {ERROR: error, VALUES: values[:0], PLACES: places[:0]}
