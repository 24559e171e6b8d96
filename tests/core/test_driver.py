from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hansa
from hansa.core.algorithm import Algorithm, State
from hansa.core.ask import Ask
from hansa.core.class_counts import ClassCounts
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.runtime import complete, complete_async
from hansa.local import SGD
from hansa.plumbing.errors import AlgorithmError, RoundAborted

Round = Callable[[Federation, State], Any]


class Foreign:
    """An awaitable that is not the federation."""

    def __await__(self) -> Generator[object, Any, None]:
        yield object()


def task() -> hansa.Task:
    x = torch.arange(8.0).view(4, 2)
    return hansa.Task(lambda: nn.Linear(2, 2), "cross_entropy", [(x, torch.tensor([0, 1, 0, 1]))] * 3)


def played(play: Round, verbs: frozenset[str] = frozenset({"reduce"}), **settings: Any) -> hansa.Result:
    """A run of an algorithm whose round is `play`."""

    @dataclass(frozen=True)
    class Played(Algorithm):
        name: ClassVar[str] = "played"

        @property
        def verbs(self) -> frozenset[str]:
            return verbs

        async def round(self, fed: Federation, state: State) -> State:
            new: State = await play(fed, state)
            return new

    return hansa.simulate(Played(), task(), **{"rounds": 1, **settings})


async def train(fed: Federation, state: State) -> None:
    await fed.reduce(SGD(), {"model": state.params._asdict()})


async def foreign(fed: Federation, state: State) -> State:
    await Foreign()
    return state


async def bare(fed: Federation, state: State) -> State:
    await asyncio.sleep(0)
    return state


async def slept(fed: Federation, state: State) -> State:
    await asyncio.sleep(0.01)
    return state


async def late(fed: Federation, state: State) -> State:
    await train(fed, state)
    await Foreign()
    return state


@pytest.mark.parametrize("play", [foreign, bare, slept, late])
def test_awaiting_anything_but_the_federation_is_an_error(play: Round) -> None:
    with pytest.raises(AlgorithmError, match="played awaited something other than the federation"):
        played(play)


@pytest.mark.parametrize("play", [foreign, bare, slept, late])
def test_it_is_the_same_error_where_an_event_loop_runs(play: Round) -> None:
    fed = Federation(range(3), 0, 0, 3, {"reduce"})
    state = State(hansa.numerics.params.Params.none())

    async def answer(request: Any) -> None:
        await asyncio.sleep(0)

    with pytest.raises(AlgorithmError, match="played awaited something other than the federation"):
        asyncio.run(complete_async(drive(play(fed, state), "played"), answer))


async def gathers(fed: Federation, state: State) -> State:
    await fed.gather(SGD(), {"model": state.params._asdict()})
    return state


def test_an_undeclared_verb_is_an_error() -> None:
    with pytest.raises(AlgorithmError, match="used the verb 'gather', but declares only: reduce"):
        played(gathers)
    assert played(gathers, frozenset({"gather"})).history[0]["replies"] == 3


async def swallows_and_returns(fed: Federation, state: State) -> State:
    try:
        await train(fed, state)
    except BaseException:
        return state
    return state


async def swallows_and_asks_others(fed: Federation, state: State) -> State:
    try:
        await train(fed, state)
    except BaseException:
        await fed.reduce(SGD(), {"model": state.params._asdict()}, parties=[1, 2])
    return state


async def catches_exceptions(fed: Federation, state: State) -> State:
    try:
        await train(fed, state)
    except Exception as error:
        raise AssertionError("the end of a round is no ordinary error") from error
    return state


async def cleans_up(fed: Federation, state: State) -> State:
    try:
        await train(fed, state)
    except BaseException:
        cleaned.append(fed.round)
        raise
    return state


cleaned: list[int] = []


@pytest.mark.parametrize("play", [swallows_and_returns, swallows_and_asks_others])
def test_swallowing_the_end_of_a_round_is_an_error(play: Round) -> None:
    with pytest.raises(AlgorithmError, match="played swallowed the end of its round") as caught:
        played(play, quorum=1.0, absent=lambda party, round: party == 0)
    assert isinstance(caught.value.__cause__, RoundAborted)


