"""The party's watch over the models that the aggregator sends (`[broadcast]` in `party.toml`).

A party trains the model that it is sent. A hostile aggregator may send one that it has changed so that the update
reveals samples (Boenisch et al. 2023), another model to each party, so that a secure sum hides nothing (Pasquini,
Francati and Ateniese 2022), or an earlier one, to undo rounds. So the party remembers, for each job, the last round in
which it trained, hashes of the models, the lengths of their changes and their losses on its own samples, and compares.
The first model of a job has nothing to be compared with.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.op import Op, Party, Payload
from hansa.core.route_op import RouteOp
from hansa.core.wrapper import unwrap
from hansa.holdings.stored_rows import whole
from hansa.local.finetune import FineTune
from hansa.local.solver import LocalSolver
from hansa.net.party.broadcast import Broadcasts
from hansa.net.party.store import PartyMemory
from hansa.numerics.norms import l2_norm
from hansa.numerics.params import Params
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError, PartyError
from hansa.plumbing.stopping import go_on

log = logging.getLogger("hansa.net")
FILE = "broadcast.seen"  # the memory's own files end with .safetensors
LEAST = 3  # changes or losses before a factor of their median counts
WINDOW = 32  # changes and losses that are remembered
MODELS = 256  # hashes of models that are remembered
BATCH = 256  # samples per pass of a model


@dataclass(frozen=True)
class SeenModels:
    """What a party remembers of the models of a job; `last` is the last model, if changes are measured."""

    round: int = 0
    models: list[str] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    last: dict[str, Tensor] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


class ModelWatch:
    """Compares the models of a job with earlier ones. What it remembers is on disk before the update leaves."""

    def __init__(self, memories: PartyMemory) -> None:
        self._memories = memories
        self._cached: tuple[str, SeenModels] | None = None  # of the job that was asked last

    def check(self, limits: Broadcasts, job: str, round: int, op: Op, payload: Payload,
              loss: Callable[[], float]) -> SeenModels:  # fmt: skip
        """Check the model that an op trains; a PartyError if the owner's limits do not allow it.

        `loss` computes the loss of the model on the party's samples. Returns what is to be remembered once the party
        has trained. The same ask again is accepted again.
        """
        seen = self._seen(job)
        if limits.rounds and round < seen.round:
            raise PartyError(
                f"the ask is of round {round}, and this party has trained in round {seen.round} of the job; see "
                "broadcast.rounds in party.toml"
            )
        after = replace(seen, round=max(round, seen.round))
        return _compared(limits, after, op, payload, loss) if limits.needs_model else after

    def remember(self, job: str, after: SeenModels) -> None:
        """Remember the models of a job; they are on disk on return."""
        seen = self._seen(job)
        if (after.round, after.models) != (seen.round, seen.models):
            self._memories.put(job, FILE, after.tree())
            self._cached = (job, after)

    def _seen(self, job: str) -> SeenModels:
        if self._cached is None or self._cached[0] != job:
            try:
                tree = self._memories.get(job, FILE)
                self._cached = (job, SeenModels() if tree is None else SeenModels(**tree))
            except (DataError, TypeError) as error:
                log.warning("the party's record of earlier models is lost: %s", error, extra={"job": job})
                self._cached = (job, SeenModels())
        return self._cached[1]


@dataclass(frozen=True)
class ModelLoss(Op):
    """For the gateway: reads training samples to measure a model. It is not registered, so no ask can name it."""

    name: ClassVar[str] = "model-loss"


class LossRefused(PartyError):
    """A model was refused because of its loss on the party's samples."""


def training_loss(party: Party, payload: Payload) -> float:
    """The mean loss of a model on the party's training samples; infinite if the model fails on them.

    A failure depends on the samples as a loss does, so it must not be answered in another way.
    """
    vectors = Params(*(payload["model"].get(name) for name in Params._fields))
    wanted = party.objective.initial
    if not all(isinstance(a, Tensor) and a.shape == b.shape for a, b in zip(vectors, wanted, strict=True)):
        raise PartyError(
            "its policy checks the loss of the models that it is sent (broadcast.loss in party.toml), and this ask has "
            "no whole model of the task"
        )
    x, y = party.rows("statistics")
    total = 0.0
    for at in range(0, party.n, BATCH):
        go_on()
        rows = slice(at, at + BATCH)
        try:
            outputs = party.objective.outputs(vectors, whole(x[rows]))
            losses = party.weighted(party.objective.loss_of(outputs, y[rows]), rows)
            total += float(losses.to(torch.float64).sum())
        except Exception:  # a character without an embedding, for example
            log.exception("the model that the aggregator sent fails on the party's samples")
            return math.inf
    return total / party.n


