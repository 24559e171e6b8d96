"""The audit log: an honest log verifies; every change in a log, receipt or proof is detected."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from league import PARTIES, Asked, Caller, League, draft, samples
from msgspec import structs
from typer.testing import CliRunner

from hansa.cli import audit as commands
from hansa.core.ask import Ask
from hansa.data.describe import Description
from hansa.holdings.labels import Labels
from hansa.net.aggregator import runtime
from hansa.net.aggregator.federation import FederationFolder
from hansa.net.audit import merkle
from hansa.net.audit.entries import Fault
from hansa.net.audit.evidence import (
    Notary,
    Statement,
    canonical,
    head_line,
    length_prefixed,
    make_statement,
    receipt_fault,
)
from hansa.net.audit.proofs import IncludedEntry, Proof, check, prove
from hansa.net.audit.receipt_file import read_receipts
from hansa.net.audit.verify import Audit, Certificate, Report, verify
from hansa.net.party.receipts import BadReceipt, Receipts
from hansa.net.party.store import PartyStore
from hansa.net.transport import certificates, client, keys
from hansa.net.transport.wire import Blob, Receipt, pack
from hansa.numerics.params import Params
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
Tree = dict[str, Any]


class Scene:
    """The log of a federation with some history, the parties' receipts, and the aggregator's own key."""

    def __init__(self, league: League, folder: Path) -> None:
        self.folder, self.notary = folder, FederationFolder.open(league.folder).notary()
        self.receipts, self.authority = league.folder / "homes", (league.folder / "ca.pem").read_bytes()
        self.log = folder / "audit.jsonl"
        self.entries = league.operator.export(self.log)
        self.lines = self.log.read_bytes().splitlines()
        self.made = 0

    def homes(self) -> list[Path]:
        return [self.receipts / name for name in PARTIES]

    def trees(self) -> list[Tree]:
        return [json.loads(line) for line in self.lines]

    def wrote(self, lines: list[bytes]) -> Path:
        self.made += 1
        path = self.folder / f"log-{self.made}.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    def forged(self, entries: list[Tree]) -> Path:
        """Other entries as the aggregator itself could write them: numbered, hashed and signed again."""
        tree, lines = merkle.Frontier(), list[bytes]()
        for number, entry in enumerate(entries, 1):
            line = canonical({**entry, "seq": number})
            tree.append(merkle.leaf_hash(line))
            lines.append(line)
            if entry["event"] == "round closed":
                head = self.notary.head(
                    entry["job"], entry["round"], entry["detail"]["model"], number, tree.root().hex()
                )
                lines.append(head_line(json.dumps(structs.asdict(head)))[:-1])
        head = self.notary.head(None, None, None, len(entries), tree.root().hex())
        return self.wrote([*lines, head_line(json.dumps(structs.asdict(head)))[:-1]])

    def plain(self) -> list[Tree]:
        """The entries, without heads."""
        return [tree for tree in self.trees() if "head" not in tree]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A synchronous and an asynchronous job, an empty round, a refusal, a rotation and a revocation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "TICK", 0.05)
        patch.setattr(client, "LEAST", 0.02)
        folder = tmp_path_factory.mktemp("audit")
        league = League(folder / "league")
        for number, name in enumerate(PARTIES):
            league.join(name, samples(number), 'jobs = ["[!r]*"]' if name == "cid" else "")
        tree = {"task": TASK, "algorithm": "fedavg", "run": {"rounds": 3, "eval_parties": False}}
        assert league.ended(league.submit(tree, "one"))["status"] == "finished"
        buffered = {"name": "fedbuff", "buffer": 2}
        assert league.ended(league.submit({**tree, "algorithm": buffered}, "two"))["status"] == "finished"
        refused = {**tree, "run": {"rounds": 1, "quorum": 1}}
        assert league.ended(league.submit(refused, "refused"))["status"] == "finished"
        bob = league.members["bob"]
        bob.leave()
        again = PartyStore(bob.store.folder)

        async def rotate() -> None:
            async with again.client(league.url) as speaker:
                await again.rotate(speaker)
            async with again.client(league.url) as speaker:
                await speaker.call("POST", "/v1/alive?instance=1")

        asyncio.run(rotate())
        again.close()
        league.operator.revoke("cid")
        league.members["cid"].gone()
        yield Scene(league, folder)
        league.close()


def fails(path: Path, words: str | None, scene: Scene, **given: Any) -> None:
    with pytest.raises(Fault, match=words):
        verify(path, scene.authority, **given)


# An honest log


def test_an_honest_log_verifies_with_all_receipts(scene: Scene) -> None:
    found = verify(scene.log, scene.authority, scene.homes())
    assert found.entries == scene.entries and found.rounds == 7 and found.refusals == 1
    assert found.authority == certificates.fingerprint(scene.authority)
    kept = [one for home in scene.homes() for path in (home / "receipts").glob("*") for one in read_receipts(path)]
    assert found.receipts == len(kept)  # some perhaps late: tickets that were under way when their job ended
    assert sum(one.receipt.status == "accepted" for one in kept) == (
        found.updates + found.evaluations + found.answers + found.refusals
    )
    assert 3 * 3 + 3 * 2 + 2 <= found.fused <= found.updates
    assert verify(scene.log) == Report(**{**vars(found), "receipts": 0})
    events = {entry["event"] for entry in scene.plain()}
    assert {"log begun", "enrolled", "certificate in use", "certificate rotated", "revoked", "job begun",
            "round closed", "update accepted", "answer refused", "job finished"} <= events  # fmt: skip


def test_a_forgery_that_changes_nothing_is_the_log(scene: Scene) -> None:
    """The basis of the tests below: only their changes are found."""
    assert scene.forged(scene.plain()).read_bytes() == scene.log.read_bytes()


def test_parties_see_the_model_they_train(scene: Scene) -> None:
    rounds = [e["detail"] for e in scene.plain() if e["event"] == "update accepted" and e["detail"]["phase"] == "round"]
    assert all(detail["model"] is not None for detail in rounds)
    assert sum(detail["shown"] for detail in rounds) >= 11  # all of the synchronous ones
    others = [e["detail"] for e in scene.plain() if e["event"] == "answer accepted"]
    assert {d["model"] is None for d in others if d["phase"] == "describe"} == {True}


# Visible in the file itself


@pytest.mark.slow
def test_every_field_of_every_kind_of_entry_is_covered(scene: Scene) -> None:
    trees = scene.trees()
    kinds = {tree.get("event", "head"): place for place, tree in reversed(list(enumerate(trees)))}
    for place in kinds.values():
        for changed in alterations(trees[place]):
            lines = [*scene.lines[:place], canonical(changed), *scene.lines[place + 1 :]]
            with pytest.raises(Fault):
                verify(scene.wrote(lines))


def alterations(tree: Any) -> Iterator[Any]:
    """A tree with one leaf changed, for each leaf."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            for changed in alterations(value):
                yield {**tree, name: changed}
            yield {k: v for k, v in tree.items() if k != name}
    elif isinstance(tree, list):
        for k, value in enumerate(tree):
            for changed in alterations(value):
                yield [*tree[:k], changed, *tree[k + 1 :]]
            yield [*tree[:k], *tree[k + 1 :]]
    elif isinstance(tree, bool):
        yield not tree
    elif isinstance(tree, (int, float)):
        yield tree + 1
    elif isinstance(tree, str):
        yield ("1" if tree[:1] == "0" else "0") + tree[1:]
        yield None
    else:
        yield "0"


