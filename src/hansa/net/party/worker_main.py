"""The worker's side: a forked process that gives up what asks do not need, and then answers them until it is ended."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hansa.core.op import Party
from hansa.net.party.asks import AskFiles, TaskReader, perform, reason
from hansa.net.party.confinement import close_connections, confine, forget_secrets, limit_cpu
from hansa.net.party.post import LOOK, PostOffice
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Changed, Worker
from hansa.net.party.worker_link import (
    LENGTH,
    AskWorker,
    Begin,
    BeginsToRead,
    Done,
    FromWorker,
    Ready,
    Request,
    Response,
    SignData,
    Signed,
    StopAsk,
    framed,
    length,
    to_worker,
)
from hansa.net.transport.process import Structured
from hansa.plumbing.errors import ConfigError, HansaError, PartyError
from hansa.plumbing.forking import hide_gpus
from hansa.plumbing.stopping import Brake, Halted, go_on

Prepare = Callable[[int, dict[str, Any], str], Party]


def serve(connection: socket.socket, store: PartyStore, prepare: Prepare, data: Callable[[], str] = str,
          lines: Structured | None = None, changed: Changed = lambda work: False) -> None:  # fmt: skip
    """Answer the asks that arrive over a connection. `lines` formats the log of this process."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the agent ends this process itself
        signal.signal(signum, signal.SIG_IGN)
    agent = _Agent(connection)
    begin = agent.begin
    if lines is not None:
        lines.party = begin.party
    store.policy, store.next_policy = begin.policy, None
    try:
        worker = Worker(store, prepare, data, agent, changed)
        worker.post = LinkPost(agent)
        if begin.declined is not None:
            worker.declined(*begin.declined)
        if store.policy.device == "cpu":
            hide_gpus()
            store.policy.limits.confine()
        else:
            _start_device(store.policy.device)
        forget_secrets()
        close_connections()
        agent.send(Ready(unconfined=confine()))
    except HansaError as error:
        agent.send(Ready(error=reason(str(error))))
        return
    reader = TaskReader()
    while True:
        ask, brake = agent.next_ask()
        if ask.policy is not None:
            store.next_policy = ask.policy
            worker.take_policy()
        limit_cpu(worker.seconds)
        files = AskFiles(Path(ask.message), Path(ask.task), Path(ask.reply))
        try:
            agent.send(Done(perform(worker, reader, ask.work, files, brake)))
        except Halted:
            agent.send(Done())
        except OSError as error:
            agent.send(Done(fault=(error.errno or 0, reason(str(error.strerror or error)))))


def _start_device(device: str) -> None:
    """Start the driver of a GPU, which may run a program; a ConfigError if this machine has no such device."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"device = {device!r} in party.toml cannot be used here ({why}); use 'cpu'") from None


class _Agent:
    """The connection to the agent. A thread reads it, so that a stop reaches a running ask.

    When the agent is gone, this process exits at once, even in the middle of work.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # one thread sends at a time
        self._asks: queue.SimpleQueue[tuple[AskWorker, Brake]] = queue.SimpleQueue()
        self._signed: queue.SimpleQueue[Signed] = queue.SimpleQueue()
        self._responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._requests = 0
        message = self._receive()
        assert isinstance(message, Begin)
        self.begin, self._seconds = message, message.policy.limits.seconds
        threading.Thread(target=self._read, name="agent", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        """Send a message."""
        with self._lock:
            self._connection.sendall(framed(message))

    def next_ask(self) -> tuple[AskWorker, Brake]:
        """Wait for the next ask; the brake stops it when the agent says so, or after the time that the policy gives."""
        return self._asks.get()

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        """Have the agent sign a message to other parties: the party's certificate and the signature."""
        self.send(SignData(data))
        signed = self._signed.get()
        if signed.error is not None:
            raise PartyError(signed.error)
        return signed.certificate, signed.signature

    def reads(self, job: str, ask: str) -> None:
        """Tell the agent that an ask begins to read."""
        self.send(BeginsToRead((job, ask)))

    def talk(self, request: bytes) -> bytes:
        """Have the agent pass a request of a session on; return the response."""
        self._requests += 1
        self.send(Request(self._requests, request))
        while True:
            go_on()
            try:
                response = self._responses.get(timeout=LOOK)
            except queue.Empty:
                continue
            if response.number != self._requests:  # of an ask that was stopped
                continue
            if response.error is not None:
                raise PartyError(response.error)
            return response.data

    def _read(self) -> None:
        number, brake = 0, Brake(0.0)
        while True:
            message = self._receive()
            if isinstance(message, AskWorker):
                if message.policy is not None:
                    self._seconds = message.policy.limits.seconds
                number, brake = message.number, Brake(self._seconds)
                self._asks.put((message, brake))
            elif isinstance(message, StopAsk) and message.number == number:
                brake.pull()
            elif isinstance(message, Signed):
                self._signed.put(message)
            elif isinstance(message, Response):
                self._responses.put(message)

    def _receive(self) -> Any:
        return to_worker(self._exactly(length(self._exactly(LENGTH))))

    def _exactly(self, size: int) -> bytes:
        data = self._connection.recv(size, socket.MSG_WAITALL) if size else b""
        if len(data) < size:
            os._exit(0)
        return data


class LinkPost(PostOffice):
    """Mailboxes at the aggregator; the agent passes the requests on."""

    def __init__(self, agent: _Agent) -> None:
        self._agent = agent

    def _sent(self, body: bytes) -> bytes:
        return self._agent.talk(body)
