"""Ops that transform a party's data, which the task applies before the first round."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.op import Op, Party, Payload
from hansa.core.shapes import Shape
from hansa.holdings.fitting import cast
from hansa.numerics.weights import Weighting


class DataOp(Op):
    """An op that transforms a party's data (imputation, scaling); its reply has no tensors.

    An op that `learns` takes numbers of its transformation from the party's own training samples. Then each prepared
    sample depends on all of them, so no noise for one sample protects it.
    """

    learns: ClassVar[bool] = False

    def transform(self, x: Tensor, payload: Payload) -> Tensor:
        """The transformed samples. Each row is transformed by itself, so any subset gives the same rows."""
        raise TypeError(f"the op {self.name!r} does not define transform()")

    def prepared(self, x: Any, payload: Payload, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """Samples as a user has them, prepared for a model of a type; None for a method without a torch module."""
        return self.transform(cast(x, device, dtype), payload)

    def weigh(self, y: Tensor, payload: Payload) -> Tensor | None:
        """Factors of the weights of samples with these targets; None for an op that changes no weights."""
        return None

    def resolved(self, party: Party, payload: Payload) -> tuple[DataOp, Payload]:
        """The same preparation with all numbers that it needs, so that it can be repeated when samples have changed."""
        return self, payload

    def apply(self, party: Party, payload: Payload) -> None:
        """Replace the party's samples and the public ones by transformed ones.

        A PartyError if the payload does not fit them.
        """
        y = party.data.rows("statistics")[1] if party.data.labelled else None
        factors = None if y is None else self.weigh(y, payload)
        if y is not None and factors is not None:
            party.data.weigh(factors)
            party.objective.weighting = Weighting.of(y)
        party.data.transform(lambda x: self.transform(x, payload))
        if party.public is not None:
            party.public = party.public._replace(x=self.transform(party.public.x, payload))

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}
