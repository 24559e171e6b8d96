"""The folders of aggregator and parties between two starts, and their state after a failed start."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import hashlib
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import address
from league import League

from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.ledger import Ledger, LedgerError, connect
from hansa.net.aggregator.process import Aggregator
from hansa.net.aggregator.registry import Registry
from hansa.net.aggregator.schema import SCHEMA, VERSION
from hansa.net.party.store import PartyStore
from hansa.net.transport.limits import Limits
from hansa.plumbing import crash_points as points
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError, HansaError


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    yield
    disk.observe(None)
    points.install(None)


def no_room(found: Callable[[str, Path], bool]) -> None:
    """A disk that is full while a condition holds."""

    def full(what: str, path: Path, *more: Any) -> None:
        if found(what, path):
            raise OSError(errno.ENOSPC, "No space left on device")

    disk.observe(full)


def broken() -> None:
    raise sqlite3.OperationalError("disk I/O error")


# The ledger


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A ledger that was closed cleanly."""
    ledger = Ledger(tmp_path / "hansa.db")
    ledger.now(lambda db: db.log("event"))
    ledger.close()
    return tmp_path / "hansa.db"


class Watched:
    """A connection with scripted results, which may fail."""

    def __init__(self, path: Path, said: list[str], fail: Callable[[str], bool] = lambda sql: False) -> None:
        self._db, self._said, self._fail, self.closed = connect(path), said, fail, False

    def _tell(self, sql: str) -> None:
        self._said.append(sql)
        if self._fail(sql):
            raise sqlite3.OperationalError("disk I/O error")

    def execute(self, sql: str, *values: Any) -> Any:
        self._tell(sql)
        return self._db.execute(sql, *values)

    def executescript(self, sql: str) -> Any:
        self._tell(sql)
        return self._db.executescript(sql)

    def close(self) -> None:
        self.closed = True
        self._db.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.mark.thin(2)
@pytest.mark.parametrize("nth", (1, 2, 3))
@pytest.mark.parametrize("what", ("create", "fsync", "rename", "folder"))
def test_a_start_that_fails_is_not_taken_for_damage_by_the_next(record: Path, what: str, nth: int) -> None:
    seen = 0

    def found(did: str, path: Path) -> bool:
        nonlocal seen
        seen += did == what
        return did == what and seen == nth

    no_room(found)
    with contextlib.suppress(LedgerError):
        Ledger(record).close()
    disk.observe(None)
    gc.collect()  # as the end of a process closes its open files
    ledger = Ledger(record)
    assert len(ledger.all("SELECT * FROM log")) == 1
    ledger.close()


@pytest.mark.parametrize("start", ("PRAGMA user_version", SCHEMA[:20], "SELECT n FROM commits"))
def test_a_start_that_fails_in_the_database_closes_it_and_is_not_taken_for_damage(record: Path, start: str) -> None:
    made: list[Watched] = []

    def failing(path: Path) -> Watched:
        made.append(Watched(path, [], lambda sql: sql.startswith(start)))
        return made[-1]

    with pytest.raises(LedgerError, match="disk I/O error"):
        Ledger(record, connect=failing)
    assert [db.closed for db in made] == [True, True]
    with contextlib.closing(sqlite3.connect(record)) as other:  # changes that a start may have made before it failed
        other.execute(f"PRAGMA user_version = {VERSION}")
    ledger = Ledger(record)
    assert len(ledger.all("SELECT * FROM log")) == 1
    ledger.close()


def test_a_connection_that_fails_as_it_is_opened_leaves_none_open(record: Path) -> None:
    made: list[Watched] = []

    def second_fails(path: Path) -> Watched:
        if made:
            raise sqlite3.OperationalError("unable to open database file")
        made.append(Watched(path, []))
        return made[-1]

    with pytest.raises(LedgerError, match="unable to open database file"):
        Ledger(record, connect=second_fails)
    assert made[0].closed


def test_to_open_a_record_changes_nothing_in_it(record: Path) -> None:
    before = record.read_bytes()
    ledger = Ledger(record)
    try:
        assert not ledger._ahead() and record.read_bytes() == before
    finally:
        ledger.close()


def test_a_record_that_is_what_it_was_is_not_checked_again_and_any_other_is(record: Path) -> None:
    said: list[str] = []
    Ledger(record, connect=lambda path: Watched(path, said)).close()
    assert not any("quick_check" in sql for sql in said)
    record.with_suffix(".mark").unlink()
    Ledger(record, connect=lambda path: Watched(path, said)).close()
    assert sum("quick_check" in sql for sql in said) == 1
    ledger = Ledger(record)
    points.install(lambda name: broken() if name == "ledger.execute" else None)
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.now(lambda db: db.log("event"))
    points.install(None)
    ledger.close()
    Ledger(record, connect=lambda path: Watched(path, said)).close()
    assert sum("quick_check" in sql for sql in said) == 2  # the cause of the fault is unknown


# A federation that an older version made


def what_to_do(error: HansaError) -> bool:
    words = ("finish its jobs with the version that made it", "`hansa init-federation`", "enrol the parties again")
    return all(word in str(error) for word in words) and "\n" not in str(error)


def test_a_record_of_an_older_version_says_what_to_do(record: Path) -> None:
    with contextlib.closing(sqlite3.connect(record)) as db:
        db.execute("PRAGMA user_version = 1")
    record.with_suffix(".mark").unlink()
    with pytest.raises(ConfigError, match="format 1, this is 3") as refused:
        Ledger(record)
    assert what_to_do(refused.value)


