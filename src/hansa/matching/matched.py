"""Base of algorithms that match the units of networks: settings, checks, and what parties send about classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.algorithm import Algorithm, Parts, Problem, State
from hansa.core.ask import Gathered
from hansa.core.federation import Federation
from hansa.core.fields import Advice
from hansa.core.op import Op, Party, Payload, Reply
from hansa.core.other_model import OtherModel
from hansa.core.quantities import AnyCount, Positive, Size
from hansa.core.wrapper import unwrap
from hansa.local import SGD
from hansa.local.solver import LocalSolver
from hansa.matching.beta_bernoulli import Process
from hansa.matching.units import Network, Units
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, PartyError, RoundAborted

Growth = Annotated[float, Meta(ge=1), Advice("the units of the widest party need a place")]

LARGEST = 1e6  # of a weight: squares of larger ones could overflow
WHOLE = 1e-6  # tolerance of shares that add up to 1


@dataclass(frozen=True)
class TrainUnits(Op):
    """Base of ops that train a network and send units of it.

    `layers` are the texts of the widest network: a party's own may be narrower, and must be the same but for that.
    `classes` is the number of classes whose shares among the party's targets are sent; 0 for none.
    """

    local: LocalSolver = SGD()
    layers: tuple[str, ...] = ("linear 1 1",)
    classes: Size = 0
    dtype: str = "float32"
    paced: ClassVar[bool] = True

    @property
    def measures(self) -> frozenset[str] | None:  # type: ignore[override]
        return self.local.measures

    @property
    def largest(self) -> float | None:
        return LARGEST

    @property
    def network(self) -> Network:
        return Network.of_texts(self.layers)

    @property
    def kind_of_numbers(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def own(self, party: Party) -> Network:
        """The party's own network; a PartyError if the ask is about another one."""
        widest, module = self.network, party.objective.network()
        try:
            network = Network.of(module)
        except ConfigError as error:
            raise PartyError(str(error)) from None
        if not widest.like(network) or any(a > b for a, b in zip(network.widths, widest.widths, strict=True)):
            raise PartyError("its model is not the chain of layers that the ask is about, or has wider layers")
        if party.objective.dtype != self.kind_of_numbers:
            raise PartyError(f"its model has numbers of another type than {self.dtype}")
        return network

    def shares(self, party: Party) -> dict[str, Tensor]:
        """The share of each class among the party's targets."""
        if not self.classes:
            return {}
        _, y = party.rows("statistics")
        counts = torch.bincount(y.flatten().cpu(), minlength=self.classes).double()
        if y.is_floating_point() or len(counts) > self.classes:
            raise PartyError(f"the ask is about {self.classes} classes, and its targets are not")
        return {"shares": counts / counts.sum()}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return self.local.demands(n, payload)

    def trained(self, party: Party, model: Params, payload: Payload) -> tuple[Tensor, Reply]:
        """The vector of a model after local training, and the local solver's reply."""
        work = {"work": payload["work"]} if "work" in payload else {}
        reply, _ = self.local.run(party, {"model": model._asdict(), **work}, {})
        w = (model.w + reply.tensors["w"]).cpu()
        if not math.isfinite(float(w.abs().max())) or float(w.abs().max()) > LARGEST:
            raise PartyError("its weights are not finite after the training, or too large; lower the learning rate")
        return w, reply


