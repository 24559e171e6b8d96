"""Why parties do not take part: each distinct reason reaches the job's status, the log and the live page."""

from __future__ import annotations

import errno
from collections import Counter
from typing import Any

import pytest
from league import PARTIES, League, samples
from typer.testing import CliRunner

from hansa.cli import network
from hansa.cli.app import app
from hansa.net.aggregator.live import Live
from hansa.net.party import agent as party
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.worker import Worker
from hansa.report.diagnosis import grouped

pytestmark = pytest.mark.usefixtures("quick")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64", "prepare": "standardise"}
NO_MOMENTS = 'ops = ["[!c]*"]'  # all but column-moments


def joined(league: League, policies: dict[str, str], data: dict[str, Any] | None = None) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, (data or {}).get(name, samples(number)), policies.get(name, ""))


def asked(league: League) -> Counter[str]:
    """The number of times that the parties were asked for sums of their features."""
    rows = league.ledger.all("SELECT party FROM replies WHERE phase LIKE 'prepare%'")
    return Counter(PARTIES[row["party"]] for row in rows)


def test_a_preparation_that_all_refuse_is_asked_once_and_every_reason_is_shown(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined(league, {"ann": NO_MOMENTS, "bob": NO_MOMENTS, "cid": "[privacy]\nsecure = true"})
    job = league.submit({"task": TASK, "run": {"rounds": 2}})
    ended = league.ended(job)
    wanted = ["ann, bob: its policy does not accept the op 'column-moments'", "cid: its policy requires a secure sum"]
    assert ended["status"] == "failed" and all(text in ended["reason"] for text in wanted), ended["reason"]
    assert "the preparation 'standardise' could not be learned" in ended["reason"]
    assert asked(league) == {"ann": 1, "bob": 1, "cid": 1}
    monkeypatch.setattr(network, "_operator", lambda federation: league.operator)
    said = CliRunner().invoke(app, ["log", str(league.folder), job])
    assert said.exit_code == 0, said.output
    line = next(line for line in said.output.splitlines() if "job failed" in line)
    assert all(text in line for text in wanted)
    refused = [line for line in said.output.splitlines() if "answer refused" in line]
    assert len(refused) == 3 and sum("does not accept the op 'column-moments'" in line for line in refused) == 2
    assert "refused" in said.output.splitlines()[-1] and "3 refused" in said.output.splitlines()[-1]
    values, _ = Live(league.runner).look()
    assert all(text in values["jobs"][0]["reason"] for text in wanted)
    assert "refused: its policy requires a secure sum" in values["party:cid"]["reason"]


@pytest.mark.slow
def test_who_refuses_a_preparation_is_left_out_of_it_and_the_others_go_on(league: League) -> None:
    """With a masked sum one refusal ends an attempt; the next attempt is made without the party that refused."""
    joined(league, {"cid": NO_MOMENTS})
    tree = {"task": TASK, "algorithm": "fedavg", "run": {"rounds": 1, "eval_parties": False}}
    private = {"secure": "masking", "threshold": 1.0}
    ended = league.ended(league.submit({**tree, "privacy": private}))
    assert ended["status"] == "finished", ended["reason"]
    assert [e["party"] for e in league.events("answer refused")] == ["cid"]
    assert ended["rounds"][0]["unprepared"] == {"cid": "its policy does not accept the op 'column-moments'"}


def test_a_masked_preparation_out_of_range_says_which_parties_do_not_answer(league: League) -> None:
    large = {name: ((samples(k)[0][0] * 1e25, samples(k)[0][1]), None) for k, name in enumerate(PARTIES)}
    joined(league, {}, large)
    ended = league.ended(league.submit({"task": TASK, "run": {"rounds": 1}, "privacy": {"secure": "masking"}}))
    assert ended["status"] == "failed"
    assert f"ann, bob, cid: {REFUSAL}" in ended["reason"], ended["reason"]
    assert max(asked(league).values()) == 3  # keys, shares, numbers: in one attempt


def test_a_party_whose_disk_is_full_is_not_taken_to_refuse(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may have space again, so the party gives no answer, and is asked again."""
    honest, times = Worker._admit, Counter[str]()

    def full(self: Any, work: Any, message: Any, task: Any) -> Any:
        if work.phase.startswith("prepare"):
            times[work.ask] += 1
            if sum(times.values()) <= 2:
                raise OSError(errno.ENOSPC, "no room")
        return honest(self, work, message, task)

    monkeypatch.setattr(Worker, "_admit", full)
    monkeypatch.setattr(party, "PAUSE", 0.05)
    joined(league, {})
    ended = league.ended(league.submit({"task": TASK, "run": {"rounds": 1}}))
    assert ended["status"] == "finished", ended["reason"]
    assert league.events("answer refused") == []


def test_a_job_that_nobody_takes_part_in_says_why_by_reason(league: League) -> None:
    joined(league, dict.fromkeys(PARTIES, 'jobs = ["heart*"]'))
    ended = league.ended(league.submit({"task": TASK, "run": {"rounds": 1}}))
    assert ended["reason"] == "no party takes part: ann, bob, cid: its policy does not accept the job 'job'"


def test_rounds_that_all_refuse_say_why_by_reason(league: League) -> None:
    joined(league, dict.fromkeys(PARTIES, 'ops = ["describe"]'))
    task = {name: value for name, value in TASK.items() if name != "prepare"}
    ended = league.ended(league.submit({"task": task, "run": {"rounds": 2, "eval_parties": False}}))
    assert ended["status"] == "failed"
    assert "ann, bob, cid: its policy does not accept the op 'sgd'" in ended["reason"], ended["reason"]


def test_reasons_are_grouped_and_kept_short() -> None:
    assert grouped({"a": "x", "b": "y", "c": "x"}) == "a, c: x; b: y"
    many = grouped({f"p{n}": "z" * 5000 for n in range(20)} | {f"q{n}": f"reason {n}" for n in range(20)})
    assert len(many) < 3000 and "p0, p1, p2, p3, p4 and 15 others: zzz" in many and "16 other reasons" in many
