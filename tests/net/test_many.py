"""Hundreds of parties at once, each with its own certificate and connection: a round reaches all and fuses all."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from crowd import Crowd, populate
from league import PATIENCE, League

from hansa.core.op import Reply
from hansa.core.sums import COPIED, StoredReply
from hansa.net.transport import pacing
from hansa.net.transport.pacing import PollPace
from hansa.plumbing import codec

MANY = 200
ROUND = {"task": {"parties": ["their-own.csv"], "model": "logistic"}, "algorithm": {"name": "fedavg"},
         "run": {"rounds": 1}}  # fmt: skip


class Throng(League):
    """A federation of many parties that are already enrolled."""

    def start(self) -> None:
        if not (self.folder / "crowd").exists():
            populate(self.folder, MANY)
        super().start()


@contextmanager
def present(league: League) -> Iterator[Crowd]:
    """All of them, on their own event loop, until the end."""
    crowd, ready, over = Crowd(league.folder, league.port, range(MANY)), threading.Event(), threading.Event()

    async def main() -> None:
        await crowd.come(0.5)
        ready.set()
        while not over.is_set():
            await asyncio.sleep(0.01)
        await crowd.leave()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield crowd
    finally:
        over.set()
        thread.join(PATIENCE)
    assert not crowd.failed()


@pytest.fixture
def throng(tmp_path: Path) -> Iterator[League]:
    league = Throng(tmp_path / "league", ["p00000"])
    yield league
    league.close()


@pytest.mark.slow
def test_a_round_reaches_every_one_of_many_parties_once_and_fuses_every_reply(throng: League) -> None:
    with present(throng) as crowd:
        job = throng.submit(ROUND, min_parties=MANY)
        shown = throng.ended(job)
        assert shown["status"] == "finished", shown["reason"]
        (line,) = shown["rounds"]
        assert (line["asked"], line["replies"], len(line["members"])) == (MANY, MANY, MANY)
        for told in (crowd.told[f"{job}/0/describe/0"], crowd.told[f"{job}/0/round/0"]):
            assert [len(told.work), len(told.fetched), len(told.accepted)] == [MANY, MANY, MANY]
        params = throng.model(job)["params"]  # type: ignore[call-overload]
        model = torch.cat([value.view(-1) for value in params.values()])
        moved = (model.double().sum() - crowd.start[job].double().sum()) / len(model)
        assert float(moved.abs()) == pytest.approx(sum(range(MANY)) / MANY / 1000, rel=1e-4)
        assert crowd.connected == MANY and len(crowd.dialled) == MANY  # one connection each, which stays


@pytest.mark.slow
def test_each_of_many_parties_is_known_by_its_own_certificate(throng: League) -> None:
    with present(throng):
        throng.until(lambda: len(throng.queue.present(range(MANY))) == MANY)
        assert {entry["party"] for entry in throng.events("certificate in use")} == {
            f"p{number:05}" for number in range(MANY)
        }


def test_thousands_of_small_stored_replies_hold_no_file_open_and_a_large_one_is_mapped(tmp_path: Path) -> None:
    for name, size in (("small", 8), ("large", COPIED)):
        (tmp_path / name).write_bytes(codec.encode(Reply({"update": torch.ones(size)}).tree()))
    before = len(os.listdir("/proc/self/fd"))
    small, large = [[StoredReply.read(tmp_path / name) for _ in range(20)] for name in ("small", "large")]
    assert len(os.listdir("/proc/self/fd")) - before == len(large)
    assert all(reply.memory is None and reply.tensors["update"].sum() == 8 for reply in small)


def test_questions_are_held_longer_where_many_ask_and_never_longer_than_the_federation_allows() -> None:
    assert pacing.poll_seconds(3, 300) == pacing.poll_seconds(1000, 300) == 25
    assert pacing.poll_seconds(10_000, 300) == 250 and pacing.poll_seconds(100_000, 300) == 300
    assert pacing.poll_seconds(10_000, 20) == 20
    drawn = [pacing.jittered(100, lambda k=k: k / 10) for k in range(11)]  # type: ignore[misc]
    assert min(drawn) == pytest.approx(80) and max(drawn) == pytest.approx(100)


def test_parties_are_told_to_come_back_over_a_time_in_proportion_to_their_number() -> None:
    pace = PollPace()
    assert pace.reconnect_delay(lambda: 1.0) == 0
    pace.update(pacing.pacing_headers(30_000, 300))
    assert pace.poll == 300 and pace.reconnect_delay(lambda: 0.5) == 60


@pytest.mark.parametrize("text", ["-1", "1e9", "nan", "", "99999999999999999999", "٣"])
def test_what_is_no_sensible_number_of_seconds_does_not_change_a_party_s_pace(text: str) -> None:
    pace = PollPace()
    pace.update({"Hansa-Poll": text, "Hansa-Spread": text})
    assert 1 <= pace.poll <= pacing.LONGEST and 0 <= pace.window <= pacing.LONGEST
    assert (pace.poll, pace.window) == (25, 0)


def test_a_question_is_answered_within_the_time_that_was_asked_for(league: League) -> None:
    ann = league.enrolled("ann")
    got = ann.call("GET", f"/v1/work?instance={ann.instance}&wait=0")
    assert got.status == 204 and got.headers["Hansa-Poll"] == "25" and got.headers["Hansa-Spread"] == "0"
    assert ann.call("GET", f"/v1/work?instance={ann.instance}&wait=-1").status == 400


def test_the_longest_question_is_a_setting_of_the_federation(found: Callable[..., League]) -> None:
    league = found(poll=1)
    ann = league.enrolled("ann")
    got = ann.call("GET", f"/v1/work?instance={ann.instance}&wait=300")
    assert got.status == 204 and got.headers["Hansa-Poll"] == "1"
