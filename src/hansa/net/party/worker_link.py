"""Messages between a party's agent and its worker process, with limits on every field.

They are MessagePack with the schema below, each after its length in four bytes, over a pair of connected sockets.
Tensors stay in files. Neither side trusts the other's bytes to be well-formed, and nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from hansa.net.party.asks import AskOutcome
from hansa.net.party.policy import Policy
from hansa.net.party.post import LARGEST
from hansa.net.party.trust import Trust
from hansa.net.transport.wire import Text, Work
from hansa.plumbing.errors import DataError

FRAME = LARGEST + 2**20  # bytes: the largest message, with the largest response of a session
LENGTH = 4  # bytes of the length before a message
SIGNED = (b"hansa secure ", b"hansa route key")  # how the data begin that a worker may have signed

ReadingAsk = tuple[
    Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=64)]
]  # a job, the hash of an ask


def worker_policy(policy: Policy) -> Policy:
    """The policy as a worker gets it: without the verifier of the aggregator, to which a worker has no connection."""
    return dataclasses.replace(policy, trust=Trust())


class Begin(Struct, tag=True):
    """To a new worker: the policy, the party's name, and the ask in which the last worker ended if it had read."""

    policy: Policy
    party: str
    declined: ReadingAsk | None


class AskWorker(Struct, tag=True):
    """To the worker: an ask, its files, and the policy if it has changed."""

    number: int
    work: Work
    message: str
    task: str
    reply: str
    policy: Policy | None


class StopAsk(Struct, tag=True):
    """To the worker: stop the work on an ask at its next step."""

    number: int


class Signed(Struct, tag=True):
    """To the worker: the party's certificate and signature, or an error."""

    certificate: bytes = b""
    signature: bytes = b""
    error: str | None = None


class Ready(Struct, tag=True):
    """From a new worker: it can begin, or why not (`error`); and what this system does not refuse to it."""

    error: Text | None = None
    unconfined: Text | None = None


class Done(Struct, tag=True):
    """From the worker: the outcome of an ask; none if it was stopped, or if the disk failed (`fault`)."""

    outcome: AskOutcome | None = None
    fault: tuple[int, Text] | None = None


class SignData(Struct, tag=True):
    """From the worker: data to sign, for a message to other parties."""

    data: bytes


class BeginsToRead(Struct, tag=True):
    """From the worker: an ask begins to read samples. If the worker ends in it, that counts as a decline."""

    reading: ReadingAsk


class Request(Struct, tag=True):
    """From the worker: a request of a session, for the mailboxes at the aggregator."""

    number: int
    data: bytes


class Response(Struct, tag=True):
    """To the worker: the response to a request of a session, or an error."""

    number: int
    data: bytes = b""
    error: str | None = None


ToWorker = Begin | AskWorker | StopAsk | Signed | Response
FromWorker = Ready | Done | SignData | BeginsToRead | Request
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def framed(message: ToWorker | FromWorker) -> bytes:
    """A message with its length."""
    data = msgspec.msgpack.encode(message)
    if len(data) > FRAME:
        raise DataError(f"a message between agent and worker has {len(data)} bytes; at most {FRAME} are sent")
    return len(data).to_bytes(LENGTH, "little") + data


def length(header: bytes) -> int:
    """The length in a message's header; a DataError if it is too large."""
    size = int.from_bytes(header, "little")
    if size > FRAME:
        raise DataError(f"a message between agent and worker has {size} bytes; at most {FRAME} are read")
    return size


def to_worker(data: bytes) -> ToWorker:
    """Decode a message of the agent."""
    message: ToWorker = _to_worker.decode(data)
    return message


def from_worker(data: bytes) -> FromWorker:
    """Decode a message of the worker; a DataError if it is malformed."""
    try:
        message: FromWorker = _from_worker.decode(data)
    except msgspec.DecodeError as error:
        raise DataError(f"malformed message of the worker: {error}") from None
    return message
