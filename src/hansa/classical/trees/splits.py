"""Find the best split of each node from its sums by feature and bin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hansa.classical.trees.bins import Bins

Array = np.ndarray[Any, Any]
ROUNDING = 2.0**-40  # a gain below this share of the children's scores is rounding


class NodeSplit(NamedTuple):
    """A split of a node, and the statistics of its children."""

    gain: float
    feature: int
    bin: int
    missing_left: bool
    goes_left: Array | None
    left: Array
    right: Array


@dataclass(frozen=True)
class SplitRule:
    """How a split is judged: the gain of Chen and Guestrin 2016 (XGBoost).

        gain = 1/2 (G_L^2 / (H_L + l2) + G_R^2 / (H_R + l2) - G^2 / (H + l2)) - gamma

    With class counts as G, the number of samples as H, and no l2, twice the gain is the decrease of the Gini impurity
    times the number of samples; with sums of targets, that of the variance. `unit` and `unit_h` turn the whole numbers
    of the sums into G and H. Children have at least `min_samples` samples and `min_weight` of H.
    """

    outputs: int
    constant: bool
    unit: float
    unit_h: float
    l2: float = 1.0
    gamma: float = 0.0
    min_samples: int = 1
    min_weight: float = 0.0

    def parts(self, sums: Array) -> tuple[Array, Array, Array]:
        """G [..., outputs], H and the number of samples, from statistics [..., rows]."""
        g = sums[..., : self.outputs] * self.unit
        count = sums[..., -1]
        return g, (count * 1.0 if self.constant else np.maximum(sums[..., self.outputs], 0) * self.unit_h), count

    def score(self, sums: Array) -> Array:
        """The sum over outputs of G^2 / (H + l2); 0 without samples."""
        g, h, _ = self.parts(sums)
        below = h + self.l2
        squares = g[..., 0] ** 2
        for output in range(1, self.outputs):
            squares = squares + g[..., output] ** 2
        return np.where(below > 0, squares / np.where(below > 0, below, 1.0), 0.0)

    def gains(self, left: Array, right: Array, whole: Array) -> Array:
        """The gain of splits; minus infinity where a child is too small."""
        scores = self.score(left) + self.score(right)
        gain = 0.5 * (scores - self.score(whole))
        gain = np.where(gain <= ROUNDING * scores, 0.0, gain) - self.gamma
        (_, h_left, n_left), (_, h_right, n_right) = self.parts(left), self.parts(right)
        small = np.minimum(n_left, n_right) < max(1, self.min_samples)
        return np.where(small | (np.minimum(h_left, h_right) < self.min_weight), -np.inf, gain)

    def divides(self, count: int) -> bool:
        """Whether a node with this many samples can be split."""
        return count >= 2 * max(1, self.min_samples)


def best_splits(sums: Array, bins: Bins, features: Array, rule: SplitRule,
                allowed: Array | None = None) -> list[NodeSplit | None]:  # fmt: skip
    """The split with the largest gain of each node, from its sums [nodes, statistics, bins]; None if none is above 0.

    Ties go to the lowest feature and the lowest bin, and to missing values on the left. Where a node has no missing
    values, they will go to the larger child, on a tie to the left one. `allowed` [nodes, features] are the features
    that each node may use.
    """
    widths = bins.widths[features]
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    by_bin = np.ascontiguousarray(sums.transpose(0, 2, 1))
    whole = by_bin[:, : starts[1]].sum(1)
    numeric, owner = ~bins.categorical[features], np.repeat(np.arange(len(features)), widths)
    running = by_bin.cumsum(1)
    before = np.where((starts[:-1] > 0)[:, None], running[:, starts[:-1] - 1], 0)
    missing = by_bin[:, starts[1:] - 1]
    position = np.arange(len(owner)) - starts[owner]
    last = widths[owner] - 1
    places = np.flatnonzero(numeric[owner] & (position < last))  # all bins of numbers, but not those of missing values
    at = owner[places]
    left = running[:, places] - before[:, at]
    total = whole[:, None]
    right_way = _both(rule, left, total)  # missing values on the right
    left_way = _both(rule, left + missing[:, at], total) if missing.any() else right_way
    gain = np.stack([left_way, right_way], axis=2)
    gain[:, position[places] == last[places] - 1, 0] = -np.inf  # all numbers and missing values on the left
    if allowed is not None:
        gain[~allowed[:, at]] = -np.inf
    flat = gain.reshape(len(sums), -1)
    found: list[NodeSplit | None] = []
    best = flat.argmax(1) if flat.shape[1] else np.zeros(len(sums), dtype=np.int64)
    for node in range(len(sums)):
        choice: NodeSplit | None = None
        if flat.shape[1] and flat[node, best[node]] > 0:
            place, to_right = divmod(int(best[node]), 2)
            f = int(at[place])
            lefts = left[node, place] + (0 if to_right else missing[node, f])
            rights = whole[node] - lefts
            goes = not to_right if missing[node, f, -1] else bool(lefts[-1] >= rights[-1])
            choice = NodeSplit(float(flat[node, best[node]]), int(features[f]), int(position[places[place]]), goes,
                               None, lefts, rights)  # fmt: skip
        for f in np.flatnonzero(~numeric).tolist():
            if allowed is None or allowed[node, f]:
                other = _categories(by_bin[node, starts[f] : starts[f + 1]], whole[node], int(features[f]), rule)
                if other is not None and (choice is None or _rank(other) > _rank(choice)):
                    choice = other
        found.append(choice)
    return found


def _rank(split: NodeSplit) -> tuple[float, int]:
    """The order of splits: by gain, then by the lower feature."""
    return split.gain, -split.feature


def _both(rule: SplitRule, left: Array, whole: Array) -> Array:
    return rule.gains(left, whole - left, whole)


def _categories(by_bin: Array, whole: Array, feature: int, rule: SplitRule) -> NodeSplit | None:
    """The best split of categories into two groups: a prefix of them, ordered by G / (H + l2) (Fisher 1958).

    With several outputs the order is that of the output with the largest sum. Missing values are one more category.
    The group that holds missing values, or else the second one, is the right one: unknown categories go there.
    """
    g, h, count = rule.parts(by_bin)
    there = np.flatnonzero(count > 0)
    if len(there) < 2:
        return None
    ruling = int(np.argmax(np.abs(g.sum(0))))
    below = h[there] + rule.l2
    ratio = np.where(below > 0, g[there, ruling] / np.where(below > 0, below, 1.0), 0.0)
    order = there[np.argsort(ratio, kind="stable")]
    left = by_bin[order].cumsum(0)[:-1]
    gain = rule.gains(left, whole - left, whole)
    best = int(gain.argmax())
    if not gain[best] > 0:
        return None
    members = np.zeros(len(by_bin), dtype=np.uint8)
    members[order[: best + 1]] = 1
    first, second = left[best], whole - left[best]
    if members[-1]:
        members[there] = 1 - members[there]
        first, second = second, first
    return NodeSplit(float(gain[best]), feature, 0, False, members, first, second)
