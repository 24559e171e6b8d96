"""What the aggregator sees of a round: the update of each party, or the sum alone.

The updates come from a simulated round with the run's own local solver, compression and protection, from the run's
first model, which everybody knows. Attacks read them as an aggregator would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.algorithms import FedAvg
from hansa.attacks.recipe import Recipe, Samples
from hansa.core.task import Pair
from hansa.fusion import WeightedMean
from hansa.fusion.fusion import Fused, Robust
from hansa.local import LocalSolver
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import ConfigError
from hansa.privacy import Privacy
from hansa.run.result import Result
from hansa.run.simulate import simulate
from hansa.select import Uniform
from hansa.server import Descent
from hansa.transforms import Clip, Transform

HIDDEN = (
    "the run sums updates by the secure sum {name!r}: the aggregator sees no single update, so there is nothing to "
    "read; attack the sum"
)


@dataclass(frozen=True)
class Watching(Robust):
    """The plain mean of all updates, by an aggregator that keeps each of them. For attacks; not registered."""

    name: ClassVar[str] = "watching"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seen", [])  # no field: fields are settings

    @property
    def seen(self) -> list[Tensor]:
        """The updates of each round, one row per party."""
        return self._seen  # type: ignore[attr-defined,no-any-return]

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        matrix = torch.stack([rows.row(k) for k in range(len(rows))])
        self.seen.append(matrix.clone())
        return Fused(matrix.double().mean(0).to(matrix.dtype), [1 / len(rows)] * len(rows))


@dataclass(frozen=True)
class Protection:
    """How updates are protected on their way: the local solver, the compression, and the protection of sums."""

    local: LocalSolver
    compress: Transform | None = None
    privacy: Privacy = Privacy()

    @classmethod
    def of(cls, recipe: Recipe) -> Protection:
        """That of the run."""
        local = recipe.algorithm.parts().local
        if not isinstance(local, LocalSolver):
            raise ConfigError(f"{recipe.algorithm.name} has no local solver, so its replies are no updates to attack")
        return cls(local, recipe.settings["compress"], recipe.settings["privacy"])


@dataclass(frozen=True)
class Seen:
    """Updates as the aggregator sees them, the model from which they start, and the local learning rate."""

    objective: Objective
    start: Params
    updates: Tensor  # [n, d], or [1, d] for a sum
    rate: float  # learning rate times local steps: minus update / rate is close to the gradient

    @property
    def gradients(self) -> Tensor:
        return -self.updates / self.rate


def single_updates(recipe: Recipe, pairs: Sequence[Pair], protection: Protection) -> Seen:
    """The update of each party that holds one of the pairs (x, y); a ConfigError if a secure sum hides them."""
    if protection.privacy.secure is not None:
        raise ConfigError(HIDDEN.format(name=protection.privacy.secure.name))
    compress = protection.compress
    dp, bound = protection.privacy.dp, protection.privacy.bound
    clip = bound if dp is None else dp.clip  # central noise is added after the aggregator has the updates
    if clip is not None:
        if compress is not None:
            raise ConfigError("updates that are both clipped and compressed cannot be watched; attack the sum")
        compress = Clip(clip)
    fusion = Watching()
    result = _one_round(recipe, pairs, protection.local, fusion, compress, Privacy())
    return _seen(result, torch.cat(fusion.seen), protection.local, pairs)


def summed_update(recipe: Recipe, pairs: Sequence[Pair], protection: Protection) -> Seen:
    """The mean of the updates of parties that hold one pair each, as the protected sum reveals it."""
    result = _one_round(recipe, pairs, protection.local, WeightedMean(), protection.compress, protection.privacy)
    objective = result.training.objective
    after = Params(**result.training.algorithm.predictor(result.state)[1]["model"])
    return _seen(result, (after.w - objective.initial.w)[None], protection.local, pairs)


def _one_round(recipe: Recipe, pairs: Sequence[Pair], local: LocalSolver, fusion: Any, compress: Transform | None,
               privacy: Privacy) -> Result:  # fmt: skip
    offsets = [0]
    for _, y in pairs:
        offsets.append(offsets[-1] + len(y))
    x, y = (torch.cat([pair[k] for pair in pairs]) for k in (0, 1))
    task = dataclasses.replace(recipe.with_samples(Samples(x, y, torch.tensor(offsets).numpy())), test=None,
                               class_weight=None, public=None, trusted=None)  # fmt: skip
    settings = {"rounds": 1, "seed": recipe.seed, "select": Uniform(), "device": recipe.settings["device"]}
    return simulate(FedAvg(local, fusion, Descent()), task, compress=compress, privacy=privacy, alone=True,
                    progress=False, **settings)  # fmt: skip


def _seen(result: Result, updates: Tensor, local: LocalSolver, pairs: Sequence[Pair]) -> Seen:
    objective = result.training.objective
    steps = local.count(len(pairs[0][1])) if hasattr(local, "count") else 1
    rate = float(getattr(local, "lr", 1.0)) * max(steps, 1)
    return Seen(objective, objective.initial, updates.to(objective.dtype), rate)
