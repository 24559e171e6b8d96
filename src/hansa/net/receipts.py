"""A party's receipts: what the aggregator has signed that it has, kept so that it cannot be denied later."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
from msgspec import structs

from hansa.core import disk
from hansa.core.errors import DataError, HansaError
from hansa.net import keys
from hansa.net.client import Client
from hansa.net.evidence import Statement, canonical, receipt_fault
from hansa.net.points import reach
from hansa.net.wire import Receipt


class BadReceipt(HansaError):
    """The aggregator does not stand by what it was sent; there is no point in working for it."""


class Receipts:
    """The files `receipts/JOB.jsonl` in a party's folder: a line for each answer, on disk before anything else is done.
    `log.pem` is the certificate of the key that signs them; it is pinned when it is first needed."""

    def __init__(self, home: Path) -> None:
        self._home, self.folder = home, home / "receipts"
        self._log: keys.Identity | None = None

    async def expect(self, client: Client, federation: str) -> None:
        """Know whose signature receipts must have, before anything is sent."""
        if self._log is None:
            self._log = await self._pinned(client, federation)

    async def keep(self, receipt: Receipt, statement: Statement, signature: str) -> None:
        """Check a receipt and keep it; a BadReceipt where it is none for that statement."""
        assert self._log is not None
        fault = receipt_fault(receipt, statement, signature, self._log)
        if fault is not None:
            raise BadReceipt(f"the aggregator's receipt for {statement.job} {statement.round} is not good: {fault}")
        line = canonical({"receipt": structs.asdict(receipt), "statement": structs.asdict(statement)})
        await asyncio.to_thread(self._append, self.folder / f"{statement.job}.jsonl", line + b"\n")

    async def _pinned(self, client: Client, federation: str) -> keys.Identity:
        path, authority = self._home / "log.pem", (self._home / "ca.pem").read_bytes()
        if not path.exists():
            _, pem = await client.call("GET", "/v1/log/certificate", limit=keys.LIMIT)
            keys.certified(pem, authority, "log", federation)
            keys.write_private(path, pem)
        return keys.certified(path.read_bytes(), authority, "log", federation)

    def _append(self, path: Path, line: bytes) -> None:
        disk.make_folder(self.folder)
        reach("receipts.folder")
        if path.exists() and (whole := _whole_lines(path)) is not None:  # cut off in a line, on which nobody has acted
            disk.cut(path, whole)
        disk.append(path, line)
        disk.flush(path)
        reach("receipt.fsync")
        disk.sync_folder(self.folder)
        reach("receipt.kept")


def _whole_lines(path: Path) -> int | None:
    """The length of the whole lines of a file whose last one was cut off; None where none was."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return None
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return None
    return path.read_bytes().rfind(b"\n") + 1


class Kept(msgspec.Struct, frozen=True):
    """A line of a file of receipts."""

    receipt: Receipt
    statement: Statement


def read_receipts(path: Path) -> list[Kept]:
    """The receipts in a file; a last line that was cut off does not count. A DataError where another is none."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    decoder, out = msgspec.json.Decoder(Kept), []
    for number, line in enumerate(lines, 1):
        try:
            out.append(decoder.decode(line))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not a receipt: {error}") from None
    return out
