"""The hook that packs models on their way to the parties (`run.compress_down`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hansa.core.op import Party, Payload, like
from hansa.holdings.gateway import SampleGateway
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError
from hansa.run.hooks import CurrentRound, RoundHook
from hansa.transforms import Transform
from hansa.transforms.downlink import model_vector, packed_form, with_vector
from hansa.transforms.transform import memory_entries, recalled

AGGREGATOR = -1  # its number among the parties, for the keys of random numbers


@dataclass
class DownlinkCompression(RoundHook):
    """How models travel to the parties.

    What the transform remembers (the error of error feedback) is the aggregator's: one memory for the first model that
    a round sends, one for the second, and so on. It is kept only if the round was not aborted.
    """

    transform: Transform
    objective: Objective
    seed: int
    _sent: dict[int, tuple[Tensor, Mapping[str, Any]]] = field(default_factory=dict)  # by the id of an opened vector
    _opened: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by the id of a vector
    _payloads: dict[int, tuple[Payload, Payload]] = field(default_factory=dict)  # by the id of a payload
    _memory: dict[str, Tensor] = field(default_factory=dict)
    _used: bool = False

    def before(self, current: CurrentRound) -> None:
        self._sent, self._opened, self._payloads, self._memory = {}, {}, {}, {}
        empty = SampleGateway((torch.zeros(0, 1), torch.zeros(0)), None)
        sender = Party(AGGREGATOR, self.objective, empty, self.seed, current.number)

        def send(payload: Payload) -> tuple[Payload, Mapping[str, Any] | None]:
            vector = model_vector(payload)
            if vector is None:
                return payload, None
            if id(vector) in self._sent:  # a protocol asks with a payload that is opened already
                return payload, self._sent[id(vector)][1]
            if id(vector) not in self._opened:
                self._pack(sender, vector, current.progress.downlink)
            opened = self._opened[id(vector)][1]
            # One payload object for equal payloads, so that a checkpoint stores its model once.
            whole = self._payloads.setdefault(id(payload), (payload, with_vector(payload, opened)))[1]
            return whole, self._sent[id(opened)][1]

        current.send = send

    def _pack(self, sender: Party, vector: Tensor, before: Mapping[str, Tensor]) -> None:
        name = f"model {len(self._opened)}"
        parts, kept = self.transform.pack(sender, name, vector, recalled(before, name))
        opened = self.transform.open(parts, like(vector))
        self._memory |= memory_entries(name, kept)
        self._sent[id(opened)] = opened, packed_form(self.transform, parts, len(vector))
        self._opened[id(vector)] = vector, opened  # the vector stays alive, so that no other one gets its id
        self._used = True

    def after(self, current: CurrentRound, line: dict[str, Any]) -> None:
        if current.empty is None:
            current.progress.downlink = {**current.progress.downlink, **self._memory}
        if not self._used and current.record.accepted:
            raise ConfigError("run.compress_down: the parties are sent no model that it could pack; leave it out")
