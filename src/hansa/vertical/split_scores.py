"""Ask a split network for the scores of single people, named by hashes of their ids.

The asker sends a hash of each id, with a salt of its own. A party compares them with the hashes of its own ids, and
computes activations for the people whom it holds. The label holder scores the people whom all parties with columns
hold. A hash hides an id only from those who cannot guess it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hansa.core.columns import id_hash
from hansa.core.entries import Flag, Several, Text, stated
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.core.session_op import Receive, Send, Talk
from hansa.models.dense import Logistic
from hansa.models.model import Model
from hansa.plumbing.errors import PartyError
from hansa.vertical.modules import DTYPES, PREFIX
from hansa.vertical.split_ops import PLACES, ROLES, Pieces, Roles, SplitForward

HELD, SCORED, SCORES, UNKNOWN = "held", "scored", "scores", "unknown"  # the tensors of messages and replies
PEOPLE = stated(people=Several(of=Text(longest=200)), salt=Text(shortest=0, longest=1000), reports=Flag(optional=True))


@register("split-scores")
@dataclass(frozen=True)
class SplitScores(SplitForward):
    """Score people by a trained split network. The label holder sends the scores to the aggregator.

    `job` is the finished job whose pieces the parties use; None for those of this run.
    """

    bottoms: tuple[Model, ...] = (Logistic(),)
    middle: Model | None = None
    head: Model = Logistic()
    dtype: Literal["float32", "float64"] = "float32"
    job: str | None = None
    scores_people: ClassVar[bool] = True
    entries = stated(**ROLES, **PEOPLE)

    @property
    def continues(self) -> str | None:
        return self.job

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {**super().demands(n, payload), "people": Roles.of(payload).rows}

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        activations = super().expects_messages(payload, sender, receiver)
        return [{HELD: ((Roles.of(payload).rows,), torch.bool)}, *activations] if activations else []

    def expects(self, payload: Payload) -> dict[str, Shape]:
        unknown: dict[str, Shape] = {UNKNOWN: ((), torch.int64)}
        if not payload.get("reports"):
            return unknown
        roles = Roles.of(payload)
        scores: dict[str, Shape] = {SCORES: ((roles.rows, roles.outputs), DTYPES[self.dtype])}
        return {**unknown, SCORED: ((roles.rows,), torch.bool), **scores}

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        roles, here = Roles.of(payload), party.id
        places = memory.get(PLACES)
        if places is None or places.tolist() != [roles.joins, roles.holder]:
            raise PartyError("it has no pieces of this network, or other parties joined it and had the labels")
        pieces = Pieces(self, party, roles, memory)
        if not all(f"{PREFIX}{name}/w" in memory for name in self._names(here, roles)):
            raise PartyError("it has no trained piece of this network")
        held, x = torch.ones(roles.rows, dtype=torch.bool), None
        if pieces.bottom is not None:
            held, x = self._asked(party, payload, roles)
        known = held
        if here in roles.shapes and here != roles.joins:
            yield Send(roles.joins, {HELD: held})
        if here == roles.joins:
            for other in roles.shapes:
                if other != here:
                    known = known & ((yield Receive(other)) or {})[HELD].cpu()
            if here != roles.holder:
                yield Send(roles.holder, {HELD: known})
        elif here == roles.holder:
            known = ((yield Receive(roles.joins)) or {})[HELD].cpu()
        outputs = yield from self.outputs(here, roles, pieces, x, torch.arange(roles.rows))
        reply = {UNKNOWN: (~held).sum()}
        if outputs is not None:
            reply |= {SCORED: known, SCORES: outputs.cpu() * known[:, None]}
        return Reply(reply), {}

    def _names(self, here: int, roles: Roles) -> list[str]:
        """The names of the pieces of a party."""
        names = [f"bottom {here}"] if here in roles.shapes else []
        names += ["middle"] if here == roles.joins and self.middle is not None else []
        return names + (["head"] if here == roles.holder else [])

    def _asked(self, party: Party, payload: Payload, roles: Roles) -> tuple[Tensor, Tensor]:
        """Which of the asked people the party holds, and their columns; zeros for those whom it does not hold."""
        held, x = asked_rows(party, payload, roles.rows, lambda own: self.features(party, roles, own).cpu())
        return held, x.to(party.objective.device)


def asked_rows(party: Party, payload: Payload, count: int,
               features: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Which of the asked people a party holds, and their features; zeros for those whom it does not hold."""
    held, at = people_here(party, payload, count)
    none = features(party.data.features("match")[:0])
    x = torch.zeros((count, *none.shape[1:]), dtype=none.dtype)
    for kind in range(2):
        places = [k for k, place in enumerate(at) if place is not None and place[0] == kind]
        if places:
            own = party.data.test_features("match") if kind else party.data.features("match")
            x[places] = features(own[torch.tensor([at[k][1] for k in places])])  # type: ignore[index]
    return held, x


def people_here(party: Party, payload: Payload, count: int) -> tuple[Tensor, list[tuple[int, int] | None]]:
    """Which of the asked people a party holds, and where: 0 for training rows or 1 for test rows, and the row."""
    people, salt = _hashes(payload.get("people")), payload.get("salt")
    if len(people) != count or not isinstance(salt, str):
        raise PartyError("malformed ask: expected a salt, and one hash per person, each of them once")
    ids = [party.ids.tolist(), party.data.test_ids("match").tolist()]
    at = {id_hash(salt, text): (kind, row) for kind, own in enumerate(ids) for row, text in enumerate(own)}
    return torch.tensor([person in at for person in people]), [at.get(person) for person in people]


def _hashes(people: object) -> list[str]:
    """The hashes of a payload; none if they are malformed or not all different."""
    texts = [text for text in people if isinstance(text, str)] if isinstance(people, list) else []
    return texts if isinstance(people, list) and len(set(texts)) == len(people) else []
