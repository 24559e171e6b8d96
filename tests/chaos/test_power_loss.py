"""A part of the power-loss campaign, and a check of the campaign itself: with a flush left out, it finds lost data
within a few seeds."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from brownout import Connection, Journal
from msgspec import structs
from power import Life, Line, Lost, Promises, campaign, fast, template

from hansa.local.dp_sgd import DPSGD
from hansa.net.aggregator.ledger import Ledger
from hansa.net.audit.evidence import canonical, make_statement
from hansa.net.audit.receipt_file import read_receipts
from hansa.net.party.query_budget import QueryBudget
from hansa.net.party.receipts import BadReceipt, Receipts
from hansa.net.party.store import PartyStore
from hansa.net.party.vault import PartyVault
from hansa.net.party.vault_lines import read_vault
from hansa.net.party.vault_marks import VaultMarks
from hansa.net.transport import keys
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import Answer, Receipt
from hansa.plumbing import disk
from hansa.plumbing.errors import HansaError
from hansa.privacy import spent

pytestmark = pytest.mark.slow


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder with fast flushes, where the system has one."""
    with tempfile.TemporaryDirectory(dir=fast(), prefix="hansa-power-") as folder:
        yield Path(folder)


def test_what_was_acknowledged_outlives_the_power() -> None:
    failures, operations = campaign(range(12))
    assert failures == 48 and operations > 5000


def skipped(monkeypatch: pytest.MonkeyPatch, name: str, which: Callable[[Path], bool] = lambda path: True) -> None:
    """Skip one operation of `plumbing.disk`, for the paths that it concerns."""
    real = getattr(disk, name)
    monkeypatch.setattr(disk, name, lambda path: None if which(path) else real(path))


def lost(**given: Any) -> str:
    with pytest.raises((Lost, HansaError)) as found:
        campaign(range(150), **given)
    return str(found.value)


def test_a_record_that_is_not_flushed_at_commit_is_found_out() -> None:
    lost(synchronous="OFF")


def test_blobs_that_are_not_flushed_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped(monkeypatch, "flush", lambda path: path.parent.name == "uploads")
    assert "damaged" in lost()


def test_names_of_blobs_that_are_not_flushed_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped(monkeypatch, "sync_folder", lambda path: path.parent.name == "blobs")
    assert "the blob " in lost()


def test_new_folders_that_are_not_flushed_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped(monkeypatch, "sync_folder", lambda path: path.name in ("blobs", "memory"))
    assert any(what in lost() for what in ("the blob ", "the memory "))


def test_a_memory_that_is_not_flushed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped(monkeypatch, "flush", lambda path: "memory" in path.parts)
    assert "the memory " in lost()


def test_receipts_that_are_not_flushed_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped(monkeypatch, "flush", lambda path: path.parent.name == "receipts")
    assert "receipt" in lost()


def test_names_of_receipts_that_are_not_flushed_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped(monkeypatch, "sync_folder", lambda path: path.name == "receipts")
    assert "a receipt of the job " in lost()


def test_a_party_whose_key_and_certificate_are_not_flushed_in_order_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped(monkeypatch, "sync_folder", lambda path: path.name == "home")
    lost()


def test_whenever_the_power_fails_in_a_rotation_key_and_certificate_go_together(memory: Path) -> None:
    root = memory / "first"
    shutil.copytree(template(memory), root)
    life = Life(root, random.Random(0), Promises(), "FULL")
    try:
        life.certificate()  # it enrols
        began = len(life.journal.events)
        life.certificate()
    finally:
        life.end()
    party = [at for at, event in enumerate(life.journal.events) if at >= began and event[1].parts[0] == "party"]
    for at in party:
        for seed in range(8):
            into = memory / f"{at}-{seed}"
            life.journal.fail(at + 1, into, random.Random(seed))
            store = PartyStore(into / "party" / "home")
            store.install_new_keys()
            store.close()
            client_context(*(store.folder / name for name in ("ca.pem", "cert.pem", "key.pem")))
            shutil.rmtree(into)


def test_whenever_the_power_fails_as_a_receipt_is_kept_the_next_one_follows_whole_lines(memory: Path) -> None:
    """Of a line that was being written nothing is left, or all of it, or a torn line, possibly with zeros in the
    middle."""
    root, chance = memory / "root", random.Random(0)
    folder = Path("machine") / "receipts"
    lines = [canonical({"receipt": _receipt(k), "statement": _statement(k)}) + b"\n" for k in range(3)]
    (root / "machine").mkdir(parents=True)
    kept = Receipts(root / "machine")
    kept._append(root / folder / "job.jsonl", lines[0])
    journal, torn = written(root, lambda: kept._append(root / folder / "job.jsonl", lines[1])), 0
    for at in range(len(journal.events) + 1):
        for seed in range(60):
            into = memory / f"{at}-{seed}"
            journal.fail(at, into, chance)
            path = into / folder / "job.jsonl"
            found = path.read_bytes()
            torn += found not in (lines[0], lines[0] + lines[1])
            assert len(read_receipts(path)) in ((2,) if at == len(journal.events) else (1, 2))
            Receipts(into / "machine")._append(path, lines[2])
            assert path.read_bytes() in (b"".join(lines), lines[0] + lines[2])
            read_receipts(path)
            shutil.rmtree(into)
    assert torn > 20


