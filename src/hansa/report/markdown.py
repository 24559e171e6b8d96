"""A report as Markdown with linked pictures, for places that do not show HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import hansa
from hansa.report.html import Detail, Picture, Section, Sheet, TableCell

SLASHED = r"\`*_{}[]#!"  # characters that a backslash escapes
# Not every Markdown reader accepts a backslash before these, so they are written as character references.
MARKS = re.compile(r"[\\`*_{}\[\]#!<>&|~$@^]|:(?=//)|(?<=\bwww)\.", re.IGNORECASE)


def render(title: str, intro: Sequence[str], sections: Sequence[Section], links: Mapping[str, str]) -> str:
    """The report as Markdown, with all text escaped; `links` has the path of each picture by its name."""
    blocks = [f"# {literal(title)}", *map(literal, intro)]
    for section in sections:
        blocks.append(f"{'###' if section.under else '##'} {literal(section.title)}")
        if isinstance(section, Sheet):
            blocks.append(_table(section))
            blocks += [literal(section.note)] if section.note else []
        elif isinstance(section, Picture):
            blocks += [f"![{literal(section.title)}]({links[section.name]})", literal(section.caption)]
        else:
            blocks.append(_text(section))
    blocks.append(f"Hansa {hansa.__version__}")
    return "\n\n".join(blocks) + "\n"


def literal(text: str) -> str:
    """Escape text for Markdown, in one line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return MARKS.sub(lambda match: f"\\{match[0]}" if match[0] in SLASHED else f"&#{ord(match[0])};", line)


def _table(sheet: Sheet) -> str:
    last = len(sheet.header) - 1
    sides = [":---" if k < sheet.words or (sheet.prose and k == last) else "---:" for k in range(len(sheet.header))]
    lines = [_row([literal(cell) for cell in sheet.header]), _row(sides)]
    return "\n".join([*lines, *(_row([_cell(cell) for cell in row]) for row in sheet.rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: str | TableCell) -> str:
    if isinstance(cell, str):
        return literal(cell)
    text = literal(cell.text)
    return f"**{text}**" if cell.strong and text else text


def _text(detail: Detail) -> str:
    if not detail.code:
        return literal(detail.text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", detail.text)), default=0))
    return f"{fence}\n{detail.text.rstrip()}\n{fence}"
