"""Reports as one self-contained HTML file, for offline reading in light or dark mode, and for printing.

A small script in the page sorts tables by mouse or keyboard; without scripts, tables keep their order. The page's
content security policy allows only this script and this style, by their hashes, and forbids all requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import hansa
from hansa.artifacts.run_folder import write_atomic
from hansa.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --page: #fff; --soft: #555; --line: #ddd; --rule: #555;
  --well: #f5f5f5; --link: #00558a }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #141414; --soft: #ababab; --line: #383838; --rule: #8a8a8a; --well: #202020;
    --link: #7cc4f5 }
  figure img { filter: invert(.92) hue-rotate(180deg) }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem;
  margin: 2rem auto; padding: 0 1.2rem; overflow-wrap: anywhere }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem }
a { color: var(--link) }
nav ul { list-style: none; margin: 1.2rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem;
  font-size: .92rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; overflow-wrap: normal }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: break-word }
thead th.text { white-space: pre }
th.prose, td.prose { overflow-wrap: anywhere; min-width: 9rem }
.broad .wide { margin-inline: min(0px, calc((60rem - 94vw) / 2)) } .broad th, .broad td { padding: .3rem .55rem }
.broad td:first-child, .broad th:first-child { position: sticky; left: 0; background: var(--page) }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; white-space: pre }
thead th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit; white-space: inherit }
thead th button::after { content: " \\2195"; opacity: .45; font-weight: 400 }
th[aria-sort=ascending] button::after { content: " \\2191"; opacity: 1 }
th[aria-sort=descending] button::after { content: " \\2193"; opacity: 1 }
button:focus-visible, .wide:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
tr.last td { border-top: 2px solid var(--rule); font-weight: 600 }
tr.group td { border-top: 1px solid var(--rule) }
tbody.sorted tr.group td { border-top: 0 }
figure { margin: 1rem 0 1.6rem }
figure img { max-width: 100%; height: auto; display: block }
figcaption, .note { color: var(--soft); font-size: .88rem; margin-top: .3rem; max-width: 46rem }
pre { background: var(--well); padding: .8rem 1rem; font-size: .82rem; line-height: 1.4; white-space: pre-wrap;
  overflow-wrap: anywhere }
footer { color: var(--soft); font-size: .82rem; margin-top: 2.5rem }
@media screen and (max-width: 45rem) { figure { overflow-x: auto } figure img { max-width: 48rem }
  figcaption { position: sticky; left: 0 } }
@page { margin: 14mm }
@page broad { size: landscape }
@media print {
  body { margin: 0; padding: 0; max-width: none; font-size: 11pt }
  nav, thead th button::after { display: none }
  figure, tr { break-inside: avoid }
  figure img { max-height: 240mm }
  table { font-size: 9pt } th, td { padding: .2rem .5rem; white-space: normal } thead th { white-space: pre-line }
  .broad { page: broad } .broad .wide { margin-inline: 0 } .broad table { font-size: 7.5pt }
  .broad th, .broad td { padding: .15rem .3rem; position: static !important }
  td.text { overflow-wrap: anywhere }
  h2, h3, .lead { break-after: avoid } pre { background: none; border: 1px solid #ccc; font-size: 8pt }
  .wide { overflow: visible }
}
"""
SCRIPT = r"""
"use strict";
const number = /^[+\-\u2212]?\d[\d,]*(\.\d+)?(e[+\-]?\d+)?/i;
function value(cell) {
  if (cell.dataset.order !== undefined) return cell.dataset.order === "" ? null : parseFloat(cell.dataset.order);
  const text = cell.textContent.trim(), found = text.match(number);
  if (found) return parseFloat(found[0].replace(/,/g, "").replace("\u2212", "-"));
  return text === "" || text === "-" || text === "\u2013" ? null : text;
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b, undefined, { numeric: true });
}
function sort(table, head, at) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = table.tBodies[0], rows = Array.from(body.rows).filter((row) => !row.classList.contains("last"));
  const keyed = rows.map((row) => ({ row, key: value(row.cells[at]) }));
  const known = keyed.filter((one) => one.key !== null), rest = keyed.filter((one) => one.key === null);
  known.sort((a, b) => (down ? -1 : 1) * compare(a.key, b.key));
  const last = body.querySelector("tr.last");
  for (const one of known.concat(rest)) body.insertBefore(one.row, last);
  body.classList.add("sorted");
}
for (const table of document.querySelectorAll("table.sortable")) {
  Array.from(table.tHead.rows[0].cells).forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, head, at));
    head.append(button);
    head.setAttribute("aria-sort", "none");
  });
}
"""
MANY_COLUMNS = 9  # a table with more columns is printed on a landscape page of its own
MANY_SECTIONS = 6  # a page with more sections begins with a table of contents


def _allowed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Whatever a name contains, the browser makes no requests and runs only the script above.
POLICY = f"default-src 'none'; img-src data:; style-src {_allowed(STYLE)}; script-src {_allowed(SCRIPT)}"


