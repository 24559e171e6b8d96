"""The running Ray engine: the seam of the worker engine (`sim.workers`), with actors on a cluster as its workers.

The driver divides a cohort into the chunks of the inner engine, so the bits are those of the inner engine on one
machine, whatever the number of actors. With ordered sums, replies come back to the driver and are fused in the order
of the parties, some windows at a time. With exact sums every actor adds its parties' replies, and the sums are joined
on the cluster in a tree: the driver receives one sum. Gathered updates that are larger than `run.reply_memory` stay on
the cluster (`cluster.gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from hansa.cluster.actor import ModelRecipe, Setting, StackSetting, digests, partial_reply, versions
from hansa.cluster.connection import WHERE, RayConnection
from hansa.cluster.crew import Crew, CrewWork
from hansa.cluster.engines import Ray
from hansa.cluster.gather import UpdateGather
from hansa.cluster.placement import PlacedHoldings
from hansa.cluster.trees import pack, unpack
from hansa.core.op import Op, Replies, Reply
from hansa.core.wrapper import unwrap
from hansa.local.solver import LocalSolver
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.replies.partial_sums import PartialSum
from hansa.replies.placed import PlacedReply, large_vectors
from hansa.replies.reply_checks import Rules
from hansa.sim.choice import compiles, single
from hansa.sim.engine import EngineInputs, Outcome, PartyWork, ReferenceEngine
from hansa.sim.stacked import StackedEngine, in_order
from hansa.sim.workers import ERRORS, WAVES, common_names

TOGETHER = 64  # parties per chunk at most, of ops that do not train, where each party answers alone
CARD = "cuda"  # the device of an actor with a GPU: Ray shows it no other card


def started(engine: Ray, inputs: EngineInputs) -> ReferenceEngine:
    """The running engine; in one process, on the CPU, for a run beside others."""
    if inputs.device not in ("cpu", "cuda"):
        raise ConfigError(f"run.device is {inputs.device!r}, and Ray chooses the cards of its actors; use 'cuda'")
    if inputs.device == "cpu" and engine.gpus is not None:
        raise ConfigError(f"{WHERE}: gpus is {engine.gpus:g}, and run.device is 'cpu'; set run.device = 'cuda'")
    if inputs.holdings.layout is not None:
        raise ConfigError(
            f"{WHERE} is for parties with the same columns, and these hold different ones; use 'auto' or 'reference'"
        )
    stacks = engine.inner == "stacked" and inputs.holdings.models is None and inputs.holdings.augment is None
    inner: ReferenceEngine = single(inputs)
    device = "cpu" if inputs.device == "cpu" or inputs.alone else CARD
    if stacks and inputs.objective.module is not None:
        inner = StackedEngine(inputs.objective, inputs.holdings, inputs.seed, device_type=device)
        inner.lanes = int(inputs.before.get("lanes", inner.lanes))
        inner.compiles = compiles(inner, inputs)
    gpus = 0.0 if inputs.device == "cpu" else engine.gpus or 1.0
    return inner if inputs.alone else RayEngine(engine, inner, device, gpus)


class RayEngine(ReferenceEngine):
    """Distribute an engine's work over actors of a cluster, which train on `device`. Call `close` at the end.

    Model, samples and memories of the driver are on its CPU. Messages have arrays of the CPU.
    """

    sums: ClassVar[bool] = True
    places: ClassVar[bool] = True

    def __init__(self, settings: Ray, inner: ReferenceEngine, device: str = "cpu", gpus: float = 0.0) -> None:
        super().__init__(inner.objective, inner.holdings, inner.seed)
        self.inner, self.settings, self._device, self._gpus = inner, settings, device, gpus
        self._card: dict[str, Any] | None = None  # of the first actor
        self.connection = RayConnection(settings.address, settings.actors, settings.cpus)
        self.ray = self.connection.ray
        self._crew: Crew | None = None
        self._placed: PlacedHoldings | None = None
        self._stale = False
        self._ask = 0
        self.data = 0  # how often the data have changed
        self.dropped: list[str] = []  # keys of columns that nobody uses any more
        try:
            self.count = self.connection.room(settings.actors, settings.cpus, gpus)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:  # type: ignore[override]
        return "ray"

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """As many tickets as the inner engine trains at once; single parties in a few waves."""
        stacks = isinstance(self.inner, StackedEngine) and self.inner.chunk > 1
        return self.inner.ahead if stacks else WAVES * self.count

    def plan(self) -> dict[str, Any]:
        plan = self.inner.plan()  # on CPUs the same bits, so the same plan
        if self._gpus:
            self._ready()  # actors say which card they have
            plan |= {**(self._card or {}), "driver": "cpu"}
        return plan

    def why(self) -> str:
        cards = f" with {self._gpus:g} GPUs each" if self._gpus else ""
        return f"{self.count} actors{cards} on a Ray cluster, {self.inner.why()}"

    def data_changed(self, parties: Sequence[int] | None = None) -> None:
        self._stale = True
        self.data += 1
        self.inner.data_changed(parties)

    def close(self) -> None:
        if self._crew is not None and self.ray.is_initialized():
            self._crew.close()
        self._crew = self._placed = None
        self.connection.close()

    def blocks(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        windows: list[tuple[list[PartyWork], list[list[PartyWork]]]] = []
        for at in range(0, len(members), self._window):
            window = members[at : at + self._window]
            windows.append((window, self._arrange(op, window)))
            if sum(len(chunks) for _, chunks in windows) >= 2 * self.count or at + self._window >= len(members):
                yield from self._ordered(op, windows, members, round)
                windows = []

    @property
    def _window(self) -> int:
        return self.inner.window if isinstance(self.inner, StackedEngine) else max(TOGETHER, 2 * self.count)

    def _chunks(self, op: Op, members: list[PartyWork]) -> list[list[PartyWork]]:
        return [chunk for at in range(0, len(members), self._window)
                for chunk in self._arrange(op, members[at : at + self._window])]  # fmt: skip

    def _arrange(self, op: Op, window: list[PartyWork]) -> list[list[PartyWork]]:
        """Divide parties into the chunks of the inner engine, on which its bits depend."""
        trains = isinstance(unwrap(op)[1], LocalSolver)
        if isinstance(self.inner, StackedEngine):
            return self.inner.arrange(op, window) if trains else [window]
        if trains:
            size = self.holdings.train.size
            return [[member] for member in sorted(window, key=lambda member: (-size(member.party), member.party))]
        wide = max(1, min(TOGETHER, len(window) // (2 * self.count)))
        return [window[at : at + wide] for at in range(0, len(window), wide)]

    def _ordered(self, op: Op, windows: list[tuple[list[PartyWork], list[list[PartyWork]]]],
                 members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:  # fmt: skip
        """Train some windows at a time, and yield their outcomes in order."""
        chunks = [chunk for _, arranged in windows for chunk in arranged]
        results = dict(self._begin(op, chunks, members, round).results())
        self.check(results)
        at = 0
        for window, arranged in windows:
            blocks, alone = list[Replies](), dict[int, Outcome]()
            for number in range(at, at + len(arranged)):
                result = results.pop(number)
                blocks += [Replies(**unpack(tree)) for tree in result["blocks"]]
                alone.update(_outcomes(result))
            at += len(arranged)
            yield from in_order(window, blocks, alone)

    def partial_sums(self, op: Op, members: list[PartyWork], round: int,
                     uniform: bool) -> Iterator[PartialSum | tuple[int, Outcome]]:  # fmt: skip
        chunks = self._chunks(op, members)
        if not chunks:
            return
        work = self._begin(op, chunks, members, round, kept=True, uniform=uniform)
        results: dict[int, Any] = {}
        total: dict[str, Any] | None = None
        while total is None:
            results.update(work.results())
            self.check(results)
            total = work.reduced()
        reports = [results[number] for number in sorted(results)]
        for report in reports:
            yield from _outcomes(report).items()
        if total["count"]:
            parties = [party for report in reports for party in report["summed"]]
            memories = {party: unpack(memory) for report in reports for party, memory in report["memories"].items()}
            sent = sum(report["bytes"] for report in reports)
            yield PartialSum(self.sender, tuple(parties), partial_reply(total), sent, memories=memories)

    def placed(self, op: Op, members: list[PartyWork], round: int,
               rules: Rules) -> Iterator[PlacedReply | Replies | tuple[int, Outcome]]:  # fmt: skip
        vectors = large_vectors(op, members[0].payload, len(members), rules.memory) if members else {}
        if not vectors:
            yield from self.blocks(op, members, round)
            return
        yield from UpdateGather(self, op, members, round, rules, vectors).replies()

    def place(self, op: Op, members: list[PartyWork], round: int, cuts: dict[str, list[int]],
              rules: Rules) -> tuple[CrewWork, dict[int, list[Any]]]:  # fmt: skip
        """Give the parties of an ask to the actors (`Trainer.place`); the pieces of each chunk, by its number."""
        pieces: dict[int, list[Any]] = {}
        chunks = self._chunks(op, members)
        numbers = {chunk[0].party: number for number, chunk in enumerate(chunks)}
        returns = 1 + sum(len(limits) - 1 for limits in cuts.values())

        def call(actor: Any, common: Any, parties: list[int], own: Any) -> Any:
            first, *rest = actor.place.options(num_returns=returns).remote(common, parties, own)
            pieces[numbers[parties[0]]] = rest
            return first

        return self._begin(op, chunks, members, round, call, columns=cuts, rules=rules), pieces

    def actors(self) -> list[Any]:
        """The actors that are ready, of which there is at least one."""
        crew = self._ready()
        crew.settle()
        return list(crew.nodes)

    def release(self, *keys: str) -> None:
        """Free columns at the actors: those of the keys, and all that nobody uses any more."""
        keys, self.dropped[:] = (*keys, *self.dropped), []
        for actor in self._crew.nodes if self._crew is not None else ():
            for key in filter(None, keys):
                actor.drop_columns.options(concurrency_group="columns").remote(key)

    def drop_lost(self) -> None:
        """Forget actors that were lost, and ask for others."""
        crew = self._ready()
        for actor in [actor for actor in crew.nodes if not crew.alive(actor)]:
            crew.lose(actor)

    def _begin(self, op: Op, chunks: list[list[PartyWork]], members: list[PartyWork], round: int,
               start: Callable[..., Any] = lambda actor, *rest: actor.train.remote(*rest), kept: bool = False,
               **settings: Any) -> CrewWork:  # fmt: skip
        """Give the chunks of an ask to the actors, with settings for all chunks."""
        crew = self._ready()
        self.release()
        self._ask += 1
        names = common_names(members)
        shared = {name: pack(members[0].payload[name]) for name in names}
        common = self.ray.put({"ask": self._ask, "op": op, "round": round, "payload": shared, "sum": kept,
                               "uniform": False, **settings})  # fmt: skip

        def call(actor: Any, chunk: list[PartyWork]) -> Any:
            own = [(pack(member.memory), pack({n: v for n, v in member.payload.items() if n not in names}),
                    member.round) for member in chunk]  # fmt: skip
            return start(actor, common, [member.party for member in chunk], own)

        assert self._placed is not None
        blocks, offsets = self._placed.train.x, self.holdings.train.offsets

        def home(chunk: list[PartyWork]) -> int | None:
            return blocks.block(int(offsets[chunk[0].party])) if len(blocks.refs) > 1 else None

        return crew.perform(chunks, call, home, kept)

    def _ready(self) -> Crew:
        """Actors that have the current data."""
        if self._crew is None or self._stale:
            self._placed = PlacedHoldings(self.ray, self.holdings)
            setting = self._setting(self._placed)
            if self._crew is None:
                self._crew = Crew(self.ray, self.count, self.settings.cpus, self._gpus, setting, self._fits)
            else:
                self._crew.give(setting)
            self._stale = False
        return self._crew

    def _setting(self, placed: PlacedHoldings) -> Any:
        """The setting of the actors, in the object store."""
        models, stack = self.holdings.models, None
        if isinstance(self.inner, StackedEngine):
            self.inner.look()
            stack = StackSetting(self.inner.pads, self.inner.compiles)
        setting = Setting(
            ModelRecipe.of(self.objective),
            {} if models is None else {name: ModelRecipe.of(each) for name, each in models.objectives.items()},
            () if models is None else models.turn,
            self.objective.weighting, placed, self.seed, stack, torch.get_float32_matmul_precision(), self._device,
            bool(self._gpus),
        )  # fmt: skip
        try:
            return self.ray.put(setting)
        except Exception as error:  # the user's own model, loss or augmentation
            raise ConfigError(
                f"{WHERE}: the model, the loss or an augmentation cannot be sent to other machines "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); define them as "
                "functions of a module"
            ) from None

    def _fits(self, said: dict[str, Any]) -> None:
        """Refuse an actor with other versions, without a GPU or with another one, or with another model."""
        here = versions()
        other = [f"{name} {said['versions'].get(name)} instead of {here[name]}" for name in here
                 if said["versions"].get(name) != here[name]]  # fmt: skip
        if other:
            raise ConfigError(
                f"{WHERE}: the machine {said['node'][:8]} of the cluster has {', '.join(other)}; install the same "
                "versions on all machines"
            )
        if said["card"] is None:
            raise ConfigError(
                f"{WHERE}: Ray gave an actor a GPU on the machine {said['node'][:8]}, and torch cannot use it there; "
                "install a torch with CUDA, or set run.device = 'cpu'"
            )
        self._card = said["card"] if self._card is None else self._card
        if said["card"] != self._card:
            raise ConfigError(
                f"{WHERE}: the machine {said['node'][:8]} of the cluster has {_text(said['card'])}, and another one "
                f"{_text(self._card)}; the numbers would depend on the machine, so use machines with the same GPU"
            )
        if said["models"] != digests(self.objective, self.holdings.models):
            raise ConfigError(
                f"{WHERE}: the model has other initial numbers on the machine {said['node'][:8]}; the function that "
                "makes it must give the same model on every machine"
            )

    def check(self, results: dict[int, Any]) -> None:
        """Raise the error of the first party that failed."""
        failed = [result for result in results.values() if "error" in result]
        if failed:  # all results are in, so the named party does not depend on timing
            first = min(failed, key=lambda result: result["party"])
            raise ERRORS.get(first["kind"], PartyError)(first["error"])


def _text(card: dict[str, Any]) -> str:
    return f"{card.get('gpu')} with CUDA {card.get('cuda')}"


def _outcomes(result: dict[str, Any]) -> dict[int, Outcome]:
    return {
        party: tree if isinstance(tree, str) else (Reply.of_tree(unpack(tree["reply"])), unpack(tree["memory"]))
        for party, tree in result["outcomes"].items()
    }
