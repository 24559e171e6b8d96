"""Invariants of a world that has ended, checked on what it left behind."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tally
import torch
from lives import Direct
from msgspec import structs

from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.job_records import needed_blobs
from hansa.net.aggregator.ledger import log_lines
from hansa.net.audit.evidence import head_line
from hansa.net.audit.verify import verify_lines
from hansa.plumbing import codec
from hansa.plumbing.errors import HansaError

if TYPE_CHECKING:
    from world import World

WIDTH = 9  # of the model


class Promises:
    """The checks, over one world."""

    def __init__(self, world: World) -> None:
        self.world, self.db, self.weather, self.names = world, world.db, world.weather, world.names
        self.fail = world.fail

    def check(self) -> None:
        """All of them."""
        job = self.db.execute("SELECT * FROM jobs").fetchone()
        lines = self.db.execute("SELECT * FROM rounds ORDER BY round").fetchall()
        empty = [json.loads(line["line"]).get("empty") is not None for line in lines]
        fine = job["status"] in ("finished", "stopped") or (job["status"] == "failed" and bool(empty) and all(empty))
        if not fine:
            self.fail(f"the job {job['status']}: {job['reason']}")
            return
        rounds = len(lines) if job["status"] == "stopped" else self.weather.rounds
        if [line["round"] for line in lines] != list(range(1, rounds + 1)):
            self.fail(f"the rounds are {[line['round'] for line in lines]}")
        self._check_receipts()
        self._check_log(len(lines), job["status"])
        self._check_audit()
        start = [0.0] * WIDTH
        if self.weather.algorithm == "tally":
            wanted = tally.expected(self._check_rounds(lines, empty), start)
        else:
            wanted = tally.expected_async(self._events(), start)
        parts = {"w": torch.tensor(wanted, dtype=torch.float64), "stats": torch.zeros(0, dtype=torch.float64),
                 "counts": torch.zeros(0, dtype=torch.int64)}  # fmt: skip
        if lines and lines[-1]["model"] != codec.digest(parts):
            self.fail(f"after the last round the model is not {wanted}")
        if job["status"] == "finished":
            self._check_model(job["model"], wanted)

    def _stored(self) -> dict[tuple[Any, ...], sqlite3.Row]:
        """The stored answers, by ask and party."""
        rows = self.db.execute("SELECT * FROM replies").fetchall()
        return {(r["job"], r["round"], r["phase"], r["number"], self.names[r["party"]]): r for r in rows}

    def _check_receipts(self) -> None:
        stored = self._stored()
        for receipt in self.world.receipts:
            row = stored.get((receipt.job, receipt.round, receipt.phase, receipt.number, receipt.party))
            if receipt.status == "accepted" and (row is None or row["given_up"] or row["blob"] != receipt.digest):
                self.fail(f"an acknowledged update is lost: {receipt}")
            if receipt.status == "rejected" and (row is None or not row["rejected"] or "not finite" not in row["why"]):
                self.fail(f"a good update was rejected: {receipt}")

    def _check_audit(self) -> None:
        """The log verifies, with all receipts that parties have stored."""
        self._verify(Direct(self.db, self.world.notary), sorted(self.world.folder.glob("*/home/receipts/*.jsonl")))

    def _verify(self, record: Direct, kept: list[Path]) -> None:
        size = record.now(lambda db: db.size())
        head = record.now(lambda db: db.head(size))
        lines = [line[:-1] for line in log_lines(record, 0, size)]
        try:
            verify_lines([*lines, head_line(json.dumps(structs.asdict(head)))[:-1]], None, kept)
        except HansaError as error:
            self.fail(f"the log does not verify: {error}")

    def _check_log(self, rounds: int, status: str) -> None:
        entries = self.db.execute("SELECT event, round FROM log").fetchall()
        closed = [entry["round"] for entry in entries if entry["event"] == "round closed"]
        if closed != list(range(1, rounds + 1)):
            self.fail(f"rounds were published as {closed}")
        if [entry["event"] for entry in entries].count(f"job {status}") != 1:
            self.fail("the job did not end once")

    def _check_rounds(self, lines: list[sqlite3.Row], empty: list[bool]) -> list[list[list[int]] | None]:
        """The members of each ask of each round; empty rounds change nothing, other rounds have their quorum."""
        history: list[list[list[int]] | None] = []
        models = [None, *(line["model"] for line in lines)]
        for place, line in enumerate(lines):
            asks = self.db.execute("SELECT number, parties, closed FROM asks WHERE phase = 'round' AND round = ? "
                                   "ORDER BY number", (place,)).fetchall()  # fmt: skip
            members = [json.loads(ask["closed"])["in"] for ask in asks]
            answered = {
                (r["number"], r["party"])
                for r in self.db.execute("SELECT number, party FROM replies WHERE phase = 'round' AND round = ? AND "
                                         "why IS NULL", (place,)).fetchall()
            }  # fmt: skip
            for ask, who in zip(asks, members, strict=True):
                if any((ask["number"], p) not in answered for p in who) or len(set(who)) != len(who):
                    self.fail(f"round {place + 1} counts {who}, who did not all answer once")
            if empty[place]:
                if json.loads(line["members"]) or (place and line["model"] != models[place]):
                    self.fail(f"round {place + 1} missed its quorum and changed something")
                history.append(None)
                continue
            if len(members) != self.weather.asks:
                self.fail(f"round {place + 1} has {len(members)} asks")
            for ask, who in zip(asks, members, strict=True):
                if len(who) < self._needed(len(json.loads(ask["parties"]))):
                    self.fail(f"round {place + 1} was fused below its quorum: {who} of {ask['parties']}")
            if json.loads(line["members"]) != [self.names[p] for p in sorted({p for who in members for p in who})]:
                self.fail(f"round {place + 1} says that it fused {line['members']}, and fused {members}")
            history.append(members)
        return history

    def _needed(self, asked: int) -> int:
        """The number of replies that make a quorum of `asked` parties."""
        quorum = self.weather.run["quorum"]
        least = -(-int(quorum * asked * 1000) // 1000) if isinstance(quorum, float) else quorum
        return max(least, self.weather.run.get("min_cohort", 1))

    def _events(self) -> list[tuple[int, int | None, int | None]]:
        """What an asynchronous job asked, and the order in which tickets were answered."""
        rows = self.db.execute("SELECT * FROM asks WHERE phase = 'round' ORDER BY round, number").fetchall()
        submitted = [row for row in rows if json.loads(row["parties"])]
        taken: set[int] = set()
        events: list[tuple[int, int | None, int | None]] = []
        for row in rows:
            parties = json.loads(row["parties"])
            if parties:
                events.append((row["round"], parties[0], None))
                continue
            if row["closed"] is None:
                continue
            ticket = json.loads(row["closed"])["ticket"]
            if ticket in taken:
                self.fail(f"the ticket {ticket} came back twice")
            taken.add(ticket)
            asked = submitted[ticket]
            lost = self.db.execute("SELECT why FROM replies WHERE round = ? AND phase = 'round' AND number = ?",
                                   (asked["round"], asked["number"])).fetchone()["why"]  # fmt: skip
            events.append((row["round"], None, -1 if lost else ticket))
        return events

    def _check_model(self, digest: str, wanted: list[float]) -> None:
        state = self.world.state
        if self.world.deaths:  # a process that dies before it has tidied up does so when it starts again
            Blobs(state).sweep(needed_blobs(Direct(self.db, self.world.notary)))
        here = {path.name for path in state.glob("blobs/??/*")}
        if here != {digest}:
            self.fail(f"of the blobs {here} only the model {digest} should be left")
        tree = codec.decode((state / "blobs" / digest[:2] / digest).read_bytes())
        found = _vector(tree)[:WIDTH]
        if found != wanted:
            self.fail(f"the model is {found} and should be {wanted}")


def _vector(tree: Any) -> list[float]:
    tensors: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            for inner in value.values():
                walk(inner)

    walk(tree)
    return [float(x) for tensor in tensors for x in tensor.flatten()]