def test_lines_that_are_dropped_swapped_repeated_or_put_in_are_found(scene: Scene) -> None:
    some = scene.plain()[:38]
    lines = scene.forged(some).read_bytes().splitlines()
    assert sum(entry["event"] == "round closed" for entry in some) >= 2 and verify(scene.wrote(lines)).fused >= 6
    for k in range(len(lines)):
        fails(scene.wrote([*lines[:k], *lines[k + 1 :]]), None, scene)
        fails(scene.wrote([*lines[: k + 1], lines[k], *lines[k + 1 :]]), None, scene)
        if k:
            fails(scene.wrote([*lines[: k - 1], lines[k], lines[k - 1], *lines[k + 1 :]]), None, scene)
    extra = canonical({**json.loads(lines[5]), "event": "nothing much", "seq": 6})
    fails(scene.wrote([*lines[:5], extra, *lines[5:]]), None, scene)
    fails(scene.wrote(lines[:-1]), "does not end with its signed head", scene)
    fails(scene.wrote([*lines, lines[-1]]), "lines after the log's last head", scene)


def test_an_entry_written_in_another_way_is_none(scene: Scene) -> None:
    place = next(k for k, tree in enumerate(scene.trees()) if tree.get("event") == "job begun")
    line = scene.lines[place]
    for other in (line.replace(b":", b": ", 1), b" " + line, line[:-1] + b',"seq":1}'):
        fails(scene.wrote([*scene.lines[:place], other, *scene.lines[place + 1 :]]), "invalid line", scene)


@pytest.mark.parametrize("data", [b"", b"\x00" * 50, b"{}\n", b"[" * 100000 + b"\n", b"no log\n", b"\xff\xfe\n", b"1"])
def test_what_is_no_log_is_refused_with_one_sentence(data: bytes, scene: Scene) -> None:
    path = scene.folder / "none"
    path.write_bytes(data)
    with pytest.raises((Fault, DataError)):
        verify(path)
    with pytest.raises(DataError, match="cannot read"):
        verify(scene.folder)


# Possible for the aggregator, which has the log's key


def index(entries: list[Tree], event: str, nth: int = 0, **detail: Any) -> int:
    found = [k for k, e in enumerate(entries)
             if e["event"] == event and all(e["detail"].get(n) == v for n, v in detail.items())]  # fmt: skip
    return found[nth]


def closing(job: str, round: int, entries: list[Tree]) -> Tree:
    return next(e for e in entries if e["event"] == "round closed" and (e["job"], e["round"]) == (job, round))


Change = Callable[[list[Tree]], None]


def edit(event: str, words: str, /, nth: int = 0, where: Tree | None = None, **detail: Any) -> tuple[Change, str]:
    def change(entries: list[Tree]) -> None:
        entry = entries[index(entries, event, nth, **(where or {}))]
        for name, value in detail.items():
            if name in ("party_", "job_", "round_"):
                entry[name[:-1]] = value
            else:
                entry["detail"][name] = value

    return change, words


def member(words: str, job: str = "one-1", round: int = 2, nth: int = 0, **given: Any) -> tuple[Change, str]:
    def change(entries: list[Tree]) -> None:
        closing(job, round, entries)["detail"]["members"][nth].update(given)

    return change, words


def fused_twice(entries: list[Tree]) -> None:
    members = closing("one-1", 2, entries)["detail"]["members"]
    members.append(members[0])


def fused_again(entries: list[Tree]) -> None:
    earlier = closing("one-1", 1, entries)["detail"]["members"][0]
    closing("one-1", 2, entries)["detail"]["members"][0] = earlier


def fused_elsewhere(entries: list[Tree]) -> None:
    closing("two-1", 1, entries)["detail"]["members"] += closing("one-1", 3, entries)["detail"]["members"][:1]


def other_model(entries: list[Tree]) -> None:
    closing("one-1", 1, entries)["detail"]["model"] = "ab" * 32


def emptied(entries: list[Tree]) -> None:
    closing("one-1", 3, entries)["detail"]["empty"] = "nobody came"


def another_key(entries: list[Tree]) -> None:
    """A certificate that the attacker made, for a party."""
    authority, pem = certificates.make_ca("league")
    key = keys.new_key()
    made = certificates.issue(authority, pem, key.public_key(), "ann", "party", "league", 9)
    entries[index(entries, "enrolled")]["detail"].update(pem=made.decode(), certificate=certificates.fingerprint(made))


def revoked_before(entries: list[Tree]) -> None:
    """An update after the end of its certificate."""
    gone = entries.pop(index(entries, "revoked"))
    entries.insert(index(entries, "job begun") + 1, gone)


