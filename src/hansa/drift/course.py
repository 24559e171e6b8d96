"""The course of a run's drifts: which samples and which parties there are in a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.plain_data import from_config
from hansa.core.task import Holdings, PartyShards
from hansa.drift.drift import Array, Concept, DataDrift, Drift
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError

NOTHING_YET = "it has no samples yet: all of them are of classes that appear later"
Pair = tuple[Tensor, Tensor]
Step = tuple[int, DataDrift, float, Array | None]  # number, drift, amount, and the places that drift (None: all)


def drifts(values: Any, rounds: int) -> tuple[Drift, ...]:
    """Read one drift or a list: parts, names or tables. A ConfigError if one goes on after the last round."""
    if values is None:
        return ()
    several = isinstance(values, (list, tuple))
    out = []
    for number, value in enumerate(values if several else [values]):
        where = f"drift[{number}]" if several else "drift"
        drift: Drift = from_config("drift", value, where=where)
        if drift.done > rounds:
            when = f"is complete in round {drift.done}" if drift.done > drift.start else f"begins in round {drift.done}"
            raise ConfigError(
                f"{where} ({drift.name}): it {when}, and the run ends with round {rounds}; let it begin earlier, or "
                "raise run.rounds"
            )
        out.append(drift)
    return tuple(out)


class Course:
    """The drifts of a simulated run. `enter` changes the parties' samples to those of a round, and who is there.

    Everything is a function of the round, the seed and the samples with which the run begins. Those are kept beside
    the drifted ones. `prepared` says that the task has a preparation of features.
    """

    def __init__(self, drifts: Sequence[Drift], holdings: Holdings, seed: int, prepared: bool = False) -> None:
        self.drifts, self.holdings, self.seed = tuple(drifts), holdings, seed
        self.changed: Callable[[Sequence[int]], None] = lambda parties: None  # told which parties' samples changed
        self._members = [self._drawn(number, drift) for number, drift in enumerate(self.drifts)]
        self._data = [(n, drift) for n, drift in enumerate(self.drifts) if isinstance(drift, DataDrift)]
        for number, drift in self._data:
            self._check(number, drift, prepared)
        self._check_presence()
        self._lacking: frozenset[int] = frozenset()
        self._dirty: frozenset[int] = frozenset()  # parties whose samples are not those of the beginning
        self._base: list[_Base] | None = None
        self._amounts: tuple[float, ...] = ()
        self._central: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._concept: Concept | None = None
        self._meet(1)

    def _drawn(self, number: int, drift: Drift) -> Array:
        """Which parties are members, as one flag per party."""
        count, where = len(self.holdings), f"drift[{number}] ({drift.name})"
        out = np.zeros(count, dtype=bool)
        if drift.parties:
            out[[self.holdings.find(str(label), where) for label in drift.parties]] = True
            return out
        share = 1.0 if drift.fraction is None else drift.fraction
        wanted = int(share * count + 1e-9)
        if share > 0 and wanted == 0:
            raise ConfigError(f"{where}: a fraction of {share:g} of {count} parties is rounded down to no party")
        out[rng.generator(self.seed, "drift", number).choice(count, size=wanted, replace=False)] = True
        return out

    def _check(self, number: int, drift: DataDrift, prepared: bool) -> None:
        """Refuse a drift that does not fit the samples."""
        held, where = self.holdings, f"drift[{number}] ({drift.name})"
        if not isinstance(held.train.x, Tensor) or (held.tests is not None and not isinstance(held.tests.x, Tensor)):
            raise ConfigError(
                f"{where}: it changes samples, and those of the parties stay in files; load them into memory, or leave "
                "it out"
            )
        y = held.train.y
        classes = held.classes if y.dim() == 1 and not y.is_floating_point() else None
        try:
            drift.check(held.shape, held.train.x.dtype, classes, prepared)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        sets = [("training", y), *([("test", held.tests.y)] if held.tests is not None else [])]
        for name, labels in (*sets, *([("central test", held.test[1])] if held.test is not None else [])):
            for label in drift.needs(classes or 0):
                if not bool((labels == label).any()):
                    raise ConfigError(f"{where}: there is no {name} sample of class {label}, which it needs")

    def _check_presence(self) -> None:
        """Refuse a course that leaves a round without any party. Cycles of day and night may do so for a while."""
        lasting = [(drift, members) for drift, members in zip(self.drifts, self._members, strict=True)
                   if drift.name in ("join", "leave")]  # fmt: skip
        for round in sorted({1, *(drift.start for drift, _ in lasting)}):
            gone = [members for drift, members in lasting if drift.away(round) is not None]
            if gone and bool(np.logical_or.reduce(gone).all()):
                raise ConfigError(f"drift: no party is there in round {round}; let some join earlier or leave later")

    # --- who is there ---

    def away(self, party: int) -> str | None:
        """Why a party cannot take part in the current round; None if it can."""
        for drift, members in zip(self.drifts, self._members, strict=True):
            if members[party] and (why := drift.away(self.round)) is not None:
                return why
        return NOTHING_YET if party in self._lacking else None

    def present(self, parties: Sequence[int]) -> Sequence[int]:
        """Those of some parties that can take part in the current round."""
        if not self._gone.any():
            return parties
        ids = np.asarray(parties, dtype=np.int64)
        return tuple(ids[~self._gone[ids]].tolist())

    @property
    def absent(self) -> frozenset[int]:
        """The parties that cannot take part in the current round."""
        return frozenset(np.flatnonzero(self._gone).tolist())

    def _meet(self, round: int) -> None:
        self.round, self._gone = round, np.zeros(len(self.holdings), dtype=bool)
        for drift, members in zip(self.drifts, self._members, strict=True):
            if drift.away(round) is not None:
                self._gone |= members
        self._gone[list(self._lacking)] = True

    # --- what they hold ---

    def begin(self, test: Pair | None, before: Tensor | None) -> None:
        """Take the samples as they are now, prepared, as those from which all drifts start.

        `test` is the aggregator's test set, and `before` its features before their preparation.
        """
        if self._base is None:
            shards = [self.holdings.train, *([self.holdings.tests] if self.holdings.tests is not None else [])]
            self._base = [_Base(shard, self.holdings.classes) for shard in shards] if self._data else []
            self._central = None if test is None else (*test, before)
            if test is not None and self._data:
                self._concept = concept_of(test[1], self.holdings.classes)

    def enter(self, round: int) -> None:
        """Go to a round, counted from 1."""
        amounts = self.amounts(round)
        if self._data and amounts != self._amounts:
            self._change(amounts)
            self._amounts = amounts
        self._meet(round)

    def amounts(self, round: int) -> tuple[float, ...]:
        """How far each drift of samples has gone in a round."""
        return tuple(drift.amount(round) for _, drift in self._data)

    @property
    def concepts(self) -> list[int]:
        """The rounds in which concepts begin: the first, and each in which a drift of samples is complete."""
        return sorted({1, *(drift.done for _, drift in self._data)}) if self._data else []

    def test(self, round: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """The aggregator's test set of a round, and its features before their preparation."""
        if self._central is None or self._concept is None:
            return self._central
        x, y, before = self._central
        steps: list[Step] = [(n, drift, amount, self._share(n, len(y)))
                             for (n, drift), amount in zip(self._data, self.amounts(round), strict=True)]  # fmt: skip
        own = np.arange(len(y))
        rows, features = self._drifted(own, x, self._concept, steps, "test")
        if rows is None or (rows is own and features is None):
            return self._central
        index = torch.from_numpy(rows).to(y.device)
        return x[index] if features is None else features, y[index], None if before is None else before[index]

    def _share(self, number: int, count: int) -> Array | None:
        """The places of test samples that drift: as large a share as the members have of all training samples."""
        members = self._members[number]
        if members.all():
            return None
        sizes = np.diff(self.holdings.train.offsets)
        share = float(sizes[members].sum() / sizes.sum())
        chosen = rng.shuffled(rng.key(self.seed, "drift", number, "share of the test set"), count)
        return np.sort(chosen[: math.floor(share * count + 0.5)])

    def _change(self, amounts: tuple[float, ...]) -> None:
        """Give all members the samples of these amounts."""
        assert self._base is not None
        dirty, lacking = set[int](), set[int]()
        drifting = np.logical_or.reduce([self._members[number] for number, _ in self._data])
        for kind, base in zip(("train", "tests"), self._base, strict=False):
            for party in np.flatnonzero(drifting).tolist():
                steps: list[Step] = [(n, drift, amount, None) for (n, drift), amount in
                                     zip(self._data, amounts, strict=True) if self._members[n][party]]  # fmt: skip
                span = base.shard.span(party)
                own = np.arange(span.start, span.stop)
                rows, features = self._drifted(own, base.x, base.concept, steps, kind, party)
                if rows is None:
                    lacking |= {party} if kind == "train" else set()
                    rows = own
                drifted = rows is not own or features is not None
                if drifted or party in self._dirty:
                    base.write(span, rows, features)
                dirty |= {party} if drifted else set()
        changed = sorted(dirty | self._dirty)
        self._dirty, self._lacking = frozenset(dirty), frozenset(lacking)
        if changed:
            self.changed(changed)

    def _drifted(self, own: Array, x: Tensor, concept: Concept, steps: Iterable[Step],
                 *owner: str | int) -> tuple[Array | None, Tensor | None]:  # fmt: skip
        """The rows in the places of `own`, and their features, if these are not those of the rows.

        The array is `own` itself if no row is another, and None if a party has nothing to show yet.
        """
        rows, keyed = own, [(*step, rng.key(self.seed, "drift", step[0], *owner)) for step in steps]
        for _, drift, amount, places, key in keyed:
            part = rows if places is None else rows[places]
            new = drift.rows(part, concept, amount, key)
            if new is None and places is None:
                return None, None
            if new is None or np.array_equal(new, part):
                continue
            rows = rows.copy()
            rows[slice(None) if places is None else places] = new
        source = features = x[torch.from_numpy(rows).to(x.device)]
        for _, drift, amount, places, key in keyed:
            if places is None:
                features = drift.features(features, amount, key)
                continue
            at = torch.from_numpy(places).to(x.device)
            part_x = features[at]
            new_x = drift.features(part_x, amount, key)
            if new_x is not part_x:
                features = features.index_copy(0, at, new_x)
        return rows, None if features is source else features


