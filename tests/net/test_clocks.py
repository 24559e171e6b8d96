"""Clocks that are a day off, or jump by a day in the middle of a round, do not matter."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from league import Asked, Caller, League, draft

from hansa.data.describe import Description
from hansa.holdings.labels import Labels
from hansa.net.transport import certificates
from hansa.plumbing import codec

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
DAY = 86400.0


class Clock:
    """The wall clock of this process, shared by all its threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off, right = 0.0, time.time
        monkeypatch.setattr(time, "time", lambda: right() + self.off)


@pytest.fixture
def clock(quick: None, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tree(**run: Any) -> dict[str, Any]:
    return {"task": TASK, "algorithm": "fedavg", "run": {"rounds": 2, **run}}


def silent_from_now_on(league: League, job: str) -> Caller:
    """Cid describes its data and then does not answer: each round ends at its deadline."""
    cid, ask = league.enrolled("cid"), Asked(job, 0, "describe", 0)
    league.until(lambda: league.queue.find(2, ask.key) is not None)
    about = Description((3,), 2, "class", False, False, Labels(0, 1, 2)).reply()
    assert cid.reply(ask, draft(cid.upload(ask, codec.encode(about.tree())))).status == 200
    league.until(lambda: league.queue.find(2, (job, 0, "round", 0)) is not None)
    return cid


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_jump_in_the_middle_of_a_round_does_not_close_it(league: League, clock: Clock, jump: float) -> None:
    """The deadline is far away, whatever the wall clock shows: a party that answers after the jump is fused."""
    league.join_all("ann", "bob")
    league.enrolled("cid")
    job = league.submit(tree(deadline=600.0))
    league.until(lambda: league.queue.find(2, (job, 0, "describe", 0)) is not None)
    clock.off = jump
    waiting = league.runner._running[job][1]
    waiting.join(0.5)  # time to make the mistake
    assert waiting.is_alive()
    rows = league.ledger.all("SELECT closed FROM asks WHERE job = ? AND phase = 'describe'", job)
    assert [row["closed"] for row in rows] == [None]
    league.operator.revoke("cid")
    ended = league.ended(job)
    assert ended["status"] == "finished" and [line["members"] for line in ended["rounds"]] == [["ann", "bob"]] * 2


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_jump_in_the_middle_of_a_round_does_not_hold_it_open(
    league: League, clock: Clock, silent: set[int], jump: float
) -> None:
    league.join_all("ann", "bob")
    job = league.submit(tree(deadline=0.5, quorum=2))
    silent_from_now_on(league, job)
    silent.add(2)
    clock.off = jump
    ended = league.ended(job)
    assert ended["status"] == "finished" and [line["members"] for line in ended["rounds"]] == [["ann", "bob"]] * 2
    assert all("deadline of 0.5 s" in line["missing"]["cid"] for line in ended["rounds"])


@pytest.mark.slow
@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_an_aggregator_that_comes_back_with_another_clock_goes_on(
    league: League, clock: Clock, silent: set[int], jump: float
) -> None:
    league.join_all("ann", "bob")
    job = league.submit(tree(deadline=1.0, quorum=1))
    cid = silent_from_now_on(league, job)
    silent.add(2)
    league.stop()
    clock.off = jump
    league.start()
    again = league.caller(cid.key, cid.files, "cid")
    assert again.call("POST", f"/v1/alive?instance={again.instance}").status == 204
    ended = league.ended(job)
    assert len(ended["rounds"]) == 2 and ended["status"] != "running", "it is held open by a day"
    assert all("deadline of 1 s" in line["missing"]["cid"] for line in ended["rounds"])


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_parties_and_certificates_of_a_day_ago_or_from_tomorrow_count(
    found: Callable[..., League], clock: Clock, jump: float
) -> None:
    """Enrolment, rotation and work, with the aggregator's clock wrong by a day from before or from after the
    enrolment."""
    league = found()
    before: Caller = league.enrolled("ann")
    clock.off = jump
    after = league.enrolled("bob")
    for caller in (before, after):
        assert caller.call("POST", f"/v1/alive?instance={caller.instance}").status == 204
    assert league.operator.invite("dora") is not None
    clock.off = 0.0
    for caller in (before, after, league.enrolled("dora")):
        assert caller.call("POST", f"/v1/alive?instance={caller.instance}").status == 204


def test_what_is_issued_now_is_good_where_it_is_yesterday_or_tomorrow(league: League) -> None:
    """Each side's TLS uses its own clock, so each certificate must be valid at the other side's time."""
    ann = league.enrolled("ann")
    assert ann.files is not None
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    for path in (league.folder / "ca.pem", league.folder / "server.pem", league.folder / "operator.pem", ann.files[0]):
        made = x509.load_pem_x509_certificate(Path(path).read_bytes())
        assert made.not_valid_before_utc < now - day and made.not_valid_after_utc > now + day
    assert day < certificates.BACKDATED
