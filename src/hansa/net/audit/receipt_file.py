"""Reading a party's file of receipts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hansa.net.audit.evidence import Statement
from hansa.net.transport.wire import Receipt
from hansa.plumbing import disk
from hansa.plumbing.errors import DataError


class StoredReceipt(msgspec.Struct, frozen=True):
    """A line of the file: a receipt and the statement that it confirms."""

    receipt: Receipt
    statement: Statement


def read_receipts(path: Path) -> list[StoredReceipt]:
    """Read the receipts in a file. A truncated last line is ignored; another invalid line is a DataError."""
    try:
        lines = disk.whole(path.read_bytes()).split(b"\n")[:-1]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    decoder, out = msgspec.json.Decoder(StoredReceipt), []
    for number, line in enumerate(lines, 1):
        try:
            out.append(decoder.decode(line))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: invalid receipt: {error}") from None
    return out
