"""Print registered parts with their fields, and the samples of each party of an experiment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hansa.core.fields import limits_of, plain, range_of, stated_types
from hansa.core.plain_data import field_default, field_types, to_config, type_name
from hansa.core.registry import KINDS, Part, lookup, noun, registered, summary  # fmt: skip
from hansa.data import draw, held
from hansa.data import table as count_table
from hansa.experiment.config import Experiment
from hansa.plumbing.errors import ConfigError
from hansa.secure.channel import CURIOUS, Channel

console = Console()


def show_kinds(as_json: bool) -> None:
    """Print all kinds of parts, with the names of the registered parts."""
    names_of = {kind: list(registered(kind)) for kind in KINDS}
    if as_json:
        print(json.dumps(names_of))
        return
    table = Table("kind", "description", "parts")
    for kind, names in names_of.items():
        table.add_row(kind, noun(kind), ", ".join(names) or "none")
    console.print(table)
    console.print("hansa parts KIND lists the parts of a kind with their fields; hansa parts KIND NAME describes one")


def rows(cls: type[Part], prefix: str = "") -> list[tuple[str, str, str, str, str]]:
    """Name, type, default, limits and the owner's default range of each field, as text.

    The fields of a default that is itself a part follow, by dotted names.
    """
    out = []
    for name, hint in stated_types(cls).items():
        default = field_default(cls, name)
        part = isinstance(default, Part)
        text = "needed" if default is dataclasses.MISSING else default.name if part else str(default)
        out.append((prefix + name, type_name(plain(hint)), text, limits_of(hint), range_of(cls, hint)))
        out += rows(type(default), f"{prefix}{name}.") if part else []
    return out


def fields(cls: type[Part]) -> list[dict[str, Any]]:
    """Name, type and default of each field, with the limits and the owner's default range of numbers."""
    out = []
    for name, hint in stated_types(cls).items():
        default = field_default(cls, name)
        if default is dataclasses.MISSING:
            default = None
        elif isinstance(default, Part):
            default = to_config(default)
        elif isinstance(default, tuple):
            default = [to_config(part) if isinstance(part, Part) else part for part in default]
        said = {"limits": limits_of(hint), "owner": range_of(cls, hint)}
        out.append({"name": name, "type": type_name(plain(hint)), "default": default,
                    **{key: text for key, text in said.items() if text}})  # fmt: skip
    return out


def show_parts(kind: str, name: str | None, as_json: bool) -> None:
    """Print all parts of a kind, or describe one."""
    chosen = registered(kind) if name is None else {name: lookup(kind, name)}
    if as_json:
        described = [
            {"name": n, "about": summary(c)[0], "details": summary(c)[1],
             **({"withstands": withstands} if (withstands := _withstands(c)) else {}),
             "fields": fields(c),
             **({"payload": {f: words for f, words in entries}} if (entries := _entries(c)) else {})}
            for n, c in chosen.items()
        ]  # fmt: skip
        print(json.dumps(described if name is None else described[0]))
        return
    if name is None:
        sums = kind == Channel.kind
        table = Table(kind, "description", *(["withstands"] if sums else []), "fields")
        for n, cls in chosen.items():
            extra = [_withstands(cls)] if sums else []
            table.add_row(n, summary(cls)[0], *extra, ", ".join(field_types(cls)))
        console.print(table)
        return
    about, details = summary(chosen[name])
    console.print(f"{name}: {about}", markup=False)
    if details:
        console.print(details, markup=False)
    if withstands := _withstands(chosen[name]):
        console.print(f"withstands: {withstands}", markup=False)
    heads, found = ["field", "type", "default", "limits", "owner's range"], rows(chosen[name])
    shown = [at for at in range(len(heads)) if at < 3 or any(row[at] for row in found)]
    table = Table(*(heads[at] for at in shown))
    for row in found:
        table.add_row(*(escape(row[at]) for at in shown))
    console.print(table)
    if entries := _entries(chosen[name]):
        table = Table("payload entry", "what it must be")
        for entry in entries:
            table.add_row(*map(escape, entry))
        console.print(table)


def _entries(cls: type[Part]) -> list[tuple[str, str]]:
    """What an op or predictor reads from its payload. Those of a wrapper are around its default inner op."""
    stated = getattr(cls, "entries", None)
    if isinstance(stated, property):
        needed = any(field_default(cls, name) is dataclasses.MISSING for name in field_types(cls))
        stated = None if needed else cls().entries  # type: ignore[attr-defined]
    pairs = stated.items() if isinstance(stated, Mapping) else ()
    return [(name, f"{entry.words}; optional" if entry.optional else entry.words) for name, entry in pairs]


def _withstands(cls: type[Part]) -> str:
    """The worst aggregator that a secure sum withstands, by default and without `active`; empty for other parts."""
    if not issubclass(cls, Channel):
        return ""
    weaker = f" (with active = false: {CURIOUS})" if "active" in field_types(cls) else ""
    return f"{cls.against}{weaker}"


def show_partition(experiment: Experiment, out: Path, as_json: bool) -> None:
    """Draw the samples of each party, and print their counts."""
    task = experiment.build_task()
    rows, joined = held(task)
    classes = task.classes if task.ids is None else None
    names = list(task.names) if task.names is not None else [str(k) for k in range(len(rows))]
    counts = count_table(rows, joined, classes)
    try:
        draw(rows, joined, classes, out, names if task.names is not None else None)
    except OSError as error:
        raise ConfigError(f"cannot draw to {out}: {error.strerror}") from None
    if as_json:
        print(json.dumps({"parties": names, "counts": counts, "picture": str(out)}))
        return
    wide = classes is not None and classes <= 20
    table = Table("party", "samples", *([str(c) for c in range(classes or 0)] if wide else []))
    for name, row in list(zip(names, counts, strict=True))[:40]:
        table.add_row(name, str(sum(row)), *([str(c) for c in row] if wide else []))
    console.print(table)
    if len(names) > 40:
        console.print(f"... and {len(names) - 40} more parties")
    console.print(f"drawn in {out}", markup=False)
