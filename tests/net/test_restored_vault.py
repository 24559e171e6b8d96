"""A vault that was restored from a backup gives nothing back: receipts and the aggregator's mark detect it."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from league import Caller, League, Member, samples
from msgspec import structs

from hansa.cli import main
from hansa.local.dp_sgd import DPSGD
from hansa.net.audit.evidence import vault_bytes
from hansa.net.audit.receipt_file import read_receipts
from hansa.net.party import agent
from hansa.net.party.query_budget import QueryBudget
from hansa.net.party.receipts import NEWEST, Receipts
from hansa.net.party.restored import acknowledge_loss, check_current, check_present
from hansa.net.party.store import PartyStore
from hansa.net.party.vault import FILE, PartyVault, load_secret
from hansa.net.party.vault_lines import read_vault
from hansa.net.party.vault_marks import VaultMarks
from hansa.net.transport import keys
from hansa.net.transport.certificates import identity_of_pem
from hansa.net.transport.wire import Answer, VaultMark, unpack
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.privacy import spent

LIMITS = "matches = 2\n[privacy]\nepsilon = 9.0\ndelta = 1e-5\n[budget]\nqueries = 50\ntotal = { evaluate = 6 }\n"
PRIVATE = DPSGD(batch=5, sigma=2.0)


def read(vault: PartyVault, ask: str, budget: QueryBudget | None = None, **kind: Any) -> None:
    vault.read("job", ask, kind.get("purpose", "train"), "", PRIVATE, 50, {}, budget or QueryBudget())


def with_marks(folder: Path) -> PartyVault:
    vault = PartyVault(folder, spent)
    vault.begin_marks()
    return vault


def test_a_mark_is_of_the_content_and_survives_what_is_added(tmp_path: Path) -> None:
    vault, made = with_marks(tmp_path), VaultMarks(tmp_path)
    marks = [made.mark()]
    for number in range(3):
        read(vault, f"{number}")
        marks.append(made.mark())
    assert len(set(marks)) == 4 and marks[-1] == made.mark() == VaultMarks(tmp_path).mark()
    assert not VaultMarks(tmp_path).missing(marks)
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    assert not any(mark.encode() in line for mark in marks for line in lines)
    for count in range(1, 5):
        (tmp_path / FILE).write_bytes(b"".join(lines[:count]))
        assert set(VaultMarks(tmp_path).missing(marks)) == set(marks[count:])
    (tmp_path / FILE).write_bytes(b"".join([lines[0], lines[2], lines[3]]))  # a line is gone from the middle
    assert set(VaultMarks(tmp_path).missing(marks)) == set(marks[1:])
    (tmp_path / FILE).unlink()
    assert set(VaultMarks(tmp_path).missing(marks)) == set(marks)


def test_two_vaults_with_the_same_lines_have_other_marks(tmp_path: Path) -> None:
    """So that nobody else can guess the content from a mark."""
    for name in ("a", "b"):
        with_marks(tmp_path / name)
    assert VaultMarks(tmp_path / "a").mark() != VaultMarks(tmp_path / "b").mark()


def test_a_failed_write_does_not_spoil_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault, made = with_marks(tmp_path), VaultMarks(tmp_path)
    made.mark()
    with monkeypatch.context() as patch:
        patch.setattr("hansa.plumbing.disk.flush", lambda path: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            read(vault, "a")  # the line is in the file, perhaps not on the disk
        with pytest.raises(OSError, match="no space"):
            made.mark()
    marks = [made.mark()]
    read(vault, "b")
    marks.append(made.mark())
    assert not VaultMarks(tmp_path).missing(marks)


def test_a_vault_that_becomes_shorter_while_the_party_runs_is_noticed(tmp_path: Path) -> None:
    vault, made = with_marks(tmp_path), VaultMarks(tmp_path)
    check_present(tmp_path, made)
    read(vault, "a")
    backup = (tmp_path / FILE).read_bytes()
    read(vault, "b")
    made.mark()
    check_present(tmp_path, made)
    (tmp_path / FILE).write_bytes(backup)
    with pytest.raises(ConfigError, match="older than the party that uses it: it was restored from a backup"):
        check_present(tmp_path, made)
    (tmp_path / FILE).unlink()
    with pytest.raises(ConfigError, match="acknowledge-loss"):
        check_present(tmp_path, made)


def test_after_an_acknowledged_loss_all_that_could_have_been_spent_is_spent(tmp_path: Path) -> None:
    (tmp_path / "party.toml").write_text(LIMITS)
    store = PartyStore(tmp_path)
    policy, secret = store.policy, load_secret(tmp_path)
    vault, made = PartyVault(tmp_path, spent, policy.privacy.budget), VaultMarks(tmp_path)
    vault.begin_marks()
    read(vault, "a")
    kept, backup = made.mark(), (tmp_path / FILE).read_bytes()
    read(vault, "b")
    newest = made.mark()
    check_current(tmp_path, made, kept, newest)
    (tmp_path / FILE).write_bytes(backup)
    restored = PartyVault(tmp_path, spent, policy.privacy.budget)
    check_current(tmp_path, VaultMarks(tmp_path), kept, kept)
    check_current(tmp_path, VaultMarks(tmp_path), None, None)
    with pytest.raises(ConfigError, match="older than the party's newest receipt"):
        check_current(tmp_path, VaultMarks(tmp_path), newest, None)
    with pytest.raises(ConfigError, match="no loss to acknowledge"):
        acknowledge_loss(tmp_path, policy, spent)
    with pytest.raises(ConfigError, match="the newest answer that the aggregator has from this party"):
        check_current(tmp_path, VaultMarks(tmp_path), kept, newest)
    assert Receipts(tmp_path).newest_mark() == newest
    lost = acknowledge_loss(tmp_path, policy, spent)
    assert lost["epsilon"] == pytest.approx(9 - spent(restored.contents.all_releases, 1e-5))
    assert (lost["queries"], lost["evaluate"], lost["match"], lost["declines"]) == (49, 6, 2, 20)
    assert lost["train"] is None and load_secret(tmp_path) != secret
    after = PartyVault(tmp_path, spent, policy.privacy.budget)
    check_current(tmp_path, VaultMarks(tmp_path), newest, newest)
    with pytest.raises(PartyError, match=r"privacy budget is spent: epsilon 9 of 9"):
        read(after, "c")
    for purpose in ("evaluate", "match", "describe"):
        with pytest.raises(PartyError, match="used up"):
            read(after, "c", policy.queries, purpose=purpose)
    with pytest.raises(PartyError, match="decline 20"):
        after.may_decline(20)
    after.may_decline(21)
    assert after.contents.lost["train"] == float("inf")
    with pytest.raises(PartyError, match="allows 1000 training asks over all jobs"):  # it had no limit: all is lost
        read(after, "c", QueryBudget(total={"train": 1000}))
    with pytest.raises(ConfigError, match="no loss to acknowledge"):
        acknowledge_loss(tmp_path, policy, spent)
    store.close()


def test_after_an_acknowledged_loss_a_sum_that_had_begun_is_not_answered_again(tmp_path: Path) -> None:
    """Its secret was kept, so a second list of survivors was signed."""
    (tmp_path / "party.toml").write_text(LIMITS)
    store, vault = PartyStore(tmp_path), with_marks(tmp_path)
    backup, job = (tmp_path / FILE).read_bytes(), vault.for_job("job")
    first = job.begin_session("secure", "0 round 0")
    job.once("secure-consistent ab", "these survivors")
    (tmp_path / NEWEST).write_text(VaultMarks(tmp_path).mark())
    (tmp_path / FILE).write_bytes(backup)
    acknowledge_loss(tmp_path, store.policy, spent)
    after = PartyVault(tmp_path, spent).for_job("job")
    with pytest.raises(PartyError, match="no state of this secure sum"):
        after.session("secure", "0 round 0")
    assert after.begin_session("secure", "0 round 0") != first
    store.close()


# Over the network


def trained(league: League) -> None:
    tree = {"task": {"dataset": "heart", "model": "logistic", "dtype": "float64"}, "run": {"rounds": 1},
            "algorithm": {"name": "fedavg", "local": {"name": "dp-sgd", "batch": 5, "sigma": 2.0}}}  # fmt: skip
    ended = league.ended(league.submit(tree, min_parties=1))
    assert ended["status"] == "finished", ended["reason"]


def renewed(member: Member, league: League) -> None:
    """Give a party a new certificate, and let it leave."""

    async def rotate() -> None:
        async with member.store.client(league.url) as client:
            await member.store.rotate(client)

    asyncio.run(rotate())
    member.leave()


def refused(league: League) -> str:
    member = Member(league, "ann", samples(0), LIMITS)
    member.gone()
    member.store.close()
    assert isinstance(member.failure, ConfigError), member.failure
    return str(member.failure)


def test_a_party_refuses_to_go_on_with_an_old_vault_until_the_loss_is_acknowledged(
    league: League, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = league.folder / "homes" / "ann"
    league.join("ann", samples(0), LIMITS)
    trained(league)
    league.members["ann"].leave()
    shutil.copytree(home, league.folder / "backup")
    renewed(league.join("ann", samples(0), LIMITS), league)
    league.join("ann", samples(0), LIMITS)  # with a certificate that the backup does not know
    trained(league)
    league.members["ann"].leave()
    newest = read_vault(home)
    assert set(newest.count()) == {"train", "describe"}
    row = league.ledger.one("SELECT mark FROM vault_marks WHERE party = 'ann'")
    assert row is not None and row["mark"] == Receipts(home).newest_mark()
    assert all(len(read_receipts(path)) > 1 for path in (home / "receipts").glob("*.jsonl"))

    shutil.copy(league.folder / "backup" / FILE, home / FILE)  # the vault alone
    assert "is older than the party's newest receipt" in refused(league)
    shutil.rmtree(home)
    shutil.copytree(league.folder / "backup", home)  # the whole folder, whose certificate has ended
    token, change = league.aggregator.registry.invite("ann")
    league.ledger.now(change)
    (store := PartyStore(home)).close()
    asyncio.run(store.enrol(league.url, token))
    why = refused(league)
    assert "is older than the newest answer that the aggregator has from this party" in why and "\n" not in why
    monkeypatch.setattr(sys, "argv", ["hansa", "privacy", "acknowledge-loss", "--state", str(home), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    lost = json.loads(capsys.readouterr().out)["lost"]
    assert 0 < lost["queries"] < 50 and 0 < lost["epsilon"] < 9
    league.join("ann", samples(0), LIMITS.replace("9.0", "30.0\ndeclines = 40").replace("50", "90"))
    trained(league)  # with what was added to the budgets
    assert read_vault(home).count()["train"] == newest.count()["train"]


def test_a_receipt_is_stored_once_if_its_mark_cannot_be_stored_at_first(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, failed = disk.put, list[Path]()

    def full(path: Path, *more: Any) -> None:
        if path.name == NEWEST and len(failed) < 3:
            failed.append(path)
            raise OSError(errno.ENOSPC, "the disk is full")
        put(path, *more)

    monkeypatch.setattr(agent, "PAUSE", 0.02)
    monkeypatch.setattr(disk, "put", full)
    league.join("ann", samples(0), LIMITS)
    trained(league)
    (path,) = (league.folder / "homes" / "ann" / "receipts").glob("*.jsonl")
    lines = path.read_bytes().splitlines()
    assert len(failed) == 3 and len(lines) == len(set(lines)) > 1


def test_a_mark_that_the_party_did_not_sign_is_ignored(league: League) -> None:
    def forge(db: Any) -> None:
        (pem,) = (row["fingerprint"] for row in db.all("SELECT fingerprint FROM certificates WHERE name = 'bob'"))
        mark = "0" * 64
        signature = keys.read_key(bob.store.folder / "key.pem").sign(vault_bytes("league", "bob", mark)).hex()
        db.run("INSERT OR REPLACE INTO vault_marks VALUES ('ann', ?, ?, ?)", mark, signature, pem)

    bob = league.join("bob", samples(1), LIMITS)
    league.ledger.now(forge)
    league.join("ann", samples(0), LIMITS)
    trained(league)


def marked(caller: Caller, mark: str) -> VaultMark:
    assert caller.key is not None
    return VaultMark(mark, caller.key.sign(vault_bytes("league", caller.name, mark)).hex())


def test_the_aggregator_keeps_the_newest_mark_of_each_party_and_checks_its_signature(league: League) -> None:
    ann, bob = league.enrolled("ann"), league.enrolled("bob")
    assert ann.call("GET", "/v1/vault").status == 204
    asked = league.ask()
    good = Answer("0" * 64, "0" * 128, why="busy", vault=marked(ann, "1" * 64))
    for wrong in (
        VaultMark("1" * 64, "2" * 128),
        marked(bob, "1" * 64),
        VaultMark("3" * 64, marked(ann, "1" * 64).signature),
    ):
        answer = Answer("0" * 64, "0" * 128, why="busy", vault=wrong)
        assert ann.reply(asked, answer).status == 401
    assert ann.reply(asked, good).status == 200
    other = league.ask(round=1)
    assert ann.reply(other, Answer("0" * 64, "0" * 128, why="busy", vault=marked(ann, "4" * 64))).status == 200
    handed = unpack(ann.call("GET", "/v1/vault").body, VaultMark)
    assert structs.replace(handed, certificate=b"") == marked(ann, "4" * 64)
    assert identity_of_pem(handed.certificate).name == "ann"
    assert bob.call("GET", "/v1/vault").status == 204
    assert league.nobody().call("GET", "/v1/vault").status == 401
