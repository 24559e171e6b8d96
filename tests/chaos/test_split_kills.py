"""A party is killed with SIGKILL in the middle of a session of split learning: it comes back, or it never does."""

from __future__ import annotations

import csv
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hansa
from hansa import Split
from hansa.core.op import Memory
from hansa.core.plain_data import to_config
from hansa.experiment.config import Experiment, parse
from hansa.models.dense import Logistic
from hansa.net.aggregator.federation import init
from hansa.net.local import free_port, processes
from hansa.net.operator import Operator
from hansa.net.party.own_models import FILE
from hansa.net.party.store import strip_checksum
from hansa.plumbing import codec
from hansa.testing import same_bits
from hansa.vertical.modules import PREFIX

PARTIES, HOLDER, PEOPLE = ("bank", "shop", "clinic"), 1, 60
PATIENCE = 600.0


class Killable:
    """A federation of four processes, of which a test kills one."""

    def __init__(self, folder: Path, started: list[subprocess.Popen[bytes]], commands: list[Any],
                 ending: ExitStack) -> None:  # fmt: skip
        self.folder, self._started, self._commands, self._ending = folder, list(started), commands, ending

    def kill(self, name: str) -> None:
        process = self._started[1 + PARTIES.index(name)]
        process.kill()
        process.wait()

    def back(self, name: str) -> None:
        """Start the process of a party again."""
        number = 1 + PARTIES.index(name)
        (self._started[number],) = self._ending.enter_context(processes([self._commands[number]], self.folder))


def write_rows(folder: Path) -> None:
    for number, name in enumerate(PARTIES):
        x = np.random.default_rng(number).normal(size=(PEOPLE, 2)).round(3)
        with open(folder / f"{name}.csv", "w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["id", "a", "b", *(["ill"] if number == HOLDER else [])])
            lines.writerows([[f"p{k}", *x[k].tolist(), *([k % 2] if number == HOLDER else [])] for k in range(PEOPLE)])


@contextmanager
def killable(folder: Path) -> Iterator[tuple[Killable, Operator]]:
    write_rows(folder)
    federation = init(folder / "federation", "kills", PARTIES, ["localhost"], free_port())
    commands: list[Any] = [("aggregator", ["serve", str(folder / "federation")], {})]
    for number, name in enumerate(PARTIES):
        (folder / name).mkdir()
        (folder / name / "party.toml").write_text("matches = 100\n")
        token = folder / "federation" / "tokens" / f"{name}.token"
        commands.append((name, [
            "join", federation.url, "--token-file", str(token), "--state", str(folder / name), "--data",
            str(folder / f"{name}.csv"), "--ids", "id", *(["--target", "ill"] if number == HOLDER else []),
        ], {}))  # fmt: skip
    with processes(commands, folder) as started, ExitStack() as ending:
        operator = Operator(federation)
        operator.wait_until_served(PATIENCE)
        yield Killable(folder, started, commands, ending), operator


def experiment(folder: Path, **run: Any) -> Experiment:
    own = Split(bottoms=(Logistic(outputs=3),), match="same", batch=10, epochs=8, lr=0.05)  # 48 steps: over a second
    task = {"parties": [f"{name}.csv" for name in PARTIES], "ids": "id", "target": "ill"}
    return parse({"task": task, "algorithm": to_config(own), "run": {"rounds": 2, "seed": 3, **run}}, str(folder))


def ended(operator: Operator, job: str) -> dict[str, Any]:
    """Wait for the end of a job; returns the job."""
    end = time.monotonic() + PATIENCE

    def check() -> None:
        assert time.monotonic() < end, operator.job(job)

    return operator.wait(job, check=check, known=True)


def pieces(memory: Memory) -> Memory:
    found = {name: value for name, value in memory.items() if name.startswith(PREFIX)}
    assert found
    return found


def killed_in_session(federation: Killable, operator: Operator, own: Experiment, name: str) -> str:
    """A job, of which a party is killed after one of two rounds, while parties send each other sealed messages."""
    end = time.monotonic() + PATIENCE
    while True:
        job, _ = operator.submit(own, "split", 3)
        while not operator.job(job)["rounds"]:
            assert time.monotonic() < end, operator.job(job)
            time.sleep(0.02)
        time.sleep(0.4)  # the second round has begun, and takes more than a second
        federation.kill(name)
        time.sleep(0.5)
        done = operator.job(job)
        if len(done["rounds"]) == 1 and done["status"] == "running":  # the others wait for it
            return job
        assert time.monotonic() < end, done
        federation.back(name)  # a busy machine came too late
        ended(operator, job)


@pytest.mark.slow
def test_a_party_that_is_killed_in_a_session_comes_back_and_the_job_has_the_simulations_bits(tmp_path: Path) -> None:
    with killable(tmp_path) as (federation, operator):
        own = experiment(tmp_path)
        job = killed_in_session(federation, operator, own, "clinic")
        federation.back("clinic")
        ended(operator, job)
        done = operator.job(job)
    assert done["status"] == "finished", done["reason"]
    reference = hansa.simulate(own.algorithm, own.build_task(), **own.settings(), progress=False)
    assert [line.get("train_loss") for line in done["rounds"]] == [line["train_loss"] for line in reference.history]
    for number, name in enumerate(PARTIES):
        kept = codec.decode(strip_checksum((tmp_path / name / "memory" / job / FILE).read_bytes()))
        assert same_bits(pieces(reference.memories[number]), pieces(kept["memory"])), name


@pytest.mark.slow
def test_a_party_that_never_comes_back_ends_the_job_with_its_name(tmp_path: Path) -> None:
    with killable(tmp_path) as (federation, operator):
        job, _ = operator.submit(experiment(tmp_path, rounds=1, deadline=30.0), "split", 3)
        end = time.monotonic() + PATIENCE
        while operator.job(job)["status"] != "running" or not (tmp_path / "clinic" / "memory" / job).exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        federation.kill("clinic")  # its rows are matched, and the session of the first round begins
        done = ended(operator, job)
    assert done["status"] == "failed"
    assert "no round was fused" in done["reason"] and "clinic" in done["reason"], done["reason"]
