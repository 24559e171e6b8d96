"""A federation with a relay, whose processes are killed and restarted; see chaos_kit.py."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_kit import AGGREGATOR, PARTIES, Federation, Member

from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.job_records import needed_blobs
from hansa.net.audit.verify import Report
from hansa.net.local import free_port

RELAY = "hub"
BEHIND = PARTIES[:2]
# A point, and how often it is reached before the process dies; a process dies once per life, in this order.
RELAYED = {
    RELAY: [
        ("ledger.created", 1), ("private.rename", 2), ("ledger.execute", 3), ("ledger.commit", 3), ("ask.opened", 1),
        ("upload.chunk", 1), ("blob.shelf", 1), ("blob.fsync", 1), ("blob.rename", 1), ("reply.stored", 1),
        ("reply.written", 1), ("reply.acknowledged", 1), ("ask.closed", 1), ("relay.decided", 1), ("blob.written", 1),
        ("blob.folder", 2), ("relay.summed", 1), ("upload.sent", 1), ("receipts.folder", 1), ("receipt.fsync", 1),
        ("receipt.kept", 1), ("relay.received", 1), ("relay.finished", 1), ("blob.discarded", 1),
        ("relay.summed", 3), ("ledger.commit", 12),
    ],
    AGGREGATOR: [("reply.stored", 2), ("reply.written", 2), ("reply.acknowledged", 2), ("round.fused", 1),
                 ("round.closed", 1)],
    "north": [("party.trained", 2), ("upload.sent", 3), ("party.received", 3)],
}  # fmt: skip


@dataclass(frozen=True)
class _Ledger:
    """The ledger of the relay, for reading."""

    database: Path

    def all(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return Federation.rows_of(self.database, sql, *values)


class RelayedFederation(Federation):
    """Two parties behind a relay, and one that is connected to the aggregator itself."""

    def _init(self) -> FederationFolder:
        self.hub = init(self.folder / RELAY, "chaos-hub", BEHIND, ["127.0.0.1"], free_port())
        self.hub_ledger = _Ledger(self.hub.folder / "state" / "hansa.db")
        self.root = init(self.home, "chaos", PARTIES, ["127.0.0.1"], free_port(), relays={RELAY: BEHIND})
        token = self.home / "tokens" / f"{RELAY}.token"
        self.relay = Member(RELAY, ["relay", str(self.hub.folder), self.root.url, "--token-file", str(token)])
        return self.root

    def _join(self, name: str, made: FederationFolder) -> None:
        self.members.setdefault(RELAY, self.relay)
        super()._join(name, self.hub if name in BEHIND else made)

    def check_receipts(self) -> int:
        """Check that every answer with a receipt is in the ledger that gave the receipt, unchanged."""
        path = self.folder / "receipts.jsonl"
        got = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        accepted = [receipt for receipt in got if receipt["status"] == "accepted"]
        columns = "SELECT job, round, phase, number, party, blob FROM replies"
        stored = {tuple(row) for row in self.rows(columns)}
        behind = {tuple(row) for row in self.hub_ledger.all(columns)}
        for receipt in accepted:
            name, asked = receipt["party"], tuple(receipt[field] for field in ("job", "round", "phase", "number"))
            ledger, names = (behind, BEHIND) if name in BEHIND else (stored, PARTIES)
            assert (*asked, names.index(name), receipt["digest"]) in ledger, f"lost: {receipt}"
        return len(accepted)

    def check_audit(self) -> Report:
        """Check both logs: that of the relay with the receipts of its parties, that of the root with its own."""
        homes = self.folder / "homes"
        inner = sorted(path for name in BEHIND for path in homes.glob(f"{name}/receipts/*.jsonl"))
        behind = self._verified(self.hub_ledger, self.hub.notary(), inner)
        assert behind.receipts > 0 and behind.updates > 0
        outer = sorted([*homes.glob(f"{PARTIES[2]}/receipts/*.jsonl"), *self.hub.folder.glob("relay/receipts/*.jsonl")])
        return self._verified(self, self.notary, outer)

    def check_needed(self) -> None:
        super().check_needed()
        here = {path.name for path in (self.hub.folder / "state" / "blobs").glob("??/*")}
        assert needed_blobs(self.hub_ledger) <= here, "the relay lost a blob that it needs"

    def check_passed_on(self, job: str) -> None:
        """Check that the relay passed on every reply that it acknowledged, once, and keeps nothing."""
        rows = self.hub_ledger.all("SELECT detail FROM log WHERE job = ? AND event = 'passed on'", job)
        asks = [json.loads(row["detail"]) for row in rows]
        round_of = [(ask["receipt"]["round"], ask["phase"], ask["number"]) for ask in asks]
        assert len(round_of) == len(set(round_of)), "an ask was passed on twice"
        entries = {row["entry"] for row in self.rows("SELECT entry FROM replies WHERE job = ? AND party < 2", job)}
        known = {ask["receipt"]["index"] + 1 for ask in asks if ask["receipt"]["index"] is not None}
        assert known <= entries
        assert not self.hub_ledger.all("SELECT 1 FROM relayed")
        assert not self.hub_ledger.all("SELECT 1 FROM replies WHERE spent = 0 AND blob IS NOT NULL")
