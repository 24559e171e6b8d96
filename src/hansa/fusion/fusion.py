"""Base of fusions, and base of robust fusions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hansa.core.ask import Gathered
from hansa.core.federation import Federation, Finding
from hansa.core.op import Op, Payload
from hansa.core.registry import Part
from hansa.fusion.ordered import NotFinite, by_coordinate, middle_of
from hansa.fusion.update import Update
from hansa.numerics.params import Params
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import BoundError, ConfigError, DataError, RoundAborted
from hansa.replies.reply_checks import all_finite


class Fused(NamedTuple):
    """Result of a fusion: the fused vector, the share of each row in it, and the rule's scores if it has any.

    A share is the fraction of a row's coordinates that were kept, or the weight of the row. Rows with less than half of
    the mean share are `excluded`; with `weights`, rows with less than half of the share that their weight implies.
    """

    w: Tensor
    shares: list[float]
    scores: list[float] | None = None
    weights: Tensor | None = None
    memory: Mapping[str, Any] | None = None  # what the rule wants to be given in the next round

    @property
    def excluded(self) -> list[int]:
        due = [1.0] * len(self.shares) if self.weights is None else self.weights.tolist()
        mean = sum(self.shares) / sum(due)
        return [k for k, share in enumerate(self.shares) if share < mean * due[k] / 2 or not due[k]]


class Fusion(Part):
    """Base of fusions: rules that combine updates. `verbs` are the exchanges that the fusion needs.

    A fusion is callable on tensors: `rule(updates, weights)` with updates [K, d] gives the fused vector. Rows with
    values that are not finite are left out first.
    """

    kind: ClassVar[str] = "fusion"
    verbs: ClassVar[frozenset[str]]
    trusts: ClassVar[bool] = False  # whether the fusion needs trusted samples at the server
    trains: ClassVar[bool] = False  # whether the server trains on these samples as a party does
    # Whether the fusion has a memory: `fuse` is given `memory`, `parties` and `layers`, and returns the new memory.
    remembers: ClassVar[bool] = False
    permutes: ClassVar[bool] = False  # whether it changes the order of an update's units before it fuses updates

    def check(self, n: int) -> None:
        """Raise BoundError if the rule cannot fuse n updates."""
        if n < 1:
            raise BoundError(f"{self.name}: there is no update to fuse")

    def fits(self, module: nn.Module) -> None:
        """Raise a ConfigError for a model whose updates the rule cannot fuse. Called before the run starts."""

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        """Fuse the rows; the result has their type. Without `watch` the shares may be left out.

        Raise NotFinite for values that are not finite, unless they cannot change the result.
        """
        raise TypeError(f"the fusion {self.name!r} does not define fuse()")

    def used(self, n: int) -> int:
        """The number of updates, of n, that the result is made of, for a rule that leaves out a fixed number."""
        return n

    def __call__(self, updates: Any, weights: Any = None, **known: Any) -> Tensor:
        return self.examine(updates, weights, watch=False, **known).w

    def examine(self, updates: Any, weights: Any = None, watch: bool = True, **known: Any) -> Fused:
        """Fuse updates and return also the share of each row and the rule's scores; a row left out has the share 0."""
        rows = updates if isinstance(updates, Rows) else Rows(_matrix(updates, self.name))
        if not rows.dtype.is_floating_point:
            raise ConfigError(f"{self.name}: updates must be floating-point numbers, got {rows.dtype}")
        shares = _weights(weights, rows, self.name)
        self.check(len(rows))
        try:
            return self.fuse(rows, shares, watch, **known)
        except NotFinite:
            finite = [k for k in range(len(rows)) if all_finite(rows.row(k))]
        self.check(len(finite))
        part = None if shares is None else shares[finite]
        if part is not None and not float(part.sum()) > 0:
            raise BoundError(f"{self.name}: all finite updates have the weight 0")
        try:
            fused = self.fuse(rows.take(finite), part, watch, **known)
        except NotFinite:
            raise DataError(f"{self.name}: the updates are too large to be added") from None
        return Fused(fused.w, _spread(fused.shares, finite, len(rows), 0.0),
                     None if fused.scores is None else _spread(fused.scores, finite, len(rows), math.nan),
                     None if fused.weights is None else shares, fused.memory)  # fmt: skip

    async def collect(self, fed: Federation, op: Op, params: Params, each: Mapping[int, Payload] | None = None,
                      **extra: Any) -> Update:  # fmt: skip
        """Send the model (and `extra`) to the cohort, run `op` at the parties, fuse the replies (`combine`)."""
        payload = {"model": params._asdict(), **extra}
        answer = await fed.gather(op, payload, each=each)
        try:
            return self.combine(fed, op, params, payload, answer)
        except BoundError as reason:
            raise RoundAborted(str(reason)) from None

    def combine(self, fed: Federation, op: Op, params: Params, payload: Payload, answer: Gathered) -> Update:
        """Fuse replies that were gathered already: all of a cohort, or those of a group of parties.

        Raise BoundError if the rule cannot fuse them.
        """
        raise TypeError(f"the fusion {self.name!r} does not define combine()")


