"""Scores of a trained linear model over columns: tests, and scores of single people, named by hashes of their ids.

Parties add their scores in a ring (Clifton, Kantarcioglu, Vaidya, Lin and Zhu 2002): the label holder sends random
numbers, every other party adds its scores and passes the sums on, and the label holder subtracts the random numbers.
Sums are modulo 2^64, so that each party sees uniform numbers, and the label holder the sum of all others.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.entries import Sizes, stated
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.predictor import METRICS
from hansa.core.registry import register
from hansa.core.route_op import Message
from hansa.core.session_op import Receive, Send, SessionOp, Talk
from hansa.plumbing.errors import PartyError
from hansa.secure.ring import add_mask
from hansa.vertical.linear_model import LINEAR_ROLES, PLACES, WEIGHTS, LinearRoles, clamped, features_of, own_weights
from hansa.vertical.modules import batch_sizes
from hansa.vertical.psi_ops import TEST_ROWS
from hansa.vertical.split_ops import common_rows, only_tensor
from hansa.vertical.split_scores import HELD, PEOPLE, SCORED, SCORES, UNKNOWN, asked_rows

SCORE_BITS = 32  # scores are added as multiples of 2^-32
LARGEST = 2.0**24  # the largest score of a party
PER_MESSAGE = 2**16  # scores of a message
SUMS = "sums"  # the tensor of a message

Sums = Generator[Send | Receive, Message | None, Tensor | None]


class LinearScoring(SessionOp):
    """What tests and scores share: the sums of scores in a ring."""

    entries = stated(**LINEAR_ROLES)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        LinearRoles.of(payload)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        roles = LinearRoles.of(payload)
        return {"steps": -(-roles.rows // PER_MESSAGE), "parameters": sum(roles.widths.values()) + 1}

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        roles = LinearRoles.of(payload)
        if (sender, receiver) not in ring_of(roles):
            return []
        return [{SUMS: ((rows,), torch.int64)} for rows in batch_sizes(roles.rows, PER_MESSAGE)]

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def scores(self, party: Party, roles: LinearRoles, x: Tensor, memory: Memory) -> Sums:
        """The scores of the rows of `x` at the label holder; None at other parties."""
        if WEIGHTS not in memory:
            raise PartyError("it has no trained part of this model")
        places = memory.get(PLACES)
        if places is None or places.tolist() != roles.places.tolist():
            raise PartyError("other parties had columns or labels when its part of the model was trained")
        own = clamped(x @ own_weights(memory, roles, party.id), LARGEST, f"a score of party {party.id}")
        steps = torch.round(own * 2.0**SCORE_BITS).to(torch.int64)
        # The mask depends on the scores: a session that begins again may add other numbers.
        seed = hashlib.blake2b(steps.numpy().tobytes(), digest_size=32, key=party.private("linear ring")).digest()
        mask = np.zeros(len(steps), dtype="<u8")
        add_mask(mask, seed)
        hidden, totals = torch.from_numpy(mask.view("<i8")), list[Tensor]()
        after = dict(ring_of(roles))[party.id]
        before = {receiver: sender for sender, receiver in ring_of(roles)}[party.id]
        for at in torch.split(torch.arange(len(steps)), PER_MESSAGE):
            if party.id == roles.holder:
                yield Send(after, {SUMS: steps[at] + hidden[at]})
                totals.append(only_tensor((yield Receive(before))).cpu() - hidden[at])
            else:
                yield Send(after, {SUMS: only_tensor((yield Receive(before))).cpu() + steps[at]})
        if party.id != roles.holder:
            return None
        return (torch.cat(totals) if totals else steps).to(torch.float64) / 2.0**SCORE_BITS


def ring_of(roles: LinearRoles) -> list[tuple[int, int]]:
    """The routes of the ring, which begins and ends at the label holder."""
    order = [roles.holder, *roles.others, roles.holder]
    return list(itertools.pairwise(order))


def outputs_of(scores: Tensor, classes: bool) -> Tensor:
    """Scores as the outputs of a model: one number, or for two classes 0 and the score, whose softmax is sigmoid."""
    return torch.stack([torch.zeros_like(scores), scores], 1) if classes else scores[:, None]


@register("linear-test")
@dataclass(frozen=True)
class LinearTest(LinearScoring):
    """Measure the model on the common test rows; the label holder computes the metrics."""

    classes: bool = True
    measures: ClassVar[frozenset[str] | None] = METRICS
    evaluates: ClassVar[bool] = True
    entries = LinearScoring.entries

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = LinearRoles.of(payload)
        rows = common_rows(memory, TEST_ROWS, roles)
        if 0 < len(rows) < party.data.least:  # whoever brings the other people chooses the common ones
            raise PartyError(
                f"its policy requires at least {party.data.least} test samples, and fewer are common to all parties; "
                "see evaluate.min_samples in party.toml"
            )
        x = features_of(party, roles, party.data.test_features("evaluate"))[rows]
        scores = yield from self.scores(party, roles, x, memory)
        if scores is None:
            return Reply({}), memory
        y = party.data.test_rows("evaluate")[1][rows]
        outputs = outputs_of(scores, self.classes).to(party.objective.device)
        return Reply({}, metrics=party.objective.metrics(outputs, y)), memory


@register("linear-scores")
@dataclass(frozen=True)
class LinearScores(LinearScoring):
    """Score people by a trained linear model. The label holder sends the scores to the aggregator.

    `job` is the finished job whose model the parties use; None for that of this run.
    """

    classes: bool = True
    job: str | None = None
    scores_people: ClassVar[bool] = True
    entries = stated(**LINEAR_ROLES, **PEOPLE)

    @property
    def continues(self) -> str | None:
        return self.job

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {**super().demands(n, payload), "people": LinearRoles.of(payload).rows}

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        roles = LinearRoles.of(payload)
        held: list[dict[str, Shape]] = [{HELD: ((roles.rows,), torch.bool)}]
        return [*(held if sender in roles.others and receiver == roles.holder else []),
                *super().expects_messages(payload, sender, receiver)]  # fmt: skip

    def expects(self, payload: Payload) -> dict[str, Shape]:
        unknown: dict[str, Shape] = {UNKNOWN: ((), torch.int64)}
        if not payload.get("reports"):
            return unknown
        rows = LinearRoles.of(payload).rows
        scores: dict[str, Shape] = {SCORES: ((rows, 1 + self.classes), torch.float64)}
        return {**unknown, SCORED: ((rows,), torch.bool), **scores}

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles = LinearRoles.of(payload)
        held, x = asked_rows(party, payload, roles.rows, lambda own: features_of(party, roles, own))
        if party.id != roles.holder:
            yield Send(roles.holder, {HELD: held})
        known = held
        for other in roles.others if party.id == roles.holder else ():
            known = known & only_tensor((yield Receive(other))).cpu()
        scores = yield from self.scores(party, roles, x, memory)
        reply = {UNKNOWN: (~held).sum()}
        if scores is not None:
            reply |= {SCORED: known, SCORES: outputs_of(scores, self.classes) * known[:, None]}
        return Reply(reply), {}
