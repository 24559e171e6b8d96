"""Federations that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from league import Caller, League

from hansa.net.aggregator import runtime, sessions
from hansa.net.aggregator.queue import TaskQueue
from hansa.net.aggregator.round import Asking, Looked
from hansa.net.party import post
from hansa.net.relay import relay
from hansa.net.transport import client


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short intervals between two looks, at the aggregator, at relays and at parties."""
    monkeypatch.setattr(runtime, "TICK", 0.05)
    monkeypatch.setattr(relay, "TICK", 0.05)
    monkeypatch.setattr(relay, "LOOK", 0.02)
    monkeypatch.setattr(client, "LEAST", 0.02)
    monkeypatch.setattr(client, "MOST", 0.1)
    monkeypatch.setattr(sessions, "LOOK", 0.02)
    monkeypatch.setattr(post, "LOOK", 0.05)


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Callable[..., League]]:
    """Makes federations."""
    made: list[League] = []

    def make(**given: Any) -> League:
        made.append(League(tmp_path / f"league-{len(made)}", **given))
        return made[-1]

    yield make
    for league in made:
        league.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of parties that do not answer. A deadline counts for them alone, however slow the others are."""
    quiet, look = set[int](), Asking._look

    def patient(machine: Asking, event: Looked) -> None:
        if not quiet.issuperset(machine.waiting):
            machine.until = max(machine.until, event.now + 0.1)
        look(machine, event)

    monkeypatch.setattr(Asking, "_look", patient)
    return quiet


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of parties that may become absent. No other party does, however slow this machine is."""
    mortal, present = set[int](), TaskQueue._present

    def here(queue: TaskQueue, party: int, now: float) -> bool:
        return present(queue, party, now) or (party in queue._heard and party not in mortal)

    monkeypatch.setattr(TaskQueue, "_present", here)
    return mortal


@pytest.fixture
def league(found: Callable[..., League]) -> League:
    """A federation of three parties."""
    return found()


@pytest.fixture
def ann(league: League) -> Caller:
    return league.enrolled("ann")