def _compared(limits: Broadcasts, seen: SeenModels, op: Op, payload: Payload,
              loss: Callable[[], float]) -> SeenModels:  # fmt: skip
    """Compare the model in a payload with the earlier ones; return what is to be remembered."""
    model = _model(payload) if _starts_there(op) else None
    if model is None:
        raise PartyError(
            "its policy checks the models that it is sent (broadcast in party.toml), and this ask trains without a "
            "model"
        )
    digest = codec.digest(model)
    if seen.models[-1:] == [digest]:
        return seen
    # Fine-tuning starts from the model that the run kept, which may be an earlier one.
    if limits.replays and digest in seen.models and not isinstance(op, FineTune):
        raise PartyError("it has seen this model in an earlier round of the job; see broadcast.replays in party.toml")
    changes, losses = seen.changes, seen.losses
    if limits.compares:
        change = _change(limits, seen, model)
        changes = [*changes, change][-WINDOW:] if change else changes
    if limits.loss is not None:
        losses = [*losses, _loss(limits.loss, losses, loss)][-WINDOW:]
    models = [*(known for known in seen.models if known != digest), digest][-MODELS:]
    return SeenModels(seen.round, models, changes, losses, model if limits.compares else {})


def _starts_there(op: Op) -> bool:
    """Whether an op trains the model of its payload. Others would ignore it: the aggregator could put any model there.

    Matching methods start from their own entries, FedMD and peers from the party's memory and from other messages.
    """
    layers, inner = unwrap(op)
    return isinstance(inner, LocalSolver) and not any(isinstance(layer, RouteOp) for layer in layers)


def _model(payload: Payload) -> dict[str, Tensor] | None:
    """The parameters and statistics of the model in a payload, on the CPU; None if there is no model."""
    model = payload.get("model")
    found = {name: model.get(name) for name in ("w", "stats")} if isinstance(model, Mapping) else {}
    vectors = {name: v.cpu() for name, v in found.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return vectors if len(vectors) == 2 else None


def _change(limits: Broadcasts, seen: SeenModels, model: dict[str, Tensor]) -> float:
    """The norm of the change since the last model; a PartyError if it is too large."""
    last = seen.last or {name: torch.zeros_like(vector) for name, vector in model.items()}
    if any(last[name].shape != vector.shape for name, vector in model.items()):
        raise PartyError("the model has another shape than the last one, so its policy cannot bound the change; see "
                         "broadcast in party.toml")  # fmt: skip
    change = l2_norm(vector - last[name] for name, vector in model.items())
    if not math.isfinite(change):
        raise PartyError("the model has numbers that are not finite, or its change has; see broadcast in party.toml")
    if not seen.last:
        return 0.0
    if limits.norm is not None and change > limits.norm:
        raise PartyError(
            f"the model has changed by a norm of {change:.6g} since the last one, and its policy allows "
            f"{limits.norm:g} (broadcast.norm in party.toml)"
        )
    if limits.factor is not None and len(seen.changes) >= LEAST:
        usual = statistics.median(seen.changes)
        if change > limits.factor * usual:
            raise PartyError(
                f"the model has changed by a norm of {change:.6g} since the last one, and the median of its changes is "
                f"{usual:.6g}; its policy allows {limits.factor:g} times that (broadcast.factor in party.toml)"
            )
    return change


def _loss(factor: float, before: list[float], loss: Callable[[], float]) -> float:
    """The loss of a model; a LossRefused if it is too large. The sentence has no number: it would reveal more."""
    value = loss()
    usual = statistics.median(before) if len(before) >= LEAST else math.inf
    if not math.isfinite(value) or value > usual + (factor - 1) * abs(usual):
        raise LossRefused(
            "the loss of the model on its samples is not finite, or rose beyond the factor that its policy allows "
            "(broadcast.loss in party.toml)"
        )
    return value
