"""PruneFL: prune the model while it is trained (Jiang, Wang, Valls, Ko, Lee, Leung and Tassiulas 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from hansa.algorithms.fedavg import FedAvg
from hansa.algorithms.pruning import by_magnitude, prunable, reselected
from hansa.core.algorithm import Problem, State
from hansa.core.applies import Applies, Unless
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.fields import Advice
from hansa.core.quantities import AnyCount, BelowOne, Positive, Share
from hansa.core.registry import register
from hansa.fusion.mean import mean_update
from hansa.fusion.update import Update
from hansa.local.pruned import Pruned, SquaredGradient, mask_payload
from hansa.plumbing.errors import ConfigError


@register("prunefl")
@dataclass(frozen=True)
class PruneFL(FedAvg):
    """Prune at one party, then let the mask follow the gradients of all. Jiang et al. 2022.

    In the first `first_rounds` rounds the party `first` trains alone, and weights are pruned by magnitude until the
    fraction `density` of each layer remains. Afterwards the cohort trains the remaining weights as in FedAvg. After
    every `interval` rounds (0: never) the mask is selected again: in each layer the smallest weights, a fraction
    `removable` * 0.5^(rounds / `half_life`) of the remaining ones, and all pruned weights become candidates. Candidates
    join in the order of their importance (the mean of the parties' squared gradients), while this raises importance per
    time, up to `max_density` of all parameters. A round takes the time `fixed` + (1 - `fixed`) * density. Weights that
    come back start at 0. Biases and other vectors are never pruned.
    """

    first: AnyCount = 0
    first_rounds: AnyCount = 1
    density: Annotated[Share, Advice("0.5 keeps half of the weights")] = 0.5
    interval: AnyCount = 10
    removable: Annotated[BelowOne, Advice("1 could empty a layer")] = 0.3
    half_life: Positive = 100.0
    fixed: Annotated[float, Meta(gt=0, lt=1), Advice("it is the time that no pruning saves")] = 0.1
    max_density: Share = 1.0
    whole: ClassVar[bool] = False
    aligned: ClassVar[bool] = False  # the mask changes
    applies: ClassVar[Applies] = {
        "first": Unless("first_rounds", 0),
        **dict.fromkeys(("removable", "half_life", "max_density"), Unless("interval", 0)),
    }

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp.of("pruned", self, "fixed"), OpenOp("squared-gradient"))

    def __post_init__(self) -> None:
        if self.max_density < self.density:
            raise ConfigError(f"max_density must be at least density, got {self.max_density} and {self.density}")
        if self.first_rounds == 0 and self.density < 1:
            raise ConfigError(
                "density describes the pruning in the first rounds, and first_rounds is 0; set density to 1, or set "
                "first_rounds"
            )

    @property
    def verbs(self) -> frozenset[str]:
        return self.fusion.verbs | ({"reduce"} if self.first_rounds else set())

    @property
    def sums(self) -> int:
        return 0  # squared gradients are no updates

    @property
    def alone(self) -> str | None:
        return "algorithm.first_rounds = 0 and algorithm.density = 1" if self.first_rounds else None

    def check(self, problem: Problem) -> None:
        super().check(problem)
        local = self.local
        if len(local.sends) > 1 or local.numbers or local.own_run or local.own_batches:
            raise ConfigError(
                f"prunefl: the local solver {local.name!r} sends more than an update, or trains in a way of its own, "
                "so its training cannot be pruned; use another solver, such as sgd"
            )
        if local.noisy or local.budget is not None:
            raise ConfigError(
                f"prunefl: its mask comes from the parties' gradients, which the epsilon of {local.name!r} does not "
                "cover; use another local solver, or fedavg"
            )
        if self.fusion.trusts:
            raise ConfigError(
                f"prunefl: {self.fusion.name} judges updates of a whole model, and parties send only those of the "
                "remaining parameters; use another fusion"
            )
        if self.first_rounds and self.first >= problem.parties:
            raise ConfigError(
                f"prunefl: algorithm.first is {self.first}, and the parties have the numbers 0 to {problem.parties - 1}"
            )
        if self.first_rounds and self.first in problem.empty:
            raise ConfigError(
                f"prunefl: the party {self.first}, which prunes first, has no samples; set algorithm.first to another "
                "party"
            )
        prunable(problem.spec, self.density)

    def init(self, problem: Problem) -> State:
        mask = torch.ones(problem.spec.dim, dtype=torch.bool)
        slots = {"mask": mask, "layers": prunable(problem.spec, self.density), "trained": 0}
        return State(problem.initial, slots=slots)

    async def round(self, fed: Federation, state: State) -> State:
        trained = state.slots["trained"]
        together = trained - self.first_rounds  # rounds of the whole cohort
        if self.interval and together > 0 and together % self.interval == 0:
            state = await self._reselect(fed, state, self.removable * 0.5 ** (together / self.half_life))
        mask = state.slots["mask"].to(state.params.w.device)
        shared = state.params._replace(w=state.params.w[mask])
        op, extra = Pruned(self.local, self.fixed), mask_payload(mask)
        if together < 0:
            payload = {"model": shared._asdict(), **extra}
            update = mean_update(await fed.reduce(op, payload, parties=[self.first]), shared)
        else:
            update = await self.fusion.collect(fed, op, shared, **extra)
        whole = torch.zeros_like(state.params.w).masked_scatter(mask, update.w)
        state = self.server.step(state, update._replace(w=whole)).replace(trained=trained + 1)
        if together < 0:
            target = self.density ** ((trained + 1) / self.first_rounds)
            mask = by_magnitude(mask.cpu(), state.params.w.cpu(), state.slots["layers"], target)
        return _pruned(fed, state, mask)

    async def _reselect(self, fed: Federation, state: State, share: float) -> State:
        """Select the mask again, by the squared gradients of the cohort at the current model."""
        mask, w = state.slots["mask"].cpu(), state.params.w
        shared = state.params._replace(w=w[mask.to(w.device)])
        squares: Update = await self.fusion.collect(fed, SquaredGradient(), shared, **mask_payload(mask))
        new = reselected(mask, w.cpu(), squares.w.cpu(), state.slots["layers"].cpu(), share, self.fixed,
                         self.max_density)  # fmt: skip
        return _pruned(fed, state, new)


def _pruned(fed: Federation, state: State, mask: torch.Tensor) -> State:
    """The state with this mask: pruned weights are 0, whatever a server optimiser did to them."""
    w = state.params.w
    fed.metrics["density"] = float(mask.double().mean())
    w = torch.where(mask.to(w.device), w, torch.zeros_like(w))
    return state.replace(state.params._replace(w=w), mask=mask.cpu())
