"""Rounds over the network: deadlines, quorums, parties that leave, are late or are revoked, and restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, PATIENCE, Asked, League, Signer, draft, logistic_task, notary, samples

import hansa
from hansa.core.ask import Ask
from hansa.core.op import Reply
from hansa.core.plain_data import build
from hansa.core.round_record import Record
from hansa.core.runtime import Open
from hansa.data.describe import Description
from hansa.data.prepare import ApplyStandardise, ColumnMoments
from hansa.holdings.labels import Labels
from hansa.local import SGD
from hansa.net.aggregator.asks import give_up, open_ask, store_answer, take_ticket
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.queue import TaskQueue
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.net.transport.wire import Answer, Blob
from hansa.plumbing import codec
from hansa.plumbing import crash_points as points

pytestmark = pytest.mark.usefixtures("quick")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}


def tree(algorithm: Any = "fedavg", task: dict[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    return {"task": task or TASK, "algorithm": algorithm, "run": {"rounds": 2, **run}}


def simulated(data: list[Any] | None = None, absent: Any = None, algorithm: Any = "fedavg", **run: Any) -> Any:
    task, method = logistic_task(data), build("algorithm", algorithm)
    return hansa.simulate(method, task, engine="reference", absent=absent, **{"rounds": 2, **run}).saved_model()


def same(a: Any, b: Any) -> bool:
    return codec.encode(a) == codec.encode(b)


class Gate:
    """Stops a job at the end of a round until released."""

    def __init__(self) -> None:
        self._held, self._go, self._left = threading.Event(), threading.Event(), 0

    def after(self, rounds: int) -> None:
        self._left = rounds
        self._held.clear()
        self._go.clear()
        points.install(self._reach)

    def _reach(self, name: str) -> None:
        if name == "round.closed" and self._left:
            self._left -= 1
            if not self._left:
                self._held.set()
                assert self._go.wait(PATIENCE)

    def held(self) -> None:
        assert self._held.wait(PATIENCE)

    def open(self) -> None:
        self._go.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()
    points.install(None)


def without(party: int, rounds: range = range(99)) -> Callable[[int, int], bool]:
    return lambda who, round: who == party and round in rounds


def test_a_round_closes_at_its_deadline_with_those_who_answered(league: League, silent: set[int]) -> None:
    league.join_all("ann", "bob")
    league.enrolled("cid")  # it is connected and does not answer
    silent.add(2)
    job = league.submit(tree(deadline=0.4, quorum=2))
    ended = league.ended(job)
    assert ended["status"] == "finished"
    for line in ended["rounds"]:
        assert line["members"] == ["ann", "bob"] and line["replies"] == 2 and line["asked"] == 3
        assert line["missing"] == {"cid": "it did not answer within the deadline of 0.4 s"}
    assert same(league.model(job), simulated(absent=without(2)))


def test_a_round_without_its_quorum_is_empty_and_leaves_the_model_as_it_was(league: League, silent: set[int]) -> None:
    league.join_all("ann", "bob")
    league.enrolled("cid")
    silent.add(2)
    job = league.submit(tree(deadline=0.4, quorum=3))
    ended = league.ended(job)
    for line in ended["rounds"]:
        assert "2 usable replies of 3 parties asked, quorum 3" in line["empty"] and line["members"] == []
    assert ended["rounds"][0]["model"] == ended["rounds"][1]["model"]
    assert [e["detail"] for e in league.events("round closed") if "quorum 3" not in e["detail"]] == []
    assert ended["status"] == "failed" and ended["model"] is None, "a job in which no round was fused learned nothing"
    assert "no round was fused" in ended["reason"] and "quorum 3" in ended["reason"]
    assert "cid: it did not answer within the deadline of 0.4 s" in ended["reason"]


def test_over_selection_closes_a_round_with_the_first_to_answer(league: League) -> None:
    league.join_all("ann", "bob")
    cid = league.enrolled("cid")
    job = league.submit(tree(cohort_size=2, over_select=0.5), min_parties=3)
    key = (job, 0, "describe", 0)
    league.until(lambda: league.queue.find(2, key) is not None)
    league.ledger.now(store_answer(key, cid.sent(Asked(*key), described(league)), None))  # and no answer after that
    league.queue.answered(key, 2, None)
    ended = league.ended(job)
    assert ended["status"] == "finished"
    for line in ended["rounds"]:
        assert line["members"] == ["ann", "bob"] and line["asked"] == 3 and set(line["missing"]) == {"cid"}
    assert same(league.model(job), simulated(absent=without(2)))


def described(league: League) -> Answer:
    """The description that cid would have sent."""
    about = Description((3,), 2, "class", False, False, Labels(0, 1, 2)).reply()
    digest, size = league.aggregator.blobs.put([codec.encode(about.tree())])
    return draft(Blob(digest, size))


def test_a_party_that_goes_silent_is_given_up_after_a_while(found: Callable[..., League], leaving: set[int]) -> None:
    league = found(absent_after=1.0)
    league.join_all("ann", "bob")
    league.enrolled("cid")
    job = league.submit(tree(quorum=2), min_parties=3)
    league.until(lambda: league.queue.find(2, (job, 0, "describe", 0)) is not None)
    leaving.add(2)
    ended = league.ended(job)
    assert ended["status"] == "finished" and [line["members"] for line in ended["rounds"]] == [["ann", "bob"]] * 2
    (entry,) = league.events("not taking part")
    assert "it had no contact for 1 s" in entry["detail"]
    assert same(league.model(job), simulated(absent=without(2)))


def test_a_late_joiner_learns_what_the_others_did_and_answers_rightly(league: League, gate: Gate) -> None:
    league.join_all("ann", "bob")
    gate.after(2)
    job = league.submit(tree(task={**TASK, "prepare": "standardise"}, rounds=4), min_parties=2)
    gate.held()
    league.join_all("cid")
    gate.open()
    ended = league.ended(job)
    assert [line["members"] for line in ended["rounds"]] == [["ann", "bob"]] * 2 + [list(PARTIES)] * 2
    data = [samples(k)[0] for k in range(3)]
    payload = standardised([x for x, _ in data[:2]])
    prepared = [(ApplyStandardise().transform(x, payload), y) for x, y in data]
    expected = simulated(prepared, without(2, range(2)), rounds=4)
    assert same(league.model(job)["params"], expected["params"])
    assert same(league.model(job)["preparation"]["payload"], payload)


def standardised(xs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is learned from these parties' features."""

    class Holder:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x
            self.objective = type("", (), {"device": "cpu"})()

        def rows(self, purpose: str) -> tuple[torch.Tensor, None]:
            return self.x, None

    def sums(centre: torch.Tensor) -> dict[str, torch.Tensor]:
        found = [ColumnMoments().run(Holder(x), {"centre": centre}, {})[0].tensors for x in xs]  # type: ignore[arg-type]
        return {name: sum(each[name] for each in found) for name in found[0]}  # type: ignore[misc]

    first = sums(torch.zeros(3, dtype=torch.float64))
    near = first["sum"] / first["count"]
    about = sums(near)
    shift = about["sum"] / about["count"]
    return {"mean": near + shift, "std": (about["square"] / about["count"] - shift**2).sqrt()}