def _matrix(updates: Any, name: str) -> Tensor:
    """Convert updates (a tensor, an array or a list of vectors) to one tensor."""
    try:
        several = isinstance(updates, (list, tuple)) and all(isinstance(row, Tensor) for row in updates)
        return (torch.stack(list(updates)) if several else torch.as_tensor(updates)).detach()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: updates must be a matrix [K, d], one row per party: {error}") from None


def _weights(weights: Any, rows: Rows, name: str) -> Tensor | None:
    """Convert weights to float64; refuse negative ones and a wrong number of them."""
    if weights is None:
        return None
    try:
        shares = torch.as_tensor(weights, dtype=torch.float64, device=rows.device)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(f"{name}: weights must be numbers, one per update, got {weights!r}") from None
    if shares.shape != (len(rows),):
        raise ConfigError(f"{name}: {len(rows)} updates need as many weights, got the shape {tuple(shares.shape)}")
    if not bool((shares >= 0).all()) or not 0 < float(shares.sum()) < math.inf:
        raise ConfigError(f"{name}: weights must be finite, not negative and not all 0")
    return shares


def _spread(values: Sequence[float], finite: Sequence[int], n: int, other: float) -> list[float]:
    out = [other] * n
    for k, value in zip(finite, values, strict=True) if values else ():
        out[k] = value
    return out


class Robust(Fusion):
    """Base of robust fusions, which examine each update because some may be hostile.

    All parties have equal weights, whatever number of samples they claim. Other tensors of a reply (running means of a
    BatchNorm, control variates, counters) are fused by the coordinate-wise median, so that they are no way to attack.
    Rules that hold against a hostile majority take the running means from the server's own samples.
    """

    verbs: ClassVar[frozenset[str]] = frozenset({"gather"})

    def weighs(self, answer: Gathered) -> Tensor | None:
        """The weights of the replies, or None for equal weights."""
        return None

    def judge(self, fed: Federation, op: Op, params: Params, payload: Payload) -> dict[str, Any]:
        """Other inputs of the rule beside the updates; `own` is the server's own reply, if the rule needs one."""
        return {}

    def combine(self, fed: Federation, op: Op, params: Params, payload: Payload, answer: Gathered) -> Update:
        self.check(len(answer.parties))
        known = self.judge(fed, op, params, payload)
        if self.remembers:
            known |= {"memory": fed.memory.get(op.name), "parties": answer.parties, "layers": fed.layers}
        try:
            fused = self.fuse(answer.matrix("w"), self.weighs(answer), **known)
        except NotFinite:
            raise BoundError(f"{self.name}: the updates are too large to be added") from None
        if fused.memory is not None:
            fed.memory[op.name] = fused.memory
        out = [answer.parties[k] for k in fused.excluded]
        fed.report(Finding(self.name, answer.parties, fused.shares, fused.scores, out))
        n, first = len(answer.parties), answer.replies[0]
        if not self.trusts:
            others = {name: median(answer, name) for name in first.tensors if name != "w"}
            counts = lower_median([reply.maxima["counts"] for reply in answer.replies]) if first.maxima else None
            return Update(fused.w, others.pop("stats", None), counts, others, n)
        if "stats" not in first.tensors and not first.maxima:
            return Update(fused.w, replies=n)
        own = known.get("own") or fed.at_server(op, payload)
        return Update(fused.w, own.tensors.get("stats"), own.maxima.get("counts"), replies=n)


def median(answer: Gathered, name: str) -> Tensor:
    """The coordinate-wise median of one tensor over the replies."""
    middle, _ = by_coordinate(answer.matrix(name), middle_of)
    return middle.view(answer.replies[0].tensors[name].shape)


def lower_median(counters: list[Tensor]) -> Tensor:
    """The coordinate-wise median of whole numbers; the lower one of two middle values."""
    return torch.stack(counters).sort(0).values[(len(counters) - 1) // 2]
