"""The party's side of tree growth: sums of statistics by node, feature and bin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.classical.trees import gradients as losses_of
from hansa.classical.trees.bins import BINS, Bins
from hansa.classical.trees.coded import Coded, coded
from hansa.classical.trees.table import TREES, TreeArrays
from hansa.core.entries import BYTES, WHOLE, Entries, Number, Shaped, Sizes, check_size, extended, optional, stated
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import SIZED, AnyCount, BelowOne, Seed, Share, Some
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample, rescaled
from hansa.plumbing import codec
from hansa.plumbing.errors import NotAdmitted, PartyError
from hansa.plumbing.stopping import go_on

Array = np.ndarray[Any, Any]
MOST_SLOTS = 2**14  # nodes of an ask
MOST_NUMBERS = 2**26  # in a reply
POINTS = Number(whole=True, least=0, most=2**16 - 1, optional=True)  # the resolution of surrogates
Reach = Annotated[float, Meta(gt=0, lt=2.0**100, description="the largest absolute value"), Owner(0, 2.0**100)]
UnitBits = Annotated[int, Meta(ge=1, le=40, description="of a whole number between 0 and the bound"), Owner(1, 64)]
MARGIN, SEEN, DATA, HISTORY = "boosting/margins", "boosting/trees", "boosting/data", "boosting/history"


def histograms(codes: Array, features: Array, bins: Bins, slot: Array, slots: int, statistics: Array) -> Array:
    """The sums [slots, statistics, bins] of each sample's statistics [statistics, samples], which are whole numbers.

    `slot` is the slot of each sample, -1 for samples that are not counted. Bins are those of `features`, in order.
    """
    counted = np.flatnonzero(slot >= 0)
    at = slot[counted].astype(np.int64)
    numbers = np.ascontiguousarray(statistics[:, counted])
    widths = bins.widths[features]
    out = np.zeros((slots, len(statistics), int(widths.sum())), dtype=np.int64)
    ones = [bool((row == 1).all()) for row in numbers]
    begin = 0
    for feature, width in zip(features.tolist(), widths.tolist(), strict=True):
        go_on()
        place = codes[feature].take(counted) + at * width
        for row, values in enumerate(numbers):
            sums = np.bincount(place, None if ones[row] else values, minlength=slots * width)
            out[:, row, begin : begin + width] = sums.reshape(slots, width)
        begin += width
    return out


class TreeOp(Op):
    """Base of the ops that send sums by node, feature and bin.

    The payload has the `bins`, the `trees` that grow, the `slots` (tree and node) and the `features` to count. A reply
    holds whole numbers: for each output a sum of gradients, then a sum of second derivatives unless `constant`, then
    the number of samples.
    """

    update: ClassVar[str | None] = None
    outputs: int
    constant: bool
    entries: ClassVar[Entries | None] = stated(
        bins=BINS, trees=TREES, points=POINTS,
        slots=Shaped(types=WHOLE, shape=(None, 2), least=0),
        features=Shaped(types=WHOLE, shape=(None,), least=0, rising=True),
    )  # fmt: skip

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        bins = Bins.of(payload["bins"], sizes.get("features"))
        trees, slots = TreeArrays.of(payload["trees"], bins), _slots(payload)
        if len(slots) and (slots[:, 0].max() >= len(trees.roots) or slots[:, 1].max() >= len(trees.feature)):
            raise PartyError("malformed ask: it wants sums of nodes that its trees do not have")
        _features(payload, len(bins.widths))

    @property
    def rows(self) -> int:
        """The statistics of each bin."""
        return self.outputs + (1 if self.constant else 2)

    @property
    def highest(self) -> tuple[int, int]:
        """The largest absolute gradient and the largest second derivative of a sample, as whole numbers."""
        raise TypeError(f"the op {self.name!r} does not define highest")

    @property
    def per_sample(self) -> Bounds:  # type: ignore[override]
        first, second = self.highest
        most = [first] * self.outputs + [second] * (not self.constant) + [1]
        return {"sums": PerSample(torch.tensor(most)[:, None], signed=True, nearest=True)}

    def rescaled(self, tensors: Mapping[str, Tensor], samples: int, limit: int) -> dict[str, Tensor]:
        less = super().rescaled(tensors, samples, limit)  # to the nearest, but counts away from 0: they bound others
        if "sums" in tensors:
            less["sums"][:, -1] = rescaled({"counts": tensors["sums"][:, -1]}, {}, samples, limit)["counts"]
        return less

    def expects(self, payload: Payload) -> dict[str, Shape]:
        widths = widths_of(payload)
        size = len(_slots(payload)), self.rows, int(widths.sum())
        if np.prod(size, dtype=object) > MOST_NUMBERS:
            raise PartyError(f"the ask wants sums of the shape {size}, and {MOST_NUMBERS} numbers are the most")
        return {"sums": (size, torch.int64)}

    def points(self, payload: Payload) -> int:
        """The resolution of surrogates (`sketches.surrogates`); 0 for the samples themselves."""
        points: int = payload.get("points", 0)
        return points

    def counted(self, own: Coded, bins: Bins, payload: Payload, statistics: Array, used: Array, small: int) -> Tensor:
        """The reply's sums, from statistics of the samples; `used` says which samples count."""
        trees = TreeArrays.of(payload["trees"], bins)
        slots = _slots(payload)
        features = _features(payload, len(bins.widths))
        out = np.zeros((len(slots), self.rows, int(bins.widths[features].sum())), dtype=np.int64)
        for tree in np.unique(slots[:, 0]).tolist():
            mine = np.flatnonzero(slots[:, 0] == tree)
            table = np.full(len(trees.feature), -1, dtype=np.int64)
            table[slots[mine, 1]] = np.arange(len(mine))
            rows = np.flatnonzero(self.used(used, tree))
            codes = own.codes if len(rows) == own.codes.shape[1] else np.ascontiguousarray(own.codes[:, rows])
            slot = table[trees.leaves(codes, bins, tree, small)]
            numbers = self.of_tree(statistics, tree)[:, rows]
            out[mine] = histograms(codes, features, bins, slot, len(mine), numbers)
        return torch.from_numpy(out)

    def of_tree(self, statistics: Array, tree: int) -> Array:
        """The statistics [rows, samples] that a tree sums."""
        return statistics

    def used(self, used: Array, tree: int) -> Array:
        """Which samples [samples] count for a tree."""
        return used

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        sums = reply.tensors.get("sums")
        return None if sums is None else self.contradiction(sums.cpu().numpy(), payload, reply.weight)

    def impossible_sum(self, sums: Mapping[str, Tensor], payload: Payload, samples: int) -> str | None:
        return self.contradiction(sums["sums"].cpu().numpy(), payload, samples)

    def contradiction(self, sums: Array, payload: Payload, samples: int, parties: int = 0) -> str | None:
        """Why sums over at most this many samples are impossible, or None.

        The totals of features may differ by the rounding of the sums of `parties`, which may have been rescaled.
        """
        widths = widths_of(payload)
        counts, (first, second) = sums[:, -1], self.highest
        if counts.size and counts.min() < 0:
            return "it has negative counts"
        if bool((np.abs(sums[:, : self.outputs]) > first * counts[:, None]).any()):
            return "it has sums of gradients that its counts do not allow"
        if not self.constant and bool(((sums[:, -2] < 0) | (sums[:, -2] > second * counts)).any()):
            return "it has sums of second derivatives that its counts do not allow"
        edges = np.concatenate([[0], np.cumsum(widths)])[:-1].astype(np.int64)
        if sums.size:
            totals = np.add.reduceat(sums, edges, axis=2)
            if bool((np.abs(totals - totals[:, :, :1]) > parties * widths.max()).any()):
                return "the totals of its sums differ between features"
            trees = _slots(payload)[:, 0] if "slots" in payload else np.arange(len(sums))  # a tree's nodes are disjoint
            if np.bincount(trees - trees.min(), totals[:, -1, 0]).max() > samples:
                return "it counts more samples than the party has"
        return None


