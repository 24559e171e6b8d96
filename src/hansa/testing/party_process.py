"""One party as a process: `python -m hansa.testing.party_process`, started by `hansa.testing.processes`.

The process holds the party's data and memory, and neither the server's state nor the algorithm. It reads messages from
standard input and answers on standard output; each message is its length and an encoded tree. Memory that was staged
under an ask is kept only when the aggregator confirms that the reply was fused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from hansa.core.answering import answer
from hansa.core.ask import op_of
from hansa.core.budget import Accountant, Spending
from hansa.core.data_op import DataOp
from hansa.core.op import Memory, Party, Reply
from hansa.experiment.config import parse
from hansa.net.party.post import PostOffice
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.determinism import set_deterministic
from hansa.plumbing.errors import HansaError, PartyError
from hansa.privacy import spent as accountant
from hansa.secure.byte_tensors import as_bytes, as_tensor
from hansa.testing.processes import EXCHANGE, LIMIT
from hansa.transforms.downlink import opened_payload


def load(message: dict[str, Any]) -> Party:
    """The party that a task message names, with its own share of the experiment's data and nothing else."""
    experiment = parse(message["experiment"], message["folder"])
    experiment.check(deployed=True)
    task = experiment.build_task()
    objective = Objective(task.model, task.loss, experiment.run.seed, bf16=experiment.run.precision == "bf16")
    holdings, id = task.holdings(objective), int(message["party"])
    objective = objective if holdings.models is None else holdings.models.of(id)
    return Party(id, objective, holdings.gateway(id).copy(), experiment.run.seed, public=holdings.public,
                 augment=holdings.augment)  # fmt: skip


def read_message(stream: BinaryIO) -> Any | None:
    """The next message, or None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    if length > LIMIT:
        raise HansaError(f"received a message of {length} bytes; the limit is {LIMIT}")
    return codec.decode(stream.read(length))


def write_message(stream: BinaryIO, tree: Any) -> None:
    data = codec.encode(tree)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


class StdioPost(PostOffice):
    """Mailboxes at the process that started this one: a request goes to standard output, in place of an answer."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers

    def _sent(self, body: bytes) -> bytes:
        write_message(self._answers, {EXCHANGE: as_tensor(body)})
        response = read_message(sys.stdin.buffer)
        if response is None:
            raise PartyError("the session has ended")
        return as_bytes(response[EXCHANGE])


class StdioParty:
    """One party: answers asks, stages its memory under them, and keeps it when the aggregator says so.

    `load` makes the party, with its own share of the data, from a task message. The accountant computes the privacy
    spending, which starts anew with each task.
    """

    def __init__(self, load: Callable[[dict[str, Any]], Party], accountant: Accountant) -> None:
        self.load, self._accountant = load, accountant
        self.spending = Spending(accountant)
        self.party: Party | None = None
        self.memory: Memory = {}
        self.staged: dict[str, Memory] = {}

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one message."""
        kind = message["type"]
        if kind == "task":
            self.party = self.load(message)
            self.memory, self.staged = {}, {}
            self.spending = Spending(self._accountant)
            return {"ready": True}
        if self.party is None:
            return {"failed": "it has no task yet"}
        if kind == "ask":
            self._drop(message["drop"])
            return self._ask(self.party, message)
        if kind == "settle":
            for name in message["keep"]:
                self.memory = self.staged.pop(name, self.memory)
            self._drop(message["drop"])
            return {"settled": True}
        return {"failed": f"it does not know messages of type {kind!r}"}

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self.staged.pop(name, None)

    def _now(self) -> Memory:
        """The memory as last staged, or as last kept."""
        return list(self.staged.values())[-1] if self.staged else self.memory

    def _ask(self, party: Party, message: dict[str, Any]) -> dict[str, Any]:
        op = op_of(message["op"], where="ask")
        spec = party.objective.spec
        payload, ask = opened_payload(message, spec.dim, spec.dtype), message["id"]
        party.round = message["round"]
        if isinstance(op, DataOp):
            op.apply(party, payload)
            return {"reply": Reply({}).tree()}

        def stage(memory: Memory) -> None:
            self.staged[ask] = memory

        try:
            spent = self.spending.charge(party.id, op, party.n, payload)
            reply, _ = answer(op, lambda: op.run(party, payload, self._now()), lambda: spent, stage)
        except PartyError as reason:
            return {"declined": str(reason)}
        return {"reply": reply.tree()}


def serve(party: StdioParty) -> None:
    """Answer messages from standard input until its end, on one thread."""
    torch.set_num_threads(1)
    set_deterministic(True)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a model that prints must not write among the answers
    while (message := read_message(sys.stdin.buffer)) is not None:
        try:
            if party.party is not None:
                party.party.post = StdioPost(answers)
            reply = party.handle(message)
        except Exception as error:  # a failure is reported; the process and the run go on
            reply = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        write_message(answers, reply)


if __name__ == "__main__":
    serve(StdioParty(load, accountant))
