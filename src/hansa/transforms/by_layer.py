"""A transform for each group of layers: `compress = { "conv*" = "top-k", "*" = "int8" }`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.op import Party, Shape
from hansa.core.quantities import CHECKED
from hansa.core.registry import Part, read_nameless, register
from hansa.core.shapes import largest_shape
from hansa.plumbing.errors import ConfigError
from hansa.transforms.identity import IdentityTransform
from hansa.transforms.transform import Kept, Layers, RowTransform, Transform, memory_entries, recalled


@register("by-layer")
@dataclass(frozen=True)
class ByLayer(RowTransform):
    """A transform for each group of parameters, by patterns of their names.

    A parameter belongs to the first pattern that matches its name; `*` stands for any characters. The parameters of a
    pattern are packed together, as one vector. In a file, a table without `name` is read this way:
    `compress = { "conv*" = "top-k", "*" = "identity" }`. The run sets `spans` to the layers of its model: pairs of the
    number of a transform and a length.
    """

    patterns: tuple[str, ...] = ("*",)
    transforms: tuple[Transform, ...] = (IdentityTransform(),)
    spans: tuple[tuple[Annotated[int, Meta(ge=0), CHECKED], ...], ...] = ()
    varies: ClassVar[tuple[str, ...]] = ("spans",)
    layered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.patterns or len(self.patterns) != len(self.transforms):
            raise ConfigError(
                f"by-layer: {len(self.patterns)} patterns and {len(self.transforms)} transforms; give one for each"
            )
        if any(len(span) != 2 or span[0] >= len(self.transforms) for span in self.spans):
            raise ConfigError("by-layer: each of `spans` is the number of a transform and a length")
        for transform in self.transforms:
            if isinstance(transform, ByLayer) or not transform.packs:
                raise ConfigError(f"by-layer: {transform.name} works on whole updates; use another transform")

    @property
    def adds(self) -> bool:  # type: ignore[override]
        return all(transform.adds for transform in self.transforms)

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return all(transform.contracts for transform in self.transforms)

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        return any(transform.sparse for transform in self.transforms)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return any(transform.remembers for transform in self.transforms)

    @property
    def lengthens(self) -> bool:
        return any(transform.lengthens for transform in self.transforms)

    def of_model(self, layers: Layers) -> Transform:
        groups: list[list[tuple[str, int]]] = [[] for _ in self.transforms]
        spans = []
        for name, length in layers:
            group = next((n for n, pattern in enumerate(self.patterns) if fnmatchcase(name, pattern)), None)
            if group is None:
                raise ConfigError(f'no pattern matches the parameter {name!r}; add one, such as "*" = "identity"')
            groups[group].append((name, length))
            spans.append((group, length))
        names = ", ".join(name for name, _ in layers)
        for pattern, group_layers in zip(self.patterns, groups, strict=True):
            if not group_layers:
                raise ConfigError(f"no parameter is left for the pattern {pattern!r}; the parties send: {names}")
        fitted = tuple(transform.of_model(group) for transform, group in zip(self.transforms, groups, strict=True))
        return dataclasses.replace(self, transforms=fitted, spans=tuple(spans))

    def in_round(self, draw: int) -> Transform:
        return dataclasses.replace(self, transforms=tuple(transform.in_round(draw) for transform in self.transforms))

    def packed(self, shape: Shape) -> dict[str, Shape]:
        (numbers,) = largest_shape(shape[0])
        return {
            f"{group}.{part}": like
            for group, transform in enumerate(self.transforms)
            for part, like in transform.packed(((self._length(group, numbers),), shape[1])).items()
        }

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        parts: dict[str, Tensor] = {}
        kept: list[dict[str, Tensor]] = [{} for _ in parties]
        for group, transform in enumerate(self.transforms):
            vector = torch.cat([values[:, columns] for columns in self._columns(group, values.shape[1])], 1)
            before = [recalled(memory, str(group)) if isinstance(memory, dict) else None for memory in memories]
            packed, after = transform.pack_rows(parties, f"{name} {group}", vector, before)
            parts |= {f"{group}.{part}": rows for part, rows in packed.items()}
            for own, memory in zip(kept, after, strict=True):
                own |= memory_entries(str(group), memory)
        return parts, [own or None for own in kept]

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        (numbers,) = largest_shape(shape[0])
        first = next(iter(parts.values()))
        out = torch.empty(len(first), numbers, dtype=shape[1], device=first.device)
        for group, transform in enumerate(self.transforms):
            like = ((self._length(group, numbers),), shape[1])
            opened = transform.open_rows({part: parts[f"{group}.{part}"] for part in transform.packed(like)}, like)
            columns = list(self._columns(group, numbers))
            pieces = torch.split(opened, [at.stop - at.start for at in columns], 1)
            for at, piece in zip(columns, pieces, strict=True):
                out[:, at] = piece
        return out

    def _length(self, group: int, numbers: int) -> int:
        return sum(at.stop - at.start for at in self._columns(group, numbers))

    def _columns(self, group: int, numbers: int) -> Iterator[slice]:
        """Where the numbers of a group are in the vector."""
        spans = self.spans or ((0, numbers),)
        if sum(length for _, length in spans) != numbers or (not self.spans and len(self.transforms) > 1):
            raise ConfigError(
                f"by-layer: the layers of the model have {sum(length for _, length in spans)} numbers, and {numbers} "
                "travel, so their layers are not known; use one transform for all of them"
            )
        left = 0
        for owner, length in spans:
            if owner == group:
                yield slice(left, left + length)
            left += length


@read_nameless("transform")
def _by_layer(table: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The table of `by-layer`, from one of patterns and transforms; None for another table."""
    if not table or not all(isinstance(value, (str, Mapping, Part)) for value in table.values()):
        return None
    return {"name": ByLayer.name, "patterns": list(table), "transforms": list(table.values())}
