"""A running party reads its policy again on SIGHUP; a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from league import PATIENCE, League, samples

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}


class JoinedParty:
    """The party ann, as `hansa join` runs it."""

    def __init__(self, league: League, folder: Path) -> None:
        self.state, self.log, self._seen = folder / "ann", folder / "ann.log", 0
        x, y = samples(0)[0]
        rows = [",".join(map(str, [*row.tolist(), int(label)])) for row, label in zip(x, y, strict=True)]
        (folder / "ann.csv").write_text("a,b,c,label\n" + "\n".join(rows) + "\n")
        (folder / "ann.token").write_text(league.token("ann").text())
        os.chmod(folder / "ann.token", 0o600)
        command = [sys.executable, "-m", "hansa.cli", "join", league.url, "--token-file", str(folder / "ann.token"),
                   "--state", str(self.state), "--data", str(folder / "ann.csv"), "--json"]  # fmt: skip
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def write(self, policy: str) -> None:
        (self.state / "party.toml").write_text(policy)

    def hang_up(self) -> dict[str, Any]:
        """Send SIGHUP; the log line that follows."""
        before = len(self.said("policy"))
        self.process.send_signal(signal.SIGHUP)
        return self.wait("policy", before + 1)[before]

    def said(self, event: str) -> list[dict[str, Any]]:
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in map(json.loads, lines) if line["event"].startswith(event)]

    def wait(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        while len(found := self.said(event)) < count:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        return found

    def record(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "policy.log").read_text().splitlines()]


@pytest.fixture
def ann(found: Callable[..., League], tmp_path: Path) -> Iterator[tuple[League, JoinedParty]]:
    league = found()
    party = JoinedParty(league, tmp_path)
    try:
        league.until(lambda: bool(league.queue.present([league.number("ann")])))
        yield league, party
    finally:
        party.process.terminate()
        assert party.process.wait(PATIENCE) == 0


def job(league: League, steps: int = 1, rounds: int = 1) -> str:
    tree = {"task": TASK, "run": {"rounds": rounds, "eval_parties": False},
            "algorithm": {"name": "fedavg", "local": {"name": "sgd", "steps": steps}}}  # fmt: skip
    return league.submit(tree, min_parties=1)


@pytest.mark.slow
def test_a_party_takes_a_new_policy_and_refuses_a_bad_one(ann: tuple[League, JoinedParty]) -> None:
    league, party = ann
    assert league.ended(job(league))["status"] == "finished"
    party.write('ops = ["describe"]\ndevice = "cuda"\n')
    line = party.hang_up()
    assert line["event"] == "policy reloaded: it counts from the next ask on" and line["changed"] == ["ops"]
    assert "device: cannot change while the party runs" in party.wait("device")[0]["event"]
    ended = league.ended(job(league))
    assert "its policy does not accept the op 'sgd'" in str(ended), ended
    for bad, why in (('ops = ["sgd"', "cannot read"), ("opps = []", "unknown field 'opps'; did you mean 'ops'?"),
                     ("class_weights = 0.5", "class_weights must be at least 1")):  # fmt: skip
        party.write(bad)
        line = party.hang_up()
        assert line["event"].startswith("policy not reloaded, the old one stays: ") and why in line["event"]
    (party.state / "party.toml").unlink()
    assert "there is no file" in party.hang_up()["event"] and not (party.state / "party.toml").exists()
    assert league.ended(job(league))["status"] == "failed"  # the policy before the bad files
    party.write("")
    assert party.hang_up()["changed"] == ["ops"]
    assert league.ended(job(league))["status"] == "finished"
    assert [entry["event"] for entry in party.record()] == [
        "policy in force", "policy reloaded", *["policy refused"] * 4, "policy reloaded"
    ]  # fmt: skip
    assert party.record()[1]["at_restart"] == ["device"] and len(party.record()[1]["sha256"]) == 64


@pytest.mark.slow
def test_an_ask_under_way_finishes_under_the_policy_with_which_it_began(ann: tuple[League, JoinedParty]) -> None:
    league, party = ann
    for _ in range(20):
        asked = len(party.said("ask received"))
        submitted = job(league, steps=20_000, rounds=2)
        party.wait("ask received", asked + 2)  # the description, then the first round
        party.write('jobs = ["other"]\n')
        party.hang_up()
        ended = league.ended(submitted)
        first, second = ended["rounds"]
        if not second["members"]:
            break
        party.write("")  # a busy machine was too slow: the second ask was under way too
        party.hang_up()
    assert first["members"] == ["ann"] and second["members"] == []
    assert "its policy does not accept the job" in str(second["missing"])
