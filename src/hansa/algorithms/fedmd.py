"""FedMD: parties with models of different architectures learn from each other's class scores (Li and Wang 2019).

Parties exchange scores on public samples, never parameters. In the authors' code the scores are compared by their mean
absolute difference, and each party first trains on the public samples and on its own ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from hansa.core import own_model
from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.applies import Applies, If
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import ANY_MODEL, WORK_ENTRY, Flag, Shaped, Sizes, stated
from hansa.core.federation import Federation
from hansa.core.fields import Advice
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, sent
from hansa.core.quantities import FACTORS, BatchSize, Epochs, PositiveFactor, Rate, SampleCount, Size
from hansa.core.registry import register
from hansa.fusion import Fusion, WeightedMean
from hansa.holdings.gateway import SampleGateway
from hansa.holdings.public import PublicSamples
from hansa.local import SGD
from hansa.local.solver import LocalSolver
from hansa.numerics import rng
from hansa.numerics.losses import Loss
from hansa.numerics.norms import max_abs
from hansa.numerics.params import Params
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, PartyError, RoundAborted
from hansa.replies.reply_checks import SLACK, all_finite

Distance = Literal["mae", "mse", "kl"]
Score = Annotated[float, Meta(gt=0, lt=1e30, description="the largest score"), FACTORS]
AnyEpochs = Annotated[int, Meta(ge=0), Advice("0 leaves the training out")]


@register("fedmd-scores")
@dataclass(frozen=True)
class PublicScores(Op):
    """The class scores of the party's own model on `align` public samples, clipped to `max_score`.

    A party without a model begins one, where the payload lets it: it trains on the `samples` public samples by the
    solver `public`, and then on its own ones by `private`. The scores are called `w`, as fusions expect.
    """

    align: SampleCount = 1
    samples: SampleCount = 1
    classes: Size = 2
    max_score: Score = 100.0
    public: LocalSolver | None = None
    private: LocalSolver | None = None
    update: ClassVar[str | None] = "w"
    entries = stated(model=ANY_MODEL, begin=Flag(optional=True), work=WORK_ENTRY)

    def __post_init__(self) -> None:
        if self.align > self.samples:
            raise ConfigError(f"align is {self.align}, and there are {self.samples} public samples; lower it")

    @property
    def largest(self) -> float | None:
        return self.max_score

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        known = public_samples(party)
        if len(known.x) != self.samples:
            raise PartyError(f"the ask is about {self.samples} public samples, and there are {len(known.x)}")
        if not own_model.known(memory):
            if not payload.get("begin"):
                raise PartyError("it has no model yet, and this ask does not let it begin one")
            memory = own_model.remember(memory, self._pretrained(party, known, payload.get("work") or {}))
        else:
            party.data.admit("statistics")  # the aggregator chooses public samples: each answer tells of the own ones
        scores = party.objective.outputs(own_model.recall(party, memory), aligned(party, self.align))
        return Reply({"w": scores.clamp(-self.max_score, self.max_score).flatten()}, weight=party.n), memory

    def _pretrained(self, party: Party, known: PublicSamples, work: Mapping[str, Any]) -> Params:
        model = party.initial()
        if self.public is not None:
            if known.y is None:
                raise PartyError("the public samples have no labels to train on")
            gateway = SampleGateway((known.x, known.y))
            model, _ = trained(self.public, stage(party, "public pretraining", data=gateway), model)
        if self.private is not None:
            model, _ = trained(self.private.at(work), stage(party, "private pretraining"), model)
        return model

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"w": ((self.align * self.classes,), payload["model"]["w"].dtype)}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        begins = payload.get("begin")
        public = self.public.demands(self.samples, {}) if begins and self.public is not None else {}
        private = self.private.demands(n, payload) if begins and self.private is not None else {}
        return together(public, private, {"steps": 1})


@register("fedmd-learn")
@dataclass(frozen=True)
class DigestAndRevisit(Op):
    """Fit the party's own model to scores on `align` public samples (digest), then train on its samples (revisit)."""

    local: LocalSolver = SGD()
    digest: LocalSolver = SGD()
    align: SampleCount = 1
    loss: Distance = "mae"
    temperature: PositiveFactor = 1.0
    max_score: Score = 100.0
    paced: ClassVar[bool] = True
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss", "digest_loss"})
    applies: ClassVar[Applies] = {"temperature": If("loss", "kl")}
    entries = stated(scores=Shaped(shape=(None, "classes")), work=WORK_ENTRY)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        if len(payload["scores"]) != self.align or max_abs([payload["scores"]]) > self.max_score * SLACK:
            raise PartyError(f"malformed ask: it needs {self.align} rows of scores up to {self.max_score:g}")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if not own_model.known(memory):
            raise PartyError("it has no model yet, because it sent no scores")
        model, x = own_model.recall(party, memory), aligned(party, self.align)
        classes = party.objective.outputs(model, x[:1]).shape[-1]
        scores = sent(payload, "scores", (self.align, classes)).to(x.device, model.w.dtype)
        objective = party.objective.with_loss(distance(self.loss, self.temperature))
        public = stage(party, "digest", objective=objective, data=SampleGateway((x, scores)))
        model, digested = trained(self.digest, public, model)
        model, revisited = trained(self.local.at(payload.get("work") or {}), party, model)
        losses = {"digest_loss": digested["train_loss"], "train_loss": revisited["train_loss"]}
        return Reply({}, weight=party.n, metrics=losses), own_model.remember(memory, model)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return together(self.digest.demands(self.align, {}), self.local.demands(n, payload))


