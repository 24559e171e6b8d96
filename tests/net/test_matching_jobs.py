"""Private set intersection between organisations: the bits of a simulation, and an aggregator that sees sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from league import PARTIES, PATIENCE, League, memory

import hansa
from hansa.holdings.gateway import TableRows
from hansa.net.aggregator.blobs import Blobs
from hansa.net.party.samples import PartySamples
from hansa.plumbing import codec
from hansa.vertical import PSI, psi_group

pytestmark = pytest.mark.usefixtures("quick")
pytest.importorskip("rbcl")
LEADER = PARTIES[1]  # it has the labels, and reads its ids once per other party


def rows(party: int) -> TableRows:
    """A party's rows: people 10 * party to 10 * party + 40, in an order of its own."""
    draw = np.random.default_rng(party)
    people = draw.permutation(np.arange(10 * party, 10 * party + 40))
    x, y = torch.from_numpy(draw.normal(size=(40, party + 1))), torch.from_numpy(people % 2) if party == 1 else None
    return TableRows(x, y, np.array([f"person-{number:04}" for number in people]))


def join(league: League, policy: Callable[[str], str] | None = None) -> None:
    for number, name in enumerate(PARTIES):
        allowed = f"matches = {2 if name == LEADER else 1}"
        league.join(name, PartySamples(rows(number)), allowed if policy is None else policy(name))


def submit(league: League, algorithm: Any = "psi") -> str:
    table = {"dataset": "heart", "loss": "cross_entropy", "dtype": "float64"}
    run = {"rounds": 2, "seed": 3}
    tree = {"task": table, "partition": "columns", "algorithm": algorithm, "run": run}
    return league.submit(tree, min_parties=3)


def check(league: League, done: dict[str, Any], algorithm: hansa.Algorithm = PSI()) -> None:  # noqa: B008
    """The job has ended with the rows of its simulation, and no party keeps secrets of the matching."""
    assert done["status"] == "finished", done["reason"]
    task = hansa.Task(None, "cross_entropy", [rows(party)[:2] for party in range(3)], names=list(PARTIES), classes=2,
                      ids=[rows(party).ids for party in range(3)])  # fmt: skip
    reference = hansa.simulate(algorithm, task, rounds=2, seed=3)
    assert done["rounds"][-1]["common"] == reference.history[-1]["common"] == 20.0
    for number, name in enumerate(PARTIES):
        own = memory(league, name, done["id"])
        assert torch.equal(own["rows"], reference.memories[number]["rows"])
        assert not [key for key in own if key.startswith("psi.") and key != "psi.over"]


@pytest.mark.slow
def test_a_deployed_matching_has_the_rows_of_its_simulation_and_the_aggregator_sees_sizes(
    found: Callable[..., League], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte that a party uploads is read. One reading of its ids per other party is enough for the leader, and
    one for each other party."""
    league, uploads, sent = found(), list[bytes](), list[bytes]()
    append, seal = Blobs.append, hansa.plumbing.codec.encode

    def recorded(self: Blobs, owner: str, digest: str, at: int, data: bytes, limit: int) -> int:
        uploads.append(bytes(data))
        return append(self, owner, digest, at, data, limit)

    def encoded(tree: Any, *more: Any, **given: Any) -> bytes:
        if isinstance(tree, dict) and set(tree) in ({"points", "commitments"}, {"asked", "own"}):
            sent.extend(tensor.numpy().tobytes()[:32] for tensor in tree.values())
        return seal(tree, *more, **given)

    monkeypatch.setattr(Blobs, "append", recorded)
    monkeypatch.setattr(codec, "encode", encoded)
    join(league)
    check(league, league.ended(submit(league)))
    received = b"".join(uploads)
    assert len(received) > 3 * 40 * 32 and len(sent) == 4 + 4  # two tensors per ask and per answer
    assert b"person" not in received and not any(point in received for point in sent)


@pytest.mark.slow
def test_a_matching_goes_on_after_a_restart_of_the_aggregator(found: Callable[..., League]) -> None:
    league = found()
    join(league)
    worker, reached, go = league.members["ann"].worker, threading.Event(), threading.Event()
    plain = worker.answer

    def late(work: Any, message: dict[str, Any], task: dict[str, Any]) -> Any:
        reply = plain(work, message, task)
        if message["op"].get("inner", {}).get("name") == "psi-answer" and not reached.is_set():
            reached.set()
            assert go.wait(PATIENCE)
        return reply

    worker.answer = late  # type: ignore[method-assign]
    job = submit(league)
    assert reached.wait(PATIENCE)
    league.stop()
    go.set()
    league.start()
    check(league, league.ended_after_all(job))


@pytest.mark.slow
def test_a_party_refuses_a_matching_with_more_people_than_its_owner_allows(found: Callable[..., League]) -> None:
    league = found()
    join(league, lambda name: "matches = 9" + ("\n[limits]\npeople = 39" if name == "cid" else ""))
    done = league.ended(submit(league))
    reasons = {name: why for line in done["rounds"] for name, why in line.get("missing", {}).items()}
    assert set(reasons) == {"cid"} and "at most 39 people (limits.people in party.toml)" in reasons["cid"]
    assert not any("common" in line for line in done["rounds"])


LINKAGE = {"name": "linkage", "threshold": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["psi", LINKAGE])
def test_a_party_refuses_a_matching_with_fewer_people_than_its_owner_requires(
    found: Callable[..., League], algorithm: Any
) -> None:
    league = found()
    join(league, lambda name: "matches = 9\nfuzzy = true" + ("\nmin_matches = 21" if name == "cid" else ""))
    done = league.ended(submit(league, algorithm))
    assert {name for line in done["rounds"] for name in line.get("missing", {})} == {"cid"}
    assert not any("common" in line for line in done["rounds"])
    assert "rows" not in memory(league, "cid", done["id"])


def test_a_deployed_linkage_has_the_rows_of_its_simulation(found: Callable[..., League]) -> None:
    league = found()
    join(league, lambda name: "matches = 1\nfuzzy = true")
    check(league, league.ended(submit(league, LINKAGE)), hansa.Linkage(threshold=1.0))


@pytest.mark.slow
def test_a_linkage_needs_the_word_of_every_owner(found: Callable[..., League]) -> None:
    league = found()
    join(league, lambda name: "matches = 9" + ("" if name == "cid" else "\nfuzzy = true"))
    done = league.ended(submit(league, LINKAGE))
    reasons = {name: why for line in done["rounds"] for name, why in line.get("missing", {}).items()}
    assert set(reasons) == {"cid"} and "see fuzzy in party.toml" in reasons["cid"]


def test_a_party_without_the_library_says_so_and_its_ids_are_not_read(
    found: Callable[..., League], monkeypatch: pytest.MonkeyPatch
) -> None:
    psi_group.sodium.cache_clear()
    monkeypatch.setattr(psi_group.importlib.util, "find_spec", lambda name: None)
    league = found()
    join(league)
    done = league.ended(submit(league))
    reasons = [why for line in done["rounds"] for why in line.get("missing", {}).values()]
    assert reasons and all(
        "needs rbcl; pip install 'hansa[vertical]'" in why for why in reasons
    )  # twice, not "used up"
