"""What HypCluster and IFCA share: k models, and each party trains the one of least loss on its own samples.

Mansour, Mohri, Ro and Suresh 2020; Ghosh, Chung, Yin and Ramchandran 2020.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from hansa.algorithms.cluster_starts import drawn_starts, read_starts
from hansa.algorithms.fedavg import FedAvg
from hansa.core.algorithm import Problem, State
from hansa.core.applies import Applies, If, Unless
from hansa.core.ask import Gathered
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Number, Sizes, model_of, stated
from hansa.core.federation import Federation, Finding, Grouping
from hansa.core.op import Memory, Party, Payload
from hansa.core.predictor import NetworkPredictor
from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.fusion import Fusion, WeightedMean
from hansa.fusion.update import Update
from hansa.local.cluster import CLUSTER, LOSS, ClusterTrain, least, losses
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import BoundError, ConfigError, PartyError, RoundAborted

TRIALS = ("later", "trial", "best", "best_loss")  # slots of the state while restarts are tried


@dataclass
class ClusterRound:
    """What a round brought: updates of clusters, their weights, the parties' mean least loss, and more where known."""

    updates: dict[int, Update]
    weights: list[float]
    loss: float
    members: dict[int, int] | None = None
    kept: dict[int, str] = field(default_factory=dict)
    farthest: tuple[int, Tensor] | None = None  # the cluster and the update of the party with the largest loss