def superseded(entries: list[Tree]) -> None:
    """The new certificate is in use before the updates that the old one signed."""
    rotated = entries.pop(index(entries, "certificate rotated"))
    used = entries.pop(index(entries, "certificate in use", -1))
    place = index(entries, "job begun")
    entries[place:place] = [rotated, used]


def no_job(entries: list[Tree]) -> None:
    entries.pop(index(entries, "job begun"))


def begun_twice(entries: list[Tree]) -> None:
    entries.insert(index(entries, "job begun"), copy.deepcopy(entries[index(entries, "job begun")]))


def signer_again(entries: list[Tree]) -> None:
    entries.append(copy.deepcopy(entries[0]))


def after_the_end(entries: list[Tree]) -> None:
    entries.append(copy.deepcopy(closing("one-1", 3, entries)))


def enrolled_twice(entries: list[Tree]) -> None:
    place = index(entries, "enrolled")
    entries.insert(place, copy.deepcopy(entries[place]))


def wrong_round(entries: list[Tree]) -> None:
    closing("one-1", 3, entries)["round"] = 4


def claimed(entries: list[Tree]) -> None:
    """An update attributed to another party."""
    entry = entries[index(entries, "update accepted", phase="round")]
    entry["party"] = "bob" if entry["party"] == "ann" else "ann"


def rejected_after_all(entries: list[Tree]) -> None:
    """A fused update that was never accepted."""
    entry = entries[index(entries, "update accepted", phase="round")]
    entry["event"] = "update rejected"
    entry["detail"]["rejected"] = "it is not liked"


def overwritten(entries: list[Tree]) -> None:
    """An update that is repeated under the same ask."""
    place = index(entries, "update accepted", phase="round")
    entries.insert(place, copy.deepcopy(entries[place]))


def from_nothing(entries: list[Tree]) -> None:
    """The last round of a job has another model, without updates that explain it."""
    closing("one-1", 3, entries)["detail"]["members"] = []


def never_submitted(entries: list[Tree]) -> None:
    entries[:] = [e for e in entries if (e["event"], e["job"]) != ("job submitted", "one-1")]


def submitted_twice(entries: list[Tree]) -> None:
    entries.append(copy.deepcopy(entries[index(entries, "job submitted")]))


def ended_twice(entries: list[Tree]) -> None:
    entries.append({**entries[index(entries, "job finished")], "event": "job failed", "detail": {}})


def ended_from_nowhere(entries: list[Tree]) -> None:
    entries.append({**entries[index(entries, "job finished")], "job": "never-was"})


def ended_nameless(entries: list[Tree]) -> None:
    entries.append({**entries[index(entries, "job finished")], "job": None})


def finished_at_once(entries: list[Tree]) -> None:
    """A job ends with a model before it has begun."""
    end = copy.deepcopy(entries[index(entries, "job finished")])
    entries.insert(index(entries, "job begun"), end)


def at(when: float) -> Change:
    def change(entries: list[Tree]) -> None:
        entries[5]["at"] = when

    return change


UPDATE = {"phase": "round"}
FORGERIES: list[tuple[Change, str]] = [
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, update="ab" * 32),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, weight=99),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, message="ab" * 32),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, model="ab" * 32),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, number=7),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, staged=True),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, shown=False),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, signature="0" * 128),
    (claimed, "was not a valid certificate of .* then"),
    edit("update accepted", "was not a valid certificate of", where=UPDATE, certificate="ab" * 32),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, job_="two-1"),
    edit("update accepted", "signature of .* does not match the statement", where=UPDATE, round_=1),
    edit(
        "update accepted", "its event name does not match|either an update or a reason", where=UPDATE, why="it refused"
    ),
    edit("answer refused", "signature of .* does not match the statement", why="because"),
    edit("job begun", "made for a different model", model="ab" * 32),
    edit("job begun", "not a SHA-256", model="ab"),
    edit("revoked", "the certificates are not those of", certificates={}),
    edit("certificate in use", "no new certificate", certificate="ab" * 32),
    edit("enrolled", "certificate belongs to", party_="zoe"),
    member("not the update that the round names", update="ab" * 32),
    member("not the update that the round names", party="zoe"),
    member("not an unfused update of this job", index=3),
    member("not an unfused update of this job", index=-1),
    (fused_twice, "names entry [0-9]+ more than once"),
    (fused_again, "not an unfused update of this job"),
    (fused_elsewhere, "not an unfused update of this job"),
    (other_model, "made for a different model"),
    (emptied, "the round is empty, but it fused updates"),
    (another_key, "not issued by the federation's authority"),
    (revoked_before, "was not a valid certificate of cid then"),
    (superseded, "was not a valid certificate of bob then"),
    (no_job, "made for a different model|had not begun"),
    (begun_twice, "had begun before"),
    (signer_again, "must be the first entry, and occur only once"),
    (after_the_end, "had ended before"),
    (enrolled_twice, "was issued before"),
    (wrong_round, "next round is 3, but this is round 4"),
    (overwritten, "had answered this ask before"),
    (rejected_after_all, "not an unfused update of this job"),
    (from_nothing, "fused nothing, but it changed the model"),
    (never_submitted, "no job one-1 was submitted before"),
    (submitted_twice, "submitted before"),
    (ended_twice, "had ended before"),
    (ended_from_nowhere, "no job never-was was submitted before"),
    (ended_nameless, "names no job"),
    (finished_at_once, "had not begun"),
    edit("job finished", "model is not a SHA-256", model="bogus"),
    edit("job finished", "model is not a SHA-256", model=None),
    edit("round closed", "closing of the round is malformed", before="bogus"),
    (at(float("nan")), "its time is invalid"),
    (at(float("inf")), "its time is invalid"),
    (at(-1.0), "its time is invalid"),
    (at(10**400), "its time is invalid"),
    edit("log begun", "is not valid text", authority="\ud800"),
    edit("log begun", "is not valid text", log="\ud800"),
    edit("enrolled", "is not valid text", pem="\ud800"),
    edit(
        "certificate in use",
        r"entry [0-9]+ \(certificate in use\): ann fine \[2J +had",
        party_="ann\nfine\x1b[2J\ud800",
    ),
    edit("certificate in use", "None had no new certificate", party_=None),
    edit("update accepted", "not a valid statement", where={"phase": "round"}, party_="\ud800"),
    edit("update accepted", "not a valid statement", where={"phase": "round"}, phase="\ud800"),
]


