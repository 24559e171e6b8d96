"""Reports: one HTML file that needs nothing else, to read offline, to print and to send on."""

from __future__ import annotations

import base64
import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hansa
from hansa.run import forensics, plots
from hansa.run.store import REPORT, SUMMARY, Store, read_json, write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1.2rem }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
th.text, td.text { text-align: left; white-space: normal }
thead th { border-bottom: 2px solid #555; vertical-align: bottom; white-space: pre }
tr.last td { border-top: 2px solid #555; font-weight: 600 }
figure { margin: 1rem 0 1.6rem }
figure img { max-width: 100%; height: auto; display: block }
figcaption, .note { color: #555; font-size: .88rem; margin-top: .3rem; max-width: 46rem }
pre { background: #f5f5f5; padding: .8rem 1rem; font-size: .82rem; line-height: 1.4; white-space: pre-wrap;
  overflow-wrap: anywhere }
footer { color: #777; font-size: .82rem; margin-top: 2.5rem }
@media print { body { margin: 0; max-width: none; font-size: 11pt } figure, table { break-inside: avoid }
  table { font-size: 9pt } th, td { padding: .2rem .5rem }
  h2 { break-after: avoid } pre { background: none; border: 1px solid #ccc } .wide { overflow: visible } }
"""
NAMES = {
    "auc": "AUC",
    "bytes_down": "bytes to the parties",
    "bytes_up": "bytes from the parties",
    "train_loss": "training loss",
}
# Whatever a name may contain, a browser that opens the report fetches nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Sheet:
    """A table. `total` sets the last row apart; cells are numbers or text as they are to be read."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    total: bool = False
    prose: bool = False  # the last column is text, to be broken into lines


@dataclass(frozen=True)
class Picture:
    """A figure with its title and what there is to see in it."""

    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Detail:
    """A section of text; `code` keeps its lines as they are."""

    title: str
    text: str
    code: bool = False


def write_report(path: Path, title: str, intro: Sequence[str], tables: Sequence[Sheet], figures: Sequence[Picture],
                 details: Sequence[Detail]) -> Path:  # fmt: skip
    """Write a report as one HTML file that refers to nothing outside itself; all text is taken literally."""
    body = [f"<p>{_safe(paragraph)}</p>" for paragraph in intro]
    body += [_sheet(sheet) for sheet in tables]
    body += [_picture(picture) for picture in figures]
    body += [_detail(detail) for detail in details]
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_safe(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{_safe(title)}</h1>\n"
        + "\n".join(body)
        + f"\n<footer>Hansa {hansa.__version__}</footer>\n</body>\n</html>\n"
    )
    write_atomic(Path(path), page.encode())
    return Path(path)


def _safe(text: str) -> str:
    return html.escape(str(text), quote=True)


def _sheet(sheet: Sheet) -> str:
    kinds = [' class="text"' if sheet.prose and k == len(sheet.header) - 1 else "" for k in range(len(sheet.header))]
    head = "".join(f'<th scope="col"{k}>{_safe(cell)}</th>' for k, cell in zip(kinds, sheet.header, strict=True))
    rows = []
    for at, row in enumerate(sheet.rows):
        last = ' class="last"' if sheet.total and at == len(sheet.rows) - 1 else ""
        rows.append(
            f"<tr{last}>" + "".join(f"<td{k}>{_safe(c)}</td>" for k, c in zip(kinds, row, strict=True)) + "</tr>"
        )
    note = f'<p class="note">{_safe(sheet.note)}</p>' if sheet.note else ""
    return (
        f'<h2>{_safe(sheet.title)}</h2>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + f"\n</tbody>\n</table></div>{note}"
    )


def _picture(picture: Picture) -> str:
    data = base64.b64encode(plots.svg(picture.figure)).decode()
    return (
        f'<h2>{_safe(picture.title)}</h2>\n<figure><img alt="{_safe(picture.title)}" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{_safe(picture.caption)}</figcaption></figure>'
    )


def _detail(detail: Detail) -> str:
    text = f"<pre>{_safe(detail.text)}</pre>" if detail.code else f"<p>{_safe(detail.text)}</p>"
    return f"<h2>{_safe(detail.title)}</h2>\n{text}"


def run_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder from what the run left there; a run not finished is reported so far."""
    store = Store(run_dir)
    record, history = store.experiment(), store.history()
    summary: dict[str, Any] = read_json(store.path / SUMMARY) if (store.path / SUMMARY).exists() else {}
    algorithm = record.get("algorithm", {}).get("name", "run")
    intro = [_story(algorithm, history, summary)]
    tables = [_numbers(summary, history)]
    evaluated = next((line for line in reversed(history) if "parties" in line), None)
    if evaluated is not None:
        tables.append(_parties(evaluated["parties"], evaluated["round"]))
    attackers: list[str] = record.get("attackers", [])
    found = forensics.table(history, attackers)
    if found:
        kind = ("kind",) if attackers else ()
        header = ("party", *kind, "rounds seen", "left out", "rejected", "mean share")
        note = "Left out: its share was under half of the mean share of the round. Rejected: never fused at all."
        tables.append(Sheet("Part in the model, party by party", header, found, note=note))
    lost = _lost(history)
    tables += [lost] if lost is not None else []
    exact = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
    details = [Detail("Exact configuration", exact, code=True)]
    title = f"{algorithm}: {store.path.resolve().name}"
    pictures = _pictures(history, summary)
    parts = forensics.figure(history, attackers)
    if parts is not None:
        caption = "The share of each party in each fused update. Grey: not in the round, or its reply was rejected."
        pictures.append(Picture("What the fusion found", caption, parts))
    return write_report(store.path / REPORT, title, intro, tables, pictures, details)


def _pictures(history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Picture]:
    pictures = []
    curves = plots.learning(history)
    if curves is not None:
        pictures.append(Picture("Learning curves", "Each point is a round in which it was measured.", curves))
    timed = plots.over_time(history)
    if timed is not None:
        caption = "The same against simulated time, which passes unevenly: a round lasts as long as its slowest party."
        pictures.append(Picture("Learning over simulated time", caption, timed))
    if history:
        up, down = ([float(line.get(name, 0)) for line in history] for name in ("bytes_up", "bytes_down"))
        before = (max(0.0, summary.get("bytes_up", 0) - sum(up)), max(0.0, summary.get("bytes_down", 0) - sum(down)))
        before = before if summary else (0.0, 0.0)
        caption = "Bytes as the wire carries them. What was exchanged to prepare the data counts as round 0."
        pictures.append(Picture("Bytes exchanged", caption, plots.traffic(up, down, before)))
    replies = plots.answers(history)
    if replies is not None:
        caption = "A missing party did not answer; a rejected reply was not fused."
        pictures.append(Picture("Replies", caption, replies))
    return pictures


def _story(algorithm: str, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    if not summary:
        return f"{algorithm}, {len(history)} rounds so far; the run is not finished."
    return f"{algorithm}, {summary.get('rounds', len(history))} rounds; it ended because: {summary.get('stopped')}."


def _numbers(summary: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Sheet:
    """The last evaluation and the totals."""
    last = next((line for line in reversed(history) if "loss" in line), history[-1] if history else {})
    source = summary or {k: v for k, v in last.items() if k not in ("seconds", "simulated_seconds")}
    rows = []
    for name in sorted(source, key=lambda n: (n not in ("accuracy", "auc", "loss"), n.startswith("party_"), n)):
        value = source[name]
        if name not in ("asked", "replies", "run_dir", "stopped", "round", "rounds") and isinstance(
            value, (int, float)
        ):
            rows.append(
                (NAMES.get(name, name.replace("_", " ")), f"{value:,}" if isinstance(value, int) else f"{value:.4g}")
            )
    return Sheet("In numbers", ("", "value"), rows)


def _parties(parties: Mapping[str, Mapping[str, float]], at: int) -> Sheet:
    metrics = sorted({metric for found in parties.values() for metric in found})
    rows = [(name, *(f"{found[m]:.4f}" if m in found else "-" for m in metrics)) for name, found in parties.items()]
    return Sheet(f"Parties, after round {at}", ("party", *metrics), rows, note="Each on its own test samples.")


def _lost(history: Sequence[Mapping[str, Any]]) -> Sheet | None:
    """Who was missing or rejected, how often, and the last reason; None where all answered."""
    count: Counter[tuple[str, str]] = Counter()
    reason: dict[tuple[str, str], str] = {}
    for line in history:
        for kind in ("missing", "rejected"):
            for party, why in line.get(kind, {}).items():
                count[party, kind] += 1
                reason[party, kind] = why
    if not count:
        return None
    rows = [(party, kind, f"{n:,}", reason[party, kind]) for (party, kind), n in count.most_common(100)]
    more = f"The 100 most frequent of {len(count):,}." if len(count) > 100 else ""
    return Sheet("Missing and rejected", ("party", "what", "rounds", "last reason"), rows, note=more, prose=True)
