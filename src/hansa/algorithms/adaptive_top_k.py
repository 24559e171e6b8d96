"""Fair top-k whose k adapts by the sign of an estimated derivative (Han, Wang and Leung 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.ask import Gathered
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import MODEL, WHOLE, Shaped, Sizes, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Count, NotNegative
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.fusion import Update
from hansa.local import SGD, LocalSolver
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.server import Descent
from hansa.transforms import AccumulatedTopK, Packed
from hansa.transforms.error_feedback import ERROR, PLACES, VALUES, returned
from hansa.transforms.top_k import magnitudes
from hansa.transforms.transform import memory_entries, recalled


@register("settle-top-k")
@dataclass(frozen=True)
class SettleTopK(Op):
    """Take back what the aggregator did not use, and measure three models on one training sample drawn each round.

    A party whose sums must be hidden measures them on as many samples as its policy requires (`Party.min_drawn`).
    `key` names the party's memory of what it sent. The models are that of the payload, and it with either of two sparse
    changes. A loss has no bound.
    """

    key: str
    per_sample: ClassVar[Bounds] = {"losses": PerSample(None, signed=True, per_party=True)}
    entries = stated(
        model=MODEL, used_values=Shaped(shape=("used",)), used_places=Shaped(types=WHOLE, shape=("used",), least=0),
        probe_values=Shaped(shape=("probe",)), probe_places=Shaped(types=WHOLE, shape=("probe",), least=0),
    )  # fmt: skip

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        places = torch.cat([payload["used_places"], payload["probe_places"]])
        if len(places) and int(places.max()) >= len(payload["model"]["w"]):
            raise PartyError("malformed ask: its changes are at other places than those of the model")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        before = recalled(memory, self.key)
        if not isinstance(before, dict) or not {ERROR, VALUES, PLACES} <= set(before):
            raise PartyError("it has sent no update that could be settled")
        model = Params(**payload["model"])
        changed = [_changed(model.w, payload, name) for name in ("used", "probe")]
        x, y = party.samples("statistics")
        rows = party.rng("settle-top-k").integers(party.n, size=1)
        if party.rows_secret:
            rows = party.some_rows(party.rows_key("settle-top-k", 0), 1)
        at, objective = torch.from_numpy(rows).to(x.device), party.objective
        x, y = x[at], y[at]
        outputs = [objective.outputs(model._replace(w=w), x) for w in (model.w, *changed)]
        losses = torch.stack([party.weighted(objective.loss_of(output, y), at).double().mean() for output in outputs])
        kept = memory_entries(self.key, returned(before, payload["used_places"]))
        return Reply({"losses": losses.cpu()}), {**memory, **kept}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"losses": ((3,), torch.float64)}


def _changed(w: Tensor, payload: Payload, name: str) -> Tensor:
    """The vector with the sparse change `name` of a payload."""
    values, places = payload[f"{name}_values"], payload[f"{name}_places"]
    return w.index_add(0, places.to(w.device), values.to(w))


@register("adaptive-top-k")
@dataclass(frozen=True)
class AdaptiveTopK(Algorithm):
    """Parties send the k largest numbers of all that they have not sent yet, and k adapts. Han, Wang and Leung 2020.

    Fair top-k (FAB-top-k): of all that the parties sent, the aggregator uses k places, such that each of N parties
    contributes at least floor(k / N) of its largest numbers. A party takes back what was not used. Each round the
    parties measure the model before and after the round and one made of fewer places (of more if k is near
    `k_min`), on one training sample each. From these losses follows whether a smaller k would have cost less time
    per reduction of the loss; k moves by (k_max - k_min) / sqrt(2m) in round m, within `k_min`..`k_max`. `k` is the
    first k. The defaults of `k` and `k_max` are the length of the model, that of `k_min` is a five-hundredth of it.
    `beta` is the time to exchange a whole update, in units of the time of local work: a round takes 1 + beta *
    2k/d.
    """

    local: LocalSolver = SGD()
    k: Count | None = None
    k_min: Count | None = None
    k_max: Count | None = None
    beta: NotNegative = 10.0
    packs: ClassVar[bool] = True

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("accumulated-top-k"), OpenOp("settle-top-k"))

    def __post_init__(self) -> None:
        if self.k_max is not None and self.k_max < (self.k_min or 1):
            raise ConfigError(f"k_max must be at least k_min, got {self.k_max} and {self.k_min or 1}")
        if self.k is not None and not (self.k_min or 1) <= self.k <= (self.k_max or self.k):
            raise ConfigError(f"k must lie in k_min..k_max, got {self.k}")

    def parts(self) -> Parts:
        return Parts(self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather", "reduce"})

    @property
    def sums(self) -> int:
        return 0  # it also sums losses

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.local.budget is not None:
            raise ConfigError(
                f"adaptive-top-k: the parties send losses without noise, which the epsilon of {self.local.name!r} does "
                "not cover; use fedavg with run.compress = 'error-feedback'"
            )
        if self.local.vectors != ("w",):
            raise ConfigError(
                f"adaptive-top-k: the local solver {self.local.name!r} sends more than an update; use another solver"
            )
        for name in ("k", "k_min", "k_max"):
            value = getattr(self, name)
            if value is not None and value > problem.spec.dim:
                raise ConfigError(f"adaptive-top-k: {name} is {value}, and the model has {problem.spec.dim} numbers")

    def limits(self, d: int) -> tuple[int, int]:
        """The least and the largest k for a model of d numbers."""
        high = self.k_max or d
        return self.k_min or min(max(1, d // 500), high), high

    def init(self, problem: Problem) -> State:
        _, high = self.limits(problem.spec.dim)
        return State(problem.initial, slots={"k": float(self.k or high), "m": 0})

    async def round(self, fed: Federation, state: State) -> State:
        params, m = state.params, int(state.slots["m"]) + 1
        d, draws = len(params.w), fed.rng("adaptive-top-k")
        low, high = self.limits(d)
        exact = float(state.slots["k"])
        k = _rounded(exact, draws.random(), low, high)
        probe = _rounded(probe_point(exact, m, low, high), draws.random(), low, high)
        fed.metrics["k"] = float(k)
        op = Packed(self.local, AccumulatedTopK(k=k), "adaptive-top-k")
        answer = await fed.gather(op, {"model": params._asdict()})
        rows = [answer.matrix("w").row(n) for n in range(len(answer.parties))]
        mean = _mean(rows, self._weights(fed, answer))
        used, probed = (fair_choice(rows, count) for count in (k, probe))
        change = torch.zeros_like(params.w).index_put((used,), mean[used].to(params.w))
        changes = _sparse("used", used, mean, params.w) | _sparse("probe", probed, mean, params.w)
        settled = {"model": params._asdict(), **changes}
        key = f"{AccumulatedTopK.name}/{self.local.name}/w"
        losses = (await fed.reduce(SettleTopK(key), settled, parties=answer.parties, uniform=True)).mean("losses")
        before, after, other = losses.tolist()
        sign = derivative_sign(before, after, other, k, probe, lambda count: 1 + self.beta * 2 * count / d)
        state = state.replace(k=next_k(exact, m, sign, low, high), m=m)
        return Descent().step(state, Update(change, *_buffers(answer, self._weights(fed, answer)), replies=len(rows)))

    def _weights(self, fed: Federation, answer: Gathered) -> Tensor:
        return torch.ones(len(answer.parties), dtype=torch.float64) if fed.by_size else answer.weights.double()


def fair_choice(rows: Sequence[Tensor], k: int) -> Tensor:
    """The places that fair top-k uses of the sparse rows that parties sent, in ascending order.

    The largest kappa such that the parties' kappa largest numbers have at most k places, all parties together; then the
    next largest number of each party, the largest first. Of values that count as equal for `TopK`, the lower place
    comes first: otherwise rounding errors would decide, and engines would differ.
    """
    places, ranks, sizes = [], [], []
    for row in rows:
        sent_places = row.nonzero().flatten()
        size, order = magnitudes(row[sent_places]).sort(descending=True, stable=True)
        places.append(sent_places[order].cpu().numpy())
        sizes.append(size.cpu().numpy())
        ranks.append(np.arange(len(order)))
    at, rank, all_sizes = (np.concatenate(column) for column in (places, ranks, sizes))
    ordered = at[np.lexsort((at, -all_sizes, rank))]
    _, first = np.unique(ordered, return_index=True)  # each place at its best rank
    return torch.from_numpy(np.sort(ordered[np.sort(first)[:k]])).to(rows[0].device)


def step_size(m: int, low: int, high: int) -> float:
    """How far k moves in round m, counted from 1."""
    return (high - low) / math.sqrt(2 * m)


def probe_point(k: float, m: int, low: int, high: int) -> float:
    """The other point of the estimated derivative: half a step below k, or above it if that is below `low`."""
    half = step_size(m, low, high) / 2
    return k - half if k - half >= low else k + half


def next_k(k: float, m: int, sign: float, low: int, high: int) -> float:
    """The k of round m + 1: a step against the sign of the derivative, within low..high."""
    return min(max(k - step_size(m, low, high) * sign, float(low)), float(high))


def derivative_sign(before: float, after: float, other: float, k: int, probe: int,
                    seconds: Callable[[int], float]) -> float:  # fmt: skip
    """The sign of the derivative of time per reduction of the loss with respect to k, estimated from two points.

    `before`, `after` and `other` are the losses before the round, after it, and with `probe` places. 0 if a loss did
    not fall, or if the points are the same.
    """
    gain, other_gain = before - after, before - other
    if k == probe or not gain > 0 or not other_gain > 0:
        return 0.0
    slope = (seconds(probe) * gain / other_gain - seconds(k)) / (probe - k)
    return math.copysign(1.0, slope) if slope else 0.0


def _rounded(value: float, draw: float, low: int, high: int) -> int:
    """A number within low..high, rounded up or down such that the mean is exact; `draw` is uniform in [0, 1)."""
    value = min(max(value, float(low)), float(high))
    return math.floor(value) + (draw < value - math.floor(value))


def _mean(rows: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The weighted mean of rows in float64, added in the order of the parties."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row, weight in zip(rows, weights.tolist(), strict=True):
        total.add_(row.double(), alpha=weight)
    return total / float(weights.sum())


def _sparse(name: str, places: Tensor, mean: Tensor, w: Tensor) -> dict[str, Tensor]:
    """A sparse change of the model as part of a payload."""
    return {f"{name}_places": places, f"{name}_values": mean[places].to(w)}


def _buffers(answer: Gathered, weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The mean of the replies' running statistics, and the maximum of their counters; None where there are none."""
    first = answer.replies[0]
    stats = None
    if "stats" in first.tensors:
        mean = _mean([reply.tensors["stats"] for reply in answer.replies], weights)
        stats = mean.to(first.tensors["stats"].dtype)
    counts = [reply.maxima["counts"] for reply in answer.replies if "counts" in reply.maxima]
    return stats, torch.stack(counts).amax(0) if counts else None
