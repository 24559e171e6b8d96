"""The rules again, in plain Python from the papers: slow, and without any code of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def mean(rows: Rows) -> list[float]:
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def median_of(values: Sequence[float]) -> float:
    n, ordered = len(values), sorted(values)
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def median(rows: Rows) -> list[float]:
    return [median_of(column) for column in zip(*rows, strict=True)]


def trimmed_mean(rows: Rows, b: int) -> list[float]:
    return [math.fsum(sorted(column)[b : len(rows) - b]) / (len(rows) - 2 * b) for column in zip(*rows, strict=True)]


def meamed(rows: Rows, q: int) -> list[float]:
    out = []
    for column in zip(*rows, strict=True):
        middle = median_of(column)
        order = sorted(range(len(rows)), key=lambda i, c=column, m=middle: (abs(c[i] - m), i))  # type: ignore[misc]
        out.append(math.fsum(column[i] for i in order[: len(rows) - q]) / (len(rows) - q))
    return out


def krum_scores(rows: Rows, neighbours: int) -> list[float]:
    return [
        sum(sorted(apart(row, other) for j, other in enumerate(rows) if j != i)[:neighbours])
        for i, row in enumerate(rows)
    ]


def krum(rows: Rows, f: int) -> int:
    scores = krum_scores(rows, len(rows) - f - 2)
    return scores.index(min(scores))


def multi_krum(rows: Rows, f: int, m: int) -> list[float]:
    scores = krum_scores(rows, len(rows) - f - 2)
    best = sorted(range(len(rows)), key=lambda i: (scores[i], i))[:m]
    return mean([rows[i] for i in best])


def bulyan(rows: Rows, f: int) -> list[float]:
    left, chosen = list(rows), []
    for _ in range(len(rows) - 2 * f):
        scores = krum_scores(left, max(1, len(left) - f - 2))
        ranks = [(score, sum(apart(row, other) for other in rows)) for score, row in zip(scores, left, strict=True)]
        chosen.append((rows.index(left[ranks.index(min(ranks))]), left.pop(ranks.index(min(ranks)))))
    chosen = [row for _, row in sorted(chosen, key=lambda pair: pair[0])]
    return meamed(chosen, 2 * f)


def distance_sum(rows: Rows, z: Sequence[float]) -> float:
    return sum(math.sqrt(apart(row, z)) for row in rows)


def fltrust(rows: Rows, own: Sequence[float]) -> list[float]:
    def dot(a: Sequence[float], b: Sequence[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    length = math.sqrt(dot(own, own))
    lengths = [math.sqrt(dot(row, row)) for row in rows]
    trust = [max(0.0, dot(row, own) / (n * length)) for row, n in zip(rows, lengths, strict=True)]
    return [
        math.fsum(t * x * length / n for t, x, n in zip(trust, column, lengths, strict=True)) / sum(trust)
        for column in zip(*rows, strict=True)
    ]
