"""A deployed job in the ledger: its facts, one transaction per closed round, and the blobs that it needs."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hansa.core.algorithm import Algorithm, State
from hansa.net.aggregator.asks import WHERE
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.ledger import Ledger, Writer
from hansa.net.aggregator.queue import Key
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.net.audit.evidence import model_digest, state_digests
from hansa.numerics.params import short
from hansa.plumbing import codec
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import ConfigError, DataError

REASON = 200  # most characters of a reason in the log: why a party is not in a round, or a round is empty
ACTIVE = "status IN ('waiting', 'running', 'stopping')"
LASTING = "(phase LIKE 'describe%' OR phase LIKE 'prepare%')"  # replies that a job needs until it ends


@dataclass(frozen=True)
class JobFacts:
    """What is drawn once for a job: the parties that take part, and the seed of all draws that parties must not guess.

    Parties that are invited later do not join a running job. The secret is in no log, report or answer.
    """

    parties: tuple[str, ...]
    secret: str


def fix_facts(job: str, parties: Sequence[str]) -> Callable[[Writer], JobFacts]:
    """Store a job's facts with these parties and a new secret; where they were stored before, they stay."""

    def change(db: Writer) -> JobFacts:
        row = db.one("SELECT parties, secret FROM job_facts WHERE job = ?", job)
        if row is not None:
            return JobFacts(tuple(json.loads(row["parties"])), row["secret"])
        facts = JobFacts(tuple(parties), secrets.token_hex(32))
        db.run("INSERT INTO job_facts VALUES (?, ?, ?)", job, json.dumps(facts.parties), facts.secret)
        return facts

    return change


class JobRecords:
    """The metrics and checkpoints of a job in the ledger. Closing a round is one transaction."""

    def __init__(self, job: str, ledger: Ledger, blobs: Blobs, runtime: NetworkRuntime,
                 algorithm: Algorithm | None = None) -> None:  # fmt: skip
        self.job, self.ledger, self.blobs, self.runtime = job, ledger, blobs, runtime
        self._algorithm, self._whole = algorithm, True
        self._line: dict[str, Any] = {}

    def _hashes(self, state: Mapping[str, Any]) -> dict[str, str]:
        """The hashes of the server's state for the log. `model` is the hash of the algorithm's model. If that is the
        parameters, parties can compare it with what they are sent; if the algorithm has no network (a tree), it is the
        hash of the state."""
        params, whole = state_digests(state)
        if self._algorithm is not None:
            params = model_digest(self._algorithm, State.of_tree(state)) or whole
        return {"model": params, "state": whole}

    def begin(self, initial: Mapping[str, Any], base: str | None = None) -> None:
        """Log, once, the hashes of the initial state and of the model's frozen parameters; from then on asks name the
        model of their round. A job that version 0.1.0 began continues as before: with the hash of the parameters
        alone. A ConfigError if the frozen parameters are not those with which the job began."""

        def change(db: Writer) -> dict[str, str]:
            row = db.one("SELECT detail FROM log WHERE job = ? AND event = 'job begun'", self.job)
            if row is not None:
                return json.loads(row["detail"])  # type: ignore[no-any-return]
            hashes = self._hashes(initial)
            frozen: dict[str, Any] = {} if base is None else {"base": base}
            db.log("job begun", self.job, model=hashes["model"], state=hashes["state"], **frozen)
            return {**hashes, **frozen}

        begun = self.ledger.now(change)
        if begun.get("base") != base:
            raise ConfigError(
                f"the frozen parameters of the model are not those with which {self.job} began (SHA-256 "
                f"{short(begun.get('base'))}, now {short(base)}); restore the base and submit the job again"
            )
        self._whole = "state" in begun
        rows = self.ledger.all("SELECT round, model FROM rounds WHERE job = ?", self.job)
        self.runtime.models = {0: begun["model"]} | {row["round"]: row["model"] for row in rows}

    def append(self, line: dict[str, Any]) -> None:
        self._line = line

    def checkpoint(self, tree: dict[str, Any]) -> None:
        """Close a round in one transaction: its members with their log entries, the hashes of the model before and
        after, the metrics line, and the signed head of the log."""
        reach("model.save")
        digest, _ = self.blobs.put(codec.pieces(tree))
        reach("model.saved")
        hashes = self._hashes(tree["state"]) if self._whole else {"model": codec.digest(tree["state"]["params"])}
        model, line = hashes["model"], self._line
        number = line["round"]
        empty = line.get("empty")
        used = [of for of in self.runtime.used if not of[0][2].startswith("select")] if empty is None else []
        members = [self.runtime.parties[party] for party in sorted({party for _, party in used})]
        reasons: dict[str, Any] = {
            name: {party: why[:REASON] for party, why in line[name].items()}
            for name in ("missing", "rejected") if name in line
        }  # fmt: skip
        reasons |= {"excluded": line["fusion"]["excluded"]} if "fusion" in line else {}
        under_way = {flight.key for flight in self.runtime.flights}

        def change(db: Writer) -> list[str]:
            fused = _fused(db, used, self.runtime.parties)
            size = db.log("round closed", self.job, number, members=fused, before=self.runtime.models[number - 1],
                          **hashes, empty=empty and empty[:REASON], **reasons)  # fmt: skip
            head = json.dumps(msgspec.structs.asdict(db.head(size, self.job, number, model)))
            row = (self.job, number, time.time(), json.dumps(members), model, head, json.dumps(line))
            db.run("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)", *row)
            before = db.one("SELECT checkpoint FROM jobs WHERE id = ?", self.job)
            db.run("UPDATE jobs SET checkpoint = ? WHERE id = ?", digest, self.job)
            done = db.all(f"SELECT seq, job, round, phase, number, blob FROM replies WHERE job = ? AND round < ? AND "
                          f"spent = 0 AND NOT {LASTING}", self.job, number)  # fmt: skip
            done = [row for row in done if (row["job"], row["round"], row["phase"], row["number"]) not in under_way]
            db.run(f"UPDATE replies SET spent = 1 WHERE seq IN ({','.join(str(row['seq']) for row in done)})")
            old = [before["checkpoint"]] if before is not None and before["checkpoint"] != digest else []
            return [blob for blob in [*old, *(row["blob"] for row in done)] if blob is not None]

        old = self.ledger.now(change)
        self.runtime.models[number] = model
        reach("round.closed")
        discard(self.ledger, self.blobs, old)

    def restore(self) -> dict[str, Any] | None:
        row = self.ledger.one("SELECT checkpoint FROM jobs WHERE id = ?", self.job)
        if row is None or row["checkpoint"] is None:
            return None
        try:
            tree: dict[str, Any] = codec.decode(self.blobs.read(row["checkpoint"]))
        except (FileNotFoundError, DataError) as error:  # after other errors the job reads it again
            raise DataError(f"the checkpoint of {self.job} is damaged: {error}") from None
        return tree

    def history(self) -> list[dict[str, Any]]:
        rows = self.ledger.all("SELECT line FROM rounds WHERE job = ? ORDER BY round", self.job)
        return [json.loads(row["line"]) for row in rows]