@dataclass(frozen=True)
class TableCell:
    """A cell of a table: its text, and its sort key if that is not the number at the start of the text.

    NaN sorts last."""

    text: str
    order: float | None = None
    strong: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table of formatted cells; the reader can sort a table with more than one row.

    `total` separates the last row. `under` makes the table part of the previous section."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | TableCell]]
    note: str = ""
    total: bool = False
    prose: bool = False  # the last column is text that wraps
    words: int = 1  # number of leading columns that are text
    grouped: int | None = None  # rows with the same value in this column form a group
    under: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption; `name` is the name of its files."""

    title: str
    caption: str
    figure: Figure
    name: str = ""
    under: bool = False

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG."""
        return plots.svg(self.figure)


@dataclass(frozen=True)
class Detail:
    """A section of text; `code` keeps the line breaks."""

    title: str
    text: str
    code: bool = False
    under: bool = False


Section = Sheet | Picture | Detail


def write_report(path: Path, title: str, intro: Sequence[str], sections: Sequence[Section]) -> Path:
    """Write a report as one self-contained HTML file; all text is escaped."""
    page = render(title, intro, sections)
    write_atomic(Path(path), page.encode(errors="replace"))
    return Path(path)


def render(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """The report as HTML."""
    body = [f"<p>{_safe(paragraph)}</p>" for paragraph in intro]
    heads = [(at, section.title) for at, section in enumerate(sections) if not section.under]
    if len(heads) > MANY_SECTIONS:
        links = "".join(f'<li><a href="#s{at}">{_safe(head)}</a></li>' for at, head in heads)
        body.append(f'<nav aria-label="Contents"><ul>{links}</ul></nav>')
    for at, section in enumerate(sections):
        level = 3 if section.under else 2
        broad = isinstance(section, Sheet) and len(section.header) > MANY_COLUMNS
        head = f'<h{level} id="s{at}">{_safe(section.title)}</h{level}>'
        leads = isinstance(section, Detail) and at + 1 < len(sections) and sections[at + 1].under
        kind = ' class="broad"' if broad else ' class="lead"' if leads else ""
        body.append(f"<section{kind}>\n{head}\n{_section(section, at)}\n</section>")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_safe(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<main>\n<h1>{_safe(title)}</h1>\n"
        + "\n".join(body)
        + f"\n</main>\n<footer>Hansa {hansa.__version__}</footer>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _safe(text: str) -> str:
    return html.escape(str(text).replace("\0", "\N{REPLACEMENT CHARACTER}"), quote=True)


def _section(section: Section, at: int) -> str:
    if isinstance(section, Sheet):
        return _sheet(section, at)
    if isinstance(section, Picture):
        data = base64.b64encode(section.svg).decode()
        return (
            f'<figure><img alt="{_safe(section.title)}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{_safe(section.caption)}</figcaption></figure>"
        )
    return f"<pre>{_safe(section.text)}</pre>" if section.code else f"<p>{_safe(section.text)}</p>"


def _sheet(sheet: Sheet, at: int) -> str:
    kinds = [' class="text"' if 1 < sheet.words > k else "" for k in range(len(sheet.header))]
    kinds[-1:] = [' class="text prose"'] if sheet.prose else kinds[-1:]
    head = "".join(f'<th scope="col"{k}>{_safe(cell)}</th>' for k, cell in zip(kinds, sheet.header, strict=True))
    rows = []
    for number, row in enumerate(sheet.rows):
        by = sheet.grouped
        begins = by is not None and number > 0 and _text(row[by]) != _text(sheet.rows[number - 1][by])
        kind = ' class="last"' if sheet.total and number == len(sheet.rows) - 1 else ' class="group"' * begins
        rows.append(f"<tr{kind}>{''.join(_cells(kinds, row))}</tr>")
    note = f'<p class="note">{_safe(sheet.note)}</p>' if sheet.note else ""
    sortable = ' class="sortable"' if len(sheet.rows) - sheet.total > 1 else ""
    return (
        f'<div class="wide" role="region" tabindex="0" aria-labelledby="s{at}"><table{sortable}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + f"\n</tbody>\n</table></div>{note}"
    )


def _cells(kinds: Sequence[str], row: Sequence[str | TableCell]) -> Iterable[str]:
    for kind, cell in zip(kinds, row, strict=True):
        if isinstance(cell, str):
            yield f"<td{kind}>{_safe(cell)}</td>"
            continue
        number = "" if cell.order is None or math.isnan(cell.order) else repr(float(cell.order))
        order = "" if cell.order is None else f' data-order="{number}"'
        text = f"<strong>{_safe(cell.text)}</strong>" if cell.strong else _safe(cell.text)
        yield f"<td{kind}{order}>{text}</td>"


def _text(cell: str | TableCell) -> str:
    return cell if isinstance(cell, str) else cell.text
