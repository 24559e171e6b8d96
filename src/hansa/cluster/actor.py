"""The actor: trains chunks of parties on a machine of the cluster, and adds their replies up if it is asked to."""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hansa.cluster.columns import ColumnHolder
from hansa.cluster.placement import PlacedHoldings
from hansa.cluster.trees import pack, packed, unpack
from hansa.core.op import Op, Replies, Reply
from hansa.core.party_models import PartyModels
from hansa.core.wrapper import unwrap
from hansa.local.solver import LocalSolver
from hansa.numerics.losses import Loss
from hansa.numerics.objective import Objective
from hansa.numerics.weights import Weighting
from hansa.plumbing import codec
from hansa.plumbing.determinism import card, set_deterministic
from hansa.plumbing.errors import DataError, HansaError
from hansa.replies.partial_sums import ReplySum
from hansa.replies.replies import reply_size
from hansa.replies.reply_checks import received
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine, first_line, one_by_one
from hansa.sim.stacked import StackedEngine


def versions() -> dict[str, str]:
    """The versions on which the bits of a run depend."""
    own = importlib.metadata.version("hansa")
    return {"Python": platform.python_version(), "torch": torch.__version__, "hansa": own}


@dataclass
class ModelRecipe:
    """How an actor makes an objective: from the same function and seed as the driver, so with the same numbers."""

    make: Callable[[], torch.nn.Module] | None
    loss: str | Loss
    seed: int
    bf16: bool

    @classmethod
    def of(cls, objective: Objective) -> ModelRecipe:
        return cls(objective.make, objective.loss, objective.seed, objective.bf16)

    def objective(self, weighting: Weighting | None, device: str) -> Objective:
        out = Objective(self.make, self.loss, self.seed, device, self.bf16)
        out.weighting = weighting
        return out


class StackSetting(NamedTuple):
    """What the driver decides about stacks, so that all actors do the same."""

    pads: bool
    compiles: bool


@dataclass
class Setting:
    """What an actor is given before it trains, and again when the data have changed."""

    recipe: ModelRecipe
    models: dict[str, ModelRecipe]
    turn: tuple[str, ...]
    weighting: Weighting | None
    placed: PlacedHoldings
    seed: int
    stack: StackSetting | None  # None: the inner engine is the reference
    precision: str  # of float32 matrix products
    device: str  # "cpu", or "cuda": the card that Ray shows the actor
    whole: bool  # whether the actor copies all samples to its device, once


def digests(objective: Objective, models: PartyModels | None) -> dict[str, str]:
    """Hashes of the initial and frozen numbers of a task's models."""
    named = {"": objective, **({} if models is None else models.objectives)}
    return {
        name: codec.digest({"initial": each.initial._asdict(), "frozen": dict(sorted(each.frozen.items()))})
        for name, each in named.items()
    }


