"""Tables of the aggregator's database, and the upgrade of a database that an earlier version made."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from hansa.plumbing.errors import ConfigError

VERSION = 3  # of the tables, in the database's `user_version`
SCHEMA = """
CREATE TABLE IF NOT EXISTS parties (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, joined INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS tokens (
    digest TEXT PRIMARY KEY, party TEXT NOT NULL, expires REAL NOT NULL, certificate TEXT,
    void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS certificates (
    fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, state TEXT NOT NULL, key TEXT NOT NULL,
    pem BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS certificates_by_name ON certificates (name);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, submitted REAL NOT NULL, status TEXT NOT NULL, reason TEXT,
    order_ BLOB NOT NULL, central TEXT, checkpoint TEXT, model TEXT, summary TEXT);
CREATE TABLE IF NOT EXISTS job_facts (job TEXT PRIMARY KEY, parties TEXT NOT NULL, secret TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS manifests (job TEXT PRIMARY KEY, manifest BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
    job TEXT NOT NULL, round INTEGER NOT NULL, closed REAL NOT NULL, members TEXT NOT NULL, model TEXT NOT NULL,
    head TEXT NOT NULL, line TEXT NOT NULL, PRIMARY KEY (job, round));
CREATE TABLE IF NOT EXISTS asks (
    job TEXT NOT NULL, round INTEGER NOT NULL, phase TEXT NOT NULL, number INTEGER NOT NULL, digest TEXT NOT NULL,
    parties TEXT NOT NULL, opened REAL NOT NULL, closed TEXT, PRIMARY KEY (job, round, phase, number));
CREATE TABLE IF NOT EXISTS replies (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, round INTEGER NOT NULL, phase TEXT NOT NULL, number INTEGER NOT NULL, party INTEGER NOT NULL,
    blob TEXT, size INTEGER NOT NULL, staged INTEGER NOT NULL, why TEXT, seconds REAL NOT NULL, entry INTEGER,
    receipt BLOB, given_up INTEGER NOT NULL DEFAULT 0, spent INTEGER NOT NULL DEFAULT 0,
    rejected INTEGER NOT NULL DEFAULT 0,
    UNIQUE (job, round, phase, number, party));
CREATE INDEX IF NOT EXISTS replies_by_blob ON replies (blob) WHERE spent = 0;
CREATE INDEX IF NOT EXISTS replies_unspent ON replies (job, round) WHERE spent = 0;
CREATE TABLE IF NOT EXISTS kept (
    job TEXT NOT NULL, round INTEGER NOT NULL, phase TEXT NOT NULL, number INTEGER NOT NULL, party INTEGER NOT NULL,
    reply TEXT NOT NULL, sent TEXT NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (job, round, phase, number, party));
CREATE INDEX IF NOT EXISTS kept_by_reply ON kept (reply);
CREATE INDEX IF NOT EXISTS kept_by_sent ON kept (sent);
CREATE TABLE IF NOT EXISTS log (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, job TEXT, round INTEGER, party TEXT, event TEXT NOT NULL,
    detail TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS log_begun ON log (job) WHERE event = 'job begun';
CREATE INDEX IF NOT EXISTS log_absent ON log (job) WHERE event = 'not taking part';
CREATE TABLE IF NOT EXISTS relayed (
    job TEXT NOT NULL, round INTEGER NOT NULL, phase TEXT NOT NULL, number INTEGER NOT NULL, work BLOB NOT NULL,
    PRIMARY KEY (job, round, phase, number));
CREATE TABLE IF NOT EXISTS vault_marks (
    party TEXT PRIMARY KEY, mark TEXT NOT NULL, signature TEXT NOT NULL, certificate TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (
    level INTEGER NOT NULL, place INTEGER NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (level, place)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commits (n INTEGER NOT NULL);
INSERT INTO commits SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM commits);
"""


def create(db: Any, path: Path) -> None:
    """Create the tables that a database lacks, and upgrade one of format 2 (hansa 0.1); refuse other formats."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, 2, VERSION):
        raise ConfigError(
            f"{path} was made by another version of hansa (format {version}, this is {VERSION}); finish its jobs "
            "with the version that made it, or make a new federation with `hansa init-federation` and enrol the "
            "parties again"
        )
    db.executescript(SCHEMA)
    if version == 2:
        _upgrade_from_2(db)
    elif version == 0:  # to set the version is a write, even where it stays the same
        db.execute(f"PRAGMA user_version = {VERSION}")


def _upgrade_from_2(db: Any) -> None:
    """Move every job's parties and secret from `asks` to `job_facts`, in one transaction.

    Format 2 had them as asks that nobody was asked, with the value as JSON in `closed`. A job that 0.1.0 began has
    parties and no secret.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        rows = "FROM asks WHERE round = 0 AND number = 0 AND digest = '' AND phase"
        drawn = dict(db.execute(f"SELECT job, closed {rows} = 'secret'").fetchall())
        for job, parties in db.execute(f"SELECT job, closed {rows} = 'parties'").fetchall():
            secret = json.loads(drawn[job]) if job in drawn else secrets.token_hex(32)
            db.execute("INSERT INTO job_facts VALUES (?, ?, ?)", (job, parties, secret))
        db.execute(f"DELETE {rows} IN ('parties', 'secret')")
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