def test_whenever_the_power_fails_what_a_party_spent_before_it_replied_stays_spent(memory: Path) -> None:
    root, op = memory / "root", DPSGD(batch=5)
    (root / "machine").mkdir(parents=True)
    torn = 0
    for before in range(2):
        vault = PartyVault(root / "machine", spent)
        vault.begin_marks()
        mark = VaultMarks(root / "machine").mark()
        journal = written(root, partial(_read, vault, f"ask {before}", op))
        for at in range(len(journal.events) + 1):
            for seed in range(25):
                into = memory / f"{before}-{at}-{seed}"
                journal.fail(at, into, random.Random(seed))
                path = into / "machine" / "vault.jsonl"
                torn += path.exists() and path.read_bytes() != disk.whole(path.read_bytes())
                again = PartyVault(into / "machine", spent)
                left = len(again.contents.spent)
                assert left in ((before + 1,) if at == len(journal.events) else (before, before + 1))
                assert not VaultMarks(into / "machine").missing({mark})
                _read(again, "another", op)
                assert len(read_vault(into / "machine").spent) == left + 1
                shutil.rmtree(into)
    assert torn > 5


def _read(vault: PartyVault, ask: str, op: DPSGD) -> None:
    vault.read("job", ask, "train", "", op, 50, {}, QueryBudget())


def _statement(number: int) -> dict[str, Any]:
    answer = Answer("0" * 64, "0" * 128, why="x" * 2000)
    return structs.asdict(make_statement("league", "ann", ("job", 0, "round", number), answer))


def _receipt(number: int) -> dict[str, Any]:
    return structs.asdict(Receipt("job", 0, "round", number, "ann", None, "late", "0" * 64, "0" * 128, None, None, None,
                                  None, ""))  # fmt: skip


def test_a_party_that_answers_again_with_a_new_key_takes_the_receipt_of_what_it_signed_before(memory: Path) -> None:
    """The power failed before the receipt was stored, and the certificate was renewed after the restart."""
    life = Life(template(memory), random.Random(0), Promises(), "FULL")
    try:
        first, _ = life.signer("ann")
        answer = Answer("0" * 64, "", why="there was none")
        said = make_statement("league", "ann", ("job", 0, "round", 0), answer)
        signed = first.sign(said.signed_bytes()).hex()
        for _ in range(2):
            life.certificate()
        again = life.signer("ann")[0].sign(said.signed_bytes()).hex()
        asyncio.run(life.receipts.expect(Line(life), "league"))  # type: ignore[arg-type]
        asyncio.run(life.receipts.keep(life.ledger.notary.receipt(said, signed, "late"), said, again))
        (kept,) = read_receipts(life.receipts.folder / "job.jsonl")
        assert again != kept.receipt.signature == signed
        another = keys.new_key().sign(said.signed_bytes()).hex()
        with pytest.raises(BadReceipt, match="does not match the statement that was sent"):
            asyncio.run(life.receipts.keep(life.ledger.notary.receipt(said, another, "late"), said, again))
    finally:
        life.end()


def test_whenever_the_power_fails_as_a_record_is_closed_or_opened_it_is_opened_again(memory: Path) -> None:
    """The mark must not describe a database that does not exist yet, or no longer exists."""
    root = memory / "root"
    (root / "machine").mkdir(parents=True)
    journal, acknowledged = Journal(root), list[int]()

    def opened(folder: Path, watch: Journal) -> Ledger:
        connection = Connection(watch, folder / "machine" / "hansa.db")
        return Ledger(folder / "machine" / "hansa.db", connect=lambda path: connection)

    disk.observe(journal)
    for _ in range(2):
        ledger = opened(root, journal)
        for _ in range(2):
            ledger.now(lambda db: db.log("event"))
            acknowledged.append(len(journal.events))
        ledger.close()
    disk.observe(None)
    for at in [*range(acknowledged[1], acknowledged[2], 3), *range(acknowledged[3], len(journal.events) + 1)]:
        for seed in range(6):
            into = memory / f"{at}-{seed}"
            journal.fail(at, into, random.Random(seed))
            ledger = opened(into, Journal(into))
            assert len(ledger.all("SELECT * FROM log")) >= sum(at >= done for done in acknowledged)
            ledger.close()
            shutil.rmtree(into)


# The disk that loses power


def written(root: Path, *steps: Callable[[], Any]) -> Journal:
    journal = Journal(root)
    disk.observe(journal)
    try:
        for step in steps:
            step()
    finally:
        disk.observe(None)
    return journal


def outcomes(journal: Journal, at: int, root: Path) -> set[str]:
    """All states of the machine's folder that were seen over many power failures."""
    found = set()
    for seed in range(60):
        into = root.with_name(f"after-{at}-{seed}")
        journal.fail(at, into, random.Random(seed))
        files = sorted(path for path in into.rglob("*") if path.is_file())
        found.add(" ".join(f"{path.name}:{path.read_bytes().decode()}" for path in files if path.name[0] != "."))
        shutil.rmtree(into)
    return found


def test_a_durable_write_is_seen_as_it_was_or_whole_and_once_it_returned_whole(memory: Path) -> None:
    root = memory / "root"
    (root / "machine").mkdir(parents=True)
    path = root / "machine" / "file"
    disk.put(path, [b"old"])
    journal = written(root, lambda: disk.put(path, [b"n", b"ew"]))
    for at in range(len(journal.events)):
        assert outcomes(journal, at, root) <= {"file:old", "file:new"}
    assert outcomes(journal, len(journal.events) - 1, root) == {"file:old", "file:new"}
    assert outcomes(journal, len(journal.events), root) == {"file:new"}


def test_what_is_not_flushed_may_be_gone_torn_or_zeros(memory: Path) -> None:
    root = memory / "root"
    (root / "machine").mkdir(parents=True)
    journal = written(root, lambda: disk.write(root / "machine" / "file", [b"abc"]))
    found = outcomes(journal, len(journal.events), root)
    assert {"", "file:", "file:abc", "file:\0\0\0"} <= found and found & {"file:a", "file:ab"}
