"""Parties that enrol again, are slow or have left; jobs that are stopped or can never run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from league import PARTIES, League, samples
from test_rounds import TASK, Gate, gate, parts, tree  # noqa: F401 (fixtures)

from hansa.core.ask import Ask
from hansa.local import SGD
from hansa.net.aggregator import queue
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.queue import TaskQueue
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.net.operator import Operator
from hansa.net.party import nursery, process
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.transport import keys
from hansa.net.transport.client import Refusal
from hansa.net.transport.process import Structured
from hansa.plumbing import crash_points as points
from hansa.plumbing.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick")


def test_a_party_that_was_revoked_enrols_anew_with_a_new_token(league: League, tmp_path: Path) -> None:
    store, first = PartyStore(tmp_path / "home"), league.token("ann")
    asyncio.run(store.enrol(league.url, first))
    before = store.identity()
    assert store.enrolled_with(first)
    league.operator.revoke("ann")
    league.operator.invite("ann")
    second = league.token("ann")
    assert not store.enrolled_with(second)
    asyncio.run(store.enrol(league.url, second))
    assert store.enrolled_with(second) and store.identity().fingerprint != before.fingerprint
    assert store.identity().key.public_bytes_raw() != before.key.public_bytes_raw()
    assert not list(store.folder.glob("*.enrol.pem"))
    store.close()


@pytest.mark.slow
def test_what_a_killed_party_had_half_written_is_gone_when_it_comes_back(tmp_path: Path) -> None:
    store = PartyStore(tmp_path / "home")
    remembered = PartyMemory(store.folder / "memory")
    remembered.stage("job-1", "0/round/0", {"w": torch.ones(2)})
    left = [store.folder / f".key.pem.{'0a' * 8}.part", store.folder / "memory" / "job-1" / f".x.{'0a' * 8}.part"]
    for path in left:
        path.write_bytes(b"half")
    with pytest.raises(ConfigError, match="another process runs this party"):
        PartyStore(tmp_path / "home")
    assert all(path.exists() for path in left)
    store.close()
    PartyStore(tmp_path / "home").close()
    assert not any(path.exists() for path in left)
    assert remembered.recall("job-1", "0/round/0") is not None


@pytest.mark.parametrize("point", ["private.rename", "rotation.key", "rotation.certificate"])
def test_an_enrolment_that_was_cut_off_anywhere_goes_on_with_the_same_token(
    league: League, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(BaseException):
        pass

    token = league.token("ann")
    for nth in range(1, 6):  # each reached point is a possible place for an interruption
        store, left = PartyStore(tmp_path / "home"), [nth]

        def cut(name: str, left: list[int] = left) -> None:
            if name == point:
                left[0] -= 1
                if left[0] == 0:
                    raise Cut

        points.install(cut)
        try:
            store.install_new_keys()
            if not store.enrolled_with(token):
                asyncio.run(store.enrol(league.url, token))
        except Cut:
            pass
        finally:
            points.install(None)
            store.close()
    store = PartyStore(tmp_path / "home")
    store.install_new_keys()
    if not store.enrolled_with(token):
        asyncio.run(store.enrol(league.url, token))
    assert store.identity().fingerprint == store.registration()["certificate"]
    key = keys.load_key(keys.read_private(store.folder / "key.pem"))
    assert key.public_key().public_bytes_raw() == store.identity().key.public_bytes_raw()
    store.close()


def test_a_party_whose_certificate_has_ended_says_so(
    league: League, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PartyStore(tmp_path / "home")
    asyncio.run(store.enrol(league.url, league.token("ann")))
    store.close()
    data = tmp_path / "data.csv"
    data.write_text("a,b,y\n1,2,0\n3,4,1\n")
    monkeypatch.setattr(process, "log_to_stderr", Structured)
    monkeypatch.setattr(process, "end_on_signal", lambda done: None)  # signals are the main thread's
    monkeypatch.setattr(nursery, "check_fork", lambda *_, **__: None)  # nobody trains
    later = store.identity().not_after + 1
    monkeypatch.setattr(process.time, "time", lambda: later)
    with pytest.raises(ConfigError, match=r"certificate of ann has expired; .*hansa invite"):
        process.join(tmp_path / "home", str(data))


def test_what_a_party_sends_slowly_is_a_sign_of_life(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ann = league.enrolled("ann")
    ask = league.ask(parties=[0])
    ann.work()
    for _ in range(3):
        now[0] += 0.9 * league.queue.absent_after
        assert league.queue.present([0]) == [0]
        assert ann.put(ask, "0" * 64, 0, b"x").status == 204
    now[0] += 1.1 * league.queue.absent_after
    assert league.queue.present([0]) == []


def test_a_stop_is_kept_through_a_crash(league: League, gate: Gate) -> None:  # noqa: F811
    league.join_all()
    gate.after(1)
    job = league.submit(tree(rounds=50))
    gate.held()
    assert league.operator.stop(job) is True
    assert league.shown(job)["status"] == "stopping", "what was acknowledged is in the ledger"
    gate.open()
    assert league.ended(job)["status"] == "stopped"


def test_a_revoked_party_is_not_waited_for_by_later_jobs(league: League) -> None:
    league.join_all("ann", "bob")
    league.enrolled("cid")
    league.operator.revoke("cid")
    job = league.submit(tree())
    ended = league.ended(job)
    assert ended["status"] == "finished" and ended["rounds"][0]["members"] == ["ann", "bob"]


def test_a_ticket_of_a_party_that_has_gone_is_lost_after_a_while_and_not_at_once(
    parts: tuple[Ledger, Blobs, TaskQueue],  # noqa: F811
    tmp_path: Path,
) -> None:
    ledger, blobs, tasks = parts  # no party had contact
    network = NetworkRuntime("job-1", "job", PARTIES, ledger, blobs, tasks, tmp_path / "messages")
    model = {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
    began, arrivals = time.monotonic(), []
    for number in (0, 2):  # the same party is asked again, as an algorithm may do
        network.answer(Ask("submit", 0, "round", number, SGD(), {"model": model}, (0,)))
        arrivals.append(network.answer(Ask("next", 0, "round", number + 1)))
    assert all(arrival.reply is None for arrival in arrivals)
    assert time.monotonic() - began >= 2 * tasks.absent_after, "or a hundred would be lost in a moment, and the round"


@pytest.mark.slow
def test_a_deadline_that_passed_while_the_aggregator_was_away_begins_again(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [league.join(name, samples(k)) for k, name in enumerate(PARTIES)]
    league.until(lambda: len(league.queue.present(range(3))) == 3)
    for member in members:
        member.leave()  # they still count as present, but do not answer
    job = league.submit(tree(rounds=1, deadline=600.0, quorum=3), min_parties=3)
    league.until(lambda: league.queue.find(0, (job, 0, "describe", 0)) is not None)
    league.stop()
    wall, steady = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: wall() + 700.0)
    monkeypatch.setattr(time, "monotonic", lambda: steady() + 700.0)
    league.start()
    league.join_all()
    ended = league.ended(job)
    assert ended["status"] == "finished" and ended["rounds"][0]["replies"] == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (tree(quorum=4), "can never be met"),
        (tree(min_cohort=4), "can never be met"),
        (tree(cohort_size=2, min_cohort=3), "can never be met"),
        (tree(own={"zed": {"lr": 1.0}}), "there is no party 'zed'"),
        (tree({"name": "fedavg", "fusion": "zeno"}), "task.trusted"),
        (tree("zeno++"), "task.trusted"),
        (tree("fsvrg", cohort=0.5), "needs every party"),
        (tree("fedbuff", min_cohort=2), "applies updates one by one"),
        (tree(task={**TASK, "model": "os:getcwd"}), "not among serve.functions"),
    ],
)
def test_a_job_that_could_never_run_is_refused_as_it_is_submitted(
    league: League, given: dict[str, Any], message: str
) -> None:
    with pytest.raises((Refusal, ConfigError), match=message):
        league.submit(given)
    assert league.operator.jobs() == [] and list(league.aggregator.blobs) == []


@pytest.mark.parametrize("job", ["x y/../z", "no#pe", "nobody-1"])
def test_a_job_is_looked_for_by_its_whole_name(league: League, job: str) -> None:
    with pytest.raises(Refusal, match="there is no job") as refusal:
        Operator.job(league.operator, job)
    assert repr(job) in str(refusal.value)
