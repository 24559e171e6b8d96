"""FedV: linear models over columns by functional encryption, with one message per party and batch.

Xu, Baracaldo, Zhou, Anwar, Joshi and Ludwig 2021 (FedV: privacy-preserving federated learning over vertically
partitioned data). Parties do not talk to each other. The aggregator has the model; a key authority lets it decrypt the
residuals of a batch, in an order that it does not know, and the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.algorithm import Problem, State
from hansa.core.declared_ops import OpenOp
from hansa.core.federation import Federation
from hansa.core.op import Payload
from hansa.core.quantities import BatchSize, Epochs, Factor, Rate
from hansa.core.registry import register
from hansa.plumbing.errors import ConfigError, DataError, RoundAborted
from hansa.secure.byte_tensors import as_bytes, split
from hansa.vertical import inner_products, psi_group
from hansa.vertical.fedv_ops import (
    FEATURE_BITS,
    FEATURES,
    KEYS,
    LEAST,
    MOST_RANGE,
    SCORE_BITS,
    SCORES,
    WEIGHT_BITS,
    FedVBatch,
    FedVKeep,
    FedVKey,
    FedVSecrets,
    label_of,
    label_offset,
    spread,
)
from hansa.vertical.linear import LinearColumns
from hansa.vertical.linear_model import FEATURES as LARGEST_FEATURE
from hansa.vertical.linear_model import LinearRoles, Loss, Residual, batch_rows, regularised
from hansa.vertical.psi import arrived


@register("fedv")
@dataclass(frozen=True)
class FedV(LinearColumns):
    """Train a linear model over columns by functional encryption. Xu et al. 2021.

    `loss` is "linear", "logistic" (the Taylor polynomial of degree 2) or "svm" (squared hinge). A round is `epochs`
    passes over the common people, in batches of at least `batch`, with gradient descent of the rate `lr` and the
    penalty `l2`. The party number `authority` holds the keys, and its columns are not used; by default it is the last
    party without labels. It gives no key for sums that spread over fewer than `least` people; a batch with such
    residuals is skipped (`skipped` in the metrics). `range` bounds the scores of a party and the targets.

    `match` finds the common people: "psi" by private set intersection, "same" for parties that hold the same people.

    With `of_job`, a job trains nothing: it asks the model of that finished job for the scores of `people`, hashes of
    ids with a `salt` (`hansa predict --federation` writes them).
    """

    loss: Loss = "logistic"
    authority: int | None = None
    match: Literal["psi", "same"] = "psi"
    epochs: Epochs = 1
    batch: BatchSize = 64
    lr: Rate = 0.1
    l2: Factor = 0.0
    range: Annotated[float, Meta(gt=0, le=MOST_RANGE)] = 64.0
    least: Annotated[int, Meta(ge=LEAST)] = 8
    of_job: str | None = None
    people: tuple[str, ...] = ()
    salt: str = ""
    helps: ClassVar[str] = "authority"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.batch:
            raise ConfigError(f"least must be at most batch ({self.batch}), got {self.least}")

    def check(self, problem: Problem) -> None:
        psi_group.available()
        super().check(problem)

    def training_ops(self) -> tuple[Any, ...]:
        return (OpenOp("fedv-secrets"), self._batch(), FedVKey(self.least), OpenOp("fedv-keep"))

    def _batch(self) -> FedVBatch:
        return FedVBatch(self.loss, self.epochs, self.batch, self.range)

    async def trained(self, fed: Federation, state: State) -> State:
        roles = self.with_rows(state, "train")
        tree, parties = roles.tree(), list(roles.widths)
        if "weights" not in state.slots:
            await arrived(fed, FedVSecrets(), {}, [(roles.helper, party) for party in parties])
        before: Mapping[str, Tensor] = state.slots.get("weights", {})
        none = {party: torch.zeros(roles.length(party), dtype=torch.float64) for party in parties}
        weights, skipped = {party: before.get(str(party), none[party]) for party in parties}, 0
        for step, rows in enumerate(batch_rows(roles.rows, self.batch) * self.epochs):
            gradient = await self._gradient(fed, roles, weights, {**tree, "step": step}, rows)
            if gradient is None:
                skipped += 1
                continue
            weights = {party: regularised(w, gradient[party], self.lr, self.l2, party == roles.holder)
                       for party, w in weights.items()}  # fmt: skip
        if skipped:
            fed.metrics["skipped"] = float(skipped)
        each = {party: {"w": w} for party, w in weights.items()}
        await fed.gather(FedVKeep(), tree, parties=parties, each=each, need="all")
        return state.replace(weights={str(party): w for party, w in weights.items()})

    async def _gradient(self, fed: Federation, roles: LinearRoles, weights: Mapping[int, Tensor], payload: Payload,
                        rows: int) -> dict[int, Tensor] | None:  # fmt: skip
        """The gradient of a batch for each party; None if its residuals are those of too few people."""
        each = {party: {"w": w, "columns": roles.widths[party]} for party, w in weights.items()}
        sent = await fed.gather(self._batch(), payload, parties=list(weights), each=each, need="all")
        replies = dict(zip(sent.parties, sent.replies, strict=True))
        ask = {**payload, "batch": rows}
        (key,) = await self._keys(fed, roles, ask)
        sums = self._decrypted(torch.stack([replies[party].tensors[SCORES].cpu() for party in weights]),
                               [1] * len(weights), key, label_of(fed.round, payload["step"], "rows"),
                               largest_sum(self.loss, len(weights), self.range))  # fmt: skip
        residuals = residual_weights(self.loss, sums, len(weights), self.range)
        if not spread(residuals, self.least):
            return None
        keys = await self._keys(fed, roles, {**ask, "weights": torch.tensor(residuals)})
        scale = 1.0 / (2.0 ** (WEIGHT_BITS + FEATURE_BITS) * rows)
        gradient = {}
        for party, own in zip(weights, keys, strict=True):
            label = label_of(fed.round, payload["step"], f"columns {party}")
            most = sum(map(abs, residuals)) * int(LARGEST_FEATURE) << FEATURE_BITS
            products = self._decrypted(replies[party].tensors[FEATURES].cpu(), residuals, own, label, most)
            if party == roles.holder:  # the column of ones is known
                products.append(sum(residuals) << FEATURE_BITS)
            gradient[party] = torch.tensor(products, dtype=torch.float64) * scale
        return gradient

    async def _keys(self, fed: Federation, roles: LinearRoles, payload: Payload) -> list[bytes]:
        got = await fed.gather(FedVKey(self.least), payload, parties=[roles.helper], need="all")
        return split(as_bytes(got.replies[0].tensors[KEYS]), 32)

    @staticmethod
    def _decrypted(points: Tensor, weights: list[int], key: bytes, label: str, most: int) -> list[int]:
        try:
            return inner_products.decrypt(points, weights, key, inner_products.bases_of(label, points.shape[1]), most)
        except DataError as error:
            raise RoundAborted(f"a batch cannot be decrypted: {error}") from None


def largest_sum(loss: Loss, parties: int, range: float) -> int:
    """The largest sum of a row's scores and target, as a multiple of 2^-12."""
    if loss == "svm":
        return 2 * label_offset(parties, range)
    return (parties + Residual.KINDS[loss].step) * (int(range * 2**SCORE_BITS) + 1)


def residual_weights(loss: Loss, sums: list[int], parties: int, range: float) -> list[int]:
    """The residuals of a batch as whole multiples of 2^-10, from the sums of scores and targets."""
    kind = Residual.KINDS[loss]
    if loss != "svm":
        return [round(kind.slope * number * 2.0 ** (WEIGHT_BITS - SCORE_BITS)) for number in sums]
    offset, one, out = label_offset(parties, range), 2**SCORE_BITS, []
    for number in sums:
        sign = 1 if number > 0 else -1
        difference = number - sign * offset - sign * one  # z - y
        out.append(round(difference * 2.0 ** (WEIGHT_BITS - SCORE_BITS)) if sign * difference < 0 else 0)
    return out