@pytest.mark.parametrize(("change", "words"), FORGERIES)
def test_a_history_that_the_aggregator_rewrites_and_signs_anew_is_found_without_any_receipt(
    scene: Scene, change: Change, words: str
) -> None:
    entries = scene.plain()
    change(entries)
    fails(scene.forged(entries), words, scene)


def test_the_closing_of_a_round_must_follow_from_the_one_before(scene: Scene) -> None:
    entries = scene.plain()
    closing("one-1", 3, entries)["detail"]["before"] = "ab" * 32
    fails(scene.forged(entries), "not the model after the previous round", scene)


def test_a_history_without_an_update_is_found_by_its_receipt(scene: Scene) -> None:
    """An update left out of the round and of the log, and all later entries signed again: the log alone looks valid."""
    entries = scene.plain()
    place = next(k for k, e in enumerate(entries) if e["event"] == "update accepted" and e["party"] == "bob" and
                 e["job"] == "one-1" and e["round"] == 1 and e["detail"]["phase"] == "round")  # fmt: skip
    entries.pop(place)
    for entry in entries:
        if entry["event"] == "round closed":
            kept = [m for m in entry["detail"]["members"] if m["index"] != place]
            entry["detail"]["members"] = [{**m, "index": m["index"] - (m["index"] > place)} for m in kept]
    path = scene.forged(entries)
    assert verify(path, scene.authority).entries == scene.entries - 1
    for home in scene.homes()[:2]:  # not only bob's: every party with a later receipt knows the root
        fails(path, "different root|not the one that the receipt confirms|this log has", scene, receipts=[home])


def test_an_entry_that_nobody_but_the_aggregator_signs_cannot_be_rewritten_either(scene: Scene) -> None:
    """Every entry with a receipt is still in its place; only the root differs."""
    entries = scene.plain()
    entries[index(entries, "started")]["detail"]["plan"] = "another"
    path = scene.forged(entries)
    assert verify(path, scene.authority).entries == scene.entries
    fails(path, "has a different root for the log of", scene, receipts=scene.homes()[:1])


def test_a_log_that_is_cut_off_and_signed_anew_is_found_by_the_receipts(scene: Scene) -> None:
    path = scene.forged(scene.plain()[:30])
    assert verify(path).entries == 30
    fails(path, "but this log has 30", scene, receipts=scene.homes())


def test_another_authority_is_not_the_given_one(scene: Scene) -> None:
    _, other = certificates.make_ca("league")
    with pytest.raises(Fault, match=r"its authority is .*; expected"):
        verify(scene.log, other)


def test_a_log_key_that_the_authority_has_not_certified_signs_nothing(scene: Scene) -> None:
    authority, pem = certificates.make_ca("league")
    key = keys.new_key()
    other = certificates.issue(authority, pem, key.public_key(), "log", "log", "league", 9)
    entries = scene.plain()
    entries[0]["detail"]["log"] = other.decode()
    before, scene.notary = scene.notary, Notary("league", key, other, scene.authority)
    try:
        fails(scene.forged(entries), "not issued by the federation's authority", scene)
    finally:
        scene.notary = before


# Receipts


def test_whatever_is_changed_in_a_receipt_is_found(scene: Scene) -> None:
    (source,) = (scene.receipts / "ann" / "receipts").glob("one-1.jsonl")
    lines = source.read_bytes().splitlines()
    tree, path = json.loads(lines[2]), scene.folder / "altered.jsonl"
    for changed in alterations(tree):
        path.write_bytes(b"".join(line + b"\n" for line in [*lines[:2], canonical(changed), *lines[3:]]))
        with pytest.raises((Fault, DataError), match=r"altered\.jsonl, line 3"):
            verify(scene.log, receipts=[path])
    path.write_bytes(source.read_bytes())
    assert verify(scene.log, receipts=[path]).receipts == len(lines)


def test_a_receipt_says_late_only_of_what_the_log_does_not_have(scene: Scene) -> None:
    kept = read_receipts(scene.receipts / "ann" / "receipts" / "one-1.jsonl")[2]
    path = scene.folder / "late.jsonl"

    def late(said: Statement) -> None:
        receipt = scene.notary.receipt(said, kept.receipt.signature, "late")
        path.write_bytes(canonical({"receipt": structs.asdict(receipt), "statement": structs.asdict(said)}) + b"\n")

    late(structs.replace(kept.statement, number=99))
    assert verify(scene.log, receipts=[path]).receipts == 1
    late(kept.statement)
    fails(scene.log, "says that the answer was late, but entry", scene, receipts=[path])


def test_a_receipt_for_something_else_than_the_log_has_convicts_whoever_signed_it(scene: Scene) -> None:
    """The aggregator acknowledged one thing and logged another, or accepted an answer and logged a rejection."""
    kept = read_receipts(scene.receipts / "ann" / "receipts" / "one-1.jsonl")[2]
    path, one = scene.folder / "promised.jsonl", kept.receipt
    heavier = structs.replace(kept.statement, weight=100)
    for said, status, why in ((heavier, "accepted", None), (kept.statement, "rejected", "it is not liked")):
        given = scene.notary.receipt(said, one.signature, status, one.index, one.size, one.root, why)
        path.write_bytes(canonical({"receipt": structs.asdict(given), "statement": structs.asdict(said)}) + b"\n")
        fails(scene.log, "is not the one that the receipt confirms", scene, receipts=[path])


def test_a_last_line_of_receipts_that_was_cut_off_is_none_and_is_written_over(scene: Scene, tmp_path: Path) -> None:
    source = scene.receipts / "ann" / "receipts" / "one-1.jsonl"
    whole, path = source.read_bytes(), tmp_path / "receipts" / "one-1.jsonl"
    path.parent.mkdir()
    path.write_bytes(whole + whole.splitlines()[0][:40])
    count = len(whole.splitlines())
    assert len(read_receipts(path)) == count
    Receipts(tmp_path)._append(path, whole.splitlines()[0] + b"\n")
    assert len(read_receipts(path)) == count + 1  # a line may be there twice
    assert verify(scene.log, receipts=[tmp_path]).receipts == count + 1
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(DataError, match="line 1: invalid receipt"):
        verify(scene.log, receipts=[path])
    with pytest.raises(DataError, match="no receipts in"):
        verify(scene.log, receipts=[scene.folder / "league" / "tokens"])


