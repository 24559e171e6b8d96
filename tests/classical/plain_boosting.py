"""Plain histogram boosting on one table, written out with loops: the reference for tests of the federated one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Node = dict[str, Any]


@dataclass
class PlainBoosting:
    """Boosting on samples with given cuts; `unit` is the step to which derivatives are rounded, 0 for none."""

    cuts: list[list[float]]
    loss: str
    outputs: int
    base: list[float]
    lr: float = 0.3
    depth: int = 3
    l2: float = 1.0
    gamma: float = 0.0
    min_samples: int = 1
    unit: float = 0.0
    unit_h: float = 0.0

    def derivatives(self, margins: list[float], y: float) -> tuple[list[float], list[float]]:
        if self.loss == "squared":
            g, h = [margins[0] - y], [1.0]
        elif self.loss == "logistic":
            p = 1 / (1 + math.exp(-margins[0]))
            g, h = [p - y], [p * (1 - p)]
        else:
            total = sum(math.exp(m - max(margins)) for m in margins)
            ps = [math.exp(m - max(margins)) / total for m in margins]
            g, h = [p - (k == y) for k, p in enumerate(ps)], [p * (1 - p) for p in ps]
        if self.unit:
            g = [round(v / self.unit) * self.unit for v in g]
            h = [round(v / self.unit_h) * self.unit_h for v in h] if self.loss != "squared" else h
        return g, h

    def fit(self, x: Any, y: Any, rounds: int) -> list[Node]:
        margins = [list(self.base) for _ in y]
        trees = []
        for _ in range(rounds):
            pairs = [self.derivatives(m, target) for m, target in zip(margins, y, strict=True)]
            grown = []
            for k in range(self.outputs):
                g, h = [pair[0][k] for pair in pairs], [pair[1][k] for pair in pairs]
                grown.append(self.node(x, g, h, list(range(len(y))), 0))
            for row, m in zip(x, margins, strict=True):
                for k, tree in enumerate(grown):
                    m[k] += leaf(tree, row)["value"]
            trees += grown
        return trees

    def score(self, g: float, h: float) -> float:
        return g * g / (h + self.l2) if h + self.l2 > 0 else 0.0

    def node(self, x: Any, g: list[float], h: list[float], rows: list[int], depth: int) -> Node:
        whole_g, whole_h = math.fsum(g[i] for i in rows), math.fsum(h[i] for i in rows)
        below = whole_h + self.l2
        found: Node = {"count": len(rows), "value": -self.lr * whole_g / below if below else 0.0}
        best, choice = 0.0, None
        for feature, cuts in enumerate(self.cuts if depth < self.depth else []):
            for cut in [*cuts, math.inf]:
                for missing_left in (True, False):
                    if cut == math.inf and missing_left:
                        continue
                    left = [i for i in rows if goes_left(x[i][feature], cut, missing_left)]
                    if min(len(left), len(rows) - len(left)) < max(1, self.min_samples):
                        continue
                    gl, hl = math.fsum(g[i] for i in left), math.fsum(h[i] for i in left)
                    scores = self.score(gl, hl) + self.score(whole_g - gl, whole_h - hl)
                    gain = 0.5 * (scores - self.score(whole_g, whole_h))
                    gain = (0.0 if gain <= 2.0**-40 * scores else gain) - self.gamma
                    if gain > best:
                        best, choice = gain, (feature, cut, missing_left, left)
        if choice is None:
            return found
        feature, cut, missing_left, left = choice
        right = sorted(set(rows) - set(left))
        if not any(math.isnan(x[i][feature]) for i in rows):
            missing_left = len(left) >= len(right)
        found |= {"feature": feature, "cut": cut, "missing_left": missing_left, "gain": best}
        return {**found, "children": [self.node(x, g, h, part, depth + 1) for part in (left, right)]}


def goes_left(value: float, cut: float, missing_left: bool) -> bool:
    return missing_left if math.isnan(value) else value <= cut


def leaf(tree: Node, row: Any) -> Node:
    while "children" in tree:
        tree = tree["children"][0 if goes_left(row[tree["feature"]], tree["cut"], tree["missing_left"]) else 1]
    return tree
