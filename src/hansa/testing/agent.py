"""A party in a process of its own: it has its data and its memory, and neither the server nor the algorithm.

It reads messages from standard input and answers on standard output, each a length and an encoded tree. What it stages
under an ask it keeps only when the aggregator confirms that the reply was fused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from hansa.core import codec
from hansa.core.budget import EPSILON, Accountant, Spending, reports_epsilon
from hansa.core.determinism import set_deterministic
from hansa.core.errors import HansaError, PartyError
from hansa.core.federation import op_of
from hansa.core.op import DataOp, Memory, Party, PeerOp, Reply, perform
from hansa.testing.processes import LIMIT


def read_message(stream: BinaryIO) -> Any | None:
    """The next message, or None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    if length > LIMIT:
        raise HansaError(f"a message of {length} bytes is over the limit of {LIMIT}")
    return codec.decode(stream.read(length))


def write_message(stream: BinaryIO, tree: Any) -> None:
    data = codec.encode(tree)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


class Agent:
    """One party: answers asks, stages its memory under them, keeps it when told to.

    `load` makes the party, with its own share of the data, from the message that gives it a task. The accountant
    reckons what it spends of its privacy, which lasts as long as the task.
    """

    def __init__(self, load: Callable[[dict[str, Any]], Party], accountant: Accountant) -> None:
        self.load, self._accountant = load, accountant
        self.books = Spending(accountant)
        self.party: Party | None = None
        self.memory: Memory = {}
        self.staged: dict[str, Memory] = {}
        self.waiting: dict[str, tuple[PeerOp, Any]] = {}

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one message."""
        kind = message["type"]
        if kind == "task":
            self.party = self.load(message)
            self.memory, self.staged, self.waiting = {}, {}, {}
            self.books = Spending(self._accountant)
            return {"ready": True}
        if self.party is None:
            return {"failed": "it has no task yet"}
        if kind == "ask":
            for name in message["drop"]:
                self.staged.pop(name, None)
            return self._ask(self.party, message)
        if kind == "deliver":
            return self._deliver(self.party, message)
        if kind == "settle":
            for name in message["keep"]:
                self.memory = self.staged.pop(name, self.memory)
            for name in message["drop"]:
                self.staged.pop(name, None)
            return {"settled": True}
        return {"failed": f"it does not know messages of type {kind!r}"}

    def _now(self) -> Memory:
        """The memory as last staged, or as last kept."""
        return list(self.staged.values())[-1] if self.staged else self.memory

    def _ask(self, party: Party, message: dict[str, Any]) -> dict[str, Any]:
        op = op_of(message["op"], where="ask")
        payload = message["payload"]
        party.round = message["round"]
        if isinstance(op, DataOp):
            op.apply(party, payload)
            return {"reply": Reply({}).tree()}
        try:
            spent = self.books.charge(party.id, op, party.n, payload)
        except PartyError as reason:
            return {"declined": str(reason)}
        outcome = perform(op, party, payload, self._now())
        if isinstance(outcome, str):
            return {"declined": outcome}
        reply, memory = outcome
        if spent is not None and reports_epsilon(op, spent):
            reply.metrics[EPSILON] = spent
        if memory:
            self.staged[message["id"]] = memory
        if isinstance(op, PeerOp):
            self.waiting[message["id"]] = (op, payload)
        return {"reply": reply.tree()}

    def _deliver(self, party: Party, message: dict[str, Any]) -> dict[str, Any]:
        """The neighbours' messages of an exchange."""
        op, payload = self.waiting.pop(message["id"])
        inbox = [(float(share), tensors) for share, tensors in message["inbox"]]
        self.staged[message["id"]] = op.receive(party, payload, inbox, self._now())
        return {"received": True}


def serve(agent: Agent) -> None:
    """Answer messages on standard input until it ends, on one thread."""
    torch.set_num_threads(1)
    set_deterministic(True)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a model prints must not end up among the answers
    while (message := read_message(sys.stdin.buffer)) is not None:
        try:
            answer = agent.handle(message)
        except Exception as error:  # a party that fails says so and stays; the aggregator goes on without it
            answer = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        write_message(answers, answer)
