"""Worker processes: the work of another engine, distributed over one process per core.

The inner engine divides a cohort into chunks for the workers: single parties for the reference engine, whose bits do
not depend on the number of workers, and stacks of parties for the stacked engine. Workers are forked once, when the
first cohort trains, and again if the data changed since. Tensors go through one region of shared memory with one slot
per party; the rest of a message goes through a pipe. The parent writes to a worker only while the worker reads, so
neither side can block the other. A worker has no open file but its pipe, so it ends whenever the parent ends.

If this process must not fork any more (`forking`), because it has computed a gradient beside a GPU meanwhile, the
inner engine goes on in this process, with the same bits.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from hansa.core.ask import op_config, op_of
from hansa.core.op import Memory, Op, Payload, Replies, Reply
from hansa.core.shapes import is_open, largest_shape
from hansa.core.wrapper import unwrap
from hansa.local.solver import LocalSolver
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, HansaError, PartyError, RuntimeFailure
from hansa.plumbing.forking import fork_obstacle, hide_gpus
from hansa.sim.engine import Failure, Outcome, PartyWork, ReferenceEngine, first_line
from hansa.sim.shared_memory import ALIGN, HERE, Room, aligned, copied, size_of
from hansa.sim.stacked import ROOM, StackedEngine, cores

log = logging.getLogger("hansa")
ERRORS: dict[str, type[HansaError]] = {kind.__name__: kind for kind in (ConfigError, DataError, PartyError, Failure)}
WAVES = 4  # tickets per worker that are trained at once, where each trains alone
SLOTS = 64  # largest number of parties at a time where each trains alone
OPEN = ROOM // SLOTS  # most bytes of shared memory for a tensor whose size is open


class WorkersEngine(ReferenceEngine):
    """Distribute an engine's work over processes. Call `close` at the end."""

    def __init__(self, inner: ReferenceEngine, workers: int | None = None) -> None:
        super().__init__(inner.objective, inner.holdings, inner.seed)
        self.inner = inner
        self.workers = workers or cores()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._room: Room | None = None
        self._head = self._apart = self._slots = 0
        self._stale = False  # whether the data changed since the workers were forked
        self._obstacle: str | None = None  # why this process must not fork any more

    @property
    def name(self) -> str:  # type: ignore[override]
        return "workers" if type(self.inner) is ReferenceEngine else self.inner.name

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """As many tickets as the inner engine trains at once; single parties in a few waves."""
        return max(self.inner.ahead, WAVES * self.workers)

    def plan(self) -> dict[str, Any]:
        return self.inner.plan()  # the same bits, so the same plan

    def why(self) -> str:
        return self.inner.why() if self._obstacle else f"{self.workers} worker processes, {self.inner.why()}"

    def blocks(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        trains = isinstance(unwrap(op)[1], LocalSolver)
        if not trains or len(members) < 2 or not _travels(op) or not self._prepare(op, members):
            yield from self.inner.blocks(op, members, round)
            return
        window = self.inner.window if isinstance(self.inner, StackedEngine) else self._slots
        for at in range(0, len(members), window):
            yield from self._train(op, members[at : at + window], round)

    def _prepare(self, op: Op, members: list[PartyWork]) -> bool:
        """Start workers that see the current data, with enough shared memory for this cohort; false if none may be."""
        layers, solver = unwrap(op)
        assert isinstance(solver, LocalSolver)
        payload = members[0].payload
        payloads = {id(member.payload): member.payload for member in members}
        answer = max(_answer_size(op, payload) for payload in payloads.values())
        spec, initial = self.objective.spec, self.objective.initial
        fresh = size_of(solver.remember(spec, initial)) + len(layers) * size_of(initial._asdict())
        memory = max(fresh, *(size_of(member.memory) for member in members))
        common = common_names(members)
        own = max(size_of({n: v for n, v in member.payload.items() if n not in common}) for member in members)
        apart = aligned(max(answer, own) + memory + 16 * ALIGN)
        head = aligned(size_of(payload) + 16 * ALIGN)
        slots = max(2 * self.workers, min(SLOTS, ROOM // apart))
        if isinstance(self.inner, StackedEngine):
            slots = min(self.inner.window, len(members))
        fits = apart <= self._apart and head <= self._head and slots <= self._slots
        if self._processes and fits and not self._stale:
            return True
        self.close()
        if isinstance(self.inner, StackedEngine):
            self.inner.look()  # once, before the fork
        if self._obstacle is None:
            self._obstacle = fork_obstacle()
            if self._obstacle is not None:
                log.warning("the parties train in one process from now on: %s", self._obstacle)
        if self._obstacle is not None:  # it stays
            return False
        self._head, self._apart, self._slots = head, apart, slots
        self._room = Room(self._head + self._slots * self._apart)
        context = multiprocessing.get_context("fork")
        for _ in range(self.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=self._serve, args=(theirs,), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a worker uses one thread only
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return True

    def _train(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        """Have the workers train a window of parties: the longest chunk first, each to the next free worker."""
        assert self._room is not None
        names = common_names(members)
        shared, _ = self._room.lay({name: members[0].payload[name] for name in names}, 0, self._head)
        common = {"op": op_config(op), "round": round, "payload": shared}
        slot_of = {member.party: slot for slot, member in enumerate(members)}
        waiting = self._arrange(op, members)[::-1]
        busy: dict[int, list[PartyWork]] = {}
        stacks: list[dict[str, Any]] = []
        alone: dict[int, dict[str, Any]] = {}

        def message(chunk: list[PartyWork]) -> bytes:
            parties = [member.party for member in chunk]
            slots = [slot_of[party] for party in parties]
            tree = {"parties": torch.tensor(parties), "slots": torch.tensor(slots), **common}
            if any(member.round is not None for member in chunk):
                tree["rounds"] = torch.tensor([member.in_round(round) for member in chunk])
            if any(member.memory or len(member.payload) > len(names) for member in chunk):
                tree["own"] = [self._own_part(member, slot_of[member.party], names) for member in chunk]
            return codec.encode(tree)

        for worker in range(min(self.workers, len(waiting))):
            busy[worker] = waiting.pop()
        for worker, data in [(worker, message(chunk)) for worker, chunk in busy.items()]:
            self._send(worker, data)
        while busy:
            ahead = message(waiting[-1]) if waiting else b""  # encoded while the workers are busy
            for pipe in wait([self._pipes[worker] for worker in busy]):
                worker = self._pipes.index(pipe)  # type: ignore[arg-type]
                chunk = busy.pop(worker)
                answered = self._receive(worker, chunk)
                if waiting:
                    busy[worker] = waiting.pop()
                    self._send(worker, ahead)
                    ahead = message(waiting[-1]) if waiting else b""
                stacks += [_listed(stack) for stack in answered["stacks"]]
                alone.update({int(party): answer for party, answer in answered["alone"].items()})
        failed = [party for party in alone if "error" in alone[party]]
        if failed:  # all outcomes are in, so the named party does not depend on timing
            first = alone[min(failed)]
            raise ERRORS.get(first["kind"], PartyError)(first["error"])
        yield from self._collect(members, stacks, alone)

    def _arrange(self, op: Op, members: list[PartyWork]) -> list[list[PartyWork]]:
        if isinstance(self.inner, StackedEngine):
            return self.inner.arrange(op, members)
        size = self.holdings.train.size
        return [[member] for member in sorted(members, key=lambda member: (-size(member.party), member.party))]

    def _own_part(self, member: PartyWork, slot: int, common: set[str]) -> dict[str, Any]:
        """The part of a message for one party; its tensors use the slot that the reply will use later."""
        assert self._room is not None
        at = self._head + slot * self._apart
        payload = {name: value for name, value in member.payload.items() if name not in common}
        tree, _ = self._room.lay({"memory": member.memory, "payload": payload}, at, at + self._apart)
        return dict(tree)

    def _collect(self, members: list[PartyWork], stacks: list[dict[str, Any]],
                 alone: dict[int, dict[str, Any]]) -> Iterator[Replies | tuple[int, Outcome]]:  # fmt: skip
        """Yield the outcomes in the order of `members`; as one stack if all replies came in stacks."""
        assert self._room is not None
        declined = {party: answer["declined"] for party, answer in alone.items() if "declined" in answer}
        layouts = [(stack["tensors"], stack["maxima"], stack["memory"]) for stack in stacks]
        if len(declined) < len(alone) or any(layout != layouts[0] for layout in layouts):
            for stack in stacks:
                alone.update(self._apart_from(stack))
            for member in members:
                answer = alone[member.party]
                yield member.party, answer["declined"] if "declined" in answer else self._alone(member, answer)
            return
        yield from sorted(declined.items())
        if not stacks:
            return
        row = {party: (stack, k) for stack in stacks for k, party in enumerate(stack["parties"])}
        slots = torch.tensor([slot for slot, member in enumerate(members) if member.party in row])
        names, room = list(stacks[0]["metrics"]), self._room

        def view(places: dict[str, Any]) -> dict[str, Tensor]:
            out = {}
            for name, (at, shape, dtype) in places.items():
                rows = room.rows(self._head + at, shape, getattr(torch, dtype), len(members), self._apart)
                out[name] = rows if len(slots) == len(members) else rows.index_select(0, slots)
            return out

        parties = [member.party for member in members if member.party in row]
        places = [row[party] for party in parties]
        weights = [stack["weights"][k] for stack, k in places]
        metrics: dict[str, Any] = {name: [stack["metrics"][name][k] for stack, k in places] for name in names}
        tensors, maxima, memory = (view(part) for part in layouts[0])
        yield Replies(parties, tensors, weights, maxima, metrics, memory=memory)

    def _apart_from(self, stack: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """A stack's replies one by one."""
        out = {}
        for k, (party, slot) in enumerate(zip(stack["parties"], stack["slots"], strict=True)):
            base = self._head + slot * self._apart
            laid = {
                part: {name: {HERE: base + at, "shape": shape, "dtype": kind}
                       for name, (at, shape, kind) in stack[part].items()}
                for part in ("tensors", "maxima", "memory")
            }  # fmt: skip
            numbers = {name: values[k] for name, values in stack["metrics"].items()}
            out[party] = {"weight": stack["weights"][k], "metrics": numbers, **laid}
        return out

    def _alone(self, member: PartyWork, answer: dict[str, Any]) -> tuple[Reply, Memory]:
        assert self._room is not None
        read = {part: {name: value.clone() for name, value in self._room.read(answer[part]).items()}
                for part in ("tensors", "maxima", "memory")}  # fmt: skip
        reply = Reply(read["tensors"], answer["weight"], read["maxima"], answer["metrics"])
        return reply, {**member.memory, **read["memory"]}

    def _send(self, worker: int, data: bytes) -> None:
        try:
            self._pipes[worker].send_bytes(data)
        except OSError:
            self._lost(worker, "it received work")

    def _receive(self, worker: int, chunk: list[PartyWork]) -> dict[str, Any]:
        try:
            answers: dict[str, Any] = codec.decode(self._pipes[worker].recv_bytes())
        except (EOFError, OSError):
            parties = ", ".join(str(member.party) for member in chunk[:5])
            self._lost(worker, f"it trained {'party' if len(chunk) == 1 else 'parties'} {parties}")
        return answers

    def _lost(self, worker: int, doing: str) -> None:
        self._processes[worker].join(timeout=1)
        code = self._processes[worker].exitcode
        self.close()
        raise RuntimeFailure(f"worker {worker} ended (exit code {code}) while {doing}; it may have run out of memory")

    def _serve(self, pipe: Connection) -> None:
        """Main loop of a worker: read a message, train a chunk, reply; exit when the parent ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        own = pipe.fileno()  # close the parent's files: its lock, its metrics, its ends of the pipes
        os.closerange(3, own)
        os.closerange(own + 1, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))
        hide_gpus()
        torch.set_num_threads(1)
        keep_memory()
        while True:
            try:
                data = pipe.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            message = codec.decode(data)
            answer = codec.encode(self._work(op_of(message["op"], where="worker"), message))
            try:
                pipe.send_bytes(answer)
            except OSError:
                os._exit(0)

    def _work(self, op: Op, message: dict[str, Any]) -> dict[str, Any]:
        assert self._room is not None
        round = message["round"]
        shared = self._room.read(message["payload"])
        slots = dict(zip(message["parties"].tolist(), message["slots"].tolist(), strict=True))
        rounds = message["rounds"].tolist() if "rounds" in message else [None] * len(slots)
        members = [PartyWork(party, shared, {}, own) for party, own in zip(slots, rounds, strict=True)]
        for member, own in zip(members, message.get("own", []), strict=False):
            # The reply will overwrite the slot, so copy the party's inputs first.
            member.memory = copied(self._room.read(own["memory"]))
            member.payload = {**shared, **copied(self._room.read(own["payload"]))} if own["payload"] else shared
        stacks: list[dict[str, Any]] = []
        alone: dict[str, Any] = {}
        try:
            if isinstance(self.inner, StackedEngine):
                done = self.inner.work(op, members, round)
            else:
                done = iter([(member.party, self.inner.one(op, member, round)) for member in members])
            for item in done:
                if isinstance(item, Replies) and self._fits(item):
                    stacks.append(self._stack(item, [slots[party] for party in item.parties]))
                elif isinstance(item, Replies):
                    for k, party in enumerate(item.parties):
                        alone[str(party)] = self._answer(item.row(k), item.remembered(k), slots[party])
                elif isinstance(item[1], str):
                    alone[str(item[0])] = {"declined": item[1]}
                else:
                    alone[str(item[0])] = self._answer(*item[1], slots[item[0]])
        except Exception as error:
            text = str(error) if isinstance(error, HansaError) else f"a worker failed: {first_line(error)}"
            alone = {str(member.party): {"error": text, "kind": type(error).__name__} for member in members}
            stacks = []
        return {"stacks": stacks, "alone": alone}

    def _stack(self, replies: Replies, slots: list[int]) -> dict[str, Any]:
        """Write a stack's tensors into the parties' slots; return the message about them."""
        assert self._room is not None
        at = 0
        index, most = torch.tensor(slots), max(slots) + 1
        numbers = {name: torch.tensor(values, dtype=torch.float64) for name, values in replies.metrics.items()}
        out: dict[str, Any] = {"parties": torch.tensor(replies.parties), "slots": index, "metrics": numbers,
                               "weights": torch.tensor(replies.weights)}  # fmt: skip
        for part, tensors in (("tensors", replies.tensors), ("maxima", replies.maxima), ("memory", replies.memory)):
            out[part] = {}
            for name, value in tensors.items():
                shape, dtype = list(value.shape[1:]), value.dtype
                self._room.rows(self._head + at, shape, dtype, most, self._apart).index_copy_(0, index, value)
                out[part][name] = [at, shape, str(dtype).removeprefix("torch.")]
                at += aligned(torch.Size(shape).numel() * dtype.itemsize)
        return out

    def _fits(self, replies: Replies) -> bool:
        """Whether one party's part of a stack fits into a slot."""
        trees = (replies.tensors, replies.maxima, replies.memory)
        return sum(size_of(value[0]) for tree in trees for value in tree.values()) <= self._apart

    def _answer(self, reply: Reply, memory: Memory, slot: int) -> dict[str, Any]:
        assert self._room is not None
        at = self._head + slot * self._apart
        tree, _ = self._room.lay(
            {"tensors": reply.tensors, "maxima": reply.maxima, "memory": memory}, at, at + self._apart
        )
        return {"weight": reply.weight, "metrics": reply.metrics, **tree}

    def data_changed(self, parties: Sequence[int] | None = None) -> None:
        self._stale = True
        self.inner.data_changed(parties)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # an idle worker reads the end of the pipe and exits
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._room, self._stale = [], [], None, False
        self._head = self._apart = self._slots = 0


def _answer_size(op: Op, payload: Payload) -> int:
    """The bytes of a reply in a slot. A tensor of open size gets at most `OPEN`; a larger one uses the pipe."""
    sent = [*op.expects(payload).values(), *op.expects_maxima(payload).values()]
    sizes = [(torch.Size(largest_shape(shape)).numel() * dtype.itemsize, is_open(shape)) for shape, dtype in sent]
    return sum((min(size, OPEN) if open_size else size) + ALIGN for size, open_size in sizes)


def common_names(members: list[PartyWork]) -> set[str]:
    """The names under which all payloads hold the same object."""
    first = members[0].payload
    others = [member.payload for member in members if member.payload is not first]
    return {name for name, value in first.items() if all(other.get(name) is value for other in others)}


def _travels(op: Op) -> bool:
    """Whether an op can be sent to another process: its name must be registered."""
    try:
        op_of(op_config(op), where="worker")
    except HansaError:
        return False
    return True


def _listed(stack: dict[str, Any]) -> dict[str, Any]:
    """A stack's message with its numbers as lists."""
    lists = {name: stack[name].tolist() for name in ("parties", "slots", "weights")}
    return {**stack, **lists, "metrics": {name: values.tolist() for name, values in stack["metrics"].items()}}


def keep_memory() -> None:
    """Make the C library keep freed memory: each step allocates the same megabytes, and new pages cost page faults."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):  # not the GNU C library
        return


def usable(device: torch.device) -> bool:
    """Whether this system can run workers for a device: on a CPU, with more than one core, by a fork."""
    return device.type == "cpu" and hasattr(os, "fork") and cores() > 1
