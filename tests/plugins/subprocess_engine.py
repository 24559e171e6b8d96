"""A plug-in engine: parties work in another process, which has copies of their samples and is asked over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from hansa.core.ask import op_config, op_of
from hansa.core.op import Op, Party, Replies, Reply, perform
from hansa.core.registry import register
from hansa.holdings.gateway import SampleGateway
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError, HansaError
from hansa.plumbing.forking import check_fork
from hansa.replies.partial_sums import PartialSum, ReplySum
from hansa.replies.replies import reply_size
from hansa.sim.engine import (
    Engine,
    EngineInputs,
    Failure,
    Outcome,
    PartyWork,
    ReferenceEngine,
    named,
)


@register("plugin-subprocess")
@dataclass(frozen=True)
class Subprocess(Engine):
    """Parties in one other process, asked over a pipe."""

    def start(self, inputs: EngineInputs) -> SubprocessEngine:
        return SubprocessEngine(inputs.objective, inputs.holdings, inputs.seed)


class SubprocessEngine(ReferenceEngine):
    """The running engine; its process is forked at the first ask, and gets each party's samples once."""

    name = "plugin-subprocess"
    sums = True

    def __init__(self, *inputs: Any) -> None:
        super().__init__(*inputs)
        self._pipe: Connection | None = None
        self._process: Any = None
        self._sent: set[int] = set()  # parties whose present samples the process has

    def plan(self) -> dict[str, Any]:
        return {"engine": self.name, "threads": 1}

    def why(self) -> str:
        return "one party at a time, in another process"

    def blocks(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        if not _travels(op):
            yield from super().blocks(op, members, round)
            return
        for member in members:
            yield member.party, _outcome(self._call("run", op, [member], round)["alone"][str(member.party)])

    def partial_sums(self, op: Op, members: list[PartyWork], round: int,
                     uniform: bool) -> Iterator[PartialSum | tuple[int, Outcome]]:  # fmt: skip
        if not _travels(op):
            yield from super().blocks(op, members, round)  # type: ignore[misc]
            return
        half = (len(members) + 1) // 2
        for group in (members[half:], members[:half]):  # any grouping, in any order
            if not group:
                continue
            answer = self._call("sum", op, group, round, uniform)
            yield from ((int(party), _outcome(tree)) for party, tree in answer["alone"].items())
            if "sum" in answer:
                memories = {int(party): memory for party, memory in answer["memories"].items()}
                total = Reply.of_tree(answer["sum"])
                yield PartialSum(self.sender, tuple(memories), total, answer["bytes"], memories=memories)

    def data_changed(self, parties: Sequence[int] | None = None) -> None:
        self._sent = set() if parties is None else self._sent - set(parties)

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._process.join()
        self._pipe = self._process = None
        self._sent = set()

    def _call(self, kind: str, op: Op, members: list[PartyWork], round: int, uniform: bool = False) -> dict[str, Any]:
        pipe = self._started()
        for party in sorted({member.party for member in members} - self._sent):
            pairs = [self.holdings.train.of(party)]
            if self.holdings.tests is not None and self.holdings.tests.of(party) is not None:
                pairs.append(self.holdings.tests.of(party))
            pipe.send_bytes(codec.encode({"kind": "samples", "party": party, "pairs": [list(pair) for pair in pairs]}))
            self._sent.add(party)
        work = [{"party": member.party, "payload": dict(member.payload), "memory": member.memory} for member in members]
        asked = {"kind": kind, "op": op_config(op), "round": round, "uniform": uniform, "work": work}
        pipe.send_bytes(codec.encode(asked))
        answer: dict[str, Any] = codec.decode(pipe.recv_bytes())
        if "failed" in answer:
            raise Failure(answer["failed"])
        return answer

    def _started(self) -> Connection:
        if self._pipe is None:
            check_fork("the engine forks a process, and this process must not", "use another engine")
            context = multiprocessing.get_context("fork")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._pipe, self.objective, self.seed))
            self._process.daemon = True
            self._process.start()
            theirs.close()
        return self._pipe


def _travels(op: Op) -> bool:
    try:
        op_of(op_config(op), where="engine")
    except HansaError:
        return False
    return True


def _outcome(tree: dict[str, Any]) -> Outcome:
    return tree["declined"] if "declined" in tree else (Reply.of_tree(tree["reply"]), tree["memory"])


def _tree(outcome: Outcome) -> dict[str, Any]:
    return {"declined": outcome} if isinstance(outcome, str) else {"reply": outcome[0].tree(), "memory": outcome[1]}


def _serve(pipe: Connection, parents: Connection, objective: Objective, seed: int) -> None:
    """The other process: keep the samples that it is sent, and answer asks."""
    parents.close()
    torch.set_num_threads(1)
    samples: dict[int, list[Any]] = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = codec.decode(pipe.recv_bytes())
            if message["kind"] == "samples":
                samples[message["party"]] = [tuple(pair) for pair in message["pairs"]]
                continue
            try:
                answer = _answer(message, samples, objective, seed)
            except HansaError as error:
                answer = {"failed": str(error)}
            pipe.send_bytes(codec.encode(answer))


def _answer(message: dict[str, Any], samples: dict[int, list[Any]], objective: Objective, seed: int) -> dict[str, Any]:
    op, round, total = op_of(message["op"], where="engine"), message["round"], ReplySum(message["uniform"])
    alone: dict[str, Any] = {}
    memories: dict[str, Any] = {}
    size = 0
    for work in message["work"]:
        train, *test = samples[work["party"]]
        party = Party(work["party"], objective, SampleGateway(train, test[0] if test else None), seed, round)
        with named(op, party.id, round):
            outcome = perform(op, party, work["payload"], work["memory"])
        if message["kind"] == "sum" and not isinstance(outcome, str):
            try:
                total.add(outcome[0])
                memories[str(party.id)] = outcome[1]
                size += reply_size(outcome[0])
                continue
            except DataError:
                pass  # the reply is sent by itself, to be rejected by its party's name
        alone[str(party.id)] = _tree(outcome)
    summed = {"sum": total.reply().tree(), "memories": memories, "bytes": size} if memories else {}
    return {"alone": alone, **summed}
