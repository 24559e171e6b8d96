"""The party's side of ID3: encode samples, route them down the tree, count labels at open nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.entries import WHOLE, Nested, Number, Several, Shaped, Sizes, check_size, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Size
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.plumbing.errors import PartyError
from hansa.plumbing.stopping import go_on


def codes(x: Tensor, domain: list[dict[str, Any]]) -> Tensor:
    """Encode each value as a branch number: the index of the value or of its interval (lower, upper]; -1 if unknown."""
    flat = x.flatten(1).double()
    out = torch.full(flat.shape, -1, dtype=torch.int64, device=x.device)
    for f, described in enumerate(domain):
        column = flat[:, f].contiguous()
        edges = torch.tensor(described.get("values", described.get("cuts")), dtype=torch.float64, device=x.device)
        at = torch.bucketize(column, edges)
        if "values" in described:
            at = torch.where(edges[at.clamp(max=len(edges) - 1)] == column, at, -1) if len(edges) else at * 0 - 1
        out[:, f] = torch.where(torch.isnan(column), -1, at)
    return out


def route(coded: Tensor, feature: Tensor, child: Tensor, stop_short: bool = True, small: int = 1) -> Tensor:
    """The node that each sample reaches. If its branch is missing: the node above, or -1 without `stop_short`.

    With `small` above 1, samples of a branch with fewer of them go with the largest branch of the node, of which one
    that is missing counts too: every group that remains, and the difference of nested ones, has none or at least
    `small`, where there are that many samples.
    """
    feature, child = feature.to(coded.device), child.to(coded.device)
    node = torch.zeros(len(coded), dtype=torch.int64, device=coded.device)
    moving = torch.ones_like(node, dtype=torch.bool)
    for _ in range(len(feature) + 1):
        split = feature[node.clamp(min=0)]
        moving = moving & (split >= 0) & (node >= 0)
        if not bool(moving.any()):
            return node
        value = coded.gather(1, split.clamp(min=0)[:, None]).squeeze(1)
        below = torch.where(value >= 0, child[node.clamp(min=0), value.clamp(min=0)], -1)
        if small > 1:
            below[moving] = _with_largest(node[moving], below[moving], small)
        lost = moving & (below < 0)
        node = torch.where(moving & ~lost, below, node)
        if not stop_short:
            node = torch.where(lost, -1, node)
        moving = moving & ~lost
    raise PartyError("malformed tree: a node is below itself")


def _with_largest(node: Tensor, below: Tensor, small: int) -> Tensor:
    """The branch of each sample; small groups join the largest one of their node."""
    groups, which, sizes = torch.unique(torch.stack([node, below]), dim=1, return_inverse=True, return_counts=True)
    by_size = torch.argsort(sizes, stable=True)
    largest = dict(zip(groups[0, by_size].tolist(), groups[1, by_size].tolist(), strict=True))  # the last one counts
    joined = torch.tensor([largest[at] for at in groups[0].tolist()], device=below.device)
    return torch.where(sizes < small, joined, groups[1])[which]


EDGES = Several(of=Number(), optional=True)
TREE = {
    "domain": Several(of=Nested(entries={"values": EDGES, "cuts": EDGES})),
    "feature": Shaped(types=WHOLE, shape=("nodes",), least=-1),
    "child": Shaped(types=WHOLE, shape=("nodes", "branches"), least=-1),
}


def check_tree(payload: Payload, features: int) -> None:
    """Raise a PartyError for a tree that does not fit the features, or in which a node is not below its parent."""
    feature, child, domain = payload["feature"], payload["child"], payload["domain"]
    fits = len(domain) == features and all(len(described) == 1 for described in domain)
    fits = (
        fits
        and len(feature) > 0
        and child.shape[1] > 0
        and _widest(domain) <= child.shape[1]
        and int(feature.max()) < features
    )
    below = torch.arange(len(child), device=child.device)[:, None] < child
    if not fits or not bool(((child == -1) | (below & (child < len(child)))).all()):
        raise PartyError("malformed tree: its nodes do not fit together, or not to the features")


def _widest(domain: list[dict[str, Any]]) -> int:
    """The most values, or intervals between cuts, of a feature."""
    return max((len(d["values"]) if "values" in d else len(d.get("cuts", ())) + 1 for d in domain), default=0)


@register("split-counts")
@dataclass(frozen=True)
class SplitCounts(Op):
    """Label counts at the given nodes, in total and for each value of each feature."""

    nodes: tuple[Size, ...] = ()
    features: Size = 0
    width: Size = 0
    classes: Size = 0
    per_sample: ClassVar[Bounds] = {
        "splits": PerSample(over=(-4, -2, -1), nearest=True), "totals": PerSample(over=(-2, -1), nearest=True),
    }  # fmt: skip
    entries = stated(**TREE)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_size(self.name, "features", self.features, sizes)
        check_size(self.name, "classes", self.classes, sizes)
        check_tree(payload, self.features)
        if min(self.width, self.classes, len(self.nodes)) < 1 or _widest(payload["domain"]) > self.width:
            raise PartyError("malformed ask: it counts fewer values or classes than there are")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("statistics")
        coded = codes(x, payload["domain"])
        node = route(coded, payload["feature"], payload["child"], False, party.min_rows)
        splits = torch.zeros(len(self.nodes), self.features, self.width, self.classes, dtype=torch.int64)
        totals = torch.zeros(len(self.nodes), self.classes, dtype=torch.int64)
        for i, wanted in enumerate(self.nodes):
            go_on()
            here = node == wanted
            labels = y[here].cpu()
            totals[i] = torch.bincount(labels, minlength=self.classes)
            inside = coded[here].cpu()
            known = inside >= 0
            at = (torch.arange(self.features) * self.width + inside) * self.classes + labels[:, None]
            size = self.features * self.width * self.classes
            splits[i] = torch.bincount(at[known], minlength=size).view(self.features, self.width, self.classes)
        return Reply({"splits": splits, "totals": totals}, weight=len(y)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        rows = len(self.nodes)
        full = (rows, self.features, self.width, self.classes)
        return {"splits": (full, torch.int64), "totals": ((rows, self.classes), torch.int64)}
