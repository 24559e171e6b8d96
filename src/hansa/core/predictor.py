"""Predictors: compute outputs from a trained model, at the aggregator or at a party."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hansa.core.entries import ANY_MODEL, OTHER_MODEL, Entries, Sizes, fault_in, stated
from hansa.core.op import Memory, Op, Party, Payload, Replies, Reply, Shape
from hansa.core.other_model import objective_of
from hansa.core.plain_data import build
from hansa.core.registry import Part, lookup, register
from hansa.holdings.stored_rows import Features, blocks
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError

METRICS = frozenset({"loss", "accuracy", "auc", "rmse", "mae", "r2"})  # all metrics of `losses.metrics`


class Predictor(Part):
    """Base of predictors: a payload (a trained model) and samples give class scores or regression values."""

    kind: ClassVar[str] = "predictor"
    personal: ClassVar[bool] = False  # whether each party has its own model, and there is no global one
    joint: ClassVar[bool] = False  # whether parts of the model lie at several parties, which only together predict
    kept: ClassVar[bool] = False  # whether deployed parties keep their parts of a joint model, to predict later
    gives: ClassVar[Literal["probabilities", "scores", "classes"]] = "probabilities"  # "classes": 0 and 1 alone
    entries: ClassVar[Entries | None] = None  # as `Op.entries`, for the payload of the predictor

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "entries" not in vars(cls) and not {"own", "outputs"}.isdisjoint(vars(cls)):
            cls.entries = None  # as of an op that reads its payload in another way than its base

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        """The payload for one party, with the party's memory.

        The party's id and number of samples may be used, not its samples: a saved model does not have them, and a
        deployed party does not show its training samples to an evaluation.
        """
        return payload

    def fitted(self, objective: Objective, payload: Payload, x: Tensor, y: Tensor) -> Payload:
        """The payload of a single model for somebody who was no party, chosen by some samples with targets."""
        raise ConfigError(f"the predictor {self.name!r} has no model for a new party; name a party of the run")

    def common(self, payload: Payload) -> Payload | None:
        """The payload of the model that all parties share; None if there are only the parties' own models."""
        return None if self.personal else payload

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        raise TypeError(f"the predictor {self.name!r} does not define outputs()")

    def probable(self, payload: Payload) -> bool:
        """Whether the softmax of class scores gives probabilities; not so for margins."""
        return True

    def check_payload(self, payload: Payload, sizes: Sizes) -> None:
        """As `Op.check_ask`, for the payload of the predictor."""


def predictor_entries(name: str) -> Entries | None:
    """What a predictor reads from its payload."""
    return lookup("predictor", name).entries  # type: ignore[attr-defined, no-any-return]


def recalls(name: str) -> bool:
    """Whether the outputs of a predictor may depend on a party's memory."""
    return lookup("predictor", name).own is not Predictor.own  # type: ignore[attr-defined]


def check_prediction(name: str, payload: Payload, sizes: Sizes, within: bool = False) -> None:
    """Raise a PartyError for the payload of a predictor; `within` if it is an entry of another payload."""
    predictor: Predictor = build("predictor", name)
    fault = fault_in(predictor.entries, payload, "payload.", sizes, True) if within and predictor.entries else None
    if fault is not None:
        raise PartyError(f"malformed ask: {fault}")
    predictor.check_payload(payload, sizes)


@register("network")
@dataclass(frozen=True)
class NetworkPredictor(Predictor):
    """The task's model, or the model that the payload describes, with the parameters of the payload."""

    entries = stated(model=ANY_MODEL, architecture=OTHER_MODEL)

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        params = Params(**{name: vector.to(x.device) for name, vector in payload["model"].items()})
        return objective_of(objective, payload).outputs(params, x)


@register("joint")
@dataclass(frozen=True)
class JointPredictor(Predictor):
    """A model whose parts lie at several parties, so that no single place can predict."""

    joint: ClassVar[bool] = True
    entries = stated()

    def outputs(self, objective: Objective, payload: Payload, x: Tensor) -> Tensor:
        raise ConfigError(
            "the parts of this model lie at several parties, so no single place can predict; the metrics of a run come "
            "from the parties together"
        )


@register("joint-by-id")
@dataclass(frozen=True)
class JointByIdPredictor(JointPredictor):
    """A joint model that the parties can ask together for the scores of people, by their ids."""

    kept: ClassVar[bool] = True


def evaluate(name: str, objective: Objective, payload: Payload, x: Features, y: Tensor,
             party: Party | None = None, memory: Memory | None = None) -> dict[str, float]:  # fmt: skip
    """The metrics of a predictor on samples; with `party` and its memory, if it runs at a party."""
    predictor: Predictor = build("predictor", name)
    payload = payload if party is None else predictor.own(party, payload, memory or {})
    outputs = [predictor.outputs(objective, payload, block) for block in blocks(x)]
    return objective.metrics(outputs[0] if len(outputs) == 1 else torch.cat(outputs), y)


@register("evaluate")
@dataclass(frozen=True)
class Evaluate(Op):
    """Measure a model on the party's own test samples."""

    predictor: str = "network"
    measures: ClassVar[frozenset[str] | None] = METRICS
    evaluates: ClassVar[bool] = True

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return predictor_entries(self.predictor)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_prediction(self.predictor, payload, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, y = party.data.test_rows("evaluate")
        metrics = evaluate(self.predictor, party.objective, payload, x, y, party, memory)
        return Reply({}, weight=len(x), metrics=metrics), memory

    def run_stack(self, parties: Sequence[Party], payloads: Sequence[Payload],
                  memories: Sequence[Memory]) -> Replies | None:  # fmt: skip
        """The replies of many simulated parties at once, in their order; parties left out run alone.

        None if all parties run alone."""
        return None

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}
