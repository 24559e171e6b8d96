"""The stacked engine: a chunk of parties trains at once, with parameters stacked to [parties, d].

Models that are chains of linear layers run as batched matrix products (`sim.chain`), others by `torch.func.vmap`. The
parties of a chunk are sorted by their number of steps, and parties that have finished leave the stack: unequal parties
cost no idle steps. Samples are padded and masked only within a step. Models that mix the rows of a batch (BatchNorm)
cannot be padded: for them only parties of equal size are stacked. Models that cannot be stacked train one party at a
time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Op, Replies
from hansa.core.predictor import Evaluate
from hansa.core.sums import BLOCK
from hansa.core.task import Holdings
from hansa.core.wrapper import Around, Wrapper, completed, unwrap
from hansa.local.solver import LocalSolver
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import threads
from hansa.plumbing.errors import HansaError, PartyError
from hansa.sim import gpu, recorded_round
from hansa.sim.chain import Chain, chain_of
from hansa.sim.engine import Failure, Outcome, PartyWork, ReferenceEngine, first_line, named, one_by_one
from hansa.sim.stack import Stack
from hansa.sim.stackable import heavy, mixes_rows, obstacle

log = logging.getLogger("hansa")
ROOM = 2**28  # bytes of updates in memory at a time
CACHE = 4 * 2**20  # bytes of a chunk's parameters on a CPU, to fit its cache
SAMPLE = 40  # samples for trying a model as a chain
WIDEST = 256  # largest number of parties in a chunk


class StackedEngine(ReferenceEngine):
    """Train many parties at once where the model allows it, one at a time where it does not."""

    name = "stacked"

    def __init__(self, objective: Objective, holdings: Holdings, seed: int, chunk: int | None = None,
                 device_type: str | None = None) -> None:  # fmt: skip
        """`device_type` is "cpu" or "cuda", for which to make chunks; by default that of the objective."""
        super().__init__(objective, holdings, seed)
        size = max(1, objective.spec.dim * objective.dtype.itemsize)
        self.device_type = device_type or objective.device.type
        on_cpu = self.device_type == "cpu"
        self.chunk = chunk or max(1, min(WIDEST, CACHE // size) if on_cpu else min(WIDEST, 2**32 // (8 * size)))
        self.lanes = cores() if on_cpu else 1  # equal chunks, one per worker process
        self.window = max(BLOCK, min(32 * BLOCK, ROOM // size // BLOCK * BLOCK))  # parties arranged together
        if chunk is None and on_cpu and objective.module is not None and heavy(objective):
            self.chunk = 1  # a CPU does not stack convolutions well
        self._fixed_chunk = chunk
        # a recording reads samples of the GPU's memory; others are read batch by batch
        self.records = self.device_type == "cuda" and isinstance(holdings.train.x, Tensor)
        self.compiles = False
        self.apart = False  # whether a recording trains each party on a stream of its own (`sim.gpu`)
        self._unrecorded: set[type] = set()
        self.complaints: set[str] = set()  # reasons of compiler failures, each logged once
        self.programs: dict[Any, Any] = {}  # recordings for a GPU
        self.traces: dict[Any, Any] = {}  # steps as lists of tensor operations, for recordings
        self.differ: set[type] = set()  # solvers whose `start` reads values that differ between parties
        self._weights: dict[str, Tensor] = {}
        self.pads = True
        self.decided_pads: bool | None = None  # `pads`, if another process has decided it
        self._chain: Chain | None = None
        self._looked = self._probed = False
        self._refused: str | None = None

    def plan(self) -> dict[str, Any]:
        plan = {"engine": self.name, "threads": 1, "chunk": self.chunk, "lanes": self.lanes}
        return plan | ({"compiled": self.compiles, "apart": self.apart} if self.records else {})

    def why(self) -> str:
        chain = self.chain
        if self.apart:
            return f"up to {self.chunk} parties at once, each on a stream of its own, recorded as a CUDA graph"
        if self.records:
            how = "compiled and recorded" if self.compiles else "recorded"
            return f"up to {self.chunk} parties at once, each step {how} as a CUDA graph"
        if chain is not None and chain.stacks and self.chunk > 1:
            return f"up to {self.chunk} parties at once as batched matrix products, which the cache holds"
        if chain is not None and self.chunk == 1:
            return "one party at a time, dense layers stepping inside the backward pass"
        if self.chunk == 1:
            return "one party at a time, which convolutions and recurrent nets prefer on a CPU"
        return f"up to {self.chunk} parties at once by vmap"

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """One full chunk per core: more tickets at once would not train faster."""
        return self.chunk * self.lanes

    def look(self) -> None:
        """Examine the model once: whether it mixes rows, and whether it is a chain."""
        if not self._looked:
            self._looked = True
            train = self.holdings.train
            decided = self.decided_pads
            self.pads = not mixes_rows(self.objective, self.holdings) if decided is None else decided
            if self.device_type == "cpu":
                self._chain = chain_of(self.objective, train.x[:SAMPLE], train.targets[:SAMPLE])
            if self._chain is not None and not self.pads:
                self._chain.stacks = False  # the loss or a layer mixes rows

    @property
    def chain(self) -> Chain | None:
        """The model as a chain, if it is one."""
        self.look()
        return self._chain

    def data_changed(self, parties: Sequence[int] | None = None) -> None:
        self.programs.clear()  # recordings read the samples at their old place
        self.traces.clear()

    def close(self) -> None:
        self.data_changed()  # recordings hold a GPU's memory
        super().close()

    def blocks(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        if not isinstance(unwrap(op)[1], LocalSolver):
            yield from self._together(op, members, round)
            return
        for at in range(0, len(members), self.window):
            window = members[at : at + self.window]
            stacks: list[Replies] = []
            alone: dict[int, Outcome] = {}
            for chunk in self.arrange(op, window):
                for done in self.work(op, chunk, round):
                    if isinstance(done, Replies):
                        stacks.append(done)
                    else:
                        alone[done[0]] = done[1]
            yield from in_order(window, stacks, alone)

    def _together(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        """Run an op that does not train: an evaluation for many parties at once, if it can; others for one by one."""
        for at in range(0, len(members), self.window):
            window, replies = members[at : at + self.window], None
            if isinstance(op, Evaluate) and len(window) > 1:
                with contextlib.suppress(Exception), threads(1):  # alone, the party that declines or fails is named
                    replies = op.run_stack([self.party(m.party, m.in_round(round)) for m in window],
                                           [m.payload for m in window], [m.memory for m in window])  # fmt: skip
            if replies is None:
                yield from super().blocks(op, window, round)
                continue
            done = set(replies.parties)
            rest = super().blocks(op, [member for member in window if member.party not in done], round)
            yield from in_order(window, [replies], dict(item for item in rest if isinstance(item, tuple)))

    def arrange(self, op: Op, members: list[PartyWork]) -> list[list[PartyWork]]:
        """Divide parties into chunks, each sorted by the number of steps, the longest first.

        Parties with similar numbers of steps are spread over as many chunks as there are cores, so that worker
        processes finish together.
        """
        solver = unwrap(op)[1]
        assert isinstance(solver, LocalSolver)
        ids = np.array([member.party for member in members])
        sizes = self.holdings.train.sizes(ids)
        order = members
        works = [member.payload.get("work") for member in members]
        if len(members) > 1 and ((sizes != sizes[0]).any() or any(work != works[0] for work in works)):
            steps: dict[Any, int] = {}
            counts = np.zeros(len(members), dtype=np.int64)
            for k, (n, work) in enumerate(zip(sizes.tolist(), works, strict=True)):
                at = (n, *sorted(work.items())) if work else n
                if at not in steps:
                    steps[at] = solver.at(work or {}).count(n) if n else 0
                counts[k] = steps[at]
            order = [members[k] for k in np.lexsort((ids, -sizes, -counts))]
        groups = [order]
        self.look()
        if not self.pads:
            alike: dict[Any, list[PartyWork]] = {}  # parties with equal batch sizes at every step
            for member in order:
                size = self.holdings.train.size(member.party)
                batch = solver.at(member.payload.get("work") or {}).plan[2]
                alike.setdefault((size, min(size, batch or size)), []).append(member)
            groups = list(alike.values())
        if self.records:  # a recording has one round
            groups = [[m for m in group if m.round == round] for group in groups for round in rounds_of(group)]
        chunks: list[list[PartyWork]] = []
        for group in groups:
            waves = -(-len(group) // (self.lanes * self.width(solver)))
            wide = -(-len(group) // waves)
            for at in range(0, len(group), wide):
                wave = group[at : at + wide]
                chunks += [wave[lane :: self.lanes] for lane in range(min(self.lanes, len(wave)))]
        return chunks

    def work(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        """Train a chunk of parties, and apply the wrappers around the solver to each."""
        layers, solver = unwrap(op)
        assert isinstance(solver, LocalSolver)
        if not by_hooks(op):
            with threads(1):
                yield from [(member.party, self.one(op, member, round)) for member in members]
            return
        ready: dict[int, PartyWork] = {}
        for member in members:
            if self.holdings.train.size(member.party) == 0:
                yield member.party, "it has no samples"
            else:
                ready[member.party] = member
        begun: dict[int, list[Around]] = {party: [] for party in ready}  # the wrappers, each at its inner op
        for layer in layers:
            works = list(ready.values())
            parties = [self.party(work.party, work.in_round(round)) for work in works]
            arounds = layer.arounds(parties, [work.payload for work in works], [work.memory for work in works])
            for member, around in zip(works, arounds, strict=True):
                begun[member.party].append(around)
                try:
                    with named(op, member.party, member.in_round(round)):
                        ready[member.party] = dataclasses.replace(member, payload=next(around))
                except PartyError as reason:
                    if isinstance(reason, Failure):
                        raise
                    del ready[member.party]
                    yield member.party, str(reason)
        if not ready:
            return
        with threads(1):  # two threads are slow as soon as another process needs a core
            done = self._train(solver, list(ready.values()), round)
            whole = self._wrapped(layers, done, list(ready.values()), round) if isinstance(done, Replies) else None
            if whole is not None:
                yield whole
                return
            outcomes = one_by_one(done, ready) if isinstance(done, Replies) else done
            for party, outcome in outcomes:
                try:
                    if not isinstance(outcome, str):
                        with named(op, party, ready[party].in_round(round)):
                            for around in reversed(begun[party]):
                                outcome = completed(around, *outcome)
                except PartyError as reason:
                    if isinstance(reason, Failure):
                        raise
                    outcome = str(reason)
                yield party, outcome

    def _wrapped(self, layers: list[Wrapper], stack: Replies, members: list[PartyWork], round: int) -> Replies | None:
        """A trained chunk after the wrappers around the solver, still stacked; None if they need each party alone."""
        if any(type(layer).after_stack is Wrapper.after_stack for layer in layers):
            return None
        works = {member.party: member for member in members}
        ids = stack.parties
        for layer in reversed(layers):
            parties = [self.party(party, works[party].in_round(round)) for party in ids]
            memories = [{**works[party].memory, **stack.remembered(k)} for k, party in enumerate(ids)]
            try:
                done = layer.after_stack(parties, stack, memories)
            except Exception:  # each party alone: the one that declines or fails is named
                return None
            if done is None:
                return None
            stack = dataclasses.replace(done[0], memory={**stack.memory, **done[1]})
        return stack

    def _train(self, solver: LocalSolver, members: list[PartyWork], round: int) -> Replies | list[tuple[int, Outcome]]:
        """Train a chunk by the fastest method for the model and the solver."""
        chain, base, original = self.chain, solver, members
        try:
            solvers, members = resolved(solver, members)
            solver = solvers[0]
            if solver.sampler == "poisson" and len({one.plan[2] for one in solvers}) > 1:
                # its steps divide by each party's own batch size
                return [(member.party, self.one(base, member, round)) for member in original]
            rule = solver.step_rule
            if chain is not None and rule is not None and chain.takes(rule, len(members)):
                return Stack(self, solvers, members, round).descend(chain, rule)
            if chain is not None and self.width(solver) == 1:
                return [
                    (m.party, base.train(self.party(m.party, m.in_round(round)), m.payload, m.memory, chain.alone))
                    for m in original
                ]
            if self.apart or ((self.records or self.width(solver) > 1) and self._stackable()):
                records = self.records and type(solver) not in self._unrecorded
                stack = Stack(self, solvers, members, round)
                alike = records and recorded_round.repeats(stack)
                done = self._record(solver, lambda: recorded_round.train_alike(stack)) if alike else None
                if done is not None:
                    return done
                if records and not alike and stack.recordable:
                    done = self._record(solver, lambda: gpu.train(stack))
                return stack.train() if done is None else done
        except PartyError:
            pass  # a party declined; it will decline again when it trains alone
        except HansaError:
            raise
        except Exception as error:
            # Train the parties one at a time: the one that failed is named, or all succeed.
            log.warning("a chunk could not be trained at once (%s); its parties train one at a time", first_line(error))
        return [(member.party, self.one(base, member, round)) for member in original]

    def _record(self, solver: LocalSolver, train: Callable[[], Replies]) -> Replies | None:
        """Train a stack by a recording; None if recording fails, and then no recording again for that solver."""
        try:
            return train()
        except HansaError:
            raise
        except Exception as error:
            self._unrecorded.add(type(solver))
            log.warning("the steps of %r cannot be recorded: %s", solver.name, first_line(error))
            return None

    def width(self, solver: LocalSolver) -> int:
        """Parties per chunk: fewer where a solver passes over the parameters several times per step."""
        wide = self._fixed_chunk is not None or self.chain is None or solver.step_rule is not None
        return self.chunk if wide else max(1, self.chunk // 4)

    def weights(self, count: int) -> dict[str, Tensor]:
        """Memory for the parameters of this many parties, reused by every chunk.

        Each parameter has a tensor of its own: inside one long vector, matrices would not be aligned for fast access.
        """
        if not self._weights or len(next(iter(self._weights.values()))) < count:
            views = self.objective.spec.split(self.objective.initial.w.expand(count, -1))
            self._weights = {name: torch.empty_like(view, memory_format=torch.contiguous_format)
                             for name, view in views.items()}  # fmt: skip
        return {name: tensor[:count] for name, tensor in self._weights.items()}

    def _stackable(self) -> bool:
        if self.chain is not None and self.chain.stacks:
            return True
        if not self._probed:
            self._probed = True
            self._refused = obstacle(self.objective, self.holdings, unrolls=self.records)
            if self._refused:
                log.warning("parties train one at a time: %s", self._refused)
        return self._refused is None


def in_order(members: list[PartyWork], stacks: list[Replies],
             alone: dict[int, Outcome]) -> Iterator[Replies | tuple[int, Outcome]]:  # fmt: skip
    """The outcomes of parties in stacks and alone: one stack, or one by one if a party alone has a reply."""
    if len(alone) < len(members) and all(isinstance(outcome, str) for outcome in alone.values()):
        yield from alone.items()
        yield merge(stacks)
        return
    by_party = {member.party: member for member in members}
    for stack in stacks:
        alone.update(one_by_one(stack, by_party))
    for member in members:
        yield member.party, alone[member.party]


def rounds_of(members: list[PartyWork]) -> list[int | None]:
    """The rounds of members of a chunk, each once."""
    return list(dict.fromkeys(member.round for member in members))


def by_hooks(op: Op) -> bool:
    """Whether an engine may call the hooks of a solver and its wrappers one by one.

    A solver that overrides `run`, `train` or `drawn`, or says so (`alone`), or a wrapper that overrides `run`, trains
    one party at a time.
    """
    layers, solver = unwrap(op)
    usual = all(type(layer).run is Wrapper.run for layer in layers)
    return usual and isinstance(solver, LocalSolver) and not (solver.own_run or solver.alone)


def resolved(solver: LocalSolver, members: list[PartyWork]) -> tuple[list[LocalSolver], list[PartyWork]]:
    """The solver of each party (one for all if equal), with the payloads' `work` applied and removed.

    Payloads that are equal afterwards become one object.
    """
    if not any("work" in member.payload for member in members):
        return [solver], members
    works = [member.payload.get("work") or {} for member in members]
    first: Any = None
    rest: list[PartyWork] = []
    for member in members:
        payload = {name: value for name, value in member.payload.items() if name != "work"}
        if first is None or payload.keys() != first.keys() or any(payload[k] is not first[k] for k in payload):
            first = payload
        rest.append(dataclasses.replace(member, payload=first))
    same = all(work == works[0] for work in works)
    return [solver.at(works[0])] if same else [solver.at(work) for work in works], rest


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def merge(stacks: list[Replies]) -> Replies:
    """Merge stacks into one, ordered by party id."""
    if len(stacks) == 1 and stacks[0].parties == sorted(stacks[0].parties):
        return stacks[0]
    parties = [party for stack in stacks for party in stack.parties]
    order = sorted(range(len(parties)), key=parties.__getitem__)
    index = torch.tensor(order)

    def rows(trees: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([t[name] for t in trees]).index_select(0, index.to(trees[0][name].device))
                for name in trees[0]}  # fmt: skip

    def items(lists: list[Sequence[Any]]) -> list[Any]:
        flat = [value for part in lists for value in part]
        return [flat[k] for k in order]

    return Replies(
        [parties[k] for k in order],
        rows([stack.tensors for stack in stacks]),
        items([stack.weights for stack in stacks]),
        rows([stack.maxima for stack in stacks]),
        {name: items([stack.metrics[name] for stack in stacks]) for name in stacks[0].metrics},
        memory=rows([stack.memory for stack in stacks]),
    )