@dataclass(frozen=True)
class Clustering(FedAvg):
    """Base of algorithms with k models, of which each party trains one.

    `start` says where the models come from. `random`: the first is the initial model, the others are other random
    initial values. `spread`: there is one model at first, and each of the first `clusters` - 1 rounds adds one, the
    model that the party with the largest loss has trained. `starts` are files of saved models instead. With `restarts`
    above 1, as many random starts train for `trial` rounds each, and the one with the least loss goes on. With `hidden`
    the aggregator learns sums over the parties of each cluster, and not who is in which cluster.
    """

    clusters: Count = 2
    start: Literal["random", "spread"] = "random"
    starts: tuple[str, ...] = ()
    restarts: Count = 1
    trial: Annotated[int, Meta(ge=2)] = 5
    hidden: bool = False
    clustered: ClassVar[bool] = True
    applies: ClassVar[Applies] = {
        "start": Unless("starts"),
        "restarts": (Unless("starts"), If("start", "random")),
        "trial": If("restarts"),
    }

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("cluster-train"),)

    def __post_init__(self) -> None:
        if self.start == "spread" and not isinstance(self.fusion, WeightedMean):
            raise ConfigError(
                f"start = 'spread' makes a model of one party's update, which passes by {self.fusion.name!r}; use "
                "start = 'random', or the fusion 'mean'"
            )
        if self.hidden and self.start == "spread":
            raise ConfigError("start = 'spread' needs the update of a single party, which hidden = true hides")
        if self.hidden and not isinstance(self.fusion, WeightedMean):
            raise ConfigError(f"hidden = true needs the fusion 'mean': {self.fusion.name!r} looks at each update")

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"} if self.hidden else {"gather"})

    @property
    def numbers(self) -> tuple[str, ...]:
        return ("share",) if self.hidden else ("cluster",)

    @property
    def sums_alone(self) -> str | None:
        return None if self.hidden else "algorithm.hidden = true"

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.clusters > problem.cohort_size:
            raise ConfigError(
                f"{self.name}: {self.clusters} clusters are more than the {problem.cohort_size} parties of a round; "
                "lower algorithm.clusters, or raise run.cohort"
            )
        if problem.spec.stats or problem.spec.counts:
            raise ConfigError(
                f"{self.name}: the model has running statistics (BatchNorm), which parties of different clusters would "
                "mix; use a model without them, such as one with GroupNorm"
            )
        if not self.hidden and type(self.fusion).combine is Fusion.combine:
            raise ConfigError(f"{self.name}: {self.fusion.name} cannot fuse a part of a cohort (Fusion.combine)")
        local = self.local
        if local.budget is not None:
            raise ConfigError(
                f"{self.name}: a party chooses its cluster by its samples, without noise, which the epsilon of "
                f"{local.name!r} does not cover; use another local solver"
            )
        if len(local.sends) > 1 or local.numbers or local.remember(problem.spec, problem.initial):
            raise ConfigError(
                f"{self.name}: the local solver {local.name!r} keeps or sends more than an update of the model, and a "
                "party may change its model; use another solver"
            )

    def sent_layers(self, spec: ParamSpec) -> list[tuple[str, int]]:
        layers = super().sent_layers(spec)
        return [(f"{c}.{name}", n) for c in range(self.clusters) for name, n in layers] if self.hidden else layers

    def init(self, problem: Problem) -> State:
        slots: dict[str, Any] = {"assigned": torch.full((problem.parties,), -1, dtype=torch.int64)}
        if self.starts:
            w = read_starts(self.starts, self.clusters, problem)
        elif self.start == "spread":
            w = problem.initial.w.unsqueeze(0).clone()
        else:
            w, *later = drawn_starts(problem, self.clusters, self.restarts)
            slots |= {"later": torch.stack(later), "trial": 0} if later else {}
        return State(problem.initial._replace(w=w[0]), slots={**slots, "w": w, "usual": 0})

    async def round(self, fed: Federation, state: State) -> State:
        models = state.slots["w"]
        payload = {"model": state.params._replace(w=models)._asdict()}
        outcome = await (self._summed(fed, payload) if self.hidden else self._gathered(fed, payload))
        slots = dict(state.slots)
        new = models.clone()
        for cluster, update in outcome.updates.items():
            update = self.scaled(update, outcome.weights[cluster] / sum(outcome.weights))
            own = State(state.params._replace(w=models[cluster]), state.round, _of_cluster(slots, cluster))
            stepped = self.server.step(own, update)
            new[cluster] = stepped.params.w
            slots |= {f"{cluster}:{name}": value for name, value in stepped.slots.items()}
        if self.start == "spread" and outcome.farthest is not None and len(new) < self.clusters:
            cluster, w = outcome.farthest
            alone = self.server.step(State(state.params._replace(w=models[cluster]), state.round), Update(w))
            new = torch.cat([new, alone.params.w.unsqueeze(0)])
        fed.grouping = self._grouping(outcome, slots)
        slots |= {"w": new, "usual": max(range(len(models)), key=outcome.weights.__getitem__)}
        slots = _tried(slots, outcome.loss, self.trial) if "trial" in slots else slots
        return State(state.params._replace(w=slots["w"][slots["usual"]]), state.round, slots)

    def scaled(self, update: Update, share: float) -> Update:
        """The update of a cluster, given the cluster's share in the weight of the cohort."""
        return update

    async def _gathered(self, fed: Federation, payload: Payload) -> ClusterRound:
        """Ask for each reply; fuse those of each cluster by themselves."""
        answer = await fed.gather(ClusterTrain(self.local), payload)
        mean = self.fusion if isinstance(self.fusion, WeightedMean) else None
        equal = mean is None or mean.equal(fed)
        numbers = [int(reply.tensors["cluster"]) for reply in answer.replies]
        heavy = [1 if equal else reply.weight for reply in answer.replies]
        each = [reply.metrics.get(LOSS, 0.0) for reply in answer.replies]
        outcome = ClusterRound({}, [0.0] * len(payload["model"]["w"]), statistics.median(each))
        outcome.members = dict(zip(answer.parties, numbers, strict=True))
        for number, weight in zip(numbers, heavy, strict=True):
            outcome.weights[number] += weight
        for cluster in sorted(set(numbers)):
            group = _updates(answer.take([k for k, number in enumerate(numbers) if number == cluster]))
            model = {**payload["model"], "w": payload["model"]["w"][cluster]}
            try:
                fused = self.fusion.combine(fed, self.local, Params(**model), {"model": model}, group)
                outcome.updates[cluster] = fused
            except BoundError as reason:
                outcome.kept[cluster] = str(reason)
        if not outcome.updates:
            raise RoundAborted(next(iter(outcome.kept.values())))
        fed.findings[:] = _joined(fed.findings)
        if mean is not None:
            fed.metrics |= answer.mean_metrics(heavy)
            outcome.loss = fed.metrics.get(LOSS, 0.0)
        far = max(range(len(each)), key=each.__getitem__)
        outcome.farthest = numbers[far], answer.replies[far].tensors["w"]
        return outcome

    async def _summed(self, fed: Federation, payload: Payload) -> ClusterRound:
        """Ask for sums alone: the update and the weight of each cluster."""
        assert isinstance(self.fusion, WeightedMean)
        w = payload["model"]["w"]
        reduced = await fed.reduce(ClusterTrain(self.local, hidden=True), payload, uniform=self.fusion.equal(fed))
        weights = [max(0.0, float(weight)) for weight in reduced.sums["share"]]
        rows = reduced.sums["w"].view(w.shape).to(torch.float64)
        # A cluster has members if its weight is not 0; secure sums round it.
        updates = {c: Update((rows[c] / weight).to(w.dtype)) for c, weight in enumerate(weights) if weight > 0.5}
        if not updates:
            raise RoundAborted("the weights of all clusters add up to nothing: a party sent wrong numbers")
        return ClusterRound(updates, weights, reduced.metrics.get(LOSS, 0.0))

    def _grouping(self, outcome: ClusterRound, slots: dict[str, Any]) -> Grouping:
        """Who is in which cluster, and who moved; puts the new clusters into the slots."""
        members = outcome.members
        if members is None:
            return Grouping(outcome.weights)
        assigned: Tensor = slots["assigned"].clone()
        known = assigned.tolist()
        before = {party: known[party] for party in members}
        assigned[list(members)] = torch.tensor(list(members.values()), device=assigned.device)
        slots["assigned"] = assigned
        moved = {party: (before[party], now) for party, now in members.items() if before[party] not in (-1, now)}
        return Grouping(outcome.weights, members, moved, outcome.kept)

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        models = state.params._replace(w=state.slots["w"])
        return "clustered", {"model": models._asdict(), "usual": state.slots["usual"]}


