"""Selection by merit: prefer parties whose past updates helped, with a floor for every party."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.applies import Applies, If
from hansa.core.ask import Gathered
from hansa.core.declared_ops import DeclaredOps
from hansa.core.federation import Federation
from hansa.core.quantities import SampleCount, Share
from hansa.core.registry import register
from hansa.core.wrapper import unwrap
from hansa.numerics.norms import l2_norm
from hansa.plumbing.errors import ConfigError
from hansa.select.selector import Ids, Selector, SelectorState, ids

DIGITS = 6  # of a score: engines agree to more digits, so they select the same parties


@register("merit")
@dataclass(frozen=True)
class Merit(Selector):
    """Prefer parties whose past updates helped; each party keeps at least a share of its fair chance.

    A party's score in a round lies in [-1, 1]. With `measure = "agreement"` it is the cosine of the party's update and
    the change of the model. With `measure = "loss"` it is the relative fall of the loss on `samples` of the server's
    trusted samples when the party's update alone is added to the model. The merit of a party is a moving mean of its
    scores, m <- (1 - rate) m + rate score; a party without a score has the mean merit of the others. From K available
    parties a cohort of n takes party k with the probability floor n / K + (1 - floor) q_k, where the q_k add up to n,
    are at most 1, and are in proportion to exp(strength m_k). So every party is selected with a probability of at least
    floor n / K, and with equal merits the draw is uniform.
    """

    measure: Literal["agreement", "loss"] = "agreement"
    floor: Share = 0.2
    strength: Annotated[float, Meta(ge=0, le=20)] = 2.0
    rate: Share = 0.3
    samples: SampleCount = 100
    sees: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True

    ops: ClassVar[DeclaredOps] = ()
    applies: ClassVar[Applies] = {"samples": If("measure", "loss")}

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        local = algorithm.parts().local
        if algorithm.verbs - {"reduce", "gather"} or algorithm.packs or algorithm.models != "one" or local is None:
            raise ConfigError(
                f"run.select: merit compares the updates of parties with the change of one model, and {algorithm.name} "
                "does not send such updates; use 'uniform' or 'weighted'"
            )
        if algorithm.clustered or not algorithm.whole or not unwrap(local)[1].aligned:
            raise ConfigError(
                f"run.select: the updates of {algorithm.name} are about different models or parts of a model, so merit "
                "cannot compare them; use 'uniform' or 'weighted'"
            )
        if local.budget is not None:
            raise ConfigError(
                f"run.select: the updates of {local.name!r} are mostly noise, which has no merit; use 'poisson' or "
                "'uniform'"
            )
        if self.measure == "loss" and not problem.trusted:
            raise ConfigError(
                "run.select: merit with measure = 'loss' needs samples of the server's own, and the task has none; set "
                "task.trusted, or measure = 'agreement'"
            )

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        here = ids(fed.available)
        merits = own_state["merit"].numpy()[here] if "merit" in own_state else np.full(len(here), math.nan)
        stream = fed.rng("merit")
        order = stream.permutation(len(here))  # so that the draw does not depend on the order of ids
        chosen = systematic(self.chances(merits, fed.cohort_size)[order], float(stream.random()))
        return tuple(np.sort(here[order][chosen]).tolist()), own_state

    def chances(self, merits: Ids, cohort: int) -> Ids:
        """The probability of each party to be selected; NaN is the merit of a party without a score."""
        count = min(cohort, len(merits))
        known = merits[~np.isnan(merits)]
        mean = math.fsum(known.tolist()) / len(known) if len(known) else 0.0
        weights = np.exp(self.strength * np.where(np.isnan(merits), mean, merits))
        return self.floor * count / max(1, len(merits)) + (1 - self.floor) * in_proportion(weights, count)

    def judged(self, fed: Federation, before: State, after: State, answer: Gathered,
               own_state: SelectorState) -> SelectorState:  # fmt: skip
        rows = answer.matrix("w")
        merit = own_state["merit"].clone() if "merit" in own_state else torch.full((len(fed.parties),), torch.nan,
                                                                                   dtype=torch.float64)  # fmt: skip
        w, change = before.params.w, after.params.w - before.params.w
        if rows.dim != len(w):
            raise ConfigError(f"run.select: merit needs updates of all {len(w)} parameters, and got {rows.dim} numbers")
        if self.measure == "loss":
            loss = fed.trusted_loss(before.params, self.samples, "merit samples")
            first = loss(w)
        for k, party in enumerate(answer.parties):
            update = rows.row(k).to(w.device)
            score = fall(first, loss(w + update)) if self.measure == "loss" else cosine(update, change)
            last = float(merit[party])
            mixed = score if math.isnan(last) else (1 - self.rate) * last + self.rate * score
            merit[party] = round(mixed, DIGITS)
        return {**own_state, "merit": merit}


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two vectors; 0 if one of them is zero or not finite."""
    lengths = l2_norm([a]), l2_norm([b])
    if not all(0 < length < math.inf for length in lengths):
        return 0.0
    product = float(((a.to(torch.float64) / lengths[0]) * (b.to(torch.float64) / lengths[1])).sum())
    return min(1.0, max(-1.0, product))


def fall(before: float, after: float) -> float:
    """The relative fall of a loss, in [-1, 1]; -1 for a loss that is not finite."""
    if not math.isfinite(after):
        return -1.0
    return min(1.0, max(-1.0, (before - after) / max(abs(before), 1e-12)))


def in_proportion(weights: Ids, count: int) -> Ids:
    """Numbers of at most 1 that add up to `count`, in proportion to the weights where they are below 1."""
    out, free = np.zeros(len(weights)), np.ones(len(weights), dtype=bool)
    while free.any():
        share = (count - np.count_nonzero(~free)) * weights / weights[free].sum()
        full = free & (share >= 1)
        if not full.any():
            out[free] = share[free]
            break
        out[full], free = 1.0, free & ~full
    return out


def systematic(chances: Ids, start: float) -> Ids:
    """Positions drawn with given probabilities, as many as they add up to (Madow 1949); `start` lies in [0, 1)."""
    ends = np.cumsum(chances)
    count = round(float(ends[-1])) if len(ends) else 0
    ends *= count / ends[-1] if count else 1.0  # without the rounding of the sum
    return np.unique(np.minimum(np.searchsorted(ends, start + np.arange(count), side="right"), len(chances) - 1))