@register("fedmd")
@dataclass(frozen=True)
class FedMD(Algorithm):
    """Parties with models of their own learn from the mean of their class scores. Li and Wang 2019.

    The first time that a party is asked, it trains its own model: `public_epochs` epochs on the public samples (by
    default as many as on its own, or none if they have no labels), then `private_epochs` on its own samples. In each
    round the parties score the same `align` public samples (by default all); the server fuses the scores. Then each
    party fits its scores to the fused ones (digest) for `digest_epochs`, by `local` with `digest_lr` (by default the
    rate of `local`) and `digest_batch`, and trains on its own samples by `local` (revisit). `loss` is the distance of
    scores: `mae` as in the authors' code, `mse`, or `kl`, which softens both by `temperature`. Scores beyond
    `max_score` are clipped.
    """

    local: LocalSolver = SGD(lr=0.05, epochs=10, batch=5)
    fusion: Fusion = WeightedMean(uniform=True)
    align: Annotated[SampleCount, Advice("leave it out for all public samples")] | None = None
    loss: Distance = "mae"
    temperature: PositiveFactor = 1.0
    digest_epochs: Epochs = 1
    digest_batch: BatchSize = 128
    digest_lr: Rate | None = None
    public_epochs: AnyEpochs | None = None
    private_epochs: AnyEpochs = 10
    max_score: Score = 100.0
    trains: ClassVar[bool] = False  # the server has no model
    models: ClassVar[Literal["one", "several"]] = "several"
    uses_public: ClassVar[bool] = True
    applies: ClassVar[Applies] = {"temperature": If("loss", "kl")}

    @property
    def ops(self) -> DeclaredOps:
        solvers = (
            self._solver(self.private_epochs, self.local.plan[2]),
            self._solver(self.private_epochs if self.public_epochs is None else self.public_epochs, self.digest_batch),
            self._solver(self.digest_epochs, self.digest_batch, self.digest_lr),
        )
        same = ("loss", "temperature", "max_score")
        scores = OpenOp("fedmd-scores", {"max_score": self.max_score}, largest=self.max_score)
        own = (scores, OpenOp.of("fedmd-learn", self, *same))
        return (*own, *(solver for solver in solvers if solver is not None))

    @property
    def verbs(self) -> frozenset[str]:
        return self.fusion.verbs | {"reduce"}

    def parts(self) -> Parts:
        return Parts(local=self.local, fusion=self.fusion)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        local = self.local
        if local.budget is not None or local.noisy:
            raise ConfigError(
                f"fedmd: parties train in several asks of a round, and the epsilon of {local.name!r} covers one "
                "training per round; use another local solver, such as sgd"
            )
        if not local.paced or not all(local.has(name) for name in ("lr", "epochs", "steps", "batch")):
            raise ConfigError(
                f"fedmd: the local solver {local.name!r} takes no epochs of batches, and digest and pretraining need "
                "them; use another one, such as sgd"
            )
        if self.fusion.trusts:
            raise ConfigError(
                f"fedmd: {self.fusion.name} judges updates of a model by the server's samples, and parties send class "
                "scores; use another fusion, such as median"
            )
        if self.fusion.remembers:
            raise ConfigError(
                f"fedmd: {self.fusion.name} compares the layers of updates of different rounds, and parties send class "
                "scores; use another fusion, such as median"
            )
        if problem.classes is None:
            raise ConfigError("fedmd: parties exchange class scores, and the task has no classes; use another task")
        if self.align is not None and self.align > problem.public:
            raise ConfigError(
                f"fedmd: algorithm.align is {self.align}, and there are {problem.public} public samples; lower it, or "
                "leave it out for all of them"
            )
        if self.public_epochs and not problem.public_targets:
            raise ConfigError(
                "fedmd: algorithm.public_epochs trains on public samples, which have no labels here; leave it out, or "
                "give them labels (in Python, Task(public=(x, y)))"
            )

    def init(self, problem: Problem) -> State:
        specs = list(problem.models.values()) or [problem.spec]
        none = Params.none()
        epochs = self.private_epochs if self.public_epochs is None else self.public_epochs
        slots = {
            "samples": problem.public, "classes": problem.classes,
            "public_epochs": epochs if problem.public_targets else 0,
            "begun": torch.zeros(problem.parties, dtype=torch.bool),
        }  # fmt: skip
        return State(none._replace(w=none.w.to(specs[0].dtype)), slots=slots)

    async def round(self, fed: Federation, state: State) -> State:
        samples, classes, begun = (state.slots[name] for name in ("samples", "classes", "begun"))
        align = samples if self.align is None else self.align
        public = self._solver(state.slots["public_epochs"], self.digest_batch)
        private = self._solver(self.private_epochs, self.local.plan[2])
        op = PublicScores(align, samples, classes, self.max_score, public, private)
        new = {party: {"begin": True} for party in fed.cohort if not begun[party]}
        update = await self.fusion.collect(fed, op, state.params, new)
        if max_abs([update.w]) > self.max_score * SLACK:  # possible only where a sum hides the single scores
            raise RoundAborted(f"fedmd: the mean score is over {self.max_score:g}: some party sent wrong numbers")
        if new and update.replies == len(fed.cohort):  # otherwise it is not known which parties have begun
            begun = begun.clone().index_fill(0, torch.tensor(list(fed.cohort)), True)
        digest = self._solver(self.digest_epochs, self.digest_batch, self.digest_lr)
        assert digest is not None
        scores = update.w.view(align, classes)
        learn = DigestAndRevisit(self.local, digest, align, self.loss, self.temperature, self.max_score)
        await fed.reduce(learn, {"scores": scores})
        return state.replace(scores=scores, begun=begun)

    def _solver(self, epochs: int, batch: int | None, lr: float | None = None) -> LocalSolver | None:
        """The local solver for another number of epochs; None for 0 epochs."""
        rate = {} if lr is None else {"lr": lr}
        return self.local.at({"epochs": epochs, "steps": None, "batch": batch, **rate}) if epochs else None

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        """Each party's own model; the payload has the hash of the last scores, by which runs can be compared."""
        scores = state.slots.get("scores")
        return "own-model", {} if scores is None else {"scores": codec.digest({"scores": scores})}


