"""The recurrent network for next-character prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from torch import Tensor, nn

from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.models.model import Model

DEEPEST = 100  # layers


@register("char-lstm")
@dataclass(frozen=True)
class CharLstm(Model):
    """Characters embedded in 8 dimensions, two LSTM layers of 256 units, a prediction at every position.

    McMahan et al. 2017, "Shakespeare LSTM"; sizes as in Reddi et al. 2021. `outputs` is the size of the vocabulary,
    which is also the number of rows of the embedding. Samples [B, T] of int64 codes give scores [B, T, outputs] for any
    T. With 90 outputs there are 822,570 parameters: Reddi's 820,522 and the second bias vector that torch gives each
    layer.
    """

    inputs: tuple[int, ...] = (80,)
    outputs: int = 90
    embed: Count = 8
    hidden: Count = 256
    layers: Annotated[int, Meta(ge=1, le=DEEPEST)] = 2

    def __call__(self) -> nn.Module:
        return CharacterNetwork(self.outputs, self.embed, self.hidden, self.layers)


class CharacterNetwork(nn.Module):
    """Embedding, LSTM, linear read-out at every position."""

    def __init__(self, vocabulary: int, embed: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embed)
        self.lstm = nn.LSTM(embed, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.output(states)
        return scores
