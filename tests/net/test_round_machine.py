"""The state machine of an ask: the same events give the same commands, and it closes once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hansa.net.aggregator.round import (
    Answered,
    Asking,
    Close,
    Closed,
    Command,
    Decision,
    Looked,
    Offer,
    Started,
    Withdraw,
)

ALL = frozenset({0, 1, 2})


def started(here: frozenset[int] = ALL, answers: dict[int, str | None] | None = None, enough: int | None = None,
            deadline: float | None = None) -> tuple[Asking, list[Command]]:  # fmt: skip
    machine = Asking((0, 1, 2), enough, deadline, 300.0)
    return machine, machine.handle(Started(10.0, here, answers or {}))


def test_those_who_are_there_are_asked_and_it_is_over_when_all_have_answered() -> None:
    machine, commands = started(frozenset({0, 2}))
    assert commands == [Offer((0, 2))]
    assert machine.handle(Answered(2, None)) == []
    assert machine.handle(Answered(0, "it has no samples")) == [Withdraw(), Close({1: "it is not connected"})]
    assert machine.state == "closing"
    assert machine.handle(Closed(Decision((2,), {0: "no", 1: "no"}))) == []
    assert machine.state == "closed" and machine.decision == Decision((2,), {0: "no", 1: "no"})


def test_what_was_answered_in_an_earlier_life_is_not_asked_again() -> None:
    machine, commands = started(answers={1: None})
    assert commands == [Offer((0, 2))]
    assert started(answers={0: None, 1: None, 2: None})[1] == [Withdraw(), Close({})]
    assert list(machine.waiting) == [0, 2]


def test_the_first_so_many_replies_will_do_and_refusals_do_not_count() -> None:
    machine, _ = started(enough=1)
    assert machine.handle(Answered(0, "no")) == []
    assert machine.handle(Answered(1, None)) == [Withdraw(), Close({})]


def test_the_deadline_is_reckoned_from_the_start_and_ends_it() -> None:
    machine, _ = started(deadline=5.0)
    machine.handle(Answered(0, None))
    assert machine.handle(Looked(14.999, ALL)) == []
    late = "it did not answer within the deadline of 5 s"
    assert machine.handle(Looked(15.0, ALL)) == [Withdraw(), Close({1: late, 2: late})]


def test_who_has_gone_is_not_waited_for() -> None:
    machine, _ = started()
    assert machine.handle(Looked(20.0, frozenset({1, 2}))) == []
    assert machine.missing == {0: "it had no contact for 300 s"}
    assert machine.handle(Looked(30.0, frozenset())) != []


def test_an_answer_of_one_who_was_given_up_counts_as_long_as_it_is_open() -> None:
    machine, _ = started()
    machine.handle(Looked(20.0, frozenset({1, 2})))
    machine.handle(Answered(0, None))
    assert machine.missing == {} and machine.answers == {0: None}


def test_an_ask_of_nobody_is_over_at_once() -> None:
    assert Asking(()).handle(Started(0.0, frozenset())) == [Withdraw(), Close({})]


events = st.one_of(
    st.builds(Answered, st.integers(0, 2), st.sampled_from([None, "no"])),
    st.builds(Looked, st.floats(10.0, 40.0), st.frozensets(st.integers(0, 2))),
)


@given(st.frozensets(st.integers(0, 2)), st.sampled_from([None, 1, 2]), st.sampled_from([None, 15.0]),
       st.lists(events, max_size=12))  # fmt: skip
def test_whatever_happens_it_closes_once_and_nobody_is_forgotten(
    here: frozenset[int], enough: int | None, deadline: float | None, story: list[Answered | Looked]
) -> None:
    machine, closes = Asking((0, 1, 2), enough, deadline, 300.0), 0
    commands = machine.handle(Started(10.0, here))
    for event in [None, *story]:
        if event is not None:
            commands = machine.handle(event)
        closes += sum(isinstance(command, Close) for command in commands)
        parts = [set(machine.answers), set(machine.missing), set(machine.waiting)]
        assert sum(map(len, parts)) == 3 and set.union(*parts) == {0, 1, 2}
        assert (machine.state == "closing") == (closes == 1)
    assert closes <= 1
    if machine.state == "waiting":
        assert machine.handle(Looked(1e9, frozenset())) != []
