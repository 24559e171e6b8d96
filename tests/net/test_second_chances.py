"""Recovery: a disk that fails for a while, an empty reason, an authority that was created anew."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from league import PARTIES, League

from hansa.net.aggregator import job
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.job import Job
from hansa.net.aggregator.job_records import JobRecords
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.registry import Registry
from hansa.net.party import store
from hansa.net.party.store import PartyStore
from hansa.net.transport.tokens import Token
from hansa.net.transport.wire import Answer, IssuedCertificate, pack, unpack
from hansa.plumbing.errors import DataError


def ended_by(error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The recorded end of a job whose work ends with that error."""
    monkeypatch.setattr(job, "PAUSE", 0.0)
    ends: list[tuple[str, str]] = []
    runner = SimpleNamespace(closing=threading.Event(), end=lambda id, status, reason: ends.append((status, reason)))
    doing: Any = SimpleNamespace(
        id="job-1",
        stopped=threading.Event(),
        runner=runner,
        _tracking=SimpleNamespace(fail=lambda reason: None),
        runtime=SimpleNamespace(close=lambda: None),
    )
    with Job.ending(doing):
        raise error
    return ends


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EIO])
def test_a_store_that_fails_for_a_while_does_not_end_a_job(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended_by(OSError(number, "for now"), monkeypatch) == []


def test_a_file_that_a_job_s_own_code_misses_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ((status, reason),) = ended_by(FileNotFoundError(errno.ENOENT, "No such file", "weights.pt"), monkeypatch)
    assert status == "failed" and "weights.pt" in reason


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "hansa.db")
    ledger.now(lambda db: db.run("INSERT INTO jobs (id, name, submitted, status, order_, checkpoint) VALUES "
                                 "('job-1', 'job', 0, 'running', '', 'ab')").rowcount)  # fmt: skip

    def records(error: Exception) -> JobRecords:
        def read(digest: str) -> bytes:
            raise error

        blobs: Any = SimpleNamespace(read=read)
        network: Any = None
        return JobRecords("job-1", ledger, blobs, network)

    with pytest.raises(OSError, match="Too many"):
        records(OSError(errno.EMFILE, "Too many open files")).restore()
    with pytest.raises(DataError, match="damaged"):
        records(FileNotFoundError("ab")).restore()
    ledger.close()


def test_a_refusal_without_a_reason_is_no_answer() -> None:
    data = pack(msgspec.structs.replace(Answer("0" * 64, "0" * 128), why=""))
    with pytest.raises(DataError, match="length >= 1"):
        unpack(data, Answer)


def test_closing_a_round_looks_at_what_was_not_fused_yet_and_no_further(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "hansa.db")
    plan = ledger.all("EXPLAIN QUERY PLAN SELECT seq FROM replies WHERE job = 'a' AND round < 9 AND spent = 0")
    assert "replies_unspent" in plan[0]["detail"]
    for event in ("job begun", "not taking part"):
        plan = ledger.all(f"EXPLAIN QUERY PLAN SELECT 1 FROM log WHERE job = 'a' AND event = '{event}'")
        assert "USING" in plan[0]["detail"] and "log_" in plan[0]["detail"]
    ledger.close()


def test_a_party_that_enrols_under_another_authority_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PartyStore(tmp_path / "home")
    for number in (1, 2):
        federation: FederationFolder = init(tmp_path / str(number), "league", PARTIES, ["127.0.0.1"], 1)
        ledger = Ledger(tmp_path / f"{number}.db", federation.notary())
        registry, token = Registry(federation, ledger), federation.token("ann")
        assert token is not None

        async def enrol(url: str, token: Token, request: bytes, r: Any = registry, db: Any = ledger,
                        f: Any = federation) -> tuple[bytes, IssuedCertificate]:  # fmt: skip
            name, pem = db.now(r.enrol(token.secret, request))
            return f.read("ca.pem"), IssuedCertificate("league", name, pem)

        monkeypatch.setattr(store, "enrol", enrol)
        asyncio.run(made.enrol("https://localhost:1", token))
        ledger.close()
        if number == 1:
            for name in ("receipts", "memory"):
                (made.folder / name).mkdir()
                (made.folder / name / "of-the-first").touch()
            (made.folder / "log.pem").touch()
    assert not [name for name in ("log.pem", "receipts", "memory") if (made.folder / name).exists()]
    (aside,) = made.folder.glob("before-*")
    assert (aside / "receipts" / "of-the-first").exists() and (aside / "memory" / "of-the-first").exists()
    made.close()


def test_an_empty_reason_is_refused_at_the_door_too(league: League) -> None:
    ann, ask = league.enrolled("ann"), league.ask()
    body = pack(msgspec.structs.replace(Answer("0" * 64, "0" * 128), why=""))
    assert ann.call("POST", f"{ask.path}/reply", body, ask.about).status == 400
