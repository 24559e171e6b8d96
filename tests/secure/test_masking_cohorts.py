"""A party counts the parties of a masked sum itself, and accepts only keys that were signed for this sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from masked_parties import Count, Diary, announced, party

from hansa.core.op import Memory, Op, Party, Payload, Reply, perform
from hansa.secure.masking_ops import SecureConsistent, SecureKeys, SecureMasked, SecureShares, SecureUnmask

SESSION = {"session": "round.0 0"}


class Scoped(Diary):
    """The vault of a party that takes part in a job."""

    def __init__(self, job: str = "job-1") -> None:
        super().__init__()
        self.job = job

    @property
    def scope(self) -> tuple[str, ...]:
        return ("league", self.job)


class Circle:
    """Parties of a masked sum; party 0 asks for a cohort of `min_cohort`."""

    def __init__(self, n: int, min_cohort: int, active: bool = True, threshold: float = 0.7,
                 neighbours: int | None = None) -> None:  # fmt: skip
        self.n, self.active = n, active
        self.parties: list[Party] = [party(id, [id, 2, 3], Scoped(), secret=b"of %d" % id) for id in range(n)]
        self.parties[0].min_cohort = min_cohort
        self.memory: dict[int, Memory] = {}
        self.neighbours = n - 1 if neighbours is None else neighbours
        self.shares = SecureShares(n, threshold, self.neighbours, active)
        self.masked = SecureMasked(Count(), 2.0**30, 53, 1, parties=n)
        keys = [self.answer(id, SecureKeys(active), SESSION) for id in range(n)]
        self.told = {**listed(keys, active), "asked": announced(self.masked, range(n))}

    def ask(self, id: int, op: Op, payload: Payload) -> Reply | str:
        outcome = perform(op, self.parties[id], payload, self.memory.get(id, {}))
        if isinstance(outcome, str):
            return outcome
        self.memory[id] = outcome[1]
        return outcome[0]

    def answer(self, id: int, op: Op, payload: Payload) -> Reply:
        reply = self.ask(id, op, payload)
        assert isinstance(reply, Reply), reply
        return reply

    def share(self) -> None:
        self.dealt = [self.answer(id, self.shares, self.told).tensors for id in range(self.n)]

    def boxes(self, id: int, others: list[int]) -> dict[str, Any]:
        rows = [self.dealt[other]["sealed"][[p for p in range(self.n) if p != other].index(id)] for other in others]
        checks = [self.dealt[other]["checks"][id] for other in others]
        return {"secure": {"ids": torch.tensor(others), "sealed": torch.stack(rows), "checks": torch.stack(checks)}}


def listed(keys: list[Reply], active: bool) -> dict[str, Any]:
    """The payload with the advertised keys."""
    names = {"keys": "keys"} | ({"certificates": "certificate", "signatures": "signature"} if active else {})
    rows = {name: torch.stack([reply.tensors[sent] for reply in keys]) for name, sent in names.items()}
    return {"ids": torch.arange(len(keys)), **rows}


@pytest.mark.parametrize("active", [True, False])
def test_a_party_shares_no_secrets_for_a_sum_of_fewer_than_its_policy_asks_for(active: bool) -> None:
    """In 0.1.0 a liar and one colluder had the sum of two parties opened, against a min_cohort of 10."""
    for n, threshold, refused in ((2, 1.0, True), (9, 1.0, True), (10, 0.7, True), (10, 1.0, False), (14, 0.7, False)):
        here = Circle(n, 10, active, threshold)
        said = here.ask(0, here.shares, here.told)
        assert isinstance(said, str) == refused, (n, threshold, said)
        if refused:
            assert "its policy asks for a cohort of at least 10" in str(said)
            assert not here.parties[0].vault.said  # type: ignore[attr-defined]


def test_where_each_shares_with_a_few_the_whole_sum_is_counted_and_not_the_neighbours() -> None:
    assert isinstance(Circle(20, 12, False, 0.6, 6).ask(0, *ask_of(Circle(20, 12, False, 0.6, 6))), Reply)
    here = Circle(20, 13, False, 0.6, 6)
    assert "at least 13, and 12 of the 20 parties that are asked can open the sum" in str(here.ask(0, *ask_of(here)))


def ask_of(here: Circle) -> tuple[Op, Payload]:
    return here.shares, here.told


def test_the_cohort_is_counted_again_at_every_exchange() -> None:
    """The policy may have changed meanwhile, and the aggregator chooses which of the party's memories is used."""
    here = Circle(4, 4, threshold=1.0)
    here.share()
    victim = here.parties[0]
    victim.min_cohort = 5
    assert "at least 5" in str(here.ask(0, here.masked, here.boxes(0, [1, 2, 3])))
    victim.min_cohort = 4
    here.answer(0, here.masked, here.boxes(0, [1, 2, 3]))
    survivors = {"survivors": torch.arange(4)}
    for op in (SecureConsistent(), SecureUnmask(3)):
        victim.min_cohort = 5
        assert "at least 5" in str(here.ask(0, op, survivors))
    victim.min_cohort = 4
    assert "3 of the parties" in str(here.ask(0, SecureConsistent(), {"survivors": torch.arange(3)}))
    here.answer(0, SecureConsistent(), survivors)


@pytest.mark.parametrize("other", ["job", "federation", "round", "session", "party"])
def test_keys_that_were_signed_for_another_sum_are_refused(other: str) -> None:
    """In 0.1.0 an aggregator could repeat what a party had advertised in another job or round."""
    here = Circle(4, 1)
    stranger, told = party(3, [0, 0, 0], Scoped(), secret=b"of 3"), dict(here.told)
    session = SESSION
    if other == "job":
        stranger.vault = Scoped("job-2")
    elif other == "federation":
        stranger.vault.__class__ = type("Elsewhere", (Scoped,), {"scope": ("elsewhere", "job-1")})
    elif other == "round":
        stranger.round = 1
    elif other == "session":
        session = {"session": "round.0 1"}
    else:
        stranger.id = 2
    reply, _ = SecureKeys(True).run(stranger, session, {})
    for name, sent in (("keys", "keys"), ("certificates", "certificate"), ("signatures", "signature")):
        told[name] = torch.cat([here.told[name][:3], reply.tensors[sent][None]])
    assert "are not signed by 3" in str(here.ask(0, here.shares, told))
    here.answer(0, here.shares, here.told)
