"""Fine-tuning: each party trains the final model further, on its own samples alone (Wang et al. 2019).

Wang, Mathews, Kiddon, Eichner, Beaufays and Ramage 2019, "Federated Evaluation of On-device Personalization".

The fine-tuned model is part of the party's memory, under names that no training method reads. It never leaves the
party: the reply to the ask is empty. A party whose fine-tuning diverges keeps the model that it started from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from hansa.core.applies import Applies, If, Unless
from hansa.core.entries import WORK_ENTRY, Entries, FreeForm, Sizes, Text, extended, stated
from hansa.core.fields import Advice
from hansa.core.metric_ranges import Range
from hansa.core.op import Memory, Party, Payload, Reply, Shape
from hansa.core.own_model import trained
from hansa.core.plain_data import build
from hansa.core.predictor import NetworkPredictor, Predictor, check_prediction, predictor_entries
from hansa.core.quantities import BatchSize, Factor, Momentum, Rate
from hansa.core.registry import Part, register
from hansa.core.wrapper import Around, Wrapper
from hansa.local.sgd import SGD
from hansa.local.solver import LocalSolver
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import PartyError
from hansa.replies.reply_checks import all_finite

PREFIX = "finetuned/"  # of the model's vectors in a memory


@register("finetune")
@dataclass(frozen=True)
class FineTuning(Part):
    """Fine-tuning after the last round: every party trains the final model further, by SGD on its own samples.

    `epochs` is the number of passes over the party's samples; 0, the default, means no fine-tuning. `lr` is the
    learning rate, `batch` the batch size (left out: the whole local set). `momentum` and `weight_decay` are those of
    the local solver "sgd". `drop_last` leaves out a last batch that is smaller, where a single sample cannot train
    BatchNorm.
    """

    kind: ClassVar[str] = "finetune"
    epochs: Annotated[int, Meta(ge=0), Advice("0 means no fine-tuning")] = 0
    lr: Rate = 0.01
    batch: BatchSize | None = 32
    momentum: Momentum = 0.0
    weight_decay: Factor = 0.0
    drop_last: bool = False
    applies: ClassVar[Applies] = {
        **dict.fromkeys(("lr", "batch", "momentum", "weight_decay"), If("epochs")),
        "drop_last": (If("epochs"), Unless("batch", None)),
    }

    @property
    def solver(self) -> SGD:
        """The local solver of the fine-tuning."""
        return SGD(self.lr, max(self.epochs, 1), batch=self.batch, momentum=self.momentum,
                   weight_decay=self.weight_decay, drop_last=self.drop_last)  # fmt: skip


@register("finetune")
@dataclass(frozen=True)
class FineTune(Wrapper):
    """Train the party's final model by a local solver, remember the result, and send nothing.

    The payload is that of `predictor`, which says what the party's model is: the global model, or its own.
    """

    inner: LocalSolver = SGD()
    predictor: str = "network"
    measures: ClassVar[frozenset[str] | None] = frozenset()
    ranges: ClassVar[dict[str, Range]] = {}
    update: ClassVar[str | None] = None

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        own, inner = predictor_entries(self.predictor), extended(self.inner.entries, "model", work=WORK_ENTRY)
        return None if own is None else extended(inner, **own)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        check_prediction(self.predictor, payload, sizes)

    def around(self, party: Party, payload: Payload, memory: Memory) -> Around:
        predictor: Predictor = build("predictor", self.predictor)
        own = predictor.own(party, payload, memory)
        if "model" not in own:
            raise PartyError(f"the model of the predictor {self.predictor!r} is no network, so it cannot be fine-tuned")
        start = Params(**own["model"])
        if [vector.shape for vector in start] != [vector.shape for vector in party.objective.initial]:
            raise PartyError("the model to fine-tune does not have the shape of its model")
        work = {"work": payload["work"]} if "work" in payload else {}
        reply, _ = yield payload if own is payload else {"model": start._asdict(), **work}
        model = trained(start, reply)
        if not (all_finite(model.w) and all_finite(model.stats)):
            model = start  # the reply is empty either way: a refusal would depend on the samples
        tuned = model._asdict()  # what the solver itself remembers is dropped: later asks may read it
        return Reply({}), {**memory, **{f"{PREFIX}{name}": vector for name, vector in tuned.items()}}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return {}

    def beside(self, payload: Payload) -> frozenset[str]:
        return frozenset()


@register("finetuned")
@dataclass(frozen=True)
class FineTunedPredictor(NetworkPredictor):
    """A party's fine-tuned model, from its memory; without one, the model that the party would have fine-tuned.

    The payload has the name of the predictor before the fine-tuning (`inner`) and its payload.
    """

    personal: ClassVar[bool] = True

    entries = stated(
        inner=Text(optional=True), payload=FreeForm(optional=True, check="the payload of the predictor `inner`")
    )

    def check_payload(self, payload: Payload, sizes: Sizes) -> None:
        if ("inner" in payload) != ("payload" in payload):
            raise PartyError("malformed ask: a fine-tuned model has the entries inner and payload, or none of them")
        if "inner" in payload:
            check_prediction(payload["inner"], payload["payload"], sizes, within=True)

    def own(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        if f"{PREFIX}w" in memory:
            return {"model": {name: memory[f"{PREFIX}{name}"] for name in Params._fields}}
        if "inner" not in payload:
            raise PartyError("it has no fine-tuned model")
        inner: Predictor = build("predictor", payload["inner"])
        return inner.own(party, payload["payload"], memory)

    def fitted(self, objective: Objective, payload: Payload, x: Tensor, y: Tensor) -> Payload:
        common = self.common(payload)
        if common is not None:
            return common
        inner: Predictor = build("predictor", payload["inner"])
        return inner.fitted(objective, payload["payload"], x, y)

    def common(self, payload: Payload) -> Payload | None:
        inner: Predictor = build("predictor", payload["inner"])
        return inner.common(payload["payload"])
