"""Cells of a table: missing values, numbers, dates, and the codes of texts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Any

MISSING = ("", "?", "-", "NA", "N/A", "#N/A", "<NA>", "NaN", "NaT", "null", "None")  # upper and lower case alike
CODE_BITS = 52  # of a text's code: a float64 holds it exactly
NAME_BYTES = 64  # of a text in UTF-8, at most; a longer one is cut and ends with a hash
_CUT = NAME_BYTES - 17
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = 86_400.0


def missing_words(words: Iterable[str]) -> frozenset[str]:
    """Words for a missing value, as `is_missing` compares them."""
    return frozenset(word.strip().lower() for word in words)


USUAL = missing_words(MISSING)


def is_missing(cell: str, words: frozenset[str] = USUAL) -> bool:
    """Whether a cell says that its value is missing."""
    return cell.lower() in words


def is_number(cell: str) -> bool:
    """Whether a cell is a finite number."""
    return parsed_number(cell) is not None


def parsed_number(cell: str) -> float | None:
    """A finite number; None for anything else. Python's underscores (1_000) are no numbers."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in cell else None


def parsed_date(cell: str) -> float | None:
    """A date or time in ISO 8601 as days since 1970-01-01; None for anything else. Without a time zone it is UTC."""
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        return None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return (moment - _EPOCH).total_seconds() / _DAY


def canonical(text: str) -> str:
    """A text of at most NAME_BYTES bytes; a longer one is cut and ends with a hash of the whole."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= NAME_BYTES and b"\0" not in raw:
        return raw.decode()
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return raw.replace(b"\0", b" ")[:_CUT].decode("utf-8", "ignore") + "#" + digest


def text_code(text: str) -> int:
    """The code of a text in canonical form: 52 bits of its BLAKE2b hash, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - CODE_BITS)


def cell_text(value: Any) -> str | None:
    """A value of any type as the cell of a CSV file would have it; None for a missing value."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()
