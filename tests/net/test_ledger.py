"""The ledger: one writer, many changes per flush, atomic changes, and an append-only log."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from league import PATIENCE, notary

from hansa.net.aggregator.asks import close_ask, decide, open_ask, take_ticket
from hansa.net.aggregator.ledger import Ledger, LedgerError, Writer, log_lines
from hansa.net.aggregator.round import Decision
from hansa.net.audit.evidence import ENTRY, entry_line
from hansa.net.audit.merkle import Frontier, leaf_hash
from hansa.plumbing import crash_points as points
from hansa.plumbing.errors import ConfigError


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "hansa.db")
    yield ledger
    ledger.close()


def add(name: str) -> object:
    return lambda db: (
        db.run("INSERT INTO parties (number, name) VALUES ((SELECT count(*) FROM parties), ?)", name).rowcount
    )


def names(ledger: Ledger) -> list[str]:
    return [row["name"] for row in ledger.all("SELECT name FROM parties ORDER BY number")]


class Held:
    """Keep the writer busy until released: changes made meanwhile form one batch."""

    def __init__(self, ledger: Ledger) -> None:
        self._go, started = threading.Event(), threading.Event()

        def wait(db: Writer) -> None:
            started.set()
            assert self._go.wait(PATIENCE)

        self._change = ledger.write(wait)
        assert started.wait(PATIENCE)

    def go(self) -> None:
        self._go.set()
        self._change.result()


def test_changes_that_wait_share_one_commit(ledger: Ledger) -> None:
    commits: list[str] = []
    held = Held(ledger)
    points.install(lambda name: commits.append(name) if name == "ledger.commit" else None)
    try:
        made = [ledger.write(add(f"p{k}")) for k in range(100)]  # type: ignore[arg-type]
        assert names(ledger) == []
        held.go()
        assert [change.result() for change in made] == [1] * 100
    finally:
        points.install(None)
    assert len(commits) <= 2 and len(names(ledger)) == 100  # the held one's, and one for all


def test_an_error_in_a_change_undoes_it_and_only_it(ledger: Ledger) -> None:
    def half(db: Writer) -> None:
        db.run("INSERT INTO parties (number, name) VALUES (77, 'half')")
        db.log("half")
        raise ValueError("no further")

    def twice(db: Writer) -> None:
        db.run("INSERT INTO parties (number, name) VALUES (78, 'again')")
        db.run("INSERT INTO parties (number, name) VALUES (78, 'and again')")

    held = Held(ledger)
    made = [ledger.write(change) for change in (add("one"), half, twice, add("two"))]  # type: ignore[list-item]
    held.go()
    with pytest.raises(ValueError, match="no further"):
        made[1].result()
    with pytest.raises(sqlite3.IntegrityError):
        made[2].result()
    assert made[0].result() == made[3].result() == 1
    assert names(ledger) == ["one", "two"] and ledger.all("SELECT * FROM log") == []


def test_a_result_comes_after_the_commit_and_a_reader_sees_no_half_change(ledger: Ledger) -> None:
    seen: list[list[str]] = []
    points.install(lambda name: seen.append(names(ledger)) if name in ("ledger.execute", "ledger.commit") else None)
    try:
        ledger.now(add("one"))  # type: ignore[arg-type]
    finally:
        points.install(None)
    assert seen == [[], ["one"]]


def test_a_change_whose_author_has_gone_does_not_stop_the_writer(ledger: Ledger) -> None:
    held = Held(ledger)

    async def leave() -> None:
        change = asyncio.wrap_future(ledger.write(add("early")))  # type: ignore[arg-type]
        running = asyncio.wrap_future(held._change)
        await asyncio.sleep(0)
        change.cancel()
        running.cancel()
        await asyncio.wait((change, running))

    asyncio.run(leave())
    held._go.set()
    ledger.now(add("next"))  # type: ignore[arg-type]
    assert names(ledger) == ["next"]


def test_a_record_that_cannot_be_written_says_so_and_goes_on_when_it_can(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "hansa.db")
    ledger._db.execute("PRAGMA query_only = 1")
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.now(add("one"))  # type: ignore[arg-type]
    ledger._db.execute("PRAGMA query_only = 0")
    ledger.now(add("two"))  # type: ignore[arg-type]
    assert names(ledger) == ["two"]
    ledger.close()


def test_closing_finishes_what_waits_and_a_restart_reads_everything(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "hansa.db")
    made = [ledger.write(add(f"p{k}")) for k in range(600)]  # type: ignore[arg-type]
    ledger.close()
    assert all(change.done() for change in made)
    again = Ledger(tmp_path / "hansa.db")
    assert names(again) == [f"p{k}" for k in range(600)]
    mode = [again._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert mode == ["wal", 2]
    again.close()


def test_a_file_that_is_none_or_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_bytes(b"no database" * 1000)
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(tmp_path / "bad.db")
    db = sqlite3.connect(tmp_path / "new.db")
    db.execute("PRAGMA user_version = 1")
    db.close()
    with pytest.raises(ConfigError, match="another version of hansa"):
        Ledger(tmp_path / "new.db")


def test_the_logs_root_stands_for_every_entry_and_stays_what_it_was(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "hansa.db")
    sizes = [ledger.now(lambda db, k=k: db.log("event", "job-1", k, "ann", why=f"reason {k}")) for k in range(5)]
    ledger.close()
    ledger = Ledger(tmp_path / "hansa.db")
    sizes.append(ledger.now(lambda db: db.log("after a restart")))
    assert sizes == [1, 2, 3, 4, 5, 6]
    rows = ledger.all("SELECT * FROM log ORDER BY seq")
    entries = [[row[name] for name in ENTRY] for row in rows]
    roots = [ledger.now(lambda db, size=size: db.root(size)) for size in range(7)]
    grown = Frontier()
    for size, entry in enumerate(entries, 1):
        assert json.loads(entry_line(*entry))["seq"] == size
        assert b"".join(log_lines(ledger, size - 1, size)) == entry_line(*entry) + b"\n"
        grown.append(leaf_hash(entry_line(*entry)))
        assert grown.root().hex() == roots[size]
        for k, changed in enumerate(entry):
            other = [*entry[:k], '"other"' if isinstance(changed, str) else 7, *entry[k + 1 :]]
            assert entry_line(*other) != entry_line(*entry)
    assert len(set(roots)) == 7 and json.loads(entries[0][6]) == {"why": "reason 0"}
    ledger.close()


def test_an_entry_that_is_undone_leaves_the_tree_as_it_was(ledger: Ledger) -> None:
    def half(db: Writer) -> None:
        db.log("half")
        raise ValueError("no further")

    ledger.now(lambda db: db.log("one"))
    before = ledger.now(lambda db: db.root(1))
    with pytest.raises(ValueError, match="no further"):
        ledger.now(half)
    assert ledger.now(lambda db: db.log("two")) == 2 and ledger.now(lambda db: db.root(1)) == before
    assert len(ledger.all("SELECT * FROM nodes")) == 3


def test_a_log_goes_on_only_under_the_key_it_was_begun_with(tmp_path: Path) -> None:
    mine = notary()
    for _ in range(2):
        ledger = Ledger(tmp_path / "hansa.db", mine)
        (entry,) = ledger.all("SELECT * FROM log")
        assert entry["event"] == "log begun" and json.loads(entry["detail"]) == mine.beginning()
        ledger.close()
    with pytest.raises(ConfigError, match="put the original ones back"):
        Ledger(tmp_path / "hansa.db", notary())
    Ledger(tmp_path / "hansa.db", mine).close()
    bare = Ledger(tmp_path / "hansa.db")
    with pytest.raises(LedgerError, match="without the key"):
        bare.now(lambda db: db.head(1))
    bare.close()


# The states of an ask

KEY = ("job-1", 0, "round", 0)


def answered(ledger: Ledger, party: int, why: str | None = None, key: tuple[str, int, str, int] = KEY) -> None:
    sql = ("INSERT INTO replies (job, round, phase, number, party, blob, size, staged, why, seconds) "
           "VALUES (?, ?, ?, ?, ?, 'b', 1, 0, ?, 0)")  # fmt: skip
    ledger.now(lambda db: db.run(sql, *key, party, why).rowcount)


def test_an_ask_is_opened_once_and_another_in_its_place_fails_loudly(ledger: Ledger) -> None:
    assert ledger.now(open_ask(KEY, "d", [0, 1], 5.0)) is None
    assert ledger.now(open_ask(KEY, "d", [0, 1], 9.0)) is None
    with pytest.raises(Exception, match="asked something else"):
        ledger.now(open_ask(KEY, "other", [0, 1], 9.0))


def test_an_ask_is_closed_once_with_the_first_to_answer(ledger: Ledger) -> None:
    ledger.now(open_ask(KEY, "d", [0, 1, 2, 3, 4], 5.0))
    answered(ledger, 3)
    answered(ledger, 0, "it would rather not")
    answered(ledger, 4)
    answered(ledger, 1)
    closed = ledger.now(close_ask(KEY, 2, {2: "it was away", 3: "it was thought to be away"}))
    assert closed.members == (3, 4)
    assert closed.missing == {
        0: "it would rather not",
        1: "the cohort was complete before it answered",
        2: "it was away",
    }
    answered(ledger, 2)
    assert ledger.now(close_ask(KEY, None, {})) == closed == Decision.of(closed.text())
    assert ledger.now(open_ask(KEY, "d", [0, 1, 2, 3, 4], 9.0)) == closed.text()


def test_tickets_come_back_in_the_order_in_which_they_were_answered(ledger: Ledger) -> None:
    flights = {k: ("job-1", 0, "round", k) for k in range(3)}
    nexts = [("job-1", 0, "round", 10 + k) for k in range(3)]
    for key in (*flights.values(), *nexts):
        ledger.now(open_ask(key, "d", [0], 1.0))
    assert ledger.now(take_ticket(nexts[0], flights)) is None
    for ticket in (2, 0):
        answered(ledger, 0, key=flights[ticket])
    assert ledger.now(take_ticket(nexts[0], flights)) == 2
    answered(ledger, 0, key=flights[1])
    assert ledger.now(take_ticket(nexts[0], flights)) == 2  # a replay
    del flights[2]
    assert ledger.now(take_ticket(nexts[1], flights)) == 0


def test_what_was_taken_from_the_world_is_taken_again(ledger: Ledger) -> None:
    assert ledger.now(decide(KEY, lambda: [1, 2], 0.0)) == [1, 2]
    assert ledger.now(decide(KEY, lambda: [3], 0.0)) == [1, 2]


def test_what_comes_after_the_end_is_told_so(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "hansa.db")
    begun, go = threading.Event(), threading.Event()
    ledger.write(lambda db: (begun.set(), go.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    before = ledger.write(add("ann"))  # type: ignore[arg-type]
    closing = threading.Thread(target=ledger.close)
    closing.start()
    while not ledger._closed:
        pass
    after = [ledger.write(lambda db: None) for _ in range(2)]
    go.set()
    closing.join(PATIENCE)
    assert before.result(PATIENCE) == 1
    for future in (*after, ledger.write(lambda db: None)):
        with pytest.raises(LedgerError, match="the ledger is closed"):
            future.result(PATIENCE)