def widths_of(payload: Payload) -> Array:
    """The number of bins of each feature that is counted; the bins themselves are checked when they are used."""
    bins = payload["bins"]
    starts, categorical = bins["starts"].cpu().numpy(), bins["categorical"].cpu().numpy()
    features = _features(payload, len(categorical))
    if len(starts) != len(categorical) + 1 or (len(starts) and np.diff(starts).min(initial=0) < 0):
        raise PartyError("malformed bins: cuts and features do not fit together")
    widths: Array = np.diff(starts) + np.where(categorical, 1, 2)
    return widths[features]


def _slots(payload: Payload) -> Array:
    slots: Array = payload["slots"].cpu().numpy()
    if len(slots) > MOST_SLOTS:
        raise PartyError(f"the ask wants sums of {len(slots)} nodes, and {MOST_SLOTS} are the most")
    return slots


def _features(payload: Payload, most: int) -> Array:
    features: Array = payload["features"].cpu().numpy()
    if not len(features) or features[-1] >= most:
        raise PartyError(f"malformed ask: 'features' must name some of the features 0 to {most - 1}")
    return features


def targets(party: Party, y: Tensor, classes: int) -> Array:
    """A party's targets: class numbers below `classes`, or one number per sample if `classes` is 0."""
    if y.dim() != 1:
        raise PartyError(f"trees need one target per sample, and the targets here have the shape {tuple(y.shape)}")
    found: Array = y.cpu().numpy()
    if not classes:
        return found.astype(np.float64)
    if y.is_floating_point() or (len(found) and (found.min() < 0 or found.max() >= classes)):
        raise PartyError(f"the job has {classes} classes, and a label here is not a class number below that")
    return found