# At the aggregator and at the party


def test_an_answer_signed_as_another_or_for_something_else_is_401_and_logged(league: League, ann: Caller) -> None:
    bob, ask = league.enrolled("bob"), league.ask()
    blob = ann.upload(ask, b"ann's")
    right = ann.signed(ask, draft(blob))
    said = make_statement("league", "ann", ask.key, right)
    assert bob.key is not None and ann.key is not None
    wrong = [
        structs.replace(right, signature=bob.key.sign(said.signed_bytes()).hex()),
        structs.replace(right, signature=ann.key.sign(structs.replace(said, party="bob").signed_bytes()).hex()),
        structs.replace(right, signature=ann.key.sign(structs.replace(said, job="job-2").signed_bytes()).hex()),
        structs.replace(right, signature=ann.key.sign(structs.replace(said, federation="x").signed_bytes()).hex()),
        structs.replace(right, weight=7),
        structs.replace(right, staged=True),
        structs.replace(right, message="ab" * 32),
        structs.replace(right, model="ab" * 32),
        structs.replace(right, shown=True),
    ]
    for answer in wrong:
        got = ann.call("POST", f"{ask.path}/reply", pack(answer), ask.about)
        assert got.status == 401 and "does not match this answer" in got.error
    stolen = structs.replace(right, blob=Blob(blob.digest, blob.size))
    got = bob.call("POST", f"{ask.path}/reply", pack(stolen), ask.about)
    assert got.status == 401
    assert [e["party"] for e in league.events("denied")] == ["ann"] * len(wrong) + ["bob"]
    assert league.replies(ask) == {} and league.events("update accepted") == []
    assert ann.call("POST", f"{ask.path}/reply", pack(right), ask.about).status == 200


def test_an_answer_to_another_message_or_model_than_was_sent_is_not_taken(league: League, ann: Caller) -> None:
    ask = league.ask()
    blob = ann.upload(ask, b"reply")
    for given, words in (({"message": "ab" * 32}, "another message"), ({"model": "ab" * 32}, "another base model"),
                         ({"shown": True}, "another base model")):  # fmt: skip
        answer = structs.replace(ann.signed(ask, draft(blob)), **given)
        assert ann.key is not None
        signature = ann.key.sign(make_statement("league", "ann", ask.key, answer).signed_bytes()).hex()
        got = ann.call("POST", f"{ask.path}/reply", pack(structs.replace(answer, signature=signature)), ask.about)
        assert got.status == 400 and words in got.error
    league.queue.withdraw(ask.key, [0])  # as after a restart, before the job has asked again
    got = ann.reply(ask, draft(blob))
    assert got.status == 503 and got.headers["Retry-After"] == "1"
    assert league.replies(ask) == {}


def test_a_reply_with_another_weight_than_was_signed_is_rejected_and_the_log_says_so(league: League) -> None:
    """Both sides have evidence: what the party signed, and why the aggregator rejected it."""
    cid = league.enrolled("cid")
    job = league.submit({"task": TASK, "algorithm": "fedavg", "run": {"rounds": 1}}, min_parties=1)
    work = cid.work()
    assert work is not None
    ask = Asked(work.job, work.round, work.phase, work.number)
    about = Description((3,), 2, "class", False, False, Labels(0, 1, 2)).reply()
    answer = draft(cid.upload(ask, codec.encode(about.tree())), weight=2)
    got = cid.reply(ask, answer)
    why = "its weight is 1, but its party signed 2"
    assert got.status == 200 and (got.receipt.status, got.receipt.why) == ("rejected", why)
    assert cid.reply(ask, answer).body == got.body
    log = certificates.identity_of_pem((league.folder / "log.pem").read_bytes())
    signed = cid.signed(ask, answer)
    said = make_statement("league", "cid", ask.key, signed)
    assert receipt_fault(got.receipt, said, signed.signature, log) is None
    for other in ({"why": "it is ugly"}, {"why": None}, {"status": "accepted"}):
        assert receipt_fault(structs.replace(got.receipt, **other), said, signed.signature, log) is not None
    (entry,) = league.events("answer rejected")
    assert json.loads(entry["detail"])["rejected"] == why
    league.operator.stop(job)
    assert league.ended(job)["status"] == "stopped"
    out, kept = league.folder / "log.jsonl", league.folder / "cid.jsonl"
    league.operator.export(out)
    kept.write_bytes(canonical({"receipt": structs.asdict(got.receipt), "statement": structs.asdict(said)}) + b"\n")
    found = verify(out, receipts=[kept])
    assert (found.rejected, found.receipts, found.updates) == (1, 1, 0)


def test_with_a_least_cohort_only_the_receipt_has_the_numbers_of_a_rejection(league: League) -> None:
    """The party is told the numbers; everybody else sees no number of a single party."""
    cid, _ = league.enrolled("cid"), league.enrolled("ann")
    run = {"rounds": 1, "min_cohort": 2}
    job = league.submit({"task": TASK, "algorithm": "fedavg", "run": run}, min_parties=2)
    work = cid.work()
    assert work is not None and work.min_cohort == 2
    ask = Asked(work.job, work.round, work.phase, work.number)
    about = Description((3,), 2, "class", False, False, Labels(0, 1, 2)).reply()
    answer = draft(cid.upload(ask, codec.encode(replace(about, weight=17).tree())), weight=23)
    got = cid.reply(ask, answer)
    assert got.receipt.why == "its weight is 17, but its party signed 23"
    assert cid.reply(ask, answer).body == got.body
    (entry,) = league.events("answer rejected")
    told = "its weight is ... but its party signed ..."
    assert json.loads(entry["detail"])["rejected"] == told
    assert league.ledger.one("SELECT why FROM replies WHERE rejected")["why"] == told
    league.operator.stop(job)
    assert league.ended(job)["status"] == "stopped"
    out, kept = league.folder / "log.jsonl", league.folder / "cid.jsonl"
    league.operator.export(out)
    said, first = make_statement("league", "cid", ask.key, cid.signed(ask, answer)), got.receipt
    kept.write_bytes(canonical({"receipt": structs.asdict(first), "statement": structs.asdict(said)}) + b"\n")
    assert verify(out, receipts=[kept]).receipts == 1
    notary = FederationFolder.open(league.folder).notary()
    other = notary.receipt(said, first.signature, "rejected", first.index, first.size, first.root, "it is ugly")
    kept.write_bytes(canonical({"receipt": structs.asdict(other), "statement": structs.asdict(said)}) + b"\n")
    with pytest.raises(Fault, match="not the one that the receipt confirms"):
        verify(out, receipts=[kept])


