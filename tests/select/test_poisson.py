"""Poisson selection: independent draws per party, possibly an empty cohort, and draws from a secret where there is
one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import hansa
from hansa.core.ask import Ask, Reduced
from hansa.core.federation import Federation
from hansa.core.op import Reply
from hansa.select import Poisson


def test_each_party_joins_with_the_cohorts_share_and_whatever_the_others_do() -> None:
    rounds, parties, share = 2000, 10, 0.3
    cohorts = []
    for round in range(rounds):
        fed = Federation(range(parties), round, 7, 3)
        chosen, _ = _drawn(fed)
        cohorts.append(set(chosen))
    deviation = (share * (1 - share) / rounds) ** 0.5
    for party in range(parties):
        assert sum(party in c for c in cohorts) / rounds == pytest.approx(share, abs=4 * deviation)
    for one, other in itertools.combinations(range(4), 2):
        both = sum(one in c and other in c for c in cohorts) / rounds
        assert both == pytest.approx(share**2, abs=4 * (share**2 / rounds) ** 0.5)
    sizes = [len(c) for c in cohorts]
    mean = sum(sizes) / rounds
    assert sum((s - mean) ** 2 for s in sizes) / rounds == pytest.approx(parties * share * (1 - share), rel=0.15)
    assert min(sizes) == 0


def _drawn(fed: Federation) -> Any:
    steps = Poisson().select(fed, hansa.FedAvg(), None, {})  # type: ignore[arg-type]
    try:
        steps.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it asked something")


def test_who_is_not_there_does_not_change_the_draw_of_the_others() -> None:
    whole, some = Federation(range(50), 3, 7, 20), Federation(range(50), 3, 7, 20)
    some.available = [party for party in range(50) if party % 3]
    assert _drawn(some)[0] == tuple(party for party in _drawn(whole)[0] if party % 3)


def test_a_secret_decides_the_draw_and_without_one_the_seed_does() -> None:
    def draws(seed: int, secret: bytes) -> list[Any]:
        return [_drawn(Federation(range(30), round, seed, 10, secret=secret))[0] for round in range(5)]

    assert draws(1, b"a" * 32) == draws(2, b"a" * 32)
    assert draws(1, b"a" * 32) != draws(1, b"b" * 32)
    assert draws(1, b"") != draws(2, b"")
    assert draws(1, b"") == draws(1, b"")


def test_a_round_without_anybody_is_empty_and_says_so(run: Any) -> None:
    lines = run("poisson", [4] * 3, rounds=12, cohort_size=1).result.history
    empty = [line for line in lines if "empty" in line]
    assert empty and len(empty) < len(lines)
    assert all(line["empty"] == "Poisson sampling selected no party this round" for line in empty)
    assert all(line["asked"] == 0 for line in empty)


def test_a_protocol_that_answers_for_nobody_is_asked_also_then(run: Any) -> None:
    heard: list[int] = []

    class Noise:
        answers_nobody = True

        async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
            heard.append(len(ask.parties))
            assert ask.op is not None
            if ask.parties:
                answer: Reduced = await fed.reduce(ask.op, ask.payload, parties=ask.parties)
                return answer
            shapes = ask.op.expects(ask.payload)
            reply = Reply({name: torch.ones(shape, dtype=kind) for name, (shape, kind) in shapes.items()})
            return Reduced(reply.tensors, 1, 1)

    lines = run("poisson", [4] * 3, rounds=12, cohort_size=1, protocol=Noise()).result.history
    assert not any("empty" in line for line in lines)
    assert len(heard) == 12 and 0 in heard


def test_there_is_no_cohort_to_exceed(run: Any) -> None:
    with pytest.raises(hansa.ConfigError, match="poisson draws each party by itself"):
        run("poisson", [4] * 3, rounds=1, cohort_size=1, over_select=0.5)