def test_a_party_that_drops_and_comes_back_goes_on_with_its_memory(league: League, gate: Gate) -> None:
    league.join_all()
    gate.after(1)
    job = league.submit(tree("scaffold", rounds=3))
    gate.held()
    league.members["cid"].leave()
    league.join_all("cid")
    gate.open()
    assert league.ended(job)["status"] == "finished"
    assert same(league.model(job), simulated(algorithm="scaffold", rounds=3))


def test_a_job_is_stopped_while_it_waits(league: League) -> None:
    league.join_all("ann", "bob")
    cid = league.enrolled("cid")
    job = league.submit(tree())
    key = (job, 0, "describe", 0)
    league.until(lambda: league.queue.find(2, key) is not None)
    assert league.operator.stop(job) is True
    ended = league.ended(job)
    assert ended["status"] == "stopped" and ended["reason"] == "stopped by the operator" and ended["model"] is None
    assert league.operator.stop(job) is False
    assert league.queue.find(2, key) is None
    late = cid.sent(Asked(*key), draft(why="too late"))
    assert league.ledger.now(store_answer(key, late, None)).status == "late"
    league.until(lambda: list(league.aggregator.blobs) == [])  # an ask in transit when the job ended is withdrawn


def test_a_job_that_waits_for_its_turn_can_be_stopped_too(found: Callable[..., League]) -> None:
    league = found(jobs=1)
    first, second = league.submit(tree()), league.submit(tree())
    assert [league.shown(job)["status"] for job in (first, second)] == ["running", "waiting"]
    assert league.operator.stop(second) and league.shown(second)["status"] == "stopped"
    third = league.submit(tree())
    assert league.operator.stop(first)
    assert league.ended(first)["status"] == "stopped"
    league.join_all()
    assert league.operator.wait(third)["status"] == "finished"


@pytest.mark.slow
def test_two_jobs_at_once_do_not_touch_each_other(league: League) -> None:
    league.join_all()
    jobs = [league.submit(tree("scaffold", rounds=3, seed=seed)) for seed in (1, 2)]
    for job, seed in zip(jobs, (1, 2), strict=True):
        assert league.ended(job)["status"] == "finished"
        assert same(league.model(job), simulated(algorithm="scaffold", rounds=3, seed=seed))