@register("gradient-histograms")
@dataclass(frozen=True)
class GradientHistograms(TreeOp):
    """Sums of gradients, second derivatives and counts by node, feature and bin, at the present outputs of the model.

    `trees` is the number of earlier trees. A party remembers their outputs for its samples. The first ask of a round
    sends all earlier trees (`before`). Later ones rely on the memory, and name these trees by their hash (`history`): a
    party whose sums must be hidden builds on no other trees than those of the last ask. `held` is the share of samples
    that only measure the model: the reply to the first ask has their loss, `loss`, and their number, `held`. `sample`
    is the share of rows that a tree uses. Rows are drawn by `key` and the party (`Party.row_draws`). `points` is the
    resolution of surrogates (`sketches.surrogates`); 0 for the samples themselves.
    """

    loss: str = "logistic"
    classes: Annotated[int, Meta(ge=0, le=2**15), SIZED] = 2
    bound: Reach = 1.0
    bits: UnitBits = 30
    trees: Some = 0
    held: BelowOne = 0.0
    sample: Share = 1.0
    key: Seed = 0
    min_rows: AnyCount = 1
    recalls: ClassVar[bool] = False  # but for what `history` names
    entries = extended(TreeOp.entries, before=optional(TREES), base=Shaped(shape=(None,)),
                       history=Shaped(types=BYTES, shape=(32,), optional=True))  # fmt: skip

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        self._check_loss()
        super().check_ask(payload, sizes)
        check_size(self.name, "classes", self.classes, sizes)
        self._base(payload)
        self._before(payload, Bins.of(payload["bins"]))

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return 1

    @property
    def constant(self) -> bool:  # type: ignore[override]
        return self.loss == "squared"

    @property
    def highest(self) -> tuple[int, int]:
        return 2**self.bits, 2**self.bits

    @property
    def per_sample(self) -> Bounds:  # type: ignore[override]
        most = losses_of.most_loss(self.loss)
        return {**super().per_sample, "loss": PerSample(most), "held": PerSample()}

    def _check_loss(self) -> None:
        if self.loss not in losses_of.LOSSES:
            raise PartyError(
                f"gradient-histograms asks for the loss {self.loss!r}; losses: {', '.join(losses_of.LOSSES)}"
            )

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        self._check_loss()
        seen = self.trees if "before" in payload else int(memory.get(SEEN, 0))
        if seen != self.trees:  # the number of asks that it answered is public
            raise NotAdmitted(f"it has the outputs of {seen} trees, and this ask is about tree {self.trees}")
        if party.min_drawn and seen and "before" not in payload:
            named = payload.get("history")
            if named is None or not torch.equal(named, memory[HISTORY]):
                raise NotAdmitted("it was sent other earlier trees than those that this ask names")
        held = party.draws(self.key, 0, self.held) if self.held else np.zeros(party.n, dtype=bool)
        drawn = party.draws(self.key, 1 + self.trees, self.sample) if self.sample < 1 else ~held
        party.check_drawn(drawn & ~held)
        x, y = party.samples("statistics")
        bins = Bins.of(payload["bins"], int(np.prod(x.shape[1:])))
        own = coded(x, bins, self.points(payload))
        labels, used = self.labels(party, y)
        margins, memory = self._margins(party, own, bins, payload, memory)
        used &= ~held
        tensors = {}
        if "before" in payload:
            outside = ~used
            each = losses_of.losses(self.loss, margins[outside], labels[outside], self.bound)
            tensors = {"loss": torch.tensor(int(each.sum())), "held": torch.tensor(int(outside.sum()))}
        used &= drawn
        g, h = losses_of.gradients(self.loss, margins, labels)
        g, h = losses_of.rounded(g, self.bound, self.bits), losses_of.rounded(h, 1.0, self.bits)
        statistics = np.stack([g.T, h.T, np.ones_like(g.T)])  # [kinds, outputs, samples]
        small = max(self.min_rows, party.min_rows)
        tensors["sums"] = self.counted(own, bins, payload, statistics, used, small)
        return Reply(tensors, weight=len(labels)), memory

    def labels(self, party: Party, y: Tensor) -> tuple[Array, Array]:
        """The targets of the samples, and which samples count."""
        found = targets(party, y, self.classes)
        return found, np.ones(len(found), dtype=bool)

    def of_tree(self, statistics: Array, tree: int) -> Array:
        chosen = statistics[:, tree % statistics.shape[1]]
        return chosen[[0, 2]] if self.constant else chosen

    def _margins(self, party: Party, own: Coded, bins: Bins, payload: Payload, memory: Memory) -> tuple[Array, Memory]:
        """The outputs of the earlier trees for the party's samples, and the memory with them."""
        base, before = self._base(payload), self._before(payload, bins)
        width = len(base)
        known = memory.get(MARGIN)
        same = known is not None and known.shape == (own.codes.shape[1], width) and int(memory[DATA]) == own.digest
        seen = int(memory[SEEN]) if same else 0
        if before is None:
            if (same and seen == self.trees) or not self.trees:
                return self._start(known if self.trees else None, base, own), memory
            raise PartyError(f"it has the outputs of {seen} trees, and this ask is about tree {self.trees}")
        if not same or seen > self.trees or party.min_drawn:
            known, seen = None, 0
        margins = self._start(known, base, own)
        before.add_to(margins, own.codes, bins, seen)
        kept = {MARGIN: torch.from_numpy(margins), SEEN: torch.tensor(self.trees), DATA: torch.tensor(own.digest),
                HISTORY: history(payload)}  # fmt: skip
        return margins, {**memory, **kept}

    def _base(self, payload: Payload) -> Tensor:
        """The output without trees."""
        width = losses_of.outputs_of(self.loss, self.classes)
        base: Tensor = payload["base"]
        if len(base) != width:
            raise PartyError(f"malformed ask: 'base' must be {width} finite numbers")
        return base

    def _before(self, payload: Payload, bins: Bins) -> TreeArrays | None:
        """The earlier trees, if the ask has them."""
        if "before" not in payload:
            return None
        before, width = TreeArrays.of(payload["before"], bins), losses_of.outputs_of(self.loss, self.classes)
        if len(before.roots) != self.trees or (self.trees and before.outputs.max() >= width):
            raise PartyError(f"malformed ask: it should have {self.trees} earlier trees, of {width} outputs")
        return before

    @staticmethod
    def _start(known: Tensor | None, base: Tensor, own: Coded) -> Array:
        if known is not None:
            return known.cpu().numpy().copy()
        return np.tile(base.cpu().numpy().astype(np.float64), (own.codes.shape[1], 1))

    def expects(self, payload: Payload) -> dict[str, Shape]:
        first: dict[str, Shape] = {"loss": ((), torch.int64), "held": ((), torch.int64)} if "before" in payload else {}
        return {**super().expects(payload), **first}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": 1}


def history(payload: Payload) -> Tensor:
    """The hash of the outputs before an ask's tree: of the earlier trees and the output without trees."""
    digest = codec.digest({"before": payload["before"], "base": payload["base"]})
    return torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
