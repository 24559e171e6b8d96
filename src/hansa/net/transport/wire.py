"""Wire format: the messages between parties, operators and the aggregator, with limits on every field.

Tensors travel as safetensors (`hansa.core.codec`) in blobs, addressed by their SHA-256. Messages are MessagePack with
the schema below. The length is checked before anything is decoded, and no message names code to run.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from hansa.core.errors import DataError

CHUNK = 4 * 2**20  # bytes per upload or download request
PROTOCOLS = (2,)  # supported versions, newest last
ENVELOPE = 2**20  # bytes: the largest message
BLOB = 2**36  # bytes: the largest blob
UNWANTED = "Hansa-Unwanted"  # response header to a heartbeat: stop the work on this ask

T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Text = Annotated[str, Meta(max_length=4096)]
Reason = Annotated[str, Meta(min_length=1, max_length=4096)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Weight = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Signature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]


class Blob(Struct, frozen=True):
    """A blob by its SHA-256 and its length in bytes."""

    digest: Digest
    size: Annotated[int, Meta(ge=0, le=BLOB)]


class Work(Struct, frozen=True):
    """An ask to a party. The blob `message` holds op and payload, the blob `task` the task.

    The party stages its memory under an ask. `base` is the ask of the committed memory, `tip` the ask whose memory this
    one builds on, `pending` the ask of an open ticket, which may be fused later; each may be None. `model` is the hash
    of the global model at the start of the round; `shown` says that the message contains that model.
    """

    job: Name
    name: Name
    party: Count
    round: Count
    phase: Name
    number: Count
    message: Blob
    task: Blob
    base: Text | None
    tip: Text | None
    pending: Text | None
    min_cohort: Count
    model: Digest | None = None
    shown: bool = False

    @property
    def ask(self) -> str:
        """The name of the ask within its job."""
        return ask_name(self.round, self.phase, self.number)


class Answer(Struct, frozen=True):
    """A party's reply: a blob and its weight, or the reason `why` there is none.

    `staged` says that the party staged memory, to be committed if the reply is fused. `signature` covers the party's
    statement (`hansa.net.audit.evidence`).
    """

    message: Digest
    signature: Signature
    blob: Blob | None = None
    weight: Weight | None = None
    staged: bool = False
    why: Reason | None = None
    model: Digest | None = None
    shown: bool = False


class Receipt(Struct, frozen=True):
    """The aggregator's acknowledgement that a party's answer is on disk; the same answer gets the same receipt.

    It contains the hash of the party's statement, the statement's signature, the index of its log entry, and the log's
    size and root after that entry. It is signed with the log's key. A late answer has no entry.
    """

    job: Name
    round: Count
    phase: Name
    number: Count
    party: Name
    digest: Digest | None
    status: Annotated[str, Meta(max_length=64)]  # "accepted"; "late": the ask was closed; "rejected": not fused
    statement: Digest
    signature: Signature
    index: Count | None
    size: Count | None
    root: Digest | None
    why: Text | None  # the reason for a rejection
    countersignature: str


class Enrolment(Struct, frozen=True):
    """An enrolment: the secret of a one-time token, and a certificate request."""

    secret: Annotated[str, Meta(max_length=256)]
    request: Annotated[bytes, Meta(max_length=16384)]


class IssuedCertificate(Struct, frozen=True):
    """The response to an enrolment or rotation: a certificate and its subject."""

    federation: Name
    party: Name
    certificate: Annotated[bytes, Meta(max_length=16384)]


class Order(Struct, frozen=True):
    """An order for a job: an experiment's tables, the aggregator's samples, the number of parties to start with.

    The submitter draws `mark` at random: repeating an order with the same mark does not create a second job.
    """

    name: Name
    experiment: dict[str, Any]
    central: Blob | None = None
    min_parties: Count | None = None
    mark: Annotated[str, Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        if not _plain(self.experiment):
            raise DataError("the experiment of an order may contain only tables, lists, texts and numbers")


class Trouble(Struct, frozen=True):
    """An error response: one sentence."""

    error: Text


def _plain(tree: Any) -> bool:
    """Whether a tree contains only what TOML can express, without dates: MessagePack can carry more."""
    if isinstance(tree, dict):
        return all(isinstance(name, str) and _plain(value) for name, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return all(map(_plain, tree))
    return tree is None or isinstance(tree, (bool, int, float, str))


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def pack(value: Struct) -> bytes:
    """Encode a message."""
    return _encoder.encode(value)


def unpack(data: bytes, kind: type[T]) -> T:
    """Decode a message of type `kind`; a DataError if the bytes are invalid."""
    if len(data) > ENVELOPE:
        raise DataError(f"a message of {len(data)} bytes exceeds the limit of {ENVELOPE}")
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        value: T = _decoders[kind].decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise DataError(f"not a valid {kind.__name__}: {str(error)[:200]}") from None
    return value


def printable(text: str) -> str:
    """Make untrusted text safe for a log or message.

    The result is one line of valid Unicode, without control characters and without changes of writing direction.
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def ask_name(round: int, phase: str, number: int) -> str:
    """The name of an ask within its job."""
    return f"{round}/{phase}/{number}"