def test_a_party_that_is_revoked_in_the_middle_is_not_waited_for(league: League, gate: Gate) -> None:
    league.join_all()
    gate.after(1)
    job = league.submit(tree(rounds=3))
    gate.held()
    league.operator.revoke("cid")
    gate.open()
    ended = league.ended(job)
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES), ["ann", "bob"], ["ann", "bob"]]
    assert same(league.model(job), simulated(absent=without(2, range(1, 3)), rounds=3))
    league.members["cid"].gone()


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_job_goes_on_after_a_restart_though_a_party_was_invited_meanwhile(
    league: League, gate: Gate, algorithm: str
) -> None:
    league.join_all()
    gate.after(1)
    job = league.submit(tree(algorithm, rounds=3))
    gate.held()
    league.operator.invite("dora")
    gate.open()
    league.stop()
    league.start()
    ended = league.ended(job)
    assert ended["status"] == "finished" and len(ended["rounds"]) == 3, ended["reason"]
    assert same(league.model(job), simulated(algorithm=algorithm, rounds=3))
    assert league.aggregator.registry.names == [*PARTIES, "dora"]
    assert len(league.events("started")) == 2 and len(league.events("job finished")) == 1


def test_nothing_of_an_ended_job_stays_but_its_model_and_its_record(league: League) -> None:
    league.join_all()
    job = league.submit(tree(rounds=3))
    ended = league.ended(job)
    assert list(league.aggregator.blobs) == [ended["model"]]
    assert league.operator.pull(job, league.folder / "model").read_bytes() == codec.encode(league.model(job))
    assert not (league.folder / "state" / "messages" / job).exists()


# Waiting for parties


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[Ledger, Blobs, TaskQueue]]:
    ledger = Ledger(tmp_path / "hansa.db", notary())
    yield ledger, Blobs(tmp_path), TaskQueue(0.2, 10)
    ledger.close()


def test_a_party_that_was_given_up_and_answers_after_all_does_not_count_twice(
    parts: tuple[Ledger, Blobs, TaskQueue], tmp_path: Path
) -> None:
    ledger, blobs, queue = parts
    network = NetworkRuntime("job-1", "job", PARTIES, ledger, blobs, queue, tmp_path / "messages")
    network.answer(Open(0, Record()))
    model = {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
    ask = Ask("reduce", 0, "round", 0, SGD(), {"model": model}, (0, 1, 2))
    key = ("job-1", 0, "round", 0)
    asked, given_up = threading.Event(), threading.Event()

    def present(parties: Any) -> list[int]:
        """All parties are present at first; then one is absent, until it is given up."""
        if asked.is_set() and 0 in parties:
            given_up.set()
            return [party for party in parties if party != 0]
        return list(parties)

    queue.reachable = present  # type: ignore[method-assign]
    answers: list[Any] = []
    working = threading.Thread(target=lambda: answers.append(network.answer(ask)))
    working.start()
    while queue.find(2, key) is None:
        threading.Event().wait(0.005)
    asked.set()
    assert given_up.wait(PATIENCE)

    def answer(party: int) -> None:
        reply = Reply({"w": torch.full((3,), float(party))}, 1, metrics={"train_loss": 1.0})
        digest, size = blobs.put([codec.encode(reply.tree())])
        sent = Signer(ledger, party, PARTIES[party]).sent(key, draft(Blob(digest, size)))
        ledger.now(store_answer(key, sent, blobs.path(digest)))
        queue.answered(key, party, None)

    answer(0)
    answer(1)
    working.join(0.3)  # it waits for the third
    assert answers == []
    answer(2)
    working.join(PATIENCE)
    assert answers[0].count == 3


@pytest.mark.parametrize("refill", ["arrival", "flush"])
def test_an_asynchronous_job_goes_on_without_a_party_that_has_gone(
    found: Callable[..., League], gate: Gate, refill: str, leaving: set[int]
) -> None:
    league = found(absent_after=0.5)
    league.join_all()
    gate.after(1)
    job = league.submit(tree({"name": "fedbuff", "buffer": 2, "refill": refill}, rounds=4))
    gate.held()
    league.operator.revoke("ann")
    league.members["cid"].leave()
    leaving.add(2)
    gate.open()
    ended = league.ended(job)
    assert ended["status"] == "finished" and len(ended["rounds"]) == 4


def test_a_ticket_is_given_up_once_and_its_answer_is_late_from_then_on(parts: tuple[Ledger, Blobs, TaskQueue]) -> None:
    ledger = parts[0]
    keys = [("job-1", 0, "round", k) for k in range(3)]
    for key in keys:
        ledger.now(open_ask(key, "d", [0], 1.0))
    ann, no = Signer(ledger, 0, "ann"), draft(why="it would rather not")
    assert ledger.now(store_answer(keys[0], ann.sent(keys[0], no), None)).status == "accepted"
    for key in keys[:2]:
        ledger.now(give_up(key, 0, "it has gone"))
        ledger.now(give_up(key, 0, "it has gone"))
    assert [ledger.now(store_answer(key, ann.sent(key, no), None)).status for key in keys[:2]] == ["accepted", "late"]
    rows = ledger.all("SELECT number, why FROM replies ORDER BY seq")
    assert [tuple(row) for row in rows] == [(0, "it would rather not"), (1, "it has gone")]
    assert ledger.now(take_ticket(keys[2], {5: keys[1]})) == 5