def test_a_receipt_is_for_its_statement_and_signed_by_the_logs_key(league: League, ann: Caller) -> None:
    ask, log = league.ask(), certificates.identity_of_pem((league.folder / "log.pem").read_bytes())
    answer = ann.signed(ask, draft(ann.upload(ask, b"reply"), weight=5))
    said = make_statement("league", "ann", ask.key, answer)
    receipt = ann.call("POST", f"{ask.path}/reply", pack(answer), ask.about).receipt
    (entry,) = league.events("update accepted")
    assert (receipt.index, receipt.size) == (entry["seq"] - 1, entry["seq"]) and said.weight == 5
    assert receipt.root == league.ledger.now(lambda db: db.root(entry["seq"]))
    assert receipt_fault(receipt, said, answer.signature, log) is None
    for name, value in structs.asdict(receipt).items():
        other = value + 1 if isinstance(value, int) else ("1" if str(value)[0] == "0" else "0") + str(value)[1:]
        assert receipt_fault(structs.replace(receipt, **{name: other}), said, answer.signature, log) is not None, name
    assert receipt_fault(receipt, structs.replace(said, weight=6), answer.signature, log) is not None
    assert receipt_fault(receipt, said, "0" * 128, log) is not None
    stranger = certificates.identity_of_pem((league.folder / "operator.pem").read_bytes())
    assert "not signed with the key" in str(receipt_fault(receipt, said, answer.signature, stranger))
    bare = structs.replace(receipt, index=None, size=None, root=None)
    assert "index, size and root in the log" in str(receipt_fault(bare, said, answer.signature, log))


def test_an_answer_whose_certificate_ends_on_the_way_is_not_taken(league: League, ann: Caller) -> None:
    from hansa.net.aggregator.asks import store_answer
    from hansa.net.aggregator.registry import Denied

    ask = league.ask()
    sent = ann.sent(ask, draft(why="no"))
    league.ledger.now(league.aggregator.registry.revoke("ann"))
    with pytest.raises(Denied, match="not valid here"):
        league.ledger.now(store_answer(ask.key, sent, None))
    assert league.events("update refused") == []


