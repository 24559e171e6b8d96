"""Statistics over seeds: intervals, paired differences, and ranks over settings.

Student's t over seeds; paired t tests with the correction of Holm 1979; the test of Friedman 1937 and the critical
difference of Nemenyi 1963, as Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006,
combines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05  # significance level; intervals have 95% coverage


@dataclass(frozen=True)
class Estimate:
    """A measure over seeds: its mean and a 95% interval of the mean.

    `n` is the number of runs. `reached` is the number of runs with a value, if runs may lack one (target not reached,
    loss not finite); mean and interval then use only these runs. `low` and `high` are None with fewer than two values,
    `mean` is None without a value.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    reached: int | None = None


@dataclass(frozen=True)
class Difference:
    """Difference of a metric between two algorithms in a setting, over pairs of runs with the same seed.

    `p` is the p value of the paired t test, `adjusted` the one after Holm's correction over all pairs of the setting;
    None if fewer than two seeds have both runs. `significant`: the adjusted p value is below 0.05.
    """

    setting: str
    first: str
    second: str
    difference: float
    low: float | None
    high: float | None
    n: int
    p: float | None
    adjusted: float | None
    significant: bool


@dataclass(frozen=True)
class Ranking:
    """Mean ranks of algorithms over blocks (1 is the best), with tests.

    `p` is the p value of Friedman's test that all algorithms are equal; None with fewer than two blocks. Two algorithms
    whose mean ranks differ by `critical` or more are significantly different (Nemenyi, 5%). `cliques` are the largest
    groups without a significant difference.
    """

    ranks: dict[str, float]  # by algorithm, best first
    blocks: int
    p: float | None
    critical: float | None
    cliques: list[list[str]]


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean and 95% t interval of the mean; no interval with fewer than two values."""
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return mean, None, None
    half = float(stats.t.ppf(1 - LEVEL / 2, len(data) - 1) * data.std(ddof=1) / math.sqrt(len(data)))
    return mean, mean - half, mean + half


def estimate(values: Sequence[float | None], censored: bool = False) -> Estimate | None:
    """Estimate from one value per run; None without runs. `censored`: a missing value means "not reached"."""
    known = [value for value in values if value is not None]
    reached = len(known) if censored or len(known) < len(values) else None
    if not values:
        return None
    if not known:
        return Estimate(None, None, None, len(values), 0)
    return Estimate(*interval(known), len(values), reached)


def paired_p(differences: Sequence[float]) -> float | None:
    """The p value of a two-sided paired t test; None with fewer than two pairs."""
    data = np.asarray(differences, dtype=np.float64)
    if len(data) < 2:
        return None
    spread = data.std(ddof=1)
    if spread == 0.0:  # the same difference in every pair: p is 0, or 1 if the difference is 0
        return 1.0 if data[0] == 0.0 else 0.0
    t = abs(data.mean()) / (spread / math.sqrt(len(data)))
    return float(2 * stats.t.sf(t, len(data) - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p values to control the family-wise error rate. Holm 1979."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    out: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (p, i) in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * p))
        out[i] = worst
    return out


def differences(setting: str, values: dict[str, dict[int, float]]) -> list[Difference]:
    """Differences of all pairs of algorithms in a setting, from the metric by algorithm and seed."""
    names = list(values)
    gaps_of_pairs: list[tuple[str, str, list[float]]] = []
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            seeds = [seed for seed in values[first] if seed in values[second]]
            if seeds:
                gaps_of_pairs.append((first, second, [values[first][s] - values[second][s] for s in seeds]))
    p_values = [paired_p(gaps) for _, _, gaps in gaps_of_pairs]
    out = []
    for (first, second, gaps), p, adjusted in zip(gaps_of_pairs, p_values, holm(p_values), strict=True):
        significant = adjusted is not None and adjusted < LEVEL
        out.append(Difference(setting, first, second, *interval(gaps), len(gaps), p, adjusted, significant))
    return out


def ranking(algorithms: Sequence[str], blocks: Sequence[Sequence[float]], higher: bool) -> Ranking:
    """Rank algorithms from one row per block with one value per algorithm; ties share their mean rank."""
    k, n = len(algorithms), len(blocks)
    if n == 0 or k == 0:
        return Ranking({}, 0, None, None, [])
    sign = -1.0 if higher else 1.0
    ranks = np.array([stats.rankdata([sign * value for value in row]) for row in blocks])
    mean = ranks.mean(axis=0)
    order = sorted(range(k), key=lambda j: (mean[j], j))
    best = {algorithms[j]: float(mean[j]) for j in order}
    if k < 2 or n < 2:
        return Ranking(best, n, None, None, [])
    critical = critical_difference(k, n)
    return Ranking(best, n, friedman(ranks), critical, cliques(best, critical))


def friedman(ranks: np.ndarray) -> float:
    """The p value of Friedman's chi-square test, corrected for ties; ranks [blocks, algorithms]."""
    if (ranks == ranks[:, :1]).all():  # all values are equal in all blocks
        return 1.0
    if ranks.shape[1] == 2:  # for which scipy has no such test: it is the chi-square test of the blocks that each wins
        return float(stats.chisquare((ranks == 1).sum(axis=0)).pvalue)
    return float(stats.friedmanchisquare(*ranks.T).pvalue)


def critical_difference(algorithms: int, blocks: int) -> float:
    """The difference of mean ranks that is significant at 5%. Nemenyi 1963, Demsar 2006, section 3.2.2."""
    q = stats.studentized_range.ppf(1 - LEVEL, algorithms, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(algorithms * (algorithms + 1) / (6 * blocks)))


def cliques(ranks: dict[str, float], critical: float) -> list[list[str]]:
    """The largest groups of two or more algorithms, all of whose mean ranks lie within the critical difference."""
    names = sorted(ranks, key=lambda name: ranks[name])
    out: list[list[str]] = []
    reached = 0
    for i in range(len(names)):
        end = i
        while end + 1 < len(names) and ranks[names[end + 1]] - ranks[names[i]] < critical:
            end += 1
        if end > i and end > reached:
            out.append(names[i : end + 1])
            reached = end
    return out
