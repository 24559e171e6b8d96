"""Grow trees level by level or leaf by leaf, from sums that the parties are asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hansa.classical.trees.bins import Bins
from hansa.classical.trees.splits import NodeSplit, SplitRule, best_splits
from hansa.classical.trees.table import TreeArrays, TreeTable

Array = np.ndarray[Any, Any]
Slots = Sequence[tuple[int, int]]  # a tree and one of its nodes
AskSums = Callable[[TreeArrays, Slots], Awaitable[Array]]


@dataclass(eq=False)
class OpenNode:
    """A node that may still be split."""

    tree: int
    node: int
    depth: int
    sums: Array
    split: NodeSplit | None = None


Pair = tuple[OpenNode, NodeSplit, tuple[int, int]]  # a node, its split and its children


@dataclass
class Growth:
    """The growth of some trees at once: the rule, the bins, and how values follow from statistics.

    `ask` gives the sums [nodes, statistics, bins] of nodes. `leaves` is the most leaves of a tree that grows leaf by
    leaf, None for growth level by level. `allowed` draws the features that a node may use, None for all.

    Of two children only the one with fewer samples is asked for: the sums of the other are those of the parent minus
    its own. If parties left or returned since the parent was asked, the statistics of the child are not those that the
    split promised. Then, and if the other child would have negative counts, both children are asked for.
    """

    ask: AskSums
    bins: Bins
    features: Array
    rule: SplitRule
    value: Callable[[Array], Array]
    depth: int
    leaves: int | None = None
    allowed: Callable[[int, int], Array] | None = None
    subtract: bool = True  # False: both children are asked for, because sums have noise

    async def grow(self, table: TreeTable, outputs: Sequence[int]) -> None:
        """Grow one tree for each of `outputs`, and add them to the table."""
        nothing = np.zeros(self.rule.outputs + (1 if self.rule.constant else 2), dtype=np.int64)
        roots = [table.add_root(output, 0, self.value(nothing)) for output in outputs]
        first = len(table.roots) - len(roots)
        slots = [(first + k, root) for k, root in enumerate(roots)]
        sums = await self.ask(table.arrays(), slots)
        opened = [OpenNode(tree, node, 0, one) for (tree, node), one in zip(slots, sums, strict=True)]
        width = self.bins.widths[self.features[0]]
        for item in opened:
            whole = item.sums[:, :width].sum(1)
            table.value[item.node], table.count[item.node] = self.value(whole), int(whole[-1])
        self._judge(opened)
        leaves = dict.fromkeys((item.tree for item in opened), 1)
        while opened:
            chosen = self._choose(opened, leaves)
            if not chosen:
                return
            opened = [item for item in opened if item not in chosen]
            grown = await self._children(table, chosen)
            for item in chosen:
                leaves[item.tree] += 1
            self._judge(grown)
            opened += grown

    def _choose(self, opened: list[OpenNode], leaves: dict[int, int]) -> list[OpenNode]:
        """The nodes to split next: all of them, or of each tree the one with the largest gain."""
        able = [item for item in opened if item.split is not None]
        if self.leaves is None:
            return able
        best: dict[int, OpenNode] = {}
        for item in able:
            assert item.split is not None
            rival = best.get(item.tree)
            better = rival is None or rival.split is None or item.split.gain > rival.split.gain
            if leaves[item.tree] < self.leaves and better:
                best[item.tree] = item
        return [best[tree] for tree in sorted(best)]

    def _judge(self, items: list[OpenNode]) -> None:
        if not items:
            return
        allowed = None if self.allowed is None else np.stack([self.allowed(i.tree, i.node) for i in items])
        splits = best_splits(np.stack([i.sums for i in items]), self.bins, self.features, self.rule, allowed)
        for item, split in zip(items, splits, strict=True):
            item.split = split

    async def _children(self, table: TreeTable, parents: list[OpenNode]) -> list[OpenNode]:
        """Split nodes; return their children that may be split further, with their sums."""
        pairs: list[Pair] = []
        for item in parents:
            split = item.split
            assert split is not None
            values = self.value(split.left), self.value(split.right)
            counts = int(split.left[-1]), int(split.right[-1])
            children = table.split(item.node, split.feature, split.bin, split.missing_left, split.goes_left, split.gain,
                                   counts, values)  # fmt: skip
            if item.depth + 1 < self.depth and any(self.rule.divides(count) for count in counts):
                pairs.append((item, split, children))
        if not pairs:
            return []
        arrays = table.arrays()
        width = self.bins.widths[self.features[0]]
        both = await self._smaller(arrays, pairs, width) if self.subtract else None
        if both is None:
            whole = await self.ask(arrays, [(item.tree, child) for item, _, children in pairs for child in children])
            both = [(whole[2 * k], whole[2 * k + 1]) for k in range(len(pairs))]
        found = []
        for (item, _, children), pair in zip(pairs, both, strict=True):
            for child, one in zip(children, pair, strict=True):
                if self.rule.divides(int(one[-1, :width].sum())):
                    found.append(OpenNode(item.tree, child, item.depth + 1, one))
        return found

    async def _smaller(self, arrays: TreeArrays, pairs: list[Pair], width: int) -> list[tuple[Array, Array]] | None:
        """The sums of both children, from those of the smaller ones.

        None if they are not what the splits promised, or more than the parents have.
        """
        smaller = [int(split.right[-1] < split.left[-1]) for _, split, _ in pairs]
        slots = [(item.tree, children[side]) for (item, _, children), side in zip(pairs, smaller, strict=True)]
        sums = await self.ask(arrays, slots)
        sides = [(split.left, split.right)[side] for (_, split, _), side in zip(pairs, smaller, strict=True)]
        others = np.stack([item.sums for item, _, _ in pairs]) - sums
        if not np.array_equal(sums[:, :, :width].sum(2), np.stack(sides)) or others[:, self.rule.outputs :].min() < 0:
            return None
        return [(one, other) if side == 0 else (other, one)
                for one, other, side in zip(sums, others, smaller, strict=True)]  # fmt: skip
