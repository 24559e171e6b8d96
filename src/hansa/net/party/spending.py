"""What a party has spent and what is left, for `hansa privacy spent`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hansa.core.budget import Accountant, Release, finite, merged
from hansa.net.party.policy import Policy
from hansa.net.party.query_budget import KINDS, PLURALS, QUERIES
from hansa.net.party.vault_lines import DECLINES, EPSILON, REFUSALS, VaultContents


def left(contents: VaultContents, policy: Policy, accountant: Accountant) -> dict[str, float | None]:
    """What is left over all jobs: epsilon, declined asks, queries, and readings by kind; None without a limit."""
    floor, counts = policy.privacy, contents.count(contents.data if policy.budget.renew else None)
    spent = contents.lost.get(EPSILON, 0.0) + accountant(contents.all_releases, floor.delta)
    return {
        EPSILON: None if floor.epsilon is None else max(0.0, floor.epsilon - spent),
        DECLINES: max(0.0, floor.declines - contents.declined()),
        REFUSALS: max(0.0, policy.broadcast.refusals - contents.refused()),
        **policy.queries.left(counts, contents.lost),
    }


def report(contents: VaultContents, policy: Policy, accountant: Accountant) -> dict[str, Any]:
    """A party's spending per job and in total, as plain data. In `left`, None means without a limit.

    A number that is infinite, or unknown after a loss, is None. With `budget.renew`, what is left of queries is that of
    the data set that was read last.
    """
    floor, lost = policy.privacy, contents.lost
    releases: dict[str, list[Release]] = {job: [] for job in contents.jobs}
    counts: dict[str, Counter[str]] = {job: Counter() for job in contents.jobs}
    for (job, _), release in contents.spent.items():
        releases[job].append(release)
    for (_, job, kind), count in contents.readings.items():
        counts[job][kind] += count
    jobs = {
        job: {
            "epsilon": finite(accountant(merged(releases[job]), floor.delta)),
            "replies": len(releases[job]),
            DECLINES: contents.declines[job],
            REFUSALS: contents.refusals[job],
            **_readings(counts[job], policy, {}),
        }
        for job in contents.jobs
    }
    return {
        "epsilon": finite(lost.get(EPSILON, 0.0) + accountant(contents.all_releases, floor.delta)),
        "delta": floor.delta,
        "budget": floor.epsilon,
        DECLINES: finite(contents.declined()),
        REFUSALS: finite(contents.refused()),
        **_readings(contents.count(), policy, lost),
        "left": left(contents, policy, accountant),
        "lost": {name: finite(amount) for name, amount in lost.items()},
        "jobs": jobs,
    }


def _readings(counts: Mapping[str, float], policy: Policy, lost: Mapping[str, float]) -> dict[str, float | None]:
    readings: dict[str, float | None] = {kind: finite(counts.get(kind, 0) + lost.get(kind, 0)) for kind in KINDS}
    return {QUERIES: finite(policy.budget.cost(counts) + lost.get(QUERIES, 0)), **readings}


def in_words(spending: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a report for people."""
    remaining = spending["left"]
    of = "" if spending["budget"] is None else f" of {spending['budget']:g}"
    yield f"epsilon {_number(spending['epsilon'])}{of} at delta {spending['delta']:g}{_rest(remaining['epsilon'])}"
    private = sum(part["replies"] for part in spending["jobs"].values())
    yield f"  differentially private replies {private}; others have no epsilon"
    yield f"queries {_number(spending[QUERIES])}{_rest(remaining[QUERIES])}"
    for kind, plural in _NAMES.items():
        yield f"  {plural} {_number(spending[kind])}{_rest(remaining[kind])}"
    yield f"declined asks {_number(spending[DECLINES])}{_rest(remaining[DECLINES])}"
    yield f"refused models {_number(spending[REFUSALS])}{_rest(remaining[REFUSALS])}"
    if spending["lost"]:
        yield "these include what counts as spent since a part of the vault was lost"
    for job, part in spending["jobs"].items():
        counts = [f"{_number(part[kind])} {plural}" for kind, plural in _NAMES.items() if part[kind]]
        bits = {DECLINES: "declined asks", REFUSALS: "refused models"}
        declined = [f"{part[name]} {what}" for name, what in bits.items() if part[name]]
        replies = f"{part['replies'] or 'no'} differentially private replies"
        epsilon = f"epsilon {_number(part['epsilon'])} in {replies}" if part["replies"] else replies
        yield f"  {job}: {', '.join([epsilon, *counts, *declined])}"


_NAMES = {**PLURALS, "match": "readings of ids"}


def _number(value: float | None) -> str:
    return "infinite" if value is None or math.isinf(value) else f"{value:.4g}"


def _rest(value: float | None) -> str:
    return ", no limit" if value is None else f", {_number(value)} left"
