"""A database of hansa 0.1 is upgraded when it is opened, and its jobs continue with their parties and secrets."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from league import League

from hansa.net.aggregator.job_records import JobFacts, fix_facts
from hansa.net.aggregator.ledger import Ledger, LedgerError, connect
from hansa.net.aggregator.schema import SCHEMA, VERSION

PARTIES, SECRET = ["ann", "bob"], "ab" * 32
FACTS = "CREATE TABLE IF NOT EXISTS job_facts"
ASK = "INSERT INTO asks VALUES (?, ?, ?, ?, ?, ?, 0, ?)"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of format 2: the parties and the secret of a job are rows of `asks`."""
    path = tmp_path / "hansa.db"
    with contextlib.closing(connect(path)) as db:
        tables = [line for line in SCHEMA.splitlines() if not line.startswith(FACTS)]
        assert len(tables) == len(SCHEMA.splitlines()) - 1
        db.executescript("\n".join(tables))
        db.execute("PRAGMA user_version = 2")
        for phase, value in (("parties", PARTIES), ("secret", SECRET), ("begin", [0, 1])):
            db.execute(ASK, ("job-1", 0, phase, 0, "", "[]", json.dumps(value)))
        db.execute(ASK, ("job-1", 0, "describe", 0, "digest", "[0, 1]", None))
        db.execute(ASK, ("of-0.1.0", 0, "parties", 0, "", "[]", json.dumps(PARTIES)))
    return path


def test_the_parties_and_the_secret_of_a_job_move_to_their_table(old: Path) -> None:
    ledger = Ledger(old)
    assert ledger.now(fix_facts("job-1", ["ann", "bob", "cid"])) == JobFacts(("ann", "bob"), SECRET)
    rows = ledger.all("SELECT job, phase FROM asks ORDER BY phase")
    assert [tuple(row) for row in rows] == [("job-1", "begin"), ("job-1", "describe")]
    assert ledger.all("PRAGMA user_version")[0][0] == VERSION
    ledger.close()
    ledger = Ledger(old)  # which upgrades nothing
    assert ledger.now(fix_facts("job-1", [])).secret == SECRET
    ledger.close()


def test_a_job_without_a_secret_gets_one_and_keeps_it(old: Path) -> None:
    ledger = Ledger(old)
    facts = ledger.now(fix_facts("of-0.1.0", []))
    assert facts.parties == ("ann", "bob") and len(bytes.fromhex(facts.secret)) == 32
    ledger.close()
    ledger = Ledger(old)
    assert ledger.now(fix_facts("of-0.1.0", [])) == facts
    ledger.close()


@pytest.mark.parametrize("start", ["BEGIN", "INSERT INTO job_facts", "DELETE", "PRAGMA user_version =", "COMMIT"])
def test_an_upgrade_that_fails_changes_nothing_and_is_made_at_the_next_start(old: Path, start: str) -> None:
    class Failing(sqlite3.Connection):
        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            if sql.startswith(start):
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *values)

    def failing(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Failing)

    with pytest.raises(LedgerError, match="disk I/O error"):
        Ledger(old, connect=failing)
    with contextlib.closing(sqlite3.connect(old)) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == 2
        assert db.execute("SELECT count(*) FROM asks WHERE phase IN ('parties', 'secret')").fetchone()[0] == 3
        assert db.execute("SELECT count(*) FROM job_facts").fetchone()[0] == 0
    ledger = Ledger(old)
    assert ledger.now(fix_facts("job-1", [])).secret == SECRET
    ledger.close()


@pytest.mark.slow
def test_a_job_that_was_interrupted_under_format_2_goes_on_with_the_same_parties_and_secret(
    league: League, quick: None
) -> None:
    league.join_all()
    task = {"dataset": "heart", "model": "logistic", "dtype": "float64", "party_test": 0.25}
    job = league.submit({"task": task, "run": {"rounds": 40}})
    league.until(lambda: len(league.shown(job)["rounds"]) >= 3)
    league.stop()
    path = league.folder / "state" / "hansa.db"
    with contextlib.closing(connect(path)) as db:
        facts = db.execute("SELECT parties, secret FROM job_facts WHERE job = ?", (job,)).fetchone()
        db.execute("DROP TABLE job_facts")
        for phase, value in (("parties", facts["parties"]), ("secret", json.dumps(facts["secret"]))):
            db.execute(ASK, (job, 0, phase, 0, "", "[]", value))
        db.execute("PRAGMA user_version = 2")
    path.with_suffix(".mark").unlink()
    league.start()
    ended = league.ended_after_all(job)
    assert ended["status"] == "finished" and len(ended["rounds"]) == 40
    row = league.ledger.one("SELECT parties, secret FROM job_facts WHERE job = ?", job)
    assert row is not None and tuple(row) == tuple(facts)