class Trainer(ColumnHolder):
    """The actor's methods. Ray runs one at a time, in the order of the calls; those of columns in another thread."""

    def __init__(self, path: list[str]) -> None:
        """`path` has the folders in which the driver finds modules; the user's functions may be in one of them."""
        import ray

        super().__init__()
        self._ray = ray
        sys.path += [folder for folder in path if folder not in sys.path]

    def hold(self, reference: list[Any]) -> dict[str, Any]:
        """Take the models and the parties' samples of a `Setting`, by its reference; earlier ones are forgotten.

        Returns where the actor runs, with which versions and GPU, and digests of its models' initial numbers. Without
        a GPU that it should have, the actor does nothing.
        """
        setting: Setting = self._ray.get(reference[0])
        usable = setting.device == "cpu" or torch.cuda.is_available()
        said = {"node": self._ray.get_runtime_context().get_node_id(), "versions": versions(),
                "card": card(torch.device(setting.device)) if usable else None}  # fmt: skip
        if said["card"] is None:
            return said
        self._device = setting.device
        set_deterministic(setting.device == "cpu")  # as `plumbing.determinism.deterministic` does
        torch.set_float32_matmul_precision(setting.precision)
        self._ask, self._sum = -1, ReplySum()
        self._columns = {}
        self._op: Op | None = None
        self._shared: dict[str, Any] = {}
        self._engine: ReferenceEngine | None = None  # frees earlier samples before new ones take memory
        objective = setting.recipe.objective(setting.weighting, setting.device)
        holdings = setting.placed.holdings(self._ray, setting.device, setting.whole)
        if setting.models:
            models = {name: each.objective(setting.weighting, setting.device) for name, each in setting.models.items()}
            holdings.models = PartyModels(models, setting.turn)
        if setting.stack is None:
            self._engine = ReferenceEngine(objective, holdings, setting.seed)
        else:
            self._engine = stacked = StackedEngine(objective, holdings, setting.seed)
            stacked.decided_pads, stacked.compiles = setting.stack
        return {**said, "models": digests(objective, holdings.models)}

    def alive(self) -> bool:
        """An answer, by which the driver sees that the actor was not lost."""
        return True

    def train(self, common: dict[str, Any], parties: list[int], own: Any) -> dict[str, Any]:
        """Run the op of an ask at a chunk of parties.

        `common` is the same for all chunks of an ask. `own` has the memory of each party, its part of the payload and
        the round of its ticket. With `sum`, the replies stay here (`summed`), and only the reports about them go back.
        """
        op, members = self._begin(common, parties, own)
        by_party = {member.party: member for member in members}
        outcomes: dict[int, Any] = {}
        blocks: list[Any] = []
        report: dict[str, Any] = {"summed": [], "bytes": 0, "memories": {}}
        try:
            for item in self._work(op, members, common["round"]):
                if common["sum"]:
                    for party, outcome in one_by_one(item, by_party):
                        if not self._add(party, outcome, report):
                            outcomes[party] = _tree(outcome)
                elif isinstance(item, Replies):
                    blocks.append(vars(item))
                else:
                    outcomes[item[0]] = _tree(item[1])
        except Exception as error:
            return failure(error, parties)
        return {**report, "memories": pack(report["memories"]), "outcomes": pack(outcomes), "blocks": pack(blocks)}

    def place(self, common: dict[str, Any], parties: list[int], own: Any) -> tuple[Any, ...]:
        """Run the op of an ask at a chunk of parties, check the replies, and divide their large vectors by columns.

        `common["columns"]` has the limits of the columns of each vector, `common["rules"]` those of replies. Returns a
        report, and an object with the columns of all accepted replies for each vector and pair of limits.
        """
        op, members = self._begin(common, parties, own)
        by_party = {member.party: member for member in members}
        cuts: dict[str, list[int]] = common["columns"]
        vectors: dict[str, list[Tensor]] = {name: [] for name in cuts}
        report: dict[str, Any] = {"rows": [], "outcomes": {}}
        try:
            for item in self._work(op, members, common["round"]):
                for party, outcome in one_by_one(item, by_party):
                    if isinstance(outcome, str):
                        report["outcomes"][party] = outcome
                        continue
                    checked = received(outcome[0], op, by_party[party].payload, common["rules"], summed=False)
                    size = reply_size(outcome[0])
                    if not isinstance(checked, str):
                        report["rows"].append(party)
                        for name, rows in vectors.items():
                            rows.append(checked.tensors[name])
                        rest = {name: value for name, value in checked.tensors.items() if name not in cuts}
                        checked = replace(checked, tensors=rest)
                    reply = checked if isinstance(checked, str) else checked.tree()
                    report["outcomes"][party] = {"bytes": size, "reply": reply, "memory": outcome[1]}
        except Exception as error:
            return failure(error, parties), *([None] * sum(len(limits) - 1 for limits in cuts.values()))
        pieces = [packed(torch.stack([row[at:end] for row in vectors[name]])) if report["rows"] else None
                  for name, limits in cuts.items() for at, end in itertools.pairwise(limits)]  # fmt: skip
        return pack(report), *pieces

    def _begin(self, common: dict[str, Any], parties: list[int], own: Any) -> tuple[Op, list[PartyWork]]:
        torch.set_num_threads(1)  # it holds for the calling thread, which Ray chooses
        if common["ask"] != self._ask:
            self._ask, self._op = common["ask"], common["op"]
            self._shared = unpack(common["payload"], self._device)
            self._sum = ReplySum(common["uniform"])
        assert self._op is not None
        members = []
        for party, (memory, payload, round) in zip(parties, own, strict=True):
            payload = {**self._shared, **unpack(payload, self._device)} if payload else self._shared
            members.append(PartyWork(party, payload, unpack(memory, self._device), round))
        return self._op, members

    def _work(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        assert self._engine is not None
        if isinstance(self._engine, StackedEngine) and isinstance(unwrap(op)[1], LocalSolver):
            return self._engine.work(op, members, round)
        return self._engine.blocks(op, members, round)

    def _add(self, party: int, outcome: Outcome, report: dict[str, Any]) -> bool:
        """Add a party's reply to the sum; false for one that must go to the driver."""
        if isinstance(outcome, str):
            return False
        try:
            self._sum.add(outcome[0])
        except DataError:  # the driver rejects it by its own rules
            return False
        report["summed"].append(party)
        report["bytes"] += reply_size(outcome[0])
        if outcome[1]:
            report["memories"][party] = outcome[1]
        return True

    def summed(self) -> dict[str, Any]:
        """The partial sum of the replies of the last ask."""
        return _partial(self._sum)

    def join(self, *parts: dict[str, Any]) -> dict[str, Any]:
        """The partial sum of partial sums."""
        total = ReplySum()
        for part in parts:
            total.add_sum(partial_reply(part))
        return _partial(total)


def failure(error: Exception, parties: list[int]) -> dict[str, Any]:
    """The report about a chunk whose parties failed."""
    text = str(error) if isinstance(error, HansaError) else f"an actor failed: {first_line(error)}"
    return {"error": text, "kind": type(error).__name__, "party": min(parties)}


def _tree(outcome: Outcome) -> Any:
    return outcome if isinstance(outcome, str) else {"reply": outcome[0].tree(), "memory": outcome[1]}


def _partial(total: ReplySum) -> dict[str, Any]:
    reply = total.reply()
    sums: dict[str, Any] = pack({"tensors": reply.tensors, "maxima": reply.maxima})
    return {**sums, "weight": reply.weight, "count": reply.count}


def partial_reply(part: dict[str, Any]) -> Reply:
    """The reply of a message that `Trainer.summed` or `Trainer.join` made."""
    return Reply(unpack(part["tensors"]), part["weight"], unpack(part["maxima"]), {}, part["count"])
