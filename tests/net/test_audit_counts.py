"""The audit's counts of updates and other answers, and the hash of the server's state after a round."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from league import League
from msgspec import structs

from hansa.net.aggregator.federation import FederationFolder
from hansa.net.aggregator.live import Verifier
from hansa.net.audit import merkle
from hansa.net.audit.entries import Fault
from hansa.net.audit.evidence import canonical, head_line
from hansa.net.audit.verify import verify

TASK = {"parties": ["x"], "model": "logistic", "dtype": "float64", "party_test": 0.25}
Tree = dict[str, Any]


def done(league: League, algorithm: Any, name: str, **run: Any) -> Tree:
    ended = league.ended(league.submit({"task": TASK, "algorithm": algorithm, "run": run}, name))
    assert ended["status"] == "finished", ended["reason"]
    return ended


def signed(league: League, entries: list[Tree], path: Path) -> Path:
    """Entries as the aggregator itself could write them: numbered, hashed and signed anew."""
    notary, tree, lines = FederationFolder.open(league.folder).notary(), merkle.Frontier(), list[bytes]()
    for number, entry in enumerate(entries, 1):
        line = canonical({**entry, "seq": number})
        tree.append(merkle.leaf_hash(line))
        lines.append(line + b"\n")
        if entry["event"] == "round closed":
            head = notary.head(entry["job"], entry["round"], entry["detail"]["model"], number, tree.root().hex())
            lines.append(head_line(json.dumps(structs.asdict(head))))
    head = notary.head(None, None, None, len(entries), tree.root().hex())
    path.write_bytes(b"".join([*lines, head_line(json.dumps(structs.asdict(head)))]))
    return path


def entries_of(log: Path) -> list[Tree]:
    return [tree for line in log.read_bytes().splitlines() if "head" not in (tree := json.loads(line))]


def test_evaluations_and_other_answers_are_not_counted_as_updates(league: League, tmp_path: Path) -> None:
    league.join_all()
    done(league, "fedavg", "job", rounds=2)
    log = tmp_path / "audit.jsonl"
    league.operator.export(log)
    found = verify(log)
    assert (found.updates, found.fused, found.rounds) == (6, 6, 2)
    assert (found.evaluations, found.answers) == (6, 3)  # of two rounds; the three descriptions of the data
    assert "6 updates, 6 evaluations and 3 other answers" in found.text()
    kinds = {(e["event"], e["detail"]["phase"]) for e in entries_of(log) if e["event"].endswith(" accepted")}
    assert kinds == {
        ("update accepted", "round"), ("evaluation accepted", "evaluate"), ("answer accepted", "describe")
    }  # fmt: skip
    shown = Verifier(league.ledger, (league.folder / "ca.pem").read_bytes()).look()
    assert shown["verified"] == shown["size"] and (shown["updates"], shown["evaluations"]) == (6, 6)

    old = entries_of(log)  # version 0.1.0 called every answer an update; its logs are counted right all the same
    for entry in old:
        entry["event"] = entry["event"].replace("evaluation ", "update ").replace("answer ", "update ")
        if entry["event"] in ("job begun", "round closed"):
            del entry["detail"]["state"]
    counted = verify(signed(league, old, tmp_path / "old.jsonl"))
    assert (counted.updates, counted.evaluations, counted.answers, counted.rounds) == (6, 6, 3, 2)
    wrong = entries_of(log)
    entry = next(e for e in wrong if e["event"] == "update accepted")
    entry["event"] = "evaluation accepted"
    with pytest.raises(Fault, match="its event name does not match its content"):
        verify(signed(league, wrong, tmp_path / "wrong.jsonl"))


@pytest.mark.parametrize("algorithm", ["naive-bayes", "id3"])
def test_the_hash_of_a_model_that_is_no_vector_changes_with_it(league: League, tmp_path: Path, algorithm: str) -> None:
    league.join_all()
    ended = done(league, algorithm, "job", rounds=2, eval_parties=False)
    log = tmp_path / "audit.jsonl"
    league.operator.export(log)
    verify(log)
    (begun,) = (e["detail"] for e in entries_of(log) if e["event"] == "job begun")
    closed = [e["detail"] for e in entries_of(log) if e["event"] == "round closed"]
    models = [begun["model"], *(detail["model"] for detail in closed)]
    assert len(set(models)) == len(models) == 1 + len(ended["rounds"])
    assert [detail["state"] for detail in closed] == models[1:]


def test_the_state_of_the_server_optimiser_is_hashed_beside_the_model(league: League, tmp_path: Path) -> None:
    """The parties compare the model with its hash, so the state has a separate hash."""
    league.join_all()
    done(league, {"name": "fedadam"}, "job", rounds=2, eval_parties=False)
    log = tmp_path / "audit.jsonl"
    league.operator.export(log)
    assert verify(log).rounds == 2
    entries = entries_of(log)
    details = [e["detail"] for e in entries if e["event"] in ("job begun", "round closed")]
    assert len({d["state"] for d in details} | {d["model"] for d in details}) == 6
    assert all(e["detail"]["shown"] for e in entries if e["event"] == "update accepted")

    def forged(change: Any) -> Path:
        changed = copy.deepcopy(entries)
        change([e["detail"] for e in changed if e["event"] == "round closed"])
        return signed(league, changed, tmp_path / "forged.jsonl")

    assert verify(forged(lambda closed: None)).rounds == 2

    def dropped(closed: list[Tree]) -> None:
        del closed[1]["state"]

    with pytest.raises(Fault, match="has no hash of the state"):
        verify(forged(dropped))
    with pytest.raises(Fault, match="closing of the round is malformed"):
        verify(forged(lambda closed: closed[0].update(state="bogus")))


@pytest.mark.slow
def test_an_empty_round_leaves_the_hash_of_the_state(league: League, tmp_path: Path) -> None:
    league.join_all()
    tree = {"task": TASK, "algorithm": "fedadam", "run": {"rounds": 2, "max_norm": 1e-12}}
    ended = league.ended(league.submit(tree))
    assert ended["status"] == "failed"
    log = tmp_path / "audit.jsonl"
    league.operator.export(log)
    verify(log)
    entries = entries_of(log)
    details = [e["detail"] for e in entries if e["event"] in ("job begun", "round closed")]
    assert len({d["state"] for d in details}) == 1
    details[-1]["state"] = "ab" * 32
    with pytest.raises(Fault, match="the round is empty, but"):
        verify(signed(league, entries, tmp_path / "forged.jsonl"))
