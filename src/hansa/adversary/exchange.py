"""The exchange that attackers act on, and its replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hansa.core.op import Op, Payload, Reply
from hansa.replies.reply_checks import Rules, fault


@dataclass(frozen=True)
class Exchange:
    """An ask, or a ticket, whose replies may be attacked: op, payload, parties, and whether weights are equal."""

    op: Op
    payload: Payload
    round: int
    parties: tuple[int, ...]
    uniform: bool
    occasion: tuple[int | str, ...]  # names the random numbers of this exchange
    each: Mapping[int, Payload] = field(default_factory=dict)  # additions to the payload of single parties

    @property
    def name(self) -> str:
        """The name of the reply's tensor that is the update."""
        assert self.op.update is not None
        return self.op.update

    def sound(self, party: int, reply: Reply) -> bool:
        """Whether a party's reply is valid; invalid replies are not attacked."""
        payload = {**self.payload, **self.each.get(party, {})}
        return fault(reply, self.op, payload, Rules(), summed=False) is None

    def update(self, reply: Reply) -> Tensor:
        """The update of a reply, as a vector."""
        return reply.tensors[self.name].flatten()

    def replaced(self, reply: Reply, row: Tensor) -> Reply:
        """The reply with another update."""
        return dataclasses.replace(reply, tensors={**reply.tensors, self.name: row.view_as(reply.tensors[self.name])})


def own_copy(reply: Reply, but: str | None = None) -> Reply:
    """Copy the tensors of a reply, except the tensor `but`."""
    tensors = {name: value if name == but else value.clone() for name, value in reply.tensors.items()}
    return dataclasses.replace(reply, tensors=tensors, maxima={n: value.clone() for n, value in reply.maxima.items()})
