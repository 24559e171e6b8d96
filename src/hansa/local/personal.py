"""Personal layers: the local solvers of FedPer and LG-FedAvg.

Arivazhagan, Aggarwal, Singh and Choudhary 2019; Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov and Morency
2020.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hansa.core.applies import Applies, Unless
from hansa.core.entries import Entries, extended, model_of
from hansa.core.op import Memory, Payload
from hansa.core.quantities import Layers
from hansa.core.registry import register
from hansa.local.context import Context
from hansa.local.delegating import Delegating
from hansa.local.solver import Carry
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError

HEAD = "personal/head"


class Division(NamedTuple):
    """The coordinates that all parties share (`base`) and those that each party keeps (`head`)."""

    base: Tensor
    head: Tensor

    def joined(self, base: Tensor, head: Tensor) -> Tensor:
        """The whole vector."""
        whole = base.new_zeros(len(self.base) + len(self.head))
        return whole.index_copy(0, self.base.to(base.device), base).index_copy(0, self.head.to(base.device), head)


@functools.lru_cache(maxsize=8)
def divide(spec: ParamSpec, layers: int, head: tuple[str, ...], lower: bool = False) -> Division:
    """Divide a model: the head is its last `layers` layers (with `lower` its first), or what `head` names."""
    order = list(dict.fromkeys(entry.name.rpartition(".")[0] for entry in spec.weights))
    last = order[:layers] if lower else order[max(0, len(order) - layers) :] if layers else []
    names = [entry.name for entry in spec.weights]
    for prefix in head:
        if not any(_inside(name, prefix) for name in names):
            raise ConfigError(f"the model has no parameter or layer {prefix!r}; it has: {', '.join(names)}")
    own = torch.cat([
        torch.full((entry.numel,), any(_inside(entry.name, prefix) for prefix in head) if head
                   else entry.name.rpartition(".")[0] in last)
        for entry in spec.weights
    ])  # fmt: skip
    return Division((~own).nonzero().flatten(), own.nonzero().flatten())


@functools.lru_cache(maxsize=8)
def in_head(solver: Personal, spec: ParamSpec, device: torch.device) -> Tensor:
    """Which coordinates of a model are in a solver's head; on a GPU a recorded step must not copy them each time."""
    base, head = solver.division(spec)
    return torch.zeros(len(base) + len(head), dtype=torch.bool).index_fill(0, head, True).to(device)


def _inside(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")


@register("personal")
@dataclass(frozen=True)
class Personal(Delegating):
    """Train the shared base and the party's own head by any solver; send only the base. Arivazhagan et al. 2019.

    The party remembers its head. In its first round a party starts with the common initial head.
    """

    layers: Layers = 1
    head: tuple[str, ...] = ()
    lower: ClassVar[bool] = False  # whether the personal layers are the first ones
    partner: ClassVar[tuple[str, str] | None] = ("fedper", "which sends the base of the model without its head")
    applies: ClassVar[Applies] = {"layers": Unless("head")}

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, model=model_of((None,)))

    def division(self, spec: ParamSpec) -> Division:
        """The shared and the personal coordinates of a model."""
        return divide(spec, self.layers, self.head, self.lower)

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        head = initial.w.index_select(0, self.division(spec).head.to(initial.w.device))
        return {HEAD: head, **self.inner.remember(spec, initial)}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        whole = own_model(self.division(ctx.spec), ctx.objective.initial.w, w, memory)
        return self.inner.start(ctx, whole, payload, memory)

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        tensors, after = self.inner.finish(ctx, start, w, carry, memory)
        base, head = (at.to(w.device) for at in self.division(ctx.spec))
        return {"w": tensors["w"].index_select(0, base)}, {**after, HEAD: w.index_select(0, head)}


def own_model(division: Division, initial: Tensor, base: Tensor, memory: Memory) -> Tensor:
    """A party's whole vector: the shared base and its own head (the initial head if it has not trained yet)."""
    head = memory[HEAD] if HEAD in memory else initial.index_select(0, division.head.to(initial.device))
    return division.joined(base, head)


@register("representation")
@dataclass(frozen=True)
class Representation(Personal):
    """As `personal`, but the first layers are the party's own: its representation of the samples. Liang et al. 2020."""

    lower: ClassVar[bool] = True
    partner: ClassVar[tuple[str, str] | None] = ("lg-fedavg", "which sends the model without its first layers")
