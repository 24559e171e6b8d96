"""Federated ID3 (Quinlan 1986): parties send counts, the server grows the tree of ID3 on all samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.counts import TREE, SplitCounts, check_tree, codes, route
from hansa.classical.domains import learn_domain
from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import WHOLE, Number, Shaped, Sizes, optional, stated
from hansa.core.federation import Federation
from hansa.core.op import Payload
from hansa.core.predictor import Predictor
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError

NODES_PER_ASK = 16


@register("id3")
@dataclass(frozen=True)
class ID3(Algorithm):
    """A decision tree from counts alone. Quinlan 1986; federated with one exchange of counts per level.

    Features with few whole values split into one branch per value; others are first cut at global quantiles into `bins`
    intervals (learned from counts). A node splits by the feature with the largest information gain; ties go to the
    lowest index (scores that agree to 9 decimals are ties). A leaf has the most frequent label; ties go to the lowest
    label. A node is a leaf at `max_depth`, when it is pure or when no feature is left. A branch without samples, and a
    value never seen in training, get the label of the node above. The whole tree grows in one round.
    """

    max_depth: AnyCount = 3
    bins: Annotated[int, Meta(ge=2)] = 8
    trains: ClassVar[bool] = False
    takes_missing: ClassVar[bool] = True

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("value-profile"), OpenOp("rank-counts"), OpenOp("split-counts"))

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.classes is None:
            raise ConfigError("id3 is a classifier: it needs class numbers (whole numbers) as targets")

    def init(self, problem: Problem) -> State:
        return State(Params.none(), slots={"features": math.prod(problem.shape), "classes": problem.classes})

    async def round(self, fed: Federation, state: State) -> State:
        domain = await learn_domain(fed, state.slots["features"], self.bins)
        return state.replace(tree=await self._grow(fed, domain, state.slots["classes"]))

    async def _grow(self, fed: Federation, domain: list[dict[str, Any]], classes: int) -> dict[str, Any]:
        widths = [len(d["values"]) if "values" in d else len(d["cuts"]) + 1 for d in domain]
        width = max([1, *widths])
        feature, child = torch.tensor([-1]), torch.full((1, width), -1)
        totals: dict[int, Tensor] = {}
        left = {0: [f for f, w in enumerate(widths) if w > 1]}
        frontier, depth = [0], 0
        while frontier:
            grown: list[int] = []
            for at in range(0, len(frontier), NODES_PER_ASK):
                nodes = frontier[at : at + NODES_PER_ASK]
                op = SplitCounts(nodes=tuple(nodes), features=len(domain), width=width, classes=classes)
                answer = await fed.reduce(op, {"domain": domain, "feature": feature, "child": child})
                totals.setdefault(0, answer.sums["totals"].cpu()[0])
                for node, splits in zip(nodes, answer.sums["splits"].cpu(), strict=True):
                    best = best_feature(splits, left[node]) if self._divides(totals[node], left[node], depth) else -1
                    feature[node] = best
                    for value in torch.nonzero(splits[best].sum(1) > 0).flatten().tolist() if best >= 0 else []:
                        new = len(feature)
                        feature = torch.cat([feature, torch.tensor([-1])])
                        child = torch.cat([child, torch.full((1, width), -1)])
                        child[node, value] = new
                        left[new] = [f for f in left[node] if f != best]
                        totals[new] = splits[best][value]
                        if self._divides(totals[new], left[new], depth + 1):
                            grown.append(new)
            frontier, depth = grown, depth + 1
        counts = torch.stack([totals[node] for node in range(len(feature))])
        return {"domain": domain, "feature": feature, "child": child, "counts": counts}

    def _divides(self, total: Tensor, left: list[int], depth: int) -> bool:
        """Whether a node may split: it is not too deep, not pure, and has a feature left."""
        return depth < self.max_depth and int((total > 0).sum()) > 1 and bool(left)

    def finished(self, state: State) -> bool:
        return "tree" in state.slots

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "id3", state.slots["tree"] if "tree" in state.slots else {"classes": state.slots["classes"]}


def best_feature(splits: Tensor, candidates: list[int]) -> int:
    """The feature with the largest sum_v sum_y c_vy log2(c_vy / c_v), which is the largest information gain; or -1."""
    best, chosen = -math.inf, -1
    for f in candidates:
        c = splits[f].double()
        by_value = c.sum(1, keepdim=True)
        score = round(float(torch.where(c > 0, c * torch.log2(c.clamp(min=1) / by_value.clamp(min=1)), 0.0).sum()), 9)
        if score > best:
            best, chosen = score, f
    return chosen


@register("id3")
@dataclass(frozen=True)
class TreePredictor(Predictor):
    """Log of the label frequencies (one added to each) at the node that a sample reaches."""

    entries = stated(
        classes=Number(whole=True, least=1, optional=True),
        counts=Shaped(types=WHOLE, shape=("nodes", None), optional=True),
        **{name: optional(entry) for name, entry in TREE.items()},
    )

    def check_payload(self, payload: Payload, sizes: Sizes) -> None:
        tree = {"counts", *TREE}
        if not (tree <= set(payload) or set(payload) == {"classes"}):
            raise PartyError(f"malformed ask: a tree has {', '.join(sorted(tree))}; without one it has classes")
        if "feature" in payload:
            check_tree(payload, sizes.get("features", len(payload["domain"])))

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        if "feature" not in payload:  # nothing learned yet
            return torch.zeros(len(x), payload["classes"], dtype=torch.float64, device=x.device)
        reached = route(codes(x, payload["domain"]), payload["feature"], payload["child"])
        counts = payload["counts"].double().to(x.device)[reached] + 1.0
        return torch.log(counts / counts.sum(1, keepdim=True))