def _fused(db: Writer, used: Sequence[tuple[Key, int]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The fused replies, as the log entry of their round names them: by who signed, a party, or a relay for several
    parties, whose names are in `parties`."""
    members: dict[int, dict[str, Any]] = {}
    for key, party in used:
        row = db.one(f"SELECT entry, blob FROM replies WHERE {WHERE} AND party = ?", *key, party)
        signer = db.one("SELECT party FROM log WHERE seq = ?", row["entry"]) if row is not None else None
        assert row is not None and signer is not None
        member = {"party": signer["party"], "index": row["entry"] - 1, "update": row["blob"]}
        member = members.setdefault(row["entry"], member)
        if signer["party"] != names[party]:
            member.setdefault("parties", []).append(names[party])
    return list(members.values())


def needed_blobs(db: Any) -> set[str]:
    """The blobs that must stay: models, checkpoints and samples of jobs, replies that may still be fused, and those
    that a job keeps."""
    rows = db.all(
        f"SELECT model AS blob FROM jobs UNION SELECT checkpoint FROM jobs WHERE {ACTIVE} UNION "
        f"SELECT central FROM jobs WHERE {ACTIVE} UNION SELECT blob FROM replies WHERE spent = 0 UNION "
        "SELECT reply FROM kept UNION SELECT sent FROM kept"
    )
    return {row["blob"] for row in rows if row["blob"] is not None}


def discard(ledger: Ledger, blobs: Blobs, candidates: list[str]) -> None:
    """Delete those of the blobs that nothing needs.

    The ledger's writer does it, which also stores new answers, so that no answer can come in between. It does it after
    the commit: after a power failure, a change that was not committed might still need the blob.
    """
    if not candidates:
        return

    def unneeded(db: Writer) -> None:
        for blob in candidates:
            used = db.one(
                "SELECT 1 FROM replies WHERE blob = ? AND spent = 0 UNION ALL SELECT 1 FROM jobs WHERE model = ? "
                f"OR ((checkpoint = ? OR central = ?) AND {ACTIVE}) UNION ALL "
                "SELECT 1 FROM kept WHERE reply = ? UNION ALL SELECT 1 FROM kept WHERE sent = ?",
                *[blob] * 6,
            )
            if used is None:
                blobs.discard(blob)

    ledger.now(lambda db: db.after(unneeded))