@dataclass(frozen=True)
class Matched(Algorithm):
    """Base of algorithms that match units of the parties' networks."""

    local: LocalSolver = SGD()
    sigma: Positive = 0.1
    sigma0: Positive = 10.0
    gamma: Positive = 1.0
    sweeps: AnyCount = 5
    growth: Growth = 10.0
    trains: ClassVar[bool] = False
    models: ClassVar[Literal["one", "several", "widths"]] = "widths"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear"})  # layers that it can match

    def process(self) -> Process:
        """The settings of the matching."""
        return Process(self.sigma, self.sigma0, self.gamma, self.sweeps)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    def parts(self) -> Parts:
        return Parts(self.local)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        inner: Any = unwrap(self.local)[1]
        if self.local.budget is not None or inner.noisy:
            raise ConfigError(
                f"{self.name}: parties send single units and the shares of their classes, which the noise of "
                f"{self.local.name!r} does not cover; use another local solver, such as sgd"
            )
        spec = next(iter(problem.models.values()), problem.spec)
        if inner.remember(spec, problem.initial) or len(inner.sends) > 1 or inner.numbers or inner is not self.local:
            raise ConfigError(
                f"{self.name}: the local solver {self.local.name!r} sends or remembers more than an update of the "
                "model, by the places of units, which change; use another one, such as sgd or adam"
            )
        self.widest(problem)

    def widest(self, problem: Problem) -> Network:
        """The parties' network with the largest widths; a ConfigError if the models cannot be matched."""
        networks: dict[str, Network] = {}
        for name, module in problem.modules.items():
            where = f"{self.name}: task.models.{name}: " if name else f"{self.name}: "
            try:
                networks[name] = Network.of(module)
            except ConfigError as error:
                raise ConfigError(f"{where}{error}") from None
        (first_name, first), *others = networks.items()
        for name, network in others:
            if not first.like(network):
                raise ConfigError(
                    f"{self.name}: the models {first_name!r} and {name!r} differ in more than the widths of their "
                    "hidden layers; give the parties one architecture, or use another algorithm such as fedmd"
                )
        if not first.widths:
            raise ConfigError(f"{self.name}: the model has no hidden layer to match; use fedavg, or a deeper model")
        for layer in first.layers:
            if layer.kind not in self.kinds:
                raise ConfigError(
                    f"{self.name} matches {' and '.join(sorted(self.kinds))} layers, and the model has "
                    f"{str(layer.text)!r}; use fedma"
                )
        widths = [max(each) for each in zip(*(network.widths for network in networks.values()), strict=True)]
        return first.resized(widths)

    def init(self, problem: Problem) -> State:
        widest = self.widest(problem)
        spec = next(iter(problem.models.values()), problem.spec)
        classes = problem.classes if problem.classes is not None and widest.outputs >= max(2, problem.classes) else 0
        return State(Params.none(), slots={
            "texts": [str(text) for text in widest.texts], "shape": list(problem.shape), "classes": classes,
            "dtype": str(spec.dtype).removeprefix("torch."), "layers": [], "places": {},
        })  # fmt: skip

    def most(self, width: int) -> int:
        """The largest number of global units of a layer."""
        return math.floor(width * self.growth)

    def model(self, state: State) -> OtherModel:
        """The matched network; layers that are not matched yet have weights of zero."""
        slots = state.slots
        network = Network.of_texts(slots["texts"])
        layers = [Units.of_tree(tree) for tree in slots["layers"]]
        widths = [len(layer.bias) for layer in layers[: len(network.widths)]]
        network = network.resized([*widths, *network.widths[len(widths) :]])
        dtype = torch.float64 if slots["dtype"] == "float64" else torch.float32
        for layer in network.layers[len(layers) :]:
            shapes = layer.sizes(layer.units, layer.inputs)
            zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}  # type: ignore[arg-type]
            layers.append(Units.of_tree(zeros))
        return OtherModel.of(network.chain(slots["shape"]), network.write(layers))


def sound(fed: Federation, answer: Gathered,
          read: Callable[[Reply], Any]) -> tuple[list[int], list[Any], list[Reply]]:  # fmt: skip
    """The replies whose parts fit together: their parties, what `read` makes of them, and the replies.

    A party chooses the sizes of its tensors and the shares of its classes. One whose parts do not fit is rejected by
    name; the round is aborted if none is left.
    """
    parties, parts, replies = list[int](), list[Any](), list[Reply]()
    for party, reply in zip(answer.parties, answer.replies, strict=True):
        reply.tensors = {name: tensor.cpu() for name, tensor in reply.tensors.items()}
        part, reason = read(reply), "its layers do not fit together, or have no units"
        shares = reply.tensors.get("shares")
        if part is not None and shares is not None:
            reason = "its shares of classes are not fractions that add up to 1"
            part = part if bool((shares >= 0).all()) and abs(float(shares.sum()) - 1) <= WHOLE else None
        if part is None:
            fed.reject(party, reason)
        else:
            parties.append(party)
            parts.append(part)
            replies.append(reply)
    if not parties:
        raise RoundAborted("no party sent units that fit together")
    return parties, parts, replies


def output_shares(replies: Sequence[Reply], outputs: int) -> list[Tensor]:
    """For each party, its share [outputs] of all samples of a class; nothing is known about outputs without samples.

    Without classes it is the party's share of all samples.
    """
    counts = []
    for reply in replies:
        shares = reply.tensors.get("shares")
        own = torch.full((outputs,), float(reply.weight), dtype=torch.float64)
        if shares is not None:
            own = torch.zeros(outputs, dtype=torch.float64)
            own[: len(shares)] = shares * reply.weight
        counts.append(own)
    total = torch.stack(counts).sum(0)
    return [own / total.where(total > 0, 1.0) for own in counts]


def each_place(places: Mapping[str, Any], cohort: Sequence[int]) -> dict[int, Any]:
    """The places of the cohort's parties that have some."""
    return {party: places[str(party)] for party in cohort if str(party) in places}


def sliced(layers: Sequence[Units], places: Sequence[Tensor]) -> list[Units]:
    """A party's own part of the global network: its hidden units, and its weights between them."""
    below: Tensor | None = None
    out = []
    for layer, place in zip(layers, (*places, None), strict=True):
        out.append(layer.taken(torch.arange(len(layer.bias)) if place is None else place, below))
        below = place
    return out