def _of_cluster(slots: dict[str, Any], cluster: int) -> dict[str, Any]:
    """The slots of the server optimiser of one cluster."""
    prefix = f"{cluster}:"
    return {name.removeprefix(prefix): value for name, value in slots.items() if name.startswith(prefix)}


def _tried(slots: dict[str, Any], loss: float, rounds: int) -> dict[str, Any]:
    """The slots after a round of a random start: the same start goes on, the next one begins, or the best one wins."""
    if slots["trial"] + 1 < rounds:
        return {**slots, "trial": slots["trial"] + 1}
    if "best" not in slots or loss < slots["best_loss"]:
        slots = {**slots, "best": slots["w"], "best_loss": loss}
    fresh = {name: value for name, value in slots.items() if ":" not in name}  # without the server optimisers' slots
    fresh |= {"assigned": torch.full_like(slots["assigned"], -1), "usual": 0}
    if "later" in slots:
        rest = {} if len(slots["later"]) == 1 else {"later": slots["later"][1:].clone()}
        kept = {name: value for name, value in fresh.items() if name != "later"}
        return {**kept, **rest, "w": slots["later"][0].clone(), "trial": 0}
    return {name: value for name, value in {**fresh, "w": slots["best"]}.items() if name not in TRIALS}


def _updates(answer: Gathered) -> Gathered:
    """Replies of one cluster without the number of the cluster."""
    replies = tuple(replace(reply, tensors={"w": reply.tensors["w"]}) for reply in answer.replies)
    return replace(answer, replies=replies)


def _joined(findings: list[Finding]) -> list[Finding]:
    """One finding for all clusters, in the order of the parties."""
    if len(findings) < 2:
        return findings
    parties = [party for finding in findings for party in finding.parties]
    shares = [share for finding in findings for share in finding.shares]
    scores = [score for finding in findings for score in finding.scores or ()]
    order = sorted(range(len(parties)), key=parties.__getitem__)
    return [
        Finding(
            findings[0].rule, [parties[k] for k in order], [shares[k] for k in order],
            [scores[k] for k in order] if len(scores) == len(parties) else None,
            sorted(party for finding in findings for party in finding.excluded),
        )
    ]  # fmt: skip


@register("clustered")
@dataclass(frozen=True)
class ClusterNetwork(NetworkPredictor):
    """The model of the cluster in which a party trained last; of the largest cluster, if it never trained."""

    personal: ClassVar[bool] = True
    entries = stated(model=model_of((None, "dim")), usual=Number(whole=True, least=0))

    def check_payload(self, payload: Payload, sizes: Sizes) -> None:
        if payload["usual"] >= len(payload["model"]["w"]):
            raise PartyError("malformed ask: it has no model of the largest cluster")

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        models = payload["model"]["w"]
        number = int(memory[CLUSTER]) if CLUSTER in memory else payload["usual"]
        return _model(payload, number if number < len(models) else payload["usual"])

    def fitted(self, objective: Objective, payload: Payload, x: Tensor, y: Tensor) -> Payload:
        return _model(payload, least(losses(objective, payload["model"]["w"], x, objective.targets(y))))


def _model(payload: Payload, cluster: int) -> Payload:
    return {"model": {**payload["model"], "w": payload["model"]["w"][cluster]}}
