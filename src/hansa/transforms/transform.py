"""Base of transforms, and the op that packs a party's update by a transform.

A transform packs one vector at a time: the update, and the other vectors that a local solver sends (SCAFFOLD's control
variates). Numbers, buffers and counters of a model travel as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hansa.core.op import Memory, Op, Party, Payload, Replies, Reply, Shape, like
from hansa.core.registry import Part, register
from hansa.core.shapes import is_open
from hansa.core.wrapper import PackingOp, unwrap
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError

Kept = Tensor | dict[str, Tensor] | None  # what a party remembers of one vector
Layers = Sequence[tuple[str, int]]  # the names of a model's parameters and their lengths, in the order of the vector
OpenParts = Callable[[Mapping[str, Tensor], Shape], Tensor]


class Transform(Part):
    """Base of transforms. Subclasses are frozen dataclasses that define `pack`, `packed` and `open`.

    `adds` says that parts may be added before they are opened: open(sum of parts) = sum of opened vectors. Only such a
    transform works with a secure sum and with central differential privacy.
    """

    kind: ClassVar[str] = "transform"
    adds: ClassVar[bool] = False
    packs: ClassVar[bool] = True  # False if replies keep their form; then `around` gives an op of its own
    # Whether the expected squared error is below the squared norm of the vector: then error feedback converges.
    contracts: ClassVar[bool] = False
    remembers: ClassVar[bool] = False  # whether the sender remembers numbers of a vector for the next one
    layered: ClassVar[bool] = False  # whether it needs to know the layers of a vector
    varies: ClassVar[tuple[str, ...]] = ()  # fields that a run sets: `of_model` and `in_round` do
    sparse: ClassVar[bool] = False  # whether most numbers are left out: right for updates, not for models

    @property
    def lengthens(self) -> bool:
        """Whether the opened vector may be longer than the vector that was packed."""
        return not self.adds

    def of_model(self, layers: Layers) -> Transform:
        """The transform for a model with these layers; a ConfigError if it does not fit them."""
        return self

    def in_round(self, draw: int) -> Transform:
        """The transform of one round; `draw` is a key for random numbers that all parties of the round share."""
        return self

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        """Pack a vector at the party: the named parts to send, and the party's new memory of this vector.

        The memory is kept only if the reply is fused. `name` differs between the vectors of a round: random numbers
        come from `keys([party], name)`, never from a global generator.
        """
        raise TypeError(f"the transform {self.name!r} does not define pack()")

    def packed(self, shape: Shape) -> dict[str, Shape]:
        """The names, shapes and types of the parts of a vector of this shape; other parts are rejected."""
        raise TypeError(f"the transform {self.name!r} does not define packed()")

    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Open the parts of a vector at the aggregator.

        The parts have the names, shapes and types of `packed`, and finite numbers. Otherwise they are the party's
        choice: raise a DataError for parts that `pack` cannot make. The aggregator then checks that the opened vector
        is finite and not too long. For sums of parts, the numbers and the type of `shape` are float64.
        """
        raise TypeError(f"the transform {self.name!r} does not define open()")

    def pack_rows(self, parties: Sequence[Party], name: str, values: Tensor,
                  memories: Sequence[Kept]) -> tuple[dict[str, Tensor], list[Kept]]:  # fmt: skip
        """As `pack`, for one row per party, with the same bits. Override it where all rows at once are faster."""
        each = [self.pack(*row) for row in zip(parties, [name] * len(parties), values, memories, strict=True)]
        parts = {part: torch.stack([packed[part] for packed, _ in each]) for part in each[0][0]}
        return parts, [kept for _, kept in each]

    def open_rows(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """As `open`, for one row per party, with the same bits. Override it where all rows at once are faster."""
        count = len(next(iter(parts.values())))
        return torch.stack([self.open({part: rows[k] for part, rows in parts.items()}, shape) for k in range(count)])

    def left_out(self, values: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """What the parts of the rows `values` leave out. Override it where it is known without opening them."""
        return values - self.open_rows(parts, like(values[0]))

    def around(self, op: Op, label: str = "") -> Op:
        """The op with a packed reply; the op itself if it sends no update. For `label` see `Packed`."""
        return Packed(op, self, label) if op.vectors else op


class RowTransform(Transform):
    """Base of transforms that handle all rows at once: subclasses define `pack_rows`, `packed` and `open_rows`."""

    def pack(self, party: Party, name: str, value: Tensor, memory: Kept) -> tuple[dict[str, Tensor], Kept]:
        parts, kept = self.pack_rows([party], name, value.unsqueeze(0), [memory])
        return {part: rows[0] for part, rows in parts.items()}, kept[0]

    def open(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return self.open_rows({part: value.unsqueeze(0) for part, value in parts.items()}, shape)[0]


def keys(parties: Sequence[Party], name: str) -> Tensor:
    """One key per party for random numbers (`numerics.rng`) about the vector `name` of this round."""
    bases = {(party.seed, party.round): rng.key(party.seed, f"transform {name}", party.round) for party in parties}
    return torch.tensor([rng.folded(bases[party.seed, party.round], party.id) for party in parties])


@register("packed")
@dataclass(frozen=True)
class Packed(PackingOp):
    """Run the inner op and pack its vectors by a transform. The vector `w` travels as `w.part` for each part.

    `label` names the ask within its round: different labels draw different random numbers.
    """

    inner: Op
    transform: Transform
    label: str = ""
    entries = PackingOp.entries

    def __post_init__(self) -> None:
        if not self.transform.packs:
            raise ConfigError(f"{self.transform.name} keeps the form of a reply; its own op applies it, not 'packed'")
        if not self.inner.vectors:
            raise ConfigError(f"{self.transform.name} packs updates, and {self.inner.name!r} sends none")
        if self.inner.longest is not None and self.transform.lengthens:
            raise ConfigError(
                f"{self.transform.name}: it can make an update longer than {self.inner.longest:g}, the length to which "
                f"{self.inner.name!r} clips it; leave one of them out"
            )

    @property
    def vectors(self) -> tuple[str, ...]:
        return ()  # they are packed already

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return self.transform.remembers or self.inner.recalls

    def _memory_name(self, vector: str) -> str:
        return f"{self.transform.name}/{unwrap(self)[1].name}/{vector}"

    def _purpose(self, vector: str) -> str:
        return f"{self.label} {vector}"

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        tensors, memory = dict(reply.tensors), dict(memory)
        for vector in self.inner.vectors:
            name = self._memory_name(vector)
            value = tensors.pop(vector)
            parts, kept = self.transform.pack(party, self._purpose(vector), value, recalled(memory, name))
            self._check_memory(kept)
            tensors |= {f"{vector}.{part}": tensor for part, tensor in parts.items()}
            memory |= memory_entries(name, kept)
        return Reply(tensors, reply.weight, reply.maxima, reply.metrics), memory

    def after_stack(self, parties: Sequence[Party], replies: Replies,
                    memories: Sequence[Memory]) -> tuple[Replies, dict[str, Tensor]] | None:  # fmt: skip
        tensors, changed = dict(replies.tensors), dict[str, Tensor]()
        for vector in self.inner.vectors:
            name = self._memory_name(vector)
            if any(is_open(sizes) for sizes, _ in self.transform.packed(like(tensors[vector][0])).values()):
                return None  # the parts of different parties may have different sizes
            before = [recalled(memory, name) for memory in memories]
            parts, kept = self.transform.pack_rows(parties, self._purpose(vector), tensors.pop(vector), before)
            self._check_memory(next((one for one in kept if one is not None), None))
            tensors |= {f"{vector}.{part}": rows for part, rows in parts.items()}
            entries = [memory_entries(name, one) for one in kept]
            if any(_layout(entry) != _layout(entries[0]) for entry in entries):
                return None
            changed |= {entry: torch.stack([one[entry] for one in entries]) for entry in entries[0]}
        return dataclasses.replace(replies, tensors=tensors), changed

    def _check_memory(self, kept: Kept) -> None:
        """Refuse to remember numbers of an update that are about other parameters in a later round."""
        layers, op = unwrap(self)
        moving = next((part for part in (op, *layers) if not part.aligned), None)
        if kept is not None and moving is not None:
            raise ConfigError(
                f"{self.transform.name}: it remembers the numbers of an update for the next round, and those of "
                f"{moving.name!r} are then about other parameters; use a transform without memory, such as 'int8'"
            )

    def expects(self, payload: Payload) -> dict[str, Shape]:
        shapes = dict(self.inner.expects(payload))
        for vector in self.inner.vectors:
            parts = self.transform.packed(shapes.pop(vector))
            shapes |= {f"{vector}.{part}": shape for part, shape in parts.items()}
        return shapes

    def beside(self, payload: Payload) -> frozenset[str]:
        """The tensors besides the parts of the update."""
        update, shapes = self.inner.update, self.inner.expects(payload)
        parts = set() if update is None else {f"{update}.{part}" for part in self.transform.packed(shapes[update])}
        return frozenset(self.expects(payload)) - parts if update is not None else frozenset()

    def opened(self, payload: Payload, reply: Reply) -> Reply:
        tensors = self._opened(payload, reply.tensors, self.transform.open)
        return Reply(tensors, reply.weight, reply.maxima, reply.metrics)

    def opened_stack(self, payload: Payload, replies: Replies) -> Replies:
        tensors = self._opened(payload, replies.tensors, self.transform.open_rows)
        return dataclasses.replace(replies, tensors=tensors)

    def opened_sums(self, payload: Payload, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if not set(self.expects(payload)) <= set(sums):  # a protocol in the clear: each reply was opened before
            return sums

        def open_sum(parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
            return self.transform.open(parts, (shape[0], torch.float64))

        return self._opened(payload, sums, open_sum)

    def _opened(self, payload: Payload, sent: Mapping[str, Tensor], open: OpenParts) -> dict[str, Tensor]:
        """The inner op's tensors, in their order, from those of a packed reply, a stack or a sum."""
        tensors = dict(sent)
        out = {}
        for name, shape in self.inner.expects(payload).items():
            if name in self.inner.vectors:
                parts = self.transform.packed(shape)
                out[name] = open({part: tensors.pop(f"{name}.{part}") for part in parts}, shape)
            else:
                out[name] = tensors.pop(name)
        return out | tensors


def recalled(memory: Mapping[str, Tensor], name: str) -> Kept:
    """What a party remembers of a vector, from its memory."""
    if name in memory:
        return memory[name]
    inside = {entry.removeprefix(f"{name}/"): value for entry, value in memory.items() if entry.startswith(f"{name}/")}
    return inside or None


def memory_entries(name: str, kept: Kept) -> Memory:
    """The entries of a party's memory for what it remembers of a vector."""
    if kept is None:
        return {}
    return {name: kept} if isinstance(kept, Tensor) else {f"{name}/{entry}": value for entry, value in kept.items()}


def _layout(memory: Memory) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in memory.items()}
