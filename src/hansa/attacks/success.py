"""How well an attack tells members from non-members, with confidence intervals.

AUC with the interval of DeLong, DeLong and Clarke-Pearson 1988; true positive rates at small false positive rates
(Carlini et al. 2022, "Membership inference attacks from first principles") with exact binomial intervals (Clopper and
Pearson 1934). Intervals have 95% confidence.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq

CONFIDENCE = 0.95
RATES = (0.01, 0.001)  # false positive rates at which true positive rates are reported
Array = np.ndarray[Any, Any]


def auc_interval(members: Array, others: Array, among: int = 1) -> tuple[float, float, float]:
    """The AUC of scores that should be higher for members, and its 95% interval (DeLong et al. 1988).

    Ties count half. Without any error the variance is 0; then the interval is that of the rule of three. The intervals
    of `among` attacks hold together (Bonferroni), so that of the best of them too.
    """
    error = (1 - CONFIDENCE) / among
    both = np.concatenate([members, others])
    wins = (stats.rankdata(both)[: len(members)] - stats.rankdata(members)) / len(others)
    losses = 1 - (stats.rankdata(both)[len(members) :] - stats.rankdata(others)) / len(members)
    area = float(wins.mean())
    variance = float(np.var(wins, ddof=1) / len(wins) + np.var(losses, ddof=1) / len(losses))
    half = stats.norm.ppf(1 - error / 2) * math.sqrt(variance)
    if variance == 0 and len(np.unique(both)) > 1:
        half = (3 if among == 1 else -math.log(error)) / min(len(members), len(others))
    return area, max(float(area - half), 0.0), min(float(area + half), 1.0)


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """The exact 95% interval of a probability (Clopper and Pearson 1934)."""
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if successes == 0 else float(stats.beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(stats.beta.ppf(1 - tail, successes + 1, trials - successes))
    return low, high


def rate_at(members: Array, others: Array, rate: float) -> tuple[float, float, float]:
    """The largest share of members above a threshold that at most `rate` of the non-members exceed, and its interval.

    With n non-members, a rate below 1 / n allows no false positive at all.
    """
    allowed = math.floor(rate * len(others) + 1e-9)
    threshold = np.sort(others)[::-1][allowed]
    hits = int((members > threshold).sum())
    return (hits / len(members), *binomial_interval(hits, len(members)))


def membership_success(members: Any, others: Any, among: int = 1) -> dict[str, Any]:
    """AUC and true positive rates at 1% and 0.1% false positives, as plain data. The sets must have equal sizes.

    `auc_interval_among` holds for the best of `among` attacks.
    """
    inside, outside = np.asarray(members, dtype=np.float64), np.asarray(others, dtype=np.float64)
    if len(inside) != len(outside) or len(inside) < 2:
        raise ValueError(f"balanced sets of at least 2 samples are needed, got {len(inside)} and {len(outside)}")
    area, low, high = auc_interval(inside, outside)
    out: dict[str, Any] = {"auc": area, "auc_interval": [low, high], "members": len(inside)}
    out["auc_interval_among"] = list(auc_interval(inside, outside, among)[1:])
    for rate in RATES:
        share, low, high = rate_at(inside, outside, rate)
        out[f"tpr_at_{rate:g}"] = share
        out[f"tpr_at_{rate:g}_interval"] = [low, high]
    out["roc"] = [[rate, rate_at(inside, outside, rate)[0]] for rate in np.geomspace(1e-3, 1.0, 40)[:-1].tolist()]
    return out


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """A bound on the chance of so many correct guesses under (epsilon, delta) differential privacy.

    Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2 (and Theorem 3.1 for
    delta = 0): the number of correct guesses is dominated by a binomial count with the success probability
    e^epsilon / (e^epsilon + 1), up to a term that delta allows.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, chance))
    if delta == 0:
        return min(tail, 1.0)
    below = np.cumsum(stats.binom.pmf(correct - np.arange(1, correct + 1), guesses, chance))
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(tail + 2 * canaries * delta * worst, 1.0)


def epsilon_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon that so many correct guesses refute: a lower confidence bound of the true epsilon."""

    def over(epsilon: float) -> float:
        return p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    if over(0.0) >= 0:
        return 0.0
    return float(brentq(over, 0.0, 64.0))  # p is 1 at an epsilon of 64


def empirical_epsilon(scores: Any, included: Any, delta: float, confidence: float = CONFIDENCE) -> dict[str, Any]:
    """A lower confidence bound of epsilon from canaries of one run: guess "in" for high scores and "out" for low ones.

    Few confident guesses, or many: four numbers of guesses are tried, each at a quarter of the error probability, so
    that the bound holds for the best of them.
    """
    order = np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")
    truth = np.asarray(included, dtype=bool)[order]
    count = len(truth)
    sizes = sorted({max(count // share, 1) // 2 * 2 for share in (8, 4, 2, 1)} - {0})
    best: dict[str, Any] = {"epsilon": 0.0, "guesses": 0, "correct": 0}
    for guesses in sizes:
        half = guesses // 2
        correct = int(truth[:half].sum() + (~truth[count - half :]).sum())
        bound = epsilon_bound(count, guesses, correct, delta, 1 - (1 - confidence) / len(sizes))
        if bound > best["epsilon"] or best["guesses"] == 0:
            best = {"epsilon": bound, "guesses": guesses, "correct": correct}
    return {**best, "canaries": count, "delta": delta, "confidence": confidence}