class _Base:
    """The samples of a set (training or test) at the beginning, and the shard that holds the current ones."""

    def __init__(self, shard: PartyShards, classes: int | None) -> None:
        assert isinstance(shard.x, Tensor)
        self.shard, self.x, self.y, self.weights, self.before = shard, shard.x, shard.y, shard.weights, shard.before
        self.concept = concept_of(shard.y, classes)

    def write(self, span: slice, rows: Array, features: Tensor | None) -> None:
        """Write a party's current samples. The task's own tensors are not changed."""
        shard, index = self.shard, torch.from_numpy(rows).to(self.y.device)
        for name in ("x", "y", "weights", "before"):
            base: Tensor | None = getattr(self, name)
            if base is None:
                continue
            if getattr(shard, name) is base:
                setattr(shard, name, base.clone())
            getattr(shard, name)[span] = features if name == "x" and features is not None else base[index]
        if shard.weights is not None:
            shard.weights = shard.weights.clone()  # the shard joins weights and targets anew for another tensor


def concept_of(y: Tensor, classes: int | None) -> Concept:
    """Labels on the CPU, and the rows of each class."""
    y = y.cpu()
    whole = y.dim() == 1 and not y.is_floating_point() and classes is not None
    return Concept(y, [np.flatnonzero(y.numpy() == label) for label in range(classes or 0)] if whole else [])
