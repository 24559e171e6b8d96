"""TiFL: parties of similar speed train together (Chai, Ali, Zawad, Truex, Anwar, Baracaldo, Zhou, Ludwig, Yan and Cheng
2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from hansa.core.algorithm import Algorithm, Problem, State
from hansa.core.applies import Applies, If, Unless
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.plain_data import field_types
from hansa.core.predictor import Evaluate
from hansa.core.quantities import Count, NotNegative, Seconds, Steps
from hansa.core.registry import register
from hansa.core.wrapper import Wrapper
from hansa.local import SGD, LocalSolver
from hansa.plumbing.errors import ConfigError
from hansa.select.selector import Ids, Selector, SelectorState, ids, uniformly

RANDOM = (0.7, 0.1, 0.1, 0.05, 0.05)  # the policy `random` of the paper, fastest tier first


@register("probe")
@dataclass(frozen=True)
class Probe(Wrapper):
    """Train for a few steps to measure the time; the result is neither sent nor remembered."""

    inner: Op = SGD()
    measures: ClassVar[frozenset[str] | None] = frozenset()
    update: ClassVar[str | None] = None
    entries = Wrapper.entries

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({}, weight=reply.weight), {}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}


@register("tiers")
@dataclass(frozen=True)
class Tiers(Selector):
    """Measure how fast parties are, sort them into tiers, draw each round's cohort from one tier. Chai et al. 2020.

    A party is profiled in the first round in which it can be selected: it trains `probe_steps` steps, `profile_rounds`
    times, and its latency is the mean of the seconds. A probe without a reply within `timeout` (T_max) counts as
    `timeout` seconds; without `timeout` it counts as the slowest reply. A party that missed all probes is never
    selected. Parties sorted by latency are split into `tiers` groups of equal size. A round draws one tier by its
    probability, among tiers with an available party, then draws the cohort uniformly in this tier. A tier smaller than
    the cohort is selected as a whole.

    Policies: `vanilla` ignores tiers. `slow` and `fast` use the slowest or the fastest tier alone. `uniform` gives all
    tiers the same probability. `random` has the paper's probabilities (0.7, 0.1, 0.1, 0.05, 0.05) for five tiers,
    fastest first. `probabilities`, fastest tier first, replace the policy. `adaptive` (the paper's Algorithm 2) starts
    from equal probabilities. Every `interval` rounds the parties test the model on their own samples. If the accuracy
    of the last round's tier did not rise since the previous test, tiers are drawn in proportion to their rank: T for
    the least accurate tier, 1 for the most accurate.

    `credits` limits the rounds in which a tier is drawn. A tier without credits is not drawn. When no tier has credits
    left, parties are drawn uniformly from all tiers.
    """

    tiers: Count = 5
    policy: Literal["vanilla", "slow", "uniform", "random", "fast", "adaptive"] = "uniform"
    probabilities: tuple[NotNegative, ...] = ()
    profile_rounds: Count = 5
    probe_steps: Steps = 10
    timeout: Seconds | None = None
    interval: Count = 10
    credits: Count | None = None
    evaluates: ClassVar[bool] = True
    applies: ClassVar[Applies] = {
        "policy": Unless("probabilities"),
        "interval": If("policy", "adaptive"),
        **dict.fromkeys(("tiers", "profile_rounds", "probe_steps", "timeout", "credits"), Unless("policy", "vanilla")),
    }

    @property
    def ops(self) -> DeclaredOps:
        solver = SGD(steps=self.probe_steps)
        fixed = [name for name in field_types(SGD) if name not in ("batch", "drop_last")]  # those of the local solver
        return OpenOp("probe"), OpenOp.of("sgd", solver, *fixed), OpenOp("evaluate")

    def __post_init__(self) -> None:
        if self.policy == "random" and self.tiers != len(RANDOM):
            raise ConfigError(
                f"the policy 'random' is made for {len(RANDOM)} tiers, not {self.tiers}; give probabilities instead"
            )
        if not self.probabilities:
            return
        if len(self.probabilities) != self.tiers:
            raise ConfigError(f"give one probability for each of the {self.tiers} tiers, got {len(self.probabilities)}")
        if abs(sum(self.probabilities) - 1) > 1e-6:
            raise ConfigError(f"probabilities must add up to 1, got {list(self.probabilities)}")

    def check(self, algorithm: Algorithm, problem: Problem) -> None:
        if self.policy == "adaptive" and not problem.party_tests:
            raise ConfigError(
                "the policy 'adaptive' compares tiers by the parties' own test samples, and they have none; set "
                "task.party_test, or choose another policy"
            )

    def chances(self) -> Ids:
        """The initial probabilities of the tiers, fastest first."""
        if self.probabilities:
            return np.array(self.probabilities)
        if self.policy == "random":
            return np.array(RANDOM)
        if self.policy in ("slow", "fast"):
            return np.eye(1, self.tiers, 0 if self.policy == "fast" else self.tiers - 1).reshape(-1)
        return np.full(self.tiers, 1 / self.tiers)

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        if self.policy == "vanilla":
            return uniformly(fed, fed.available), own_state
        own_state = await self._profile(fed, algorithm, state, own_state)
        groups = self.split(own_state["latency"].numpy())
        if self.policy == "adaptive" and state.round % self.interval == 0:
            own_state = await self._adapt(fed, algorithm, state, own_state, groups)
        groups = [np.sort(group[np.isin(group, ids(fed.available))]) for group in groups]
        credits = own_state.get("credits", [self.credits] * self.tiers)
        usable = np.array([len(group) > 0 and credit != 0 for group, credit in zip(groups, credits, strict=True)])
        if not usable.any():
            return uniformly(fed, np.sort(np.concatenate(groups)).tolist()), {**own_state, "tier": None}
        chances = own_state["chances"].numpy() * usable if "chances" in own_state else self.chances() * usable
        chances = chances if chances.any() else usable
        tier = int(fed.rng("tier").choice(self.tiers, p=chances / chances.sum()))
        if self.credits is not None:
            credits = [credit - (place == tier) for place, credit in enumerate(credits)]
        return uniformly(fed, groups[tier].tolist()), {**own_state, "tier": tier, "credits": credits}

    def split(self, latency: Ids) -> list[Ids]:
        """The parties of each tier, fastest tier first; parties of equal speed are ordered by id."""
        known = np.flatnonzero(np.isfinite(latency))
        return np.array_split(known[np.argsort(latency[known], kind="stable")], self.tiers)

    async def _profile(
        self, fed: Federation, algorithm: Algorithm, state: State, own_state: SelectorState
    ) -> SelectorState:
        """Profile the parties that are new; return the state with `latency`, the mean seconds of each party.

        The latency is NaN for a party that was never asked, infinite for a party that never replied in time.
        """
        latency = (
            own_state["latency"] if "latency" in own_state else torch.full((len(fed.parties),), torch.nan).double()
        )
        here = ids(fed.available)
        new = here[np.isnan(latency.numpy()[here])]
        if not len(new):
            return {**own_state, "latency": latency}
        times = np.full((self.profile_rounds, len(new)), np.inf)
        local = algorithm.parts().local
        batch, drop_last = local.plan[2:] if isinstance(local, LocalSolver) else (32, False)
        op = Probe(SGD(steps=self.probe_steps, batch=batch, drop_last=drop_last))
        for row in times:
            answer = await fed.gather(op, {"model": state.params._asdict()}, parties=new.tolist())
            if len(answer.seconds) != len(answer.parties):
                raise ConfigError(
                    "tiers needs a runtime that measures how long parties take, and this one has no clock"
                )
            row[np.searchsorted(new, answer.parties)] = answer.seconds
        answered = np.isfinite(times)
        if not answered.any():  # no party replied: the round will be empty, and the next round tries again
            return {**own_state, "latency": latency}
        in_time = answered if self.timeout is None else times <= self.timeout
        if not in_time.any():
            raise ConfigError(f"no party answered a probe within {self.timeout} s; raise the timeout of tiers")
        longest = times[answered].max() if self.timeout is None else self.timeout
        mean = np.where(in_time, times, longest).mean(0)
        latency = latency.clone()
        latency[torch.from_numpy(new)] = torch.from_numpy(np.where(in_time.any(0), mean, np.inf))
        return {**own_state, "latency": latency}

    async def _adapt(
        self, fed: Federation, algorithm: Algorithm, state: State, own_state: SelectorState, groups: list[Ids]
    ) -> SelectorState:
        """Measure the accuracy of each tier; set new chances if the accuracy of the last round's tier did not rise."""
        predictor, payload = algorithm.predictor(state)
        pool = np.intersect1d(np.concatenate(groups), ids(fed.available))
        answer = await fed.gather(Evaluate(predictor), payload, parties=pool.tolist())
        heard = dict(zip(answer.parties, answer.replies, strict=True))
        now = np.array([accuracy([heard[p] for p in group.tolist() if p in heard]) for group in groups])
        tier, before = own_state.get("tier"), own_state.get("accuracy")
        own_state = {**own_state, "accuracy": torch.from_numpy(now)}
        if tier is not None and before is not None and now[tier] <= before.numpy()[tier]:
            own_state["chances"] = torch.from_numpy(by_rank(now))
        return own_state


def accuracy(replies: list[Reply]) -> float:
    """The accuracy over the test samples of all replying parties; NaN if no party replied.

    For a task without accuracy this is the negative loss.
    """
    measured = [reply for reply in replies if {"accuracy", "loss"} & set(reply.metrics)]
    weight = sum(reply.weight for reply in measured)
    values = [reply.metrics.get("accuracy", -reply.metrics.get("loss", 0.0)) * reply.weight for reply in measured]
    return sum(values) / weight if weight else float("nan")


def by_rank(accuracies: Ids) -> Ids:
    """Probabilities in proportion to rank: T for the least accurate tier, down to 1 for the most accurate tier.

    Tiers of unknown accuracy come last. Ties favour the faster tier.
    """
    count = len(accuracies)
    shares = np.empty(count)
    shares[np.argsort(accuracies, kind="stable")] = np.arange(count, 0, -1) / (count * (count + 1) / 2)
    return shares
