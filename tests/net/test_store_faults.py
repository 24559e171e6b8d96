"""A full, read-only or damaged disk, and no more open files: a clear refusal, no corruption, and normal work once
the fault is gone."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from league import PARTIES, PATIENCE, Asked, Caller, League, draft, logistic_task

import hansa
from hansa.core.plain_data import build
from hansa.net.aggregator import blobs as blobs_module
from hansa.net.aggregator import job as one_job
from hansa.net.aggregator import jobs
from hansa.net.aggregator.blobs import Blobs, Damaged
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.job_records import discard
from hansa.net.aggregator.ledger import Ledger, LedgerError, Writer
from hansa.net.aggregator.process import Aggregator
from hansa.net.aggregator.serve_settings import Serve
from hansa.net.audit.receipt_file import read_receipts
from hansa.net.local import free_port
from hansa.net.party import agent as party
from hansa.net.party.receipts import Receipts
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.transport import certificates, keys
from hansa.net.transport.signing import About
from hansa.net.transport.tokens import Token
from hansa.net.transport.wire import Blob, Enrolment, pack
from hansa.plumbing import codec, disk
from hansa.plumbing import crash_points as points
from hansa.plumbing.errors import ConfigError, DataError, HansaError

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
TREE = {"task": TASK, "algorithm": "fedavg", "run": {"rounds": 2}}


@pytest.fixture(autouse=True)
def unobserved(quick: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(party, "PAUSE", 0.05)
    monkeypatch.setattr(one_job, "PAUSE", 0.05)
    monkeypatch.setattr(jobs, "PAUSE", 0.05)
    yield
    disk.observe(None)
    points.install(None)


def flip(path: Path, at: int | None = None) -> Path:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
    return path


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


HARM = pytest.mark.parametrize("harm", (flip, truncate))


class Faulty:
    """A disk that fails with an error at operations of a kind, under a folder, for a number of faults."""

    def __init__(self, folder: Path, number: int, what: str = "", faults: float = 1) -> None:
        self.folder, self.number, self.what, self.left = folder, number, what, faults
        disk.observe(self)

    def __call__(self, what: str, path: Path, *more: Any) -> None:
        if self.left > 0 and what.startswith(self.what) and path.is_relative_to(self.folder):
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), str(path))


def stored(league: League) -> list[Path]:
    return sorted(path for path in (league.folder / "state" / "blobs").rglob("*") if path.is_file())


def answer(caller: Caller, ask: Asked, data: bytes = b"a reply") -> Any:
    """Upload and answer, as far as possible."""
    blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
    sent = caller.put(ask, blob.digest, 0, data)
    return sent if sent.status != 204 else caller.reply(ask, draft(blob))


# No room


@pytest.mark.parametrize("number", (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
@pytest.mark.parametrize("what", ("create", "write", "mkdir", "fsync", "rename", "folder"))
def test_a_fault_of_the_disk_at_any_step_is_said_and_leaves_nothing_half_stored(
    shared: tuple[League, Caller], what: str, number: int
) -> None:
    league, ann = shared
    ask = league.ask(number=next(COUNT))
    data = random.Random(ask.number).randbytes(100)  # its shelf is made when it is first needed
    before = stored(league)
    if what == "mkdir":
        shutil.rmtree(league.folder / "state" / "blobs" / hashlib.sha256(data).hexdigest()[:2], ignore_errors=True)
        before = stored(league)
    Faulty(league.folder / "state", number, what)
    got = answer(ann, ask, data)
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert (got.status, got.error) == (507 if full else 503, f"the aggregator cannot store this: {os.strerror(number)}")
    assert got.headers["Retry-After"] == "5"
    assert league.replies(ask) == {}
    disk.observe(None)
    assert answer(ann, ask, data).receipt.status == "accepted"
    assert sorted(set(stored(league)) - set(before)) == [
        league.aggregator.blobs.verified(hashlib.sha256(data).hexdigest())
    ]


COUNT = iter(range(10**6))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[League, Caller]]:
    league = League(tmp_path_factory.mktemp("shared") / "league")
    yield league, league.enrolled("ann")
    league.close()


def test_a_file_that_may_not_grow_is_left_as_long_as_it_was(shared: tuple[League, Caller]) -> None:
    """Enforced by the kernel: no file of this process may be longer than that."""
    league, ann = shared
    ask, data = league.ask(number=next(COUNT)), random.Random(1).randbytes(3 * 2**20)
    digest = hashlib.sha256(data).hexdigest()
    assert ann.put(ask, digest, 0, data[: 2**20]).status == 204
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, hard))
    try:
        got = ann.put(ask, digest, 2**20, data[2**20 :])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert got.status == 507 and got.error == "the aggregator cannot store this: File too large"
    assert league.aggregator.blobs.received("party.ann", digest) == 2**20
    assert ann.put(ask, digest, 2**20, data[2**20 :]).status == 204
    assert ann.reply(ask, draft(Blob(digest, len(data)))).receipt.status == "accepted"


def test_a_record_that_is_full_or_read_only_is_said_and_goes_on_when_it_can(shared: tuple[League, Caller]) -> None:
    league, ann = shared
    db = league.ledger._db
    ask, data = league.ask(number=next(COUNT)), b"not yet"
    why = "x" * 2000  # it needs a page of its own
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")
    try:
        got = [ann.reply(league.ask(number=next(COUNT)), draft(why=why)) for _ in range(6)][-1]
    except LedgerError as error:  # to open the ask needed one
        assert error.full
    else:
        assert got.status == 507 and got.error == "the ledger cannot be written: database or disk is full"
    db.execute(f"PRAGMA max_page_count = {2**32 - 2}")
    db.execute("PRAGMA query_only = 1")
    got = answer(ann, ask, data)
    assert got.status == 503 and "attempt to write a readonly database" in got.error
    db.execute("PRAGMA query_only = 0")
    assert answer(ann, ask, data).receipt.status == "accepted"


def test_uploads_leave_the_last_of_the_disk_to_the_record(found: Callable[..., League]) -> None:
    league = found(min_free=2**62)
    ann = league.enrolled("ann")
    ask = league.ask()
    got = answer(ann, ask)
    assert got.status == 507 and "fewer than serve.min_free = 4,611,686,018,427,387,904" in got.error
    assert ann.reply(ask, draft(why="there is no room for it")).receipt.status == "accepted"
    assert disk.free(league.folder) > 0
    with pytest.raises(ConfigError, match="min_free must be at least 0"):
        Serve(min_free=-1)


@pytest.mark.slow
def test_a_job_goes_through_random_faults_to_the_same_bits(found: Callable[..., League]) -> None:
    league = found(absent_after=60.0)
    league.join_all()
    chance, faults, refused = random.Random(3), list[str](), list[str]()

    def failing(what: str, path: Path, *more: Any) -> None:
        if len(faults) < 40 and path.suffix != ".mark" and chance.random() < 0.2:
            faults.append(what)
            raise OSError(errno.ENOSPC, "No space left on device")

    def refusing(name: str) -> None:
        if name == "ledger.execute" and len(refused) < 30 and chance.random() < 0.3:
            refused.append(name)
            raise sqlite3.OperationalError("database or disk is full")

    disk.observe(failing)
    points.install(refusing)
    job = submitted(league)
    ended = league.ended_after_all(job)
    disk.observe(None)
    points.install(None)
    assert ended["status"] == "finished", ended["reason"]
    assert len(faults) >= 20 and len(refused) >= 10
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 2
    assert codec.encode(league.model(ended["id"])) == codec.encode(simulated())


def submitted(league: League) -> str:
    """A job, submitted again as an operator does who is told to try again."""
    while True:
        try:
            return league.runner.submit(jobs.Order("job", TREE, mark="1"))
        except LedgerError as error:
            assert "disk is full" in str(error)


def simulated() -> Any:
    return hansa.simulate(build("algorithm", "fedavg"), logistic_task(), engine="reference", rounds=2).saved_model()


# No more open files


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process can be set on Linux alone")
def test_an_aggregator_without_open_files_says_so_and_goes_on_when_it_has_some(tmp_path: Path) -> None:
    """A real process that from some moment on gets no more file descriptors from the kernel."""
    port = free_port()
    folder = tmp_path / "federation"
    init(folder, "league", PARTIES, ["127.0.0.1"], port)
    config = folder / "federation.toml"
    config.write_text(config.read_text().replace("# idle = 25 ", "idle = 600 "))  # the callers may be slow
    command = [sys.executable, "-c", "from hansa.cli import main; main()", "serve", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    callers: list[Caller] = []
    said: list[str] = []
    assert process.stderr is not None
    try:
        assert any(" serving " in line for line in process.stderr)
        reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
        reader.start()
        place: Any = SimpleNamespace(folder=folder, port=port)
        files = folder / "operator.pem", folder / "operator.key"
        token = Token.parse((folder / "tokens" / "ann.token").read_text())
        callers += Caller(place, keys.load_key(files[1].read_bytes()), files, "operator"), Caller(place), Caller(place)
        chief, stranger, late = callers
        request = certificates.make_request(keys.new_key(), "ann")

        def upload() -> Any:
            data = str(next(COUNT)).encode()  # not what is there already
            return chief.call("PUT", f"/v1/uploads/{hashlib.sha256(data).hexdigest()}?at=0", data, About())

        def enrol() -> Any:
            return stranger.call("POST", "/v1/enrol", pack(Enrolment(token.secret, request)))

        assert upload().status == 204
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        taken = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
        lowest = next(number for number in range(len(taken) + 1) if number not in taken)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
        got = upload()
        assert got.status == 503 and got.error == "the aggregator cannot store this: Too many open files"
        # New clients wait, and the process does not spin meanwhile.
        coming, came = (
            threading.Thread(target=lambda: came.append(late.call("GET", "/v1/ca")), daemon=True),
            list[Any](),
        )
        used, began = cpu_seconds(process.pid), time.monotonic()
        coming.start()
        coming.join(1.5)
        assert not came and coming.is_alive()
        assert cpu_seconds(process.pid) - used < (time.monotonic() - began) / 2
        assert chief.call("GET", "/v1/jobs").body == b"[]"  # requests that need no file descriptor are served
        assert process.poll() is None
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        coming.join(PATIENCE)
        assert [one.status for one in came] == [200]
        assert (upload().status, enrol().status) == (204, 200)
    finally:
        for caller in callers:
            caller.close()
        process.terminate()
        assert process.wait(PATIENCE) == 0
        reader.join(PATIENCE)
        process.stderr.close()
    assert sum("cannot accept" in line for line in said) >= 1 and len(said) < 50


def cpu_seconds(process: int) -> float:
    """The processor time that a process has used."""
    spent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


# Damaged blobs


@HARM
def test_a_blob_that_is_read_for_a_decision_is_what_was_kept(tmp_path: Path, harm: Callable[[Path], Path]) -> None:
    blobs = Blobs(tmp_path)
    digest, _ = blobs.put([b"some ", b"bytes"])
    assert blobs.read(digest) == b"some bytes" and blobs.verified(digest) == blobs.path(digest)
    harm(blobs.path(digest))
    for look in (blobs.read, blobs.verified):
        with pytest.raises(Damaged, match=rf"the file .*{digest} is damaged"):
            look(digest)


def test_blobs_that_are_verified_ahead_come_in_order_each_with_its_own_fate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs_module, "LARGE", 100)
    blobs = Blobs(tmp_path)
    kept = [blobs.put([bytes([k]) * (10 if k % 2 else 1000)])[0] for k in range(20)]
    for k in (4, 5):
        flip(blobs.path(kept[k]))
    for k in (10, 11):
        blobs.discard(kept[k])
    for k, check in enumerate(blobs.verifying(kept)):
        if k in (4, 5, 10, 11):
            with pytest.raises(Damaged if k < 10 else FileNotFoundError):
                check()
        else:
            assert check() == blobs.path(kept[k])
    assert k == 19


@HARM
def test_a_reply_that_was_damaged_before_it_was_fused_is_not_fused_and_the_round_says_so(
    league: League, harm: Callable[[Path], Path]
) -> None:
    league.join_all()
    done: list[str] = []

    def reached(name: str) -> None:
        sql = "SELECT party, blob FROM replies WHERE phase = 'round' AND round = 1 AND party = 1"
        if name == "reply.acknowledged" and not done and (row := league.ledger.one(sql)) is not None:
            done.append(row["blob"])
            harm(league.aggregator.blobs.path(row["blob"]))

    points.install(reached)
    ended = league.ended(league.submit({**TREE, "run": {"rounds": 3}}))
    assert ended["status"] == "finished"
    first, second, third = ended["rounds"]
    hurt = first if first.get("rejected") else second
    assert list(hurt["rejected"]) == ["bob"] and f"{done[0]} is damaged" in hurt["rejected"]["bob"]
    assert hurt["members"] == ["ann", "cid"] and third["members"] == list(PARTIES)


@HARM
def test_a_job_whose_checkpoint_is_damaged_fails_and_names_the_file(
    league: League, harm: Callable[[Path], Path]
) -> None:
    league.join_all()
    held = threading.Event()

    def reached(name: str) -> None:
        if name == "round.closed" and not held.is_set():
            held.set()
            league.runner.closing.set()  # as when the aggregator shuts down

    points.install(reached)
    job = league.submit({**TREE, "run": {"rounds": 5}})
    assert held.wait(PATIENCE)
    league.stop()
    points.install(None)
    database = sqlite3.connect(league.folder / "state" / "hansa.db")
    ((digest,),) = database.execute("SELECT checkpoint FROM jobs WHERE id = ?", (job,)).fetchall()
    database.close()
    harm(Blobs(league.folder / "state").path(digest))
    league.start()
    ended = league.ended(job)
    assert ended["status"] == "failed"
    assert f"the checkpoint of {job} is damaged: the file " in ended["reason"] and digest in ended["reason"]


@HARM
def test_a_model_that_is_damaged_is_not_pulled(league: League, tmp_path: Path, harm: Callable[[Path], Path]) -> None:
    league.join_all()
    ended = league.ended(league.submit(TREE))
    harm(league.aggregator.blobs.path(ended["model"]))
    with pytest.raises(DataError, match=f"the model of {ended['id']} is damaged at the aggregator"):
        league.operator.pull(ended["id"], tmp_path / "model")
    assert not (tmp_path / "model").exists()


@HARM
def test_a_job_whose_own_samples_are_damaged_fails_and_names_the_file(
    league: League, harm: Callable[[Path], Path]
) -> None:
    blobs = league.aggregator.blobs
    data = codec.encode({"test": None, "trusted": None, "classes": 2, "loss": "cross_entropy"})
    digest, size = blobs.put([data])
    harm(blobs.path(digest))
    league.join_all()
    ended = league.ended(league.runner.submit(jobs.Order("job", TREE, Blob(digest, size))))
    assert ended["status"] == "failed"
    assert f"samples of {ended['id']} cannot be read: the file " in ended["reason"] and digest in ended["reason"]


# A damaged record


def ledger_of(folder: Path, entries: int = 400) -> Ledger:
    folder.mkdir()
    ledger = Ledger(folder / "hansa.db")
    for k in range(0, entries, 20):
        ledger.now(lambda db, k=k: [db.log("event", "job-1", k + n, "ann", why="w" * 50) for n in range(20)])
    return ledger


def crashed(ledger: Ledger, folder: Path, to: Path) -> Path:
    """The state after a kill: the database with its write-ahead log."""
    to.mkdir()
    for path in folder.iterdir():
        shutil.copy(path, to / path.name)
    return to / "hansa.db"


def test_a_flipped_bit_of_the_database_is_a_refusal_or_changes_nothing_else(tmp_path: Path) -> None:
    """After an unclean end. SQLite's pages have no checksums: it detects only a broken structure."""
    ledger_of(tmp_path / "first").close()
    data, refused = (tmp_path / "first" / "hansa.db").read_bytes(), 0
    chance = random.Random(0)
    for k in range(60):
        (tmp_path / str(k)).mkdir()
        path = tmp_path / str(k) / "hansa.db"
        hurt = bytearray(data)
        if k % 3:
            hurt[chance.randrange(len(hurt))] ^= 1 << chance.randrange(8)
        else:  # a whole sector is something else
            at = chance.randrange(len(hurt) // 512) * 512
            hurt[at : at + 512] = chance.randbytes(512)
        path.write_bytes(hurt)
        try:
            ledger = Ledger(path)
        except (LedgerError, ConfigError) as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
            continue
        ledger.now(lambda db: db.log("it goes on"))
        ledger.close()
    assert refused > 5


def test_any_flipped_bit_of_a_database_at_rest_is_a_refusal(tmp_path: Path) -> None:
    ledger_of(tmp_path / "first").close()
    path, chance = tmp_path / "first" / "hansa.db", random.Random(0)
    data = path.read_bytes()
    for _ in range(40):
        at = chance.randrange(len(data))
        flip(path, at)
        with pytest.raises(LedgerError, match=f"{path} has changed since the aggregator closed it"):
            Ledger(path)
        flip(path, at)
    Ledger(path).close()
    Ledger(path).close()


def test_a_write_ahead_log_that_lost_what_was_acknowledged_is_refused(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "first")
    try:
        good = crashed(ledger, tmp_path / "first", tmp_path / "good")
        bad = {name: crashed(ledger, tmp_path / "first", tmp_path / name) for name in ("gone", "flipped", "cut", "db")}
    finally:
        ledger.close()
    again = Ledger(good)
    assert len(again.all("SELECT * FROM log")) == 400
    again.close()
    bad["gone"].with_name("hansa.db-wal").unlink()
    flip(bad["flipped"].with_name("hansa.db-wal"), 100)
    truncate(bad["cut"].with_name("hansa.db-wal"))
    bad["db"].unlink()
    for name in ("gone", "flipped", "cut"):
        with pytest.raises(LedgerError, match=r"of the \d+ commits that were acknowledged"):
            Ledger(bad[name])
    with pytest.raises(LedgerError, match="is missing"):
        Ledger(bad["db"])
    for name in bad:  # the operator decides to go on without
        bad[name].with_name("hansa.mark").unlink()
        Ledger(bad[name]).close()


@HARM
def test_a_damaged_mark_says_nothing(tmp_path: Path, harm: Callable[..., Path]) -> None:
    ledger_of(tmp_path / "first").close()
    harm(tmp_path / "first" / "hansa.mark")
    Ledger(tmp_path / "first" / "hansa.db").close()


def test_a_record_that_is_damaged_while_it_is_used_says_so_and_the_writer_lives(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "first")
    for db in (ledger._db, ledger._reader):
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA cache_size = 1")
    path = tmp_path / "first" / "hansa.db"
    root = ledger.all("SELECT rootpage FROM sqlite_master WHERE name = 'log'")[0][0]
    with open(path, "r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    for db in (ledger._db, ledger._reader):
        db.execute("PRAGMA shrink_memory")
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger.all("SELECT * FROM log")
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.now(lambda db: db.log("one more"))
    ledger.now(lambda db: db.run("INSERT INTO parties (number, name) VALUES (0, 'ann')").rowcount)  # another table
    ledger.close()
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger(path)


def test_a_blob_goes_only_after_the_commit_that_makes_it_unneeded(tmp_path: Path) -> None:
    """In one batch, which fails: blobs that it would have made unneeded are still needed."""
    ledger, blobs = Ledger(tmp_path / "hansa.db"), Blobs(tmp_path)
    digest, _ = blobs.put([b"needed"])
    seen: list[bool] = []

    def forget(db: Writer) -> None:
        db.after(lambda after: blobs.discard(digest))
        seen.append(digest in blobs)

    def fail(db: Writer) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    started, go = threading.Event(), threading.Event()
    held = ledger.write(lambda db: (started.set(), go.wait(PATIENCE)))
    assert started.wait(PATIENCE)
    both = [ledger.write(forget), ledger.write(fail)]
    go.set()
    held.result()
    for change in both:
        with pytest.raises(LedgerError, match="disk I/O error"):
            change.result()
    assert seen == [True] and digest in blobs
    ledger.now(forget)
    assert digest not in blobs
    ledger.close()


def test_a_blob_stays_where_an_answer_needs_it_that_comes_with_its_discarding(tmp_path: Path) -> None:
    ledger, blobs = Ledger(tmp_path / "hansa.db"), Blobs(tmp_path)
    digest, _ = blobs.put([b"needed"])
    started, go = threading.Event(), threading.Event()
    ledger.write(lambda db: (started.set(), go.wait(PATIENCE)))
    assert started.wait(PATIENCE)
    forgetting = threading.Thread(target=discard, args=(ledger, blobs, [digest]))
    forgetting.start()
    while ledger._queue.empty():
        time.sleep(0.001)
    sql = ("INSERT INTO replies (job, round, phase, number, party, blob, size, staged, seconds) "
           "VALUES ('job-1', 0, 'round', 0, 0, ?, 6, 0, 0)")  # fmt: skip
    answered = ledger.write(lambda db: db.run(sql, digest).rowcount)
    go.set()
    forgetting.join()
    assert answered.result() == 1 and digest in blobs
    ledger.close()


# A damaged federation, a damaged party


@HARM
@pytest.mark.parametrize("name", ("ca.pem", "ca.key", "operator.pem", "tokens/ann.token"))
def test_an_aggregator_refuses_to_start_with_a_damaged_file(
    tmp_path: Path, name: str, harm: Callable[..., Path]
) -> None:
    """Files that a person may edit (federation.toml, hosts) are refused if they are invalid; see test_identity."""
    init(tmp_path / "federation", "league", PARTIES, ["127.0.0.1"], 0)
    path = tmp_path / "federation" / name
    if name.startswith("tokens"):  # its secret may be any
        path.write_bytes(path.read_bytes()[:-60])
    else:
        harm(path)
    with pytest.raises(HansaError) as found:
        Aggregator(FederationFolder.open(tmp_path / "federation")).ledger.close()
    assert "\n" not in str(found.value) and path.name in str(found.value)


def test_an_aggregator_refuses_to_start_on_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    init(tmp_path / "federation", "league", PARTIES, ["127.0.0.1"], 0)
    for what in ("mkdir", "create", "fsync", "rename", "folder"):
        shutil.rmtree(tmp_path / "federation" / "state", ignore_errors=True)
        Faulty(tmp_path, errno.EROFS, what, 99)
        with pytest.raises(HansaError, match="Read-only file system"):
            Aggregator(FederationFolder.open(tmp_path / "federation"))
        disk.observe(None)


@pytest.mark.thin(1)
@pytest.mark.parametrize("what", ("mkdir", "create", "write", "fsync", "folder"))
def test_a_party_whose_disk_is_full_keeps_its_receipt_when_there_is_room_and_goes_on(league: League, what: str) -> None:
    league.join_all()
    kept = league.folder / "homes" / "ann" / "receipts"
    fault = Faulty(kept, errno.ENOSPC, what, 3)
    ended = league.ended(league.submit(TREE))
    assert ended["status"] == "finished" and fault.left == 0
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 2
    answered = {row["entry"] for row in league.ledger.all("SELECT entry FROM replies WHERE party = 0")}
    held = [one.receipt.size for one in read_receipts(kept / f"{ended['id']}.jsonl")]
    assert set(held) == answered


def test_receipts_whose_flush_failed_are_written_anew(tmp_path: Path) -> None:
    receipts, path = Receipts(tmp_path), tmp_path / "receipts" / "job.jsonl"
    receipts._append(path, b"1\n")
    Faulty(tmp_path, errno.EIO, "fsync")
    with pytest.raises(OSError):
        receipts._append(path, b"2\n")
    seen: list[str] = []
    disk.observe(lambda what, path, *more: seen.append(what))
    receipts._append(path, b"2\n")
    assert path.read_bytes() == b"1\n2\n2\n" and seen[:4] == ["create", "write", "fsync", "rename"]
    seen.clear()
    receipts._append(path, b"3\n")
    assert seen == ["write", "fsync", "folder"]


@HARM
def test_a_memory_that_is_damaged_is_lost_and_not_used(tmp_path: Path, harm: Callable[[Path], Path]) -> None:
    memory = PartyMemory(tmp_path)
    memory.stage("job", "0/round/0", {"c": torch.arange(50.0)})
    harm(next((tmp_path / "job").iterdir()))
    assert memory.recall("job", "0/round/0") is None


@HARM
@pytest.mark.parametrize("name", ("party.json", "key.pem", "cert.pem", "ca.pem"))
def test_a_party_refuses_to_start_with_a_damaged_file(
    league: League, tmp_path: Path, name: str, harm: Callable[[Path], Path]
) -> None:
    store = PartyStore(tmp_path / "home")
    asyncio.run(store.enrol(league.url, league.token("ann")))
    harm(store.folder / name)
    with pytest.raises(HansaError) as found:
        store.install_new_keys()
        store.registration()
        store.identity()
        store.client()
    assert name in str(found.value) and "\n" not in str(found.value)
    store.close()


def test_a_key_that_is_not_the_certificates_is_refused(league: League, tmp_path: Path) -> None:
    store = PartyStore(tmp_path / "home")
    asyncio.run(store.enrol(league.url, league.token("ann")))
    keys.write_private(store.folder / "key.pem", keys.key_bytes(keys.new_key()))
    with pytest.raises(ConfigError, match="does not belong to the key"):
        store.client()
    store.close()
