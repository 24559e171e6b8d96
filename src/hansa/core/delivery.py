"""Deliver the final model to the parties of a job whose parties have models of their own.

A party's own model may need both its memory and what the aggregator holds (the shared layers, for example). At the end
of a deployed job every party gets the latter, and keeps both together (`net.party.own_models`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hansa.core.entries import Entries, Sizes
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import check_prediction, predictor_entries
from hansa.core.registry import register


@register("deliver")
@dataclass(frozen=True)
class Deliver(Op):
    """Keep the final model of a job: the payload of a predictor. It reads no sample, and the reply is empty."""

    used_by: str = "network"  # the predictor

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return predictor_entries(self.used_by)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_prediction(self.used_by, payload, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({}), {}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}
