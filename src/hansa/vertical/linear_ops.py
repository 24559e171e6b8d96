"""The parties' ops of encrypted linear models (Hardy et al. 2017): train, with a coordinator that holds the key.

One step, for a batch of people whom the run's seed decides:

1. every party k except the label holder sends its scores x_k . w_k to the label holder, encrypted;
2. the label holder adds its own scores and the labels, and sends the encrypted residuals to the others;
3. every party computes the encrypted gradient of its weights, adds a random mask, and sends it to the coordinator;
4. the coordinator decrypts it and sends it back; the party subtracts the mask and takes a step.

The coordinator sees masked gradients alone, and the parties see ciphertexts alone. With K parties that have columns, a
batch has 4 K - 2 messages. Numbers are exact integers, multiples of a fixed step, so that the result does not depend
on keys, masks or the order of sums.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.entries import Sizes, stated
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.quantities import SUM_RANGES, BatchSize, Epochs, Factor, Rate
from hansa.core.registry import register
from hansa.core.route_op import Message
from hansa.core.session_op import Receive, Send, SessionOp, Talk
from hansa.plumbing.errors import DataError, PartyError
from hansa.secure.additive import SLACK as KEY_SLACK
from hansa.secure.additive import AdditiveKeyBits, AdditivePrivateKey, AdditivePublicKey, prime_bits
from hansa.secure.byte_tensors import as_bytes, from_rows, to_rows
from hansa.secure.encoding import Numbers
from hansa.secure.primes import Stream
from hansa.secure.weighted_sums import MaskedPacking, sum_bits, weighted_sums
from hansa.vertical.linear_model import (
    FEATURES,
    LINEAR_ROLES,
    PLACES,
    WEIGHTS,
    LinearRoles,
    Loss,
    Residual,
    batch_count,
    batch_places,
    batch_rows,
    features_of,
    own_weights,
    regularised,
    score_steps,
    steps_of,
    targets_of,
)
from hansa.vertical.psi_ops import ROWS
from hansa.vertical.split_ops import common_rows, only_tensor

log = logging.getLogger("hansa")
SCORE_BITS, FEATURE_BITS = 24, 16  # scores and targets are multiples of 2^-24, features of 2^-16
LARGEST = 2.0**20  # the largest range of scores
KEY = "linear/key"  # in the coordinator's memory: its private key
PUBLIC, SCORES, RESIDUALS, GRADIENT = "key", "scores", "residuals", "gradient"  # the tensors of messages

Exchange = Generator[Send | Receive, Message | None, Tensor]


@register("linear-train")
@dataclass(frozen=True)
class LinearTrain(SessionOp):
    """Train a linear model over the columns of several parties by some epochs, under encryption.

    `range` bounds the scores of each party and the targets; `key_bits` is the length of the coordinator's key.
    """

    loss: Loss = "logistic"
    epochs: Epochs = 1
    batch: BatchSize = 128
    lr: Rate = 0.1
    l2: Factor = 0.0
    range: Annotated[float, Meta(gt=0, le=LARGEST), SUM_RANGES] = 64.0
    key_bits: AdditiveKeyBits = 2048
    measures: ClassVar[frozenset[str] | None] = frozenset()

    entries = stated(**LINEAR_ROLES)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        LinearRoles.of(payload)

    @property
    def residual(self) -> Residual:
        return Residual.KINDS[self.loss]

    def packing(self, roles: LinearRoles, rows: int) -> MaskedPacking:
        """How the sums of a batch are packed into plaintexts."""
        parts = len(roles.widths) + self.residual.step  # the scores of all parties, and the targets
        largest = int(parts * self.range * 2**SCORE_BITS) * int(FEATURES * 2**FEATURE_BITS)
        return MaskedPacking.of(sum_bits(rows, largest), prime_bits(self.key_bits) - 1 - KEY_SLACK)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        roles = LinearRoles.of(payload)
        steps = self.epochs * batch_count(roles.rows, self.batch)
        return {"epochs": self.epochs, "steps": steps, "parameters": sum(roles.widths.values()) + 1}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        roles, size = LinearRoles.of(payload), self.key_bits // 8
        batches = batch_rows(roles.rows, self.batch) * self.epochs
        if sender == roles.helper and receiver in roles.widths:
            opened = {rows: self._gradient_shape(roles, rows, receiver, opened=True) for rows in set(batches)}
            return [{PUBLIC: ((size,), torch.uint8)}, *(opened[rows] for rows in batches)]
        if sender in roles.widths and receiver == roles.helper:
            sealed = {rows: self._gradient_shape(roles, rows, sender, opened=False) for rows in set(batches)}
            return [sealed[rows] for rows in batches]
        for name, at, to in ((SCORES, roles.others, [roles.holder]), (RESIDUALS, [roles.holder], roles.others)):
            if sender in at and receiver in to:
                return [{name: ((rows, size), torch.uint8)} for rows in batches]
        return []

    def _gradient_shape(self, roles: LinearRoles, rows: int, party: int, opened: bool) -> dict[str, Shape]:
        packing = self.packing(roles, rows)
        size = packing.size if opened else self.key_bits // 8
        return {GRADIENT: ((packing.plaintexts(roles.length(party)), size), torch.uint8)}

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = LinearRoles.of(payload)
        return (yield from self._coordinate(party, roles, memory) if party.id == roles.helper
                else self._train(party, roles, memory))  # fmt: skip

    def _coordinate(self, party: Party, roles: LinearRoles, memory: Memory) -> Talk:
        """At the coordinator: send the public key, and decrypt masked gradients."""
        self._check_batches(roles)
        if KEY not in memory:
            key = AdditivePrivateKey.generate(self.key_bits, Stream(party.private("linear key")))
            memory = {**memory, KEY: key.tensor()}
        key = AdditivePrivateKey.of_tensor(memory[KEY])
        for other in roles.widths:
            yield Send(other, {PUBLIC: key.public.tensor()})
        for rows in batch_rows(roles.rows, self.batch) * self.epochs:
            packing = self.packing(roles, rows)
            for other in roles.widths:
                texts = received(key.public, only_tensor((yield Receive(other))), other)
                yield Send(other, {GRADIENT: self._decrypted(key, texts, packing, other)})
        return Reply({}), memory

    def _decrypted(self, key: AdditivePrivateKey, texts: list[int], packing: MaskedPacking, sender: int) -> Tensor:
        """The numbers of ciphertexts; zeros if one is out of range, which would reveal the key.

        A refusal would tell whoever chose the residuals about the sender's columns.
        """
        try:
            return to_rows(key.decrypt(texts, packing.limit), packing.size)
        except (DataError, OverflowError):
            log.warning("party %d sent a gradient for decryption that is out of range; it gets zeros", sender)
            return to_rows([0] * len(texts), packing.size)

    def _train(self, party: Party, roles: LinearRoles, memory: Memory) -> Talk:
        """At a party with columns."""
        self._check_batches(roles)
        rows, w = common_rows(memory, ROWS, roles), own_weights(memory, roles, party.id)
        holds = party.id == roles.holder
        x = features_of(party, roles, party.data.features("train"))[rows]
        y = targets_of(party.data.rows("train")[1], self.residual)[rows] if holds else None
        key = self._key((yield Receive(roles.helper)))
        for at in batch_places(party, roles.rows, self.batch, self.epochs):
            scores = score_steps(party, x[at] @ w, self.range, SCORE_BITS)
            # The draws depend on all that is encrypted: a session that begins again may have other numbers.
            draws = Stream(party.private("linear scores") + hashlib.sha256(scores.tobytes()).digest())
            if y is not None:
                scores = scores - self.residual.step * score_steps(party, y[at], self.range, SCORE_BITS)
                draws = Stream(party.private("linear targets") + hashlib.sha256(scores.tobytes()).digest())
            sealed = key.encrypt(scores.tolist(), draws)
            residuals = yield from self._residuals(roles, key, sealed, holds)
            steps = steps_of(x[at], FEATURE_BITS)
            gradient = yield from self._gradient(party, roles, key, residuals, steps)
            after = regularised(w, gradient, self.lr, self.l2, holds)
            w = torch.where(after.isfinite(), after, w)  # of a model that diverges, the last finite weights stay
        return Reply({}), {**memory, WEIGHTS: w, PLACES: roles.places}

    def _check_batches(self, roles: LinearRoles) -> None:
        """Refuse batches in which a party has as many equations (its gradient) as unknown numbers (the residuals)."""
        widest, fewest = max(map(roles.length, roles.widths)), min(batch_rows(roles.rows, self.batch))
        if fewest <= widest:
            raise PartyError(
                f"a batch has {fewest} people, and a party has {widest} weights: its gradient would reveal the "
                "residual of each person; use larger batches"
            )

    def _key(self, message: Message | None) -> AdditivePublicKey:
        try:
            key = AdditivePublicKey.of_tensor(only_tensor(message))
            key.check(self.key_bits)
        except DataError as error:
            raise PartyError(f"the coordinator sent an invalid key: {error}") from None
        return key

    def _residuals(self, roles: LinearRoles, key: AdditivePublicKey, sealed: list[int],
                   holds: bool) -> Generator[Send | Receive, Message | None, list[int]]:  # fmt: skip
        """The encrypted residuals of a batch; `sealed` are the party's own encrypted scores (minus targets)."""
        if not holds:
            yield Send(roles.holder, {SCORES: key.rows(sealed)})
            return received(key, only_tensor((yield Receive(roles.holder))), roles.holder)
        total = sealed
        for other in roles.others:
            theirs = received(key, only_tensor((yield Receive(other))), other)
            total = [key.add(ours, text) for ours, text in zip(total, theirs, strict=True)]
        for other in roles.others:
            yield Send(other, {RESIDUALS: key.rows(total)})
        return total

    def _gradient(self, party: Party, roles: LinearRoles, key: AdditivePublicKey, residuals: list[int],
                  steps: Numbers) -> Exchange:  # fmt: skip
        """The gradient of the party's weights: computed under encryption, decrypted under a mask."""
        packing = self.packing(roles, len(steps))
        # The mask depends on all that the sums depend on: a label holder may send the same residuals for other people,
        # and a session that begins again may have another key.
        parts = (as_bytes(key.tensor()), as_bytes(key.rows(residuals)), np.ascontiguousarray(steps).tobytes())
        heard = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
        draws = Stream(party.private("linear mask") + heard)
        sums = weighted_sums(key, residuals, steps)
        texts, masks = packing.masked(key, sums, draws)
        yield Send(roles.helper, {GRADIENT: key.rows(texts)})
        opened = from_rows(only_tensor((yield Receive(roles.helper))))
        try:
            plain = self._possible(roles, packing.unmasked(opened, masks, len(sums)), steps)
        except DataError as error:
            log.warning("party %d skips a batch: %s", party.id, error)
            plain = [0] * len(sums)
        scale = self.residual.slope / (2.0 ** (SCORE_BITS + FEATURE_BITS) * len(steps))
        return torch.tensor([float(number) for number in plain], dtype=torch.float64) * scale

    def _possible(self, roles: LinearRoles, plain: list[int], steps: Numbers) -> list[int]:
        """The sums; a DataError if no residuals within the range can have them: some party's numbers overflow."""
        largest = int((len(roles.widths) + self.residual.step) * self.range * 2**SCORE_BITS)
        bounds = (abs(steps).sum(0)).tolist()
        if any(abs(number) > largest * bound for number, bound in zip(plain, bounds, strict=True)):
            raise DataError("a decrypted gradient is larger than the scores of all parties allow")
        return plain


def received(key: AdditivePublicKey, rows: Tensor, sender: int) -> list[int]:
    """Received ciphertexts; a PartyError that names the sender if one is invalid."""
    try:
        return key.ciphertexts(rows)
    except DataError as error:
        raise PartyError(f"party {sender} sent invalid ciphertexts: {error}") from None
