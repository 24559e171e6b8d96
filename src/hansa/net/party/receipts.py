"""A party's receipts: signed acknowledgements that the aggregator cannot deny later."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from msgspec import structs

from hansa.net.audit.evidence import Statement, canonical, receipt_fault, signed_by
from hansa.net.transport import certificates, keys
from hansa.net.transport.client import Client
from hansa.net.transport.wire import Receipt
from hansa.plumbing import disk
from hansa.plumbing.crash_points import reach, steps
from hansa.plumbing.errors import HansaError

LINE = 2**17  # bytes: longer than any line
NEWEST = "newest.mark"  # in the party's folder: the mark of its vault with the newest receipt


class BadReceipt(HansaError):
    """An invalid receipt: the aggregator does not confirm what it was sent, so the party stops."""


class Receipts:
    """The files `receipts/JOB.jsonl` in a party's folder: one line per answer, on disk before the party goes on.

    `log.pem` is the certificate of the key that signs receipts; it is pinned on first use.
    """

    def __init__(self, party_folder: Path) -> None:
        self._party_folder, self.folder = party_folder, party_folder / "receipts"
        self._log: certificates.Identity | None = None
        self._doubtful: set[Path] = set()  # files whose last flush failed: their content on disk is unknown

    async def expect(self, client: Client, federation: str) -> None:
        """Load the certificate that must have signed the receipts, before anything is sent."""
        if self._log is None:
            self._log = await self._pinned(client, federation)

    async def keep(self, receipt: Receipt, statement: Statement, signature: str, mark: str | None = None) -> None:
        """Check a receipt and store it; a BadReceipt if it does not match the statement.

        `mark` is the mark of the party's vault when it answered.
        """
        assert self._log is not None
        if self._signed_before(statement.signed_bytes(), receipt.signature):
            signature = receipt.signature
        fault = receipt_fault(receipt, statement, signature, self._log)
        if fault is not None:
            raise BadReceipt(
                f"the aggregator's receipt for job {statement.job}, round {statement.round}, is invalid: {fault}"
            )
        line = canonical({"receipt": structs.asdict(receipt), "statement": structs.asdict(statement)})
        if mark is not None:  # before the line: after an error both are written again, and a line would be twice
            await asyncio.to_thread(disk.put, self._party_folder / NEWEST, [mark.encode()], steps("private"))
        await asyncio.to_thread(self._append, self.folder / f"{statement.job}.jsonl", line + b"\n")

    def newest_mark(self) -> str | None:
        """The mark of the vault with the newest receipt, or of the aggregator where the vault lacks its content."""
        path = self._party_folder / NEWEST
        return path.read_text() if path.exists() else None

    def _signed_before(self, data: bytes, signature: str) -> bool:
        """Whether the party signed the data, a statement for example, with a former key.

        Only the first answer counts. A party that missed its receipt, got a new certificate and answered again receives
        the receipt of the first answer, with the old signature.
        """
        former = certificates.public_keys(self._party_folder / "former.pem")
        return any(signed_by(key, signature, data) for key in former)

    async def _pinned(self, client: Client, federation: str) -> certificates.Identity:
        path, authority = self._party_folder / "log.pem", (self._party_folder / "ca.pem").read_bytes()
        if not path.exists():
            _, pem = await client.call("GET", "/v1/log/certificate", limit=keys.LIMIT)
            certificates.verify_certificate(pem, authority, "log", federation)
            disk.put(path, [pem], steps("private"))
        return certificates.verify_certificate(path.read_bytes(), authority, "log", federation)

    def _append(self, path: Path, line: bytes) -> None:
        disk.make_folder(self.folder)
        reach("receipts.folder")
        if path.exists() and ((end := _torn(path)) is not None or path in self._doubtful):
            whole = path.read_bytes()[:end]  # without the torn line, which was never acknowledged
            disk.put(path, [whole], steps("private"))
        disk.append(path, line)
        self._doubtful.add(path)
        disk.flush(path)
        self._doubtful.discard(path)
        reach("receipt.fsync")
        disk.sync_folder(self.folder)
        reach("receipt.kept")


def _torn(path: Path) -> int | None:
    """Where a torn last line begins; None if the last line is complete."""
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - LINE)
        file.seek(start)
        tail = file.read()
    whole = len(disk.whole(tail))
    return None if whole == len(tail) else start + whole
