"""Power-of-choice: select the candidates with the largest loss (Cho, Wang and Joshi 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.applies import Applies, If
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, Sizes
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.plain_data import build
from hansa.core.predictor import Predictor, check_prediction, predictor_entries, recalls
from hansa.core.quantities import BatchSize, Count
from hansa.core.registry import register
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError
from hansa.select.selector import Ids, Selector, SelectorState
from hansa.select.weighted import ask_sizes, draw, drawable


@register("loss")
@dataclass(frozen=True)
class Loss(Op):
    """The mean loss of a model on the party's training samples, or on `batch` samples drawn each round."""

    predictor: str = "network"
    batch: BatchSize | None = None

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return predictor_entries(self.predictor)

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return recalls(self.predictor)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_prediction(self.predictor, payload, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.samples("statistics")
        rows: Any = slice(None)
        if self.batch is not None and self.batch < party.n:
            key = party.rows_key("candidate", rng.folded(rng.key(party.seed, "candidate", party.round), party.id))
            rows = torch.from_numpy(party.some_rows(key, self.batch)).to(x.device)
            x, y = x[rows], y[rows]
        predictor: Predictor = build("predictor", self.predictor)
        own = predictor.own(party, payload, memory)
        losses = party.weighted(party.objective.loss_of(predictor.outputs(party.objective, own, x), y), rows)
        return Reply({"loss": losses.to(torch.float64).mean().cpu()}, weight=party.n), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"loss": ((), torch.float64)}


@register("power-of-choice")
@dataclass(frozen=True)
class PowerOfChoice(Selector):
    """Draw d candidates in proportion to their samples, take the m with the largest loss. Cho, Wang and Joshi 2020.

    `pow-d` asks the candidates for the loss of the global model on all their training samples. `cpow-d` uses one
    mini-batch of `batch` samples, which is cheaper. `rpow-d` asks nothing and uses the training loss that a party last
    reported; the loss of a party that has not trained yet is infinite, so that every party is selected once. Ties go to
    the lower id. A candidate that does not reply cannot be selected. The default of `d` is twice the cohort size, and
    at most the number of parties. A large d is fast at first but biased. With `decay`, d falls linearly to the cohort
    size in that many rounds; after that this selector equals `weighted`. The draw already accounts for the parties'
    sizes, so the mean of the updates gives every party the same weight.
    """

    d: Count | None = None
    variant: Literal["pow-d", "cpow-d", "rpow-d"] = "pow-d"
    batch: BatchSize = 32
    decay: Count | None = None
    by_size: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True

    ops: ClassVar[DeclaredOps] = (OpenOp("loss"), OpenOp("samples"))
    applies: ClassVar[Applies] = {"batch": If("variant", "cpow-d")}

    @property
    def watches(self) -> bool:
        return self.variant == "rpow-d"

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        local = algorithm.parts().local
        if local is not None and local.budget is not None:
            raise ConfigError(
                f"run.select: power-of-choice uses the parties' training loss, a number without noise that the "
                f"epsilon of {local.name!r} does not cover; use 'poisson' or 'uniform'"
            )
        if self.d is not None and self.d < problem.cohort_size:
            raise ConfigError(
                f"power-of-choice draws {self.d} candidates, fewer than the cohort of {problem.cohort_size}; raise d, "
                "or lower the cohort"
            )

    def candidates(self, cohort: int, parties: int, round: int) -> int:
        """The number of candidates in a round."""
        d = min(2 * cohort if self.d is None else self.d, parties)
        if self.decay is not None:  # integer arithmetic, so that the result does not depend on the machine
            d = cohort + (d - cohort) * max(0, self.decay - round) // self.decay
        return d

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        own_state = await ask_sizes(fed, own_state)
        if self.watches and "losses" not in own_state:
            own_state["losses"] = torch.full((len(fed.parties),), torch.inf, dtype=torch.float64)
        drawn = draw(fed, own_state, self.candidates(fed.cohort_size, len(fed.parties), state.round))
        if len(drawn) <= fed.cohort_size:  # all candidates are selected, so their losses are not needed
            return drawn, own_state
        if self.watches:
            return largest(drawn, own_state["losses"].numpy()[list(drawn)], fed.cohort_size), own_state
        predictor, payload = algorithm.predictor(state)
        op = Loss(predictor, self.batch if self.variant == "cpow-d" else None)
        answer = await fed.gather(op, payload, parties=drawn)
        losses = answer.rows("loss").numpy() if answer.parties else np.zeros(0)
        return largest(answer.parties, losses, fed.cohort_size), own_state

    def pool(self, fed: Federation, own_state: SelectorState) -> int:
        return drawable(fed, own_state)

    def heard(self, own_state: SelectorState, losses: Mapping[int, float]) -> SelectorState:
        known = own_state["losses"].clone()
        known[torch.tensor(list(losses))] = torch.tensor(list(losses.values()), dtype=torch.float64)
        return {**own_state, "losses": known}


def largest(parties: tuple[int, ...], losses: Ids, count: int) -> tuple[int, ...]:
    """The parties with the largest losses, in the order of their ids. Ties go to the lower id."""
    chosen = np.lexsort((np.array(parties), -losses))[:count]
    return tuple(sorted(parties[k] for k in chosen))