def public_samples(party: Party) -> PublicSamples:
    """The public samples of the party's task; a PartyError if there are none."""
    if party.public is None:
        raise PartyError("the task has no public samples")
    return party.public


def aligned(party: Party, align: int) -> Tensor:
    """The public samples of a round, drawn by a key that all parties share."""
    x = public_samples(party).x
    if align > len(x):
        raise PartyError(f"the ask is about {align} public samples, and there are {len(x)}")
    rows = rng.shuffled(rng.key(party.seed, "align", party.round), len(x))[:align]
    return x[torch.from_numpy(np.sort(rows)).to(x.device)]


def stage(party: Party, purpose: str, **fields: Any) -> Party:
    """The party with random streams of its own for one training of several in a round."""
    return replace(party, seed=rng.key(party.seed, "fedmd", purpose), **fields)


def trained(solver: LocalSolver, party: Party, model: Params) -> tuple[Params, dict[str, float]]:
    """A model after training and the metrics; a PartyError if the model is no longer finite."""
    model, metrics = own_model.measured(solver, party, model)
    if not all(all_finite(vector) for vector in (model.w, model.stats)):
        raise PartyError("its model is not finite after training; lower the learning rate")
    return model, metrics


def together(*demands: Mapping[str, int]) -> dict[str, int]:
    """The work of several trainings: the most epochs of one of them, and all steps."""
    epochs = [each["epochs"] for each in demands if "epochs" in each]
    return ({"epochs": max(epochs)} if epochs else {}) | {"steps": sum(each.get("steps", 0) for each in demands)}


def distance(loss: Distance, temperature: float) -> str | Loss:
    """The loss of scores against scores."""
    return functools.partial(softened, temperature=temperature) if loss == "kl" else loss


def softened(output: Tensor, target: Tensor, temperature: float) -> Tensor:
    """T^2 times the Kullback-Leibler divergence of softened scores, per sample. Hinton, Vinyals and Dean 2015."""
    own, wanted = (F.log_softmax(scores / temperature, -1) for scores in (output, target))
    return temperature**2 * F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
