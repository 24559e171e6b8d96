"""What all models over columns share: they match people first, and score people by their ids later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from hansa.core.algorithm import Algorithm, PeopleScores, Problem, State
from hansa.core.declared_ops import OpenOp
from hansa.core.federation import Federation
from hansa.core.registry import Part
from hansa.core.session_op import SessionOp
from hansa.plumbing.errors import ConfigError
from hansa.vertical import psi_group
from hansa.vertical.psi import ALIGNED, aligned
from hansa.vertical.split_rows import same_people
from hansa.vertical.split_scores import SCORED, SCORES, UNKNOWN


class ColumnModel(Algorithm):
    """Base of models over the columns of several parties.

    The first round finds the common people; then every round calls `trained`. With `of_job`, the only round calls
    `score_people`.
    """

    match: Literal["psi", "same"]
    of_job: str | None
    people: tuple[str, ...]
    salt: str
    trains: ClassVar[bool] = False
    participation: ClassVar[Any] = "all"
    data: ClassVar[Literal["rows", "columns"]] = "columns"

    def check_people(self) -> None:
        """Raise a ConfigError unless `of_job` and `people` fit each other."""
        if (self.of_job is None) != (not self.people):
            raise ConfigError("of_job and people belong together: `hansa predict --federation` sets both")
        if len(set(self.people)) < len(self.people):
            raise ConfigError("people: a hash is there twice; ask for each person once")

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather", "route"})

    @property
    def matching_ops(self) -> tuple[OpenOp | Part, ...]:
        """The ops that find the common people."""
        return ALIGNED if self.match == "psi" else (OpenOp("split-order"), OpenOp("split-same"))

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.match == "psi" and self.of_job is None:
            psi_group.available()
        if problem.layout is not None and len(problem.layout.label_holders) != 1:
            holders = problem.layout.label_holders
            which = "none has" if not holders else f"the parties {', '.join(map(str, holders))} have"
            raise ConfigError(f"{self.name} needs one party with labels, and {which}; give the labels to one party")

    @property
    def continues(self) -> str | None:
        return self.of_job

    async def round(self, fed: Federation, state: State) -> State:
        if self.of_job is not None:
            found = await self.score_people(fed, state, self.people, self.salt)
            unknown = {str(party): count for party, count in found.unknown.items()}
            return state.replace(scores={SCORES: found.outputs, SCORED: found.scored, UNKNOWN: unknown})
        if "people" not in state.slots:
            holder, parties, least = self.matched_parties(state)
            people = await (aligned if self.match == "psi" else same_people)(fed, holder, parties, least)
            state = state.replace(people={"train": people.train, "test": people.test})
            fed.metrics |= {"common": float(people.train), "common_test": float(people.test)}
        return await self.trained(fed, state)

    def matched_parties(self, state: State) -> tuple[int, list[int], int]:
        """The label holder, the parties whose people are matched, and the fewest common people."""
        raise TypeError(f"the algorithm {self.name!r} does not define matched_parties()")

    async def trained(self, fed: Federation, state: State) -> State:
        """Train for one round."""
        raise TypeError(f"the algorithm {self.name!r} does not define trained()")

    async def tested(self, fed: Federation, state: State) -> dict[str, float]:
        """The metrics on the common people of the test samples."""
        raise TypeError(f"the algorithm {self.name!r} does not define tested()")

    async def scores_by(self, fed: Federation, op: SessionOp, payload: Mapping[str, Any],
                        routes: Iterable[tuple[int, int]], holder: int) -> PeopleScores:  # fmt: skip
        """The scores that the label holder reports after a session, and how many people each party did not know."""
        replies = await fed.session(op, payload, routes, each={holder: {"reports": True}})
        by_party = dict(zip(replies.parties, replies.replies, strict=True))
        unknown = {party: int(reply.tensors[UNKNOWN]) for party, reply in by_party.items()}
        scores = by_party[holder].tensors
        return PeopleScores(scores[SCORES], scores[SCORED], unknown)

    async def metrics_by(self, fed: Federation, op: SessionOp, payload: Mapping[str, Any],
                         routes: Iterable[tuple[int, int]], holder: int) -> dict[str, float]:  # fmt: skip
        """The metrics that the label holder reports after a session."""
        replies = await fed.session(op, payload, routes)
        return dict(dict(zip(replies.parties, replies.replies, strict=True))[holder].metrics)

    def finished(self, state: State) -> bool:
        return "scores" in state.slots

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return ("joint", dict(state.slots["scores"])) if "scores" in state.slots else ("joint-by-id", {})

    async def evaluate(self, fed: Federation, state: State) -> dict[str, float]:
        if "scores" in state.slots:
            scored = state.slots["scores"][SCORED]
            return {"asked": float(len(scored)), "scored": float(scored.sum())}
        if not state.slots.get("people", {}).get("test"):
            return {}
        return await self.tested(fed, state)


def asked_people(tree: Mapping[str, Any], people: Sequence[str], salt: str) -> dict[str, Any]:
    """The payload that asks for the scores of people."""
    return {**tree, "people": list(people), "salt": salt}
