"""Trees as one table of nodes: split samples by bins, route them to leaves, add up values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta

from hansa.classical.trees.bins import Bins
from hansa.core.entries import BYTES, FLOAT64, INT32, Nested, Shaped
from hansa.plumbing.errors import PartyError
from hansa.plumbing.stopping import go_on

Array = np.ndarray[Any, Any]
MOST_DEPTH = 64
Levels = Annotated[int, Meta(ge=1, le=MOST_DEPTH, description="levels of splits")]
MOST_NODES = 2**22  # of all trees together
INTEGERS = ("roots", "outputs", "feature", "bin", "child", "missing", "choice", "count")
NAMES = (*INTEGERS, "gain", "value", "sets")
TREES = Nested(entries={
    **{name: Shaped(types=INT32, shape=(None,)) for name in INTEGERS}, "gain": Shaped(types=FLOAT64, shape=(None,)),
    "value": Shaped(types=FLOAT64, shape=(None, None)), "sets": Shaped(types=BYTES, shape=(None, None)),
})  # fmt: skip


@dataclass
class TreeTable:
    """The nodes of many trees. A split sends a sample to the node `child` (left) or `child` + 1 (right).

    `feature` is -1 at a leaf. A number goes left if its bin is at most `bin`; a missing value goes left if `missing` is
    1. A category goes left if row `choice` of `sets` has a 1 for it; missing and unknown categories go right. A tree
    adds the `value` of a sample's leaf to the output `outputs` of the tree, or one number to each output if that is -1.
    `gain` and `count` are those of the split and the number of training samples, for reports.
    """

    width: int  # numbers in a node's value
    roots: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    feature: list[int] = field(default_factory=list)
    bin: list[int] = field(default_factory=list)
    child: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    choice: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    gain: list[float] = field(default_factory=list)
    value: list[Array] = field(default_factory=list)
    sets: list[Array] = field(default_factory=list)

    def add_root(self, output: int, count: int, value: Array) -> int:
        """Begin a tree; return its root."""
        self.roots.append(len(self.feature))
        self.outputs.append(output)
        return self._add(count, value)

    def _add(self, count: int, value: Array) -> int:
        for column, start in ((self.feature, -1), (self.bin, 0), (self.child, 0), (self.missing, 0), (self.choice, -1)):
            column.append(start)
        self.count.append(int(count))
        self.gain.append(0.0)
        self.value.append(value)
        return len(self.feature) - 1

    def split(self, node: int, feature: int, bin: int, missing_left: bool, goes_left: Array | None, gain: float,
              counts: tuple[int, int], values: tuple[Array, Array]) -> tuple[int, int]:  # fmt: skip
        """Split a leaf; return its children. `goes_left` are the categories that go left, None for numbers."""
        self.feature[node], self.bin[node], self.gain[node] = feature, bin, gain
        self.missing[node] = int(missing_left)
        if goes_left is not None:
            self.choice[node] = len(self.sets)
            self.sets.append(goes_left)
        left = self._add(counts[0], values[0])
        right = self._add(counts[1], values[1])
        self.child[node] = left
        return left, right

    def arrays(self) -> TreeArrays:
        """The trees as they are now."""
        widest = max((len(row) for row in self.sets), default=0)
        sets = np.zeros((len(self.sets), widest), dtype=np.uint8)
        for row, members in zip(sets, self.sets, strict=True):
            row[: len(members)] = members
        integers = {name: np.array(getattr(self, name), dtype=np.int32) for name in INTEGERS}
        value = np.array(self.value, dtype=np.float64).reshape(-1, self.width)
        return TreeArrays(**integers, gain=np.array(self.gain, dtype=np.float64), value=value, sets=sets)


@dataclass(frozen=True)
class TreeArrays:
    """The columns of a `TreeTable`, as arrays; `child` and `roots` are positions in them."""

    roots: Array
    outputs: Array
    feature: Array
    bin: Array
    child: Array
    missing: Array
    choice: Array
    count: Array
    gain: Array
    value: Array
    sets: Array

    @classmethod
    def none(cls, width: int) -> TreeArrays:
        """No trees."""
        return TreeTable(width).arrays()

    def payload(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors by name, for messages and files."""
        return {name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in NAMES}

    @classmethod
    def of(cls, payload: Any, bins: Bins) -> TreeArrays:
        """The trees of a message; a PartyError if they are malformed."""
        if not isinstance(payload, Mapping) or set(payload) != set(NAMES):
            raise PartyError(f"malformed trees: expected the tensors {', '.join(NAMES)}")
        trees = cls(**{name: _array(payload[name], name) for name in NAMES})
        trees._check(bins)
        return trees

    def _check(self, bins: Bins) -> None:
        nodes, trees = len(self.feature), len(self.roots)
        columns = (self.bin, self.child, self.missing, self.choice, self.count, self.gain, self.value)
        at = np.arange(nodes)
        inner = self.feature >= 0
        feature = np.where(inner, self.feature, 0)
        chosen = inner & (self.choice >= 0)
        fits = (
            nodes <= MOST_NODES
            and all(len(column) == nodes for column in columns)
            and len(self.outputs) == trees
            and self.value.ndim == 2
            and self.sets.ndim == 2
            and bool(((self.roots >= 0) & (self.roots < nodes)).all())
            and bool(((self.outputs >= -1) & (self.outputs < 2**15)).all())
            and bool(((self.feature >= -1) & (self.feature < len(bins.widths))).all())
            and (not inner.any() or bool(((self.child > at) & (self.child < nodes - 1))[inner].all()))
            and bool((self.choice < len(self.sets)).all())
            and bool((bins.categorical[feature] == chosen)[inner].all() if inner.any() else True)
            and bool((bins.widths[feature] <= self.sets.shape[1])[chosen].all() if chosen.any() else True)
            and bool(np.isfinite(self.value).all())
        )
        if not fits:
            raise PartyError("malformed trees: their nodes do not fit together, or not to the bins")
        level = self.roots
        for _ in range(MOST_DEPTH + 1):
            below = self.child[level[self.feature[level] >= 0]]
            if not len(below):
                return
            level = np.unique(np.concatenate([below, below + 1]))
        raise PartyError(f"malformed trees: deeper than {MOST_DEPTH} levels")

    def joined(self, more: TreeArrays) -> TreeArrays:
        """These trees and more trees."""
        nodes, sets = len(self.feature), len(self.sets)
        widest = max(self.sets.shape[1], more.sets.shape[1])
        padded = [np.pad(part.sets, ((0, 0), (0, widest - part.sets.shape[1]))) for part in (self, more)]
        shifted = {"roots": more.roots + nodes, "child": np.where(more.feature >= 0, more.child + nodes, 0),
                   "choice": np.where(more.choice >= 0, more.choice + sets, -1)}  # fmt: skip
        columns = {name: np.concatenate([getattr(self, name), shifted.get(name, getattr(more, name))])
                   for name in NAMES if name != "sets"}  # fmt: skip
        columns = {name: column.astype(np.int32) if name in INTEGERS else column for name, column in columns.items()}
        return TreeArrays(**columns, sets=np.concatenate(padded))

    def first(self, trees: int) -> TreeArrays:
        """The first trees, up to the end of a round: the nodes of a round lie together."""
        if trees >= len(self.roots):
            return self
        columns = {name: getattr(self, name) for name in NAMES}
        nodes = int(self.roots[trees])
        whole = ("roots", "outputs", "sets")
        columns |= {name: column[:nodes] for name, column in columns.items() if name not in whole}
        return TreeArrays(**{**columns, "roots": self.roots[:trees], "outputs": self.outputs[:trees]})

    def leaves(self, codes: Array, bins: Bins, tree: int, small: int = 1) -> Array:
        """The leaf of each sample in one tree, from the codes [features, samples].

        With `small` above 1, samples of a node with fewer of them go with the samples of its sibling: every group that
        remains, and the difference of any two nested ones, has none or at least `small`.
        """
        samples = codes.shape[1]
        flat = codes.reshape(-1)
        feature, child, cut = (column.astype(np.intp) for column in (self.feature, self.child, self.bin))
        unknown = (bins.widths - 1)[feature]
        missing_left, categories = self.missing == 1, bool((self.choice >= 0).any())
        node = np.full(samples, self.roots[tree], dtype=np.intp)
        active, at = np.arange(samples), node
        while True:  # children come after their parents, and trees have at most MOST_DEPTH levels
            go_on()
            used = feature.take(at)
            going = used >= 0
            if not going.all():
                active, at, used = active[going], at[going], used[going]
            if not len(active):
                return node
            code = flat.take(used * samples + active)
            right = code > cut.take(at)
            right &= ~((code == unknown.take(at)) & missing_left.take(at))
            if categories:
                chosen = self.choice.take(at)
                right = np.where(chosen >= 0, self.sets[chosen, np.where(chosen >= 0, code, 0)] == 0, right)
            at = self._with_siblings(child.take(at), right, small)
            node[active] = at

    def _with_siblings(self, child: Array, right: Array, small: int) -> Array:
        """The nodes that samples go to, from the left child and whether they go right; small groups join the other."""
        if small > 1:
            sizes = np.bincount(child + right, minlength=len(self.feature) + 1)
            lefts, rights = sizes[child], sizes[child + 1]
            right = np.where(np.minimum(lefts, rights) < small, rights > lefts, right)
        return child + right

    def add_to(self, margins: Array, codes: Array, bins: Bins, first: int = 0) -> None:
        """Add the values of the trees from `first` on to the outputs [samples, outputs], in place."""
        for tree in range(first, len(self.roots)):
            values = self.value[self.leaves(codes, bins, tree)]
            with np.errstate(over="ignore"):  # losses and gradients bound an output that is infinite
                if self.outputs[tree] < 0:
                    margins += values
                else:
                    margins[:, self.outputs[tree]] += values[:, 0]


def _array(tensor: Any, name: str) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise PartyError(f"malformed trees: {name!r} is not a tensor")
    dtype = {"sets": torch.uint8, "gain": torch.float64, "value": torch.float64}.get(name, torch.int32)
    if tensor.dtype != dtype or (tensor.dim() != 1 and name not in ("sets", "value")):
        raise PartyError(f"malformed trees: {name!r} is not of the expected type")
    return tensor.cpu().numpy()
