"""The report of a run: metrics, participation of parties, and the exact configuration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hansa.artifacts.run_folder import REPORT, SUMMARY, RunFolder, read_json
from hansa.core.round_record import LISTED
from hansa.report import clusters, fusion_shares, metric_tables, plots
from hansa.report.display import tuned_rows
from hansa.report.html import Detail, Picture, Section, Sheet, write_report
from hansa.report.party_metrics import own_metrics

ASKED = 200  # maximum number of parties in the participation table
NAMES = {
    "auc": "AUC",
    "bytes_down": "bytes to the parties",
    "bytes_up": "bytes from the parties",
    "common": "common people",
    "common_test": "common test people",
    "train_loss": "training loss",
}


def run_report(run_dir: Path) -> Path:
    """Write `report.html` from the files of a run folder; an unfinished run is reported up to now."""
    store = RunFolder(run_dir)
    record, history = store.experiment(), store.history()
    summary: dict[str, Any] = read_json(store.path / SUMMARY) if (store.path / SUMMARY).exists() else {}
    algorithm = record.get("algorithm", {}).get("name", "run")
    intro = [_story(algorithm, history, summary)]
    tables: list[Section] = [_numbers(summary, history)]
    tables += metric_tables.sheets(metric_tables.chosen(record), history, summary, algorithm)
    parties = own_metrics(history, summary, ASKED)
    if parties.rows or parties.notes:
        note = " ".join(["Each on its own test samples, after the last round with an evaluation.", *parties.notes])
        tables.append(Sheet("Parties", parties.header, parties.rows, note=note))
    attackers: list[str] = record.get("attackers", [])
    shares = fusion_shares.table(history, attackers)
    if shares:
        kind = ("kind",) if attackers else ()
        header = ("party", *kind, "rounds seen", "excluded", "rejected", "mean share")
        note = "Excluded: share below half of the mean share of the round. Rejected: reply not fused at all."
        tables.append(Sheet("Share in the model by party", header, shares, note=note))
    groups = clusters.table(history)
    if groups:
        note = "Each party trains the model of the cluster that fits its samples best."
        tables.append(Sheet("Clusters", ("party", "cluster", "moves", "last moved in round"), groups, note=note))
    asked = _asked(history)
    tables += [asked] if asked is not None else []
    lost = _lost(history)
    tables += [lost] if lost is not None else []
    exact = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
    details = [Detail("Exact configuration", exact, code=True)]
    title = f"{algorithm}: {store.path.resolve().name}"
    pictures = _pictures(history, summary)
    parts = fusion_shares.figure(history, attackers)
    if parts is not None:
        caption = "The share of each party in each fused update. Grey: not in the round, or its reply was rejected."
        pictures.append(Picture("Shares in the fusion", caption, parts))
    return write_report(store.path / REPORT, title, intro, [*tables, *pictures, *details])


def _pictures(history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Picture]:
    pictures = []
    curves = plots.learning(history)
    if curves is not None:
        pictures.append(Picture("Learning curves", "Each point is a round with a measurement.", curves))
    timed = plots.over_time(history)
    if timed is not None:
        caption = "The metric against simulated time. Rounds differ in length: each lasts as long as its slowest party."
        pictures.append(Picture("Learning over simulated time", caption, timed))
    if history:
        up, down = ([float(line.get(name, 0)) for line in history] for name in ("bytes_up", "bytes_down"))
        before = (max(0.0, summary.get("bytes_up", 0) - sum(up)), max(0.0, summary.get("bytes_down", 0) - sum(down)))
        before = before if summary else (0.0, 0.0)
        caption = "Bytes as sent over the network. Bytes to prepare the data count as round 0."
        pictures.append(Picture("Bytes exchanged", caption, plots.traffic(up, down, before)))
    replies = plots.answers(history)
    if replies is not None:
        caption = "A missing party did not reply; a rejected reply was not fused."
        pictures.append(Picture("Replies", caption, replies))
    return pictures


def _story(algorithm: str, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    if not summary:
        return f"{algorithm}, {len(history)} rounds so far; the run is not finished."
    problem = f" Problem: {summary['problem']}." if "problem" in summary else ""
    rounds = summary.get("rounds", len(history))
    return f"{algorithm}, {rounds} rounds; reason for the end: {summary.get('stopped')}.{problem}"


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
    return Sheet("In numbers", ("", "value"), rows + tuned_rows(summary.get("finetuned")))


def _asked(history: Sequence[Mapping[str, Any]]) -> Sheet | None:
    """Rounds in which each party was asked and was fused; None if the rounds do not record it."""
    asked, used = Counter[str](), Counter[str]()
    for line in history:
        cohort = line.get("cohort", ())
        asked.update(cohort)
        without = {*line.get("missing", ()), *line.get("rejected", ())} if "empty" not in line else set(cohort)
        used.update(party for party in cohort if party not in without)
    if not asked:
        return None
    parties = sorted(asked, key=lambda party: (int(party) if party.isdigit() else -1, party))
    rows = [(party, f"{asked[party]:,}", f"{used[party]:,}") for party in parties[:ASKED]]
    notes = [f"The first {ASKED} of {len(parties):,} parties that were asked."] if len(parties) > ASKED else []
    listed = sum("cohort" in line for line in history)
    notes += [f"Of the {listed:,} rounds with a cohort of at most {LISTED} parties."] if listed < len(history) else []
    return Sheet("Participation", ("party", "rounds asked", "rounds answered"), rows, note=" ".join(notes))


def _lost(history: Sequence[Mapping[str, Any]]) -> Sheet | None:
    """Parties that were missing or rejected: how often, and the last reason; None if all replied."""
    count: Counter[tuple[str, str]] = Counter()
    reason: dict[tuple[str, str], str] = {}
    for line in history:
        for kind in ("missing", "rejected", "unprepared"):
            for party, why in line.get(kind, {}).items():
                count[party, kind] += 1
                reason[party, kind] = why
    if not count:
        return None
    rows = [(party, kind, f"{n:,}", reason[party, kind]) for (party, kind), n in count.most_common(100)]
    notes = [f"The 100 most frequent of {len(count):,}."] if len(count) > 100 else []
    if any(kind == "unprepared" for _, kind in count):
        notes.append("Unprepared: the preprocessing of features was fitted without the party's samples.")
    return Sheet(
        "Missing and rejected", ("party", "what", "rounds", "last reason"), rows, note=" ".join(notes), prose=True
    )