def test_a_federation_without_a_key_for_its_log_says_what_to_do(tmp_path: Path) -> None:
    init(tmp_path / "f", "league", ["ann"], ["127.0.0.1"], 0)
    (tmp_path / "f" / "log.pem").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*log\.pem"):  # its key is there: somebody has removed it
        Aggregator(FederationFolder.open(tmp_path / "f"))
    (tmp_path / "f" / "log.key").unlink()
    with pytest.raises(ConfigError, match=r"has no log\.key and no log\.pem") as refused:
        Aggregator(FederationFolder.open(tmp_path / "f"))
    assert what_to_do(refused.value)


# Uploads


def test_uploads_that_one_party_begins_at_the_same_time_leave_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, together = Blobs(tmp_path), threading.Barrier(2)
    free = disk.free

    def slow(folder: Path) -> int:  # both are between deletion and creation, if the lock allows it
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        return free(folder)

    monkeypatch.setattr(disk, "free", slow)
    for k in range(3):  # two names could share a lock by chance
        names = [hashlib.sha256(f"{k} {j}".encode()).hexdigest() for j in range(2)]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda name: blobs.append("party.ann", name, 0, b"x" * 100, 2**20), names))
        together.reset()
    assert len(list((tmp_path / "uploads").iterdir())) == 1


@pytest.mark.parametrize("what", ("write", "mkdir", "fsync", "rename"))
def test_what_the_aggregator_could_not_keep_takes_no_room(tmp_path: Path, what: str) -> None:
    blobs = Blobs(tmp_path)
    no_room(lambda did, path: did == what)
    with pytest.raises(OSError, match="No space"):
        blobs.put([b"some", b"bytes"])
    disk.observe(None)
    assert list((tmp_path / "uploads").iterdir()) == []


# A party's folder


@pytest.mark.parametrize("text", ("{", "", "[]", "{}", '{"party": "ann"}'))
def test_a_party_whose_file_cannot_be_read_can_enrol_again(league: League, tmp_path: Path, text: str) -> None:
    store, token = PartyStore(tmp_path / "home"), league.token("ann")
    asyncio.run(store.enrol(league.url, token))
    assert store.enrolled_with(token) and not store.enrolled_with(league.token("bob"))
    (store.folder / "party.json").write_text(text)
    shutil.copy(store.folder / "cert.pem", store.folder / "cert.enrol.pem")
    store.install_new_keys()
    with pytest.raises(ConfigError, match="enrol again, with the aggregator's URL and a new token"):
        store.registration()
    assert not store.enrolled_with(token)
    token, change = league.aggregator.registry.invite("ann")
    league.ledger.now(change)
    asyncio.run(store.enrol(league.url, token))
    assert store.enrolled_with(token) and store.registration()["party"] == "ann"
    store.close()


# federation.toml


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("limits = 3", "limits must be a table"),
        ("serve = 3", "serve must be a table"),
        ("serve = [1]", "serve must be a table"),
        (f'[serve]\nadmin = "127.0.0.1:{"9" * 5000}"', "admin: expected HOST:PORT"),
        ("[limits]\nstall = 1e-9", "stall must be at least 0.1 and at most 60, got 1e-09"),
    ],
)
def test_a_federation_s_file_that_says_nonsense_gets_a_sentence(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(f'name = "league"\nparties = ["ann"]\nurl = "https://127.0.0.1:1"\n{line}\n')
    with pytest.raises(ConfigError, match=said) as refused:
        FederationFolder.open(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("name", ("handshake", "head", "stall", "idle", "shutdown"))
def test_a_time_in_which_nothing_can_be_done_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 0.1"):
        Limits(**{name: 0.09})  # type: ignore[arg-type]
    Limits(**{name: 0.1})  # type: ignore[arg-type]


def test_an_address_with_a_port_of_thousands_of_digits_gets_a_sentence() -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT") as refused:
        address("127.0.0.1:" + "9" * 5000)
    assert len(str(refused.value)) < 200
    assert address("127.0.0.1:65535") == ("127.0.0.1", 65535)


# The registry


def test_one_party_s_coming_and_going_reads_nothing_of_the_others(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(registry: Registry) -> None:
        raise AssertionError("the whole registry was read")

    monkeypatch.setattr(Registry, "reload", whole)
    registry = league.aggregator.registry
    league.enrolled("ann")
    bob = league.enrolled("bob")
    league.operator.invite("dan")
    assert registry.numbers == {"ann": 0, "bob": 1, "cid": 2, "dan": 3}
    assert registry.met == {"ann", "bob"}
    league.operator.revoke("bob")
    assert registry.met == {"ann"}
    assert bob.call("POST", f"/v1/alive?instance={bob.instance}").status == 403
    league.operator.invite("bob")
    league.enrolled("bob")
    assert registry.met == {"ann", "bob"}


def test_a_party_whose_coming_could_not_be_written_has_not_come(league: League) -> None:
    ann = league.enrolled("ann")
    registry = league.aggregator.registry
    league.ledger.now(lambda db: db.run("UPDATE parties SET joined = 0").rowcount)
    registry.reload()

    points.install(lambda name: broken() if name == "ledger.execute" else None)
    assert ann.call("POST", f"/v1/alive?instance={ann.instance}").status == 503
    points.install(None)
    assert registry.met == set()
    assert ann.call("POST", f"/v1/alive?instance={ann.instance}").status == 204
    row = league.ledger.one("SELECT joined FROM parties WHERE name = 'ann'")
    assert registry.met == {"ann"} and row is not None and row["joined"] == 1
