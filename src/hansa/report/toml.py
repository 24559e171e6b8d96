"""Plain data as readable TOML text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

WIDE = 110  # an array up to this many characters stays on one line
BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(tree: Mapping[str, Any]) -> str:
    """The tree as TOML: tables for mappings at top level, inline tables below; None is left out."""
    blocks = []
    plain = {name: value for name, value in tree.items() if not _is_table(value) and not _is_tables(value)}
    if plain:
        blocks.append(_lines(plain))
    for name, value in tree.items():
        if _is_table(value):
            blocks.append(f"[{_key(name)}]\n{_lines(value)}")
        elif _is_tables(value):
            blocks += [f"[[{_key(name)}]]\n{_lines(table)}" for table in value]
    return "\n".join(blocks)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_table, value))


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in table.items() if value is not None)


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    """A basic string, escaped as in JSON; invisible and bidirectional control characters are escaped too."""
    return "".join(c if c.isprintable() else _escaped(c) for c in json.dumps(text, ensure_ascii=False))


def _escaped(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {_value(v)}" for name, v in value.items() if v is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        parts = [_value(part) for part in value if part is not None]
        line = f"[{', '.join(parts)}]"
        return line if len(line) <= WIDE else "[\n" + "".join(f"  {part},\n" for part in parts) + "]"
    return _text(str(value))