def test_a_party_stops_when_its_receipt_is_not_good(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    ann = league.join("ann", samples(0))
    good = Notary.receipt

    def bad(self: Notary, *given: Any) -> Receipt:
        return structs.replace(good(self, *given), countersignature="0" * 128)

    monkeypatch.setattr(Notary, "receipt", bad)
    league.submit({"task": TASK, "algorithm": "fedavg", "run": {"rounds": 1}}, min_parties=1)
    ann.gone()
    assert isinstance(ann.failure, BadReceipt) and "not signed with the key" in str(ann.failure)
    assert not (ann.store.folder / "receipts").exists()


def test_a_party_refuses_a_message_that_does_not_hold_the_model_it_should(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aggregator sends another model than the one that it logged for the round."""
    honest = Ask.message

    def lying(ask: Ask, party: int) -> dict[str, Any]:
        told = honest(ask, party)
        if "model" not in told["payload"]:
            return told
        model = told["payload"]["model"]
        return {**told, "payload": {**told["payload"], "model": {**model, "w": model["w"] + 1}}}

    monkeypatch.setattr(Ask, "message", lying)
    league.join_all()
    ended = league.ended(league.submit({"task": TASK, "algorithm": "fedavg", "run": {"rounds": 1}}))
    assert ended["status"] == "failed"
    whys = [json.loads(e["detail"])["why"] for e in league.events("update refused")]
    assert len(whys) == 3 and all("does not contain the model" in why for why in whys)


def test_no_two_lists_of_fields_are_signed_alike() -> None:
    lists: list[list[str | int | None]] = [[], [""], [None], ["", ""], ["a", "b"], ["ab"], ["a", None, "b"],
                                           [None, "ab"], ["a\x00b"], [12], [1, 2]]  # fmt: skip
    made = {length_prefixed(what, fields) for what in ("head", "receipt") for fields in lists}
    assert len(made) == 2 * len(lists)


# Proofs


@pytest.fixture(scope="module")
def proof(scene: Scene) -> Proof:
    return prove(scene.log, "one-1", "bob", 2)


def test_a_proof_says_who_sent_what_and_what_became_of_it(scene: Scene, proof: Proof) -> None:
    found = check(msgspec.json.decode(msgspec.json.encode(proof), type=Proof), scene.authority)
    entries = scene.plain()
    closed = closing("one-1", 2, entries)["detail"]
    (member,) = (m for m in closed["members"] if m["party"] == "bob")
    said = entries[member["index"]]["detail"]
    assert (found.party, found.job, found.round, found.model) == ("bob", "one-1", 2, closed["model"])
    (one,) = found.updates
    assert (one["update"], one["weight"], one["base"]) == (said["update"], 12, closed["before"])
    for word in ("bob", said["update"], "weight 12", closed["before"], closed["model"], "round 2", "one-1"):
        assert word in found.text()
    assert len(proof.closing.path) <= 8 and len(proof.updates) == 1


def test_every_round_of_every_party_can_be_proved_or_it_is_said_why_not(scene: Scene) -> None:
    for job, rounds in (("one-1", 3), ("two-1", 3)):
        for round in range(1, rounds + 1):
            named = {m["party"] for m in closing(job, round, scene.plain())["detail"]["members"]}
            for party in PARTIES:
                if party in named:
                    assert check(prove(scene.log, job, party, round)).party == party
                else:
                    with pytest.raises(DataError, match="the party was not asked, or"):
                        prove(scene.log, job, party, round)
    for given, words in ((("one-1", "ann", 4), "no closed round 4"), (("none", "ann", 1), "no closed round 1"),
                         (("one-1", "zoe", 1), "no update of 'zoe'")):  # fmt: skip
        with pytest.raises(DataError, match=words):
            prove(scene.log, *given)


def test_whatever_is_changed_in_a_proof_is_found(scene: Scene, proof: Proof) -> None:
    tree = json.loads(msgspec.json.encode(proof))
    count = 0
    for changed in alterations(tree):
        count += 1
        with pytest.raises((Fault, msgspec.ValidationError)):
            check(msgspec.convert(changed, Proof))
    assert count > 60


def test_a_proof_is_of_one_round_and_one_party(scene: Scene, proof: Proof) -> None:
    other, later = prove(scene.log, "one-1", "ann", 2), prove(scene.log, "one-1", "bob", 3)
    for mixed in (
        structs.replace(proof, updates=[*proof.updates, *other.updates]),
        structs.replace(proof, updates=proof.updates * 2),
        structs.replace(proof, updates=[]),
        structs.replace(proof, updates=later.updates),
        structs.replace(proof, head=later.head),
        structs.replace(proof, closing=later.closing, head=later.head),
        structs.replace(proof, closing=later.closing),
    ):
        with pytest.raises(Fault):
            check(mixed)
    with pytest.raises(Fault, match=r"its authority is .*; expected"):
        check(proof, certificates.make_ca("league")[1])


def test_a_proof_says_whether_its_party_was_shown_the_model(scene: Scene, proof: Proof) -> None:
    found = check(proof)
    (one,) = found.updates
    assert one["shown"] is True and f"made from the model {found.before}" in found.text()
    unseen = dataclasses.replace(found, updates=[{**one, "shown": False}]).text()
    assert f"for the round that began with {found.before}" in unseen and "made from" not in unseen


def another_algorithm(pem: str) -> str:
    """A certificate for a key of an unknown type."""
    data = base64.b64decode("".join(pem.splitlines()[1:-1])).replace(b"\x2b\x65\x70\x03\x21", b"\x1b\x65\x70\x03\x21")
    return f"-----BEGIN CERTIFICATE-----\n{base64.encodebytes(data).decode()}-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("name", ["authority", "log", "certificate"])
def test_a_proof_with_a_certificate_that_cannot_be_read_is_a_fault(proof: Proof, name: str) -> None:
    for other in (lambda pem: "\ud800", another_algorithm):
        (update,) = proof.updates
        if name == "certificate":
            bad = structs.replace(proof, updates=[structs.replace(update, certificate=other(update.certificate))])
        else:
            bad = structs.replace(proof, **{name: other(getattr(proof, name))})
        with pytest.raises(Fault):
            check(bad)


def test_a_fault_can_be_printed_whatever_it_quotes() -> None:
    said = str(Fault("ann\nfine\x1b[2J\ud800\u202e" + 5000 * "x"))
    assert said.startswith("ann fine [2J") and said.isprintable() and len(said) <= 2000
    said.encode()


def test_each_certificate_is_looked_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of a certificate takes no longer if others have many."""

    class Seen(dict[str, Certificate]):
        def values(self) -> Any:
            raise AssertionError("all certificates were gone through")

        items = __iter__ = values

    audit = Audit(scene.authority)
    audit.certificates = Seen()
    for line in scene.lines:
        audit.add_line(line)
    assert audit.finish().entries == scene.entries and {c.state for c in dict.values(audit.certificates)} >= {"ended"}


def by_hand(scene: Scene, proof: Proof, change: Change) -> Proof:
    """The proof of bob's update in round 2 that the aggregator could make from a forged history."""
    entries = scene.plain()
    change(entries)
    nodes = merkle.InMemoryNodes()
    for number, entry in enumerate(entries, 1):
        merkle.append(nodes, number - 1, merkle.leaf_hash(canonical({**entry, "seq": number})))
    closed = next(k for k, e in enumerate(entries) if e["event"] == "round closed" and e["round"] == 2)
    said = proof.updates[0].entry["seq"] - 1

    def path(place: int) -> list[str]:
        return [node.hex() for node in merkle.inclusion(nodes, place, closed + 1)]

    detail, root = entries[closed]["detail"], merkle.root(nodes, closed + 1).hex()
    head = scene.notary.head(entries[closed]["job"], 2, detail["model"], closed + 1, root)
    shown = structs.replace(proof.updates[0], entry=entries[said], path=path(said))
    return structs.replace(proof, head=head, closing=IncludedEntry(entries[closed], path(closed)), updates=[shown])


def test_a_proof_by_an_aggregator_that_lies_proves_nothing(scene: Scene, proof: Proof) -> None:
    place = proof.updates[0].entry["seq"] - 1

    def rejected(entries: list[Tree]) -> None:
        entries[place]["event"] = "update rejected"
        entries[place]["detail"]["rejected"] = "it is not liked"

    def elsewhere(entries: list[Tree]) -> None:
        closing("one-1", 2, entries)["job"] = "three-1"

    def from_another(entries: list[Tree]) -> None:
        closing("one-1", 2, entries)["detail"]["before"] = "ab" * 32

    def heavier(entries: list[Tree]) -> None:
        entries[place]["detail"]["weight"] = 100

    assert check(by_hand(scene, proof, lambda entries: None)).party == "bob"

    def twice(entries: list[Tree]) -> None:
        closing("one-1", 2, entries)["detail"]["members"].append({"party": "ann", "index": place, "update": "ab" * 32})

    def of_nothing(entries: list[Tree]) -> None:
        closing("one-1", 2, entries)["detail"]["empty"] = "nobody came"

    for change, words in ((rejected, "does not name this entry"), (elsewhere, "does not name this entry"),
                          (heavier, "signature of bob does not match"),
                          (from_another, "made for a different model"), (twice, "more than once"),
                          (of_nothing, "the round is empty, but")):  # fmt: skip
        with pytest.raises(Fault, match=words):
            check(by_hand(scene, proof, change))
    key = certificates.identity_of_pem(proof.updates[0].certificate.encode()).key
    for name in ("bob", "zoe"):  # the same key, certified once more
        other = FederationFolder.open(scene.folder / "league").issue(key, name, "party", 9).decode()
        with pytest.raises(Fault, match="signature of bob does not match"):
            check(structs.replace(proof, updates=[structs.replace(proof.updates[0], certificate=other)]))


# The commands


def hansa(*arguments: Any) -> tuple[int, str]:
    found = CliRunner().invoke(commands.app, [str(a) for a in arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        return 2, str(found.exception)
    return found.exit_code, found.output


def test_the_commands_say_it_in_a_line_and_by_their_exit_code(scene: Scene, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(scene.authority)
    code, said = hansa("audit", "verify", scene.log, "--receipts", scene.receipts / "ann", "--ca", ca)
    assert code == 0 and said.count("\n") == 1 and "is complete and valid" in said and "the one given" in said
    code, said = hansa("audit", "verify", scene.log, "--json")
    assert code == 0 and json.loads(said)["good"] is True and json.loads(said)["rounds"] == 7
    proof = tmp_path / "proof.json"
    code, said = hansa("audit", "prove", "one-1", "ann", 1, "--log", scene.log, "--out", proof)
    assert code == 0 and f"wrote {proof}" in said
    code, said = hansa("audit", "check", proof, "--json", "--ca", ca)
    assert code == 0 and json.loads(said)["party"] == "ann"
    code, said = hansa("audit", "check", proof)
    assert code == 0 and said.startswith("ann sent the update") and "compare it with your ca.pem" in said
    proof.write_text(proof.read_text().replace('"weight":12', '"weight":13'))
    code, said = hansa("audit", "check", proof)
    assert code == 1 and said.startswith("FAULT: ") and said.count("\n") == 1
    bad = scene.wrote([*scene.lines[:3], *scene.lines[4:]])
    code, said = hansa("audit", "verify", bad, "--json")
    assert code == 1 and "entry" in json.loads(said)["fault"]
    for given in (("verify", tmp_path / "none"), ("check", scene.log), ("check", tmp_path),
                  ("verify", scene.log, "--ca", scene.log), ("verify", scene.log, "--receipts", tmp_path / "no"),
                  ("prove", "one-1", "zoe", 1, "--log", scene.log, "--out", proof)):  # fmt: skip
        assert hansa("audit", *given)[0] == 2, given


def test_an_export_is_of_pages_and_shows_heads(scene: Scene, league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    from hansa.net.aggregator import operator_routes

    monkeypatch.setattr(operator_routes, "LINES", 7)
    for _ in range(5):
        league.ledger.now(lambda db: [db.log("something", why="x") for _ in range(6)])
    out = league.folder / "out.jsonl"
    count = league.operator.export(out)
    assert count == 32 and verify(out).entries == 32 and not out.with_name("out.jsonl.part").exists()


def test_a_page_of_an_export_ends_where_it_is_large_and_says_so(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hansa.net import operator as operate
    from hansa.net.aggregator import operator_routes

    monkeypatch.setattr(operator_routes, "PAGE", 5000)
    monkeypatch.setattr(operate, "PAGE", 5000 + 2500)  # what the operator takes at once
    league.ledger.now(lambda db: [db.log("something", why="x" * 2000) for _ in range(20)])
    size = league.ledger.now(lambda db: db.size())
    out = league.folder / "out.jsonl"
    assert league.operator.export(out) == size == verify(out).entries
    beyond = league.chief().call("GET", f"/v1/log/lines?after={size - 1}&to={size + 9}")
    assert beyond.headers["Hansa-At"] == str(size)


def test_an_aggregator_that_does_not_say_where_a_page_ends_is_not_asked_for_ever(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hansa.net.aggregator import operator_routes

    monkeypatch.setattr(operator_routes, "LINES", 0)
    with pytest.raises(DataError, match="a page of the log ends at"):
        league.operator.export(league.folder / "out.jsonl")


def test_reasons_are_short_in_the_entry_of_a_round_and_whole_in_its_line(league: League) -> None:
    from hansa.net.aggregator.job_records import JobRecords

    records = JobRecords("job-1", league.ledger, league.aggregator.blobs, _Network())  # type: ignore[arg-type]
    why = "x" * 1000
    line = {"round": 1, "missing": {"ann": why}, "rejected": {"bob": why}, "empty": why}
    records.append(line)
    records.checkpoint({"state": {"params": Params(*[torch.zeros(1)] * 3), "slots": {}}})
    (entry,) = league.events("round closed")
    told = json.loads(entry["detail"])
    assert [told["missing"]["ann"], told["rejected"]["bob"], told["empty"]] == ["x" * 200] * 3
    assert records.history() == [line]


class _Network:
    """The part of the network's interface that closing a round needs."""

    parties, members, used, flights = PARTIES, (), (), ()

    def __init__(self) -> None:
        self.models = {0: "ab" * 32}


def test_a_certificate_counts_for_its_role_its_federation_and_its_authority_alone() -> None:
    authority, pem = certificates.make_ca("league")
    made = certificates.issue(authority, pem, keys.new_key().public_key(), "log", "log", "league", 9)
    assert certificates.verify_certificate(made, pem, "log", "league").role == "log"
    for given in ((made, pem, "party", "league"), (made, pem, "log", "other"),
                  (made, certificates.make_ca("league")[1], "log", "league"),
                  (pem, pem, "log", "league"), (b"none", pem, "log", "league")):  # fmt: skip
        with pytest.raises(keys.IdentityError):
            certificates.verify_certificate(*given)
    assert certificates.check_authority(pem) == certificates.fingerprint(pem)
    with pytest.raises(keys.IdentityError, match="not a certificate authority"):
        certificates.check_authority(made)
