"""What the line of a round tells of the parties: of a single one no more than `run.min_cohort` allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Any

from hansa.core.budget import finite
from hansa.core.federation import Finding, Gathered
from hansa.core.round_record import LISTED, Record, without_numbers
from hansa.metrics.names import higher_is_better

Name = Callable[[int], str]


def refusals(record: Record, least: int, name: Name) -> dict[str, Any]:
    """Who did not answer, was rejected or counts for less than its weight, and why; with a min_cohort no number of
    theirs."""
    out: dict[str, Any] = {}
    for kind, who in (("missing", record.missing), ("rejected", record.rejected), ("capped", record.capped)):
        if who:
            out[kind] = {name(p): reason if least == 1 else without_numbers(reason) for p, reason in who.items()}
    return out


def unused(record: Record, least: int, name: Name) -> dict[str, str]:
    """The same in one table, by party, of those whose replies are not used."""
    told = refusals(record, least, name)
    return {party: reason for kind in told if kind != "capped" for party, reason in told[kind].items()}


def caught(findings: Sequence[Finding], record: Record, attackers: Set[int]) -> dict[str, float]:
    """Where the attackers are known: which part of those excluded or rejected were attackers (precision), and of the
    attackers were excluded or rejected (recall)."""
    seen = {*record.fused, *record.rejected, *(p for finding in findings for p in finding.parties)}
    without = {*record.rejected, *(p for finding in findings for p in finding.excluded)}
    right, hostile = len(without & attackers), len(seen & attackers)
    out = {"exclusion_precision": right / len(without)} if without else {}
    return out | ({"exclusion_recall": right / hostile} if hostile else {})


def fused(findings: Sequence[Finding], least: int, name: Name) -> dict[str, Any]:
    """What the fusion found about single parties, by name; with a min_cohort only whom it left out."""
    out: dict[str, Any] = {}
    for finding in findings:
        excluded = [name(p) for p in finding.excluded]
        out = {"rule": finding.rule, "excluded": excluded}
        if least == 1:
            shares = {name(p): share for p, share in zip(finding.parties, finding.shares, strict=True)}
            out = {"rule": finding.rule, "shares": shares, "excluded": excluded}
            if finding.scores is not None:
                scores = zip(finding.parties, finding.scores, strict=True)
                out["scores"] = {name(p): finite(s) for p, s in scores}
    return {"fusion": out} if out else {}


def over_parties(answers: Gathered, least: int, name: Name) -> dict[str, Any]:
    """Each party's metrics on its own test samples: mean, worst tenth, variance, and the mean over samples. With a
    min_cohort, only what is made of so many parties."""
    out: dict[str, Any] = {}
    for metric in sorted({m for reply in answers.replies for m in reply.metrics}):
        pairs = [(r.metrics[metric], r.weight) for r in answers.replies if metric in r.metrics]
        if len(pairs) < least:
            continue
        values = sorted((v for v, _ in pairs), reverse=not higher_is_better(metric))
        mean = sum(values) / len(values)
        tenth = values[: math.ceil(len(values) / 10)]
        out[f"party_{metric}_mean"] = mean
        if len(tenth) >= least:
            out[f"party_{metric}_worst_tenth"] = sum(tenth) / len(tenth)
        out[f"party_{metric}_variance"] = sum((v - mean) * (v - mean) for v in values) / len(values)
        out[metric] = sum(v * n for v, n in pairs) / sum(n for _, n in pairs)
    if len(answers.parties) <= LISTED and least == 1:
        who = map(name, answers.parties)
        out["parties"] = {one: reply.metrics for one, reply in zip(who, answers.replies, strict=True)}
    return out