def test_except_exception_does_not_catch_the_end_of_a_round() -> None:
    done = played(catches_exceptions, absent=lambda party, round: True)
    assert "0 usable replies of 3 parties asked" in done.history[0]["empty"]


def test_a_round_may_clean_up_and_pass_its_end_on() -> None:
    cleaned.clear()
    done = played(cleans_up, rounds=2, absent=lambda party, round: round == 0)
    assert cleaned == [0]
    assert ["empty" in line for line in done.history] == [True, False]


async def asks(fed: Federation, state: State) -> State:
    await fed.reduce(SGD(), {"model": state.params._asdict()})
    await fed.gather(SGD(), {"model": state.params._asdict()}, parties=[2, 0])
    return state


def test_asks_are_numbered_and_parties_are_in_the_order_of_their_ids() -> None:
    fed = Federation(range(3), 5, 0, 3)
    seen: list[Ask] = []
    complete(drive(asks(fed, State(hansa.numerics.params.Params.none())), "asks"), seen.append)
    assert [(a.verb, a.round, a.phase, a.index, a.parties) for a in seen] == [
        ("reduce", 5, "round", 0, (0, 1, 2)),
        ("gather", 5, "round", 1, (0, 2)),
    ]


def test_an_asks_digest_changes_with_everything_that_was_asked() -> None:
    def ask(**other: Any) -> Ask:
        base = {"verb": "reduce", "round": 1, "phase": "round", "index": 0, "op": SGD(), "payload": {"w":
        torch.zeros(2)},
                "parties": (0, 1)}  # fmt: skip
        return Ask(**{**base, **other})

    others = [
        {"verb": "gather"}, {"round": 2}, {"phase": "publish"}, {"index": 1}, {"op": SGD(lr=0.2)}, {"parties": (0, 2)},
        {"payload": {"w": torch.tensor([0.0, 1e-30])}}, {"payload": {"v": torch.zeros(2)}}, {"uniform": True},
        {"each": {1: {"c": 1}}}, {"routes": ((0, 1),)}, {"routes": ((1, 0),)},
    ]  # fmt: skip
    digests = [ask().digest(), *(ask(**other).digest() for other in others)]
    assert len(set(digests)) == len(digests)
    assert ask().digest() == ask(op=SGD(), payload={"w": torch.zeros(2)}).digest()


@pytest.mark.parametrize("parties", [[0, 0], [3], [-1]])
def test_asking_an_unknown_party_or_one_twice_is_an_error(parties: list[int]) -> None:
    async def wrong(fed: Federation, state: State) -> State:
        await fed.gather(SGD(), {}, parties=parties)
        return state

    with pytest.raises(AlgorithmError, match="parties must exist and be distinct"):
        played(wrong, frozenset({"gather"}))


def test_tickets_are_held_to_one_a_party_and_next_to_some() -> None:
    async def twice(fed: Federation, state: State) -> State:
        await fed.submit(SGD(), {"model": state.params._asdict()}, 1)
        await fed.submit(SGD(), {"model": state.params._asdict()}, 1)
        return state

    async def none(fed: Federation, state: State) -> State:
        await fed.next()
        return state

    verbs = frozenset({"submit", "next"})
    with pytest.raises(AlgorithmError, match="party 1 already has an unanswered ticket"):
        played(twice, verbs)
    with pytest.raises(AlgorithmError, match="no ticket is unanswered"):
        played(none, verbs)


def test_an_ordinary_error_of_a_runtime_may_be_handled() -> None:
    async def careful(fed: Federation, state: State) -> str:
        try:
            await fed.reduce(ClassCounts(2))
        except ValueError:
            await fed.reduce(ClassCounts(2))
            return "handled"
        return "nothing happened"

    answers = iter([ValueError("no"), None])

    def answer(request: Any) -> None:
        given = next(answers)
        if given is not None:
            raise given

    fed = Federation(range(2), 0, 0, 2)
    assert complete(drive(careful(fed, State(hansa.numerics.params.Params.none())), "careful"), answer) == "handled"
