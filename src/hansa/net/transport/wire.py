"""Wire format: the messages between parties, operators and the aggregator, with limits on every field.

Tensors travel as safetensors (`plumbing.codec`) in blobs, addressed by their SHA-256. Messages are MessagePack with
the schema below. The length is checked before anything is decoded, and no message names code to run.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from hansa.net.transport.names import NAME
from hansa.plumbing.errors import DataError

CHUNK = 4 * 2**20  # bytes per upload or download request
PROTOCOLS = (2,)  # supported versions, newest last
CERTIFICATE = 2**14  # bytes: the largest certificate
ENVELOPE = 2**20  # bytes: the largest message
BLOB = 2**36  # bytes: the largest blob
WAITING = 50  # the most jobs that a party may name as not approved yet
UNWANTED = "Hansa-Unwanted"  # response header to a heartbeat: stop the work on this ask

T = TypeVar("T")
Name = Annotated[str, Meta(pattern=rf"^{NAME}\Z")]
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
    of the global model at the start of the round; `shown` says that the message contains that model. `manifest` says
    what the asks of the job may be (`hansa.net.transport.manifest`). `keeps` says that the aggregator stores the reply
    after its round.
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
    manifest: Blob | None = None
    keeps: bool = False

    @property
    def ask(self) -> str:
        """The name of the ask within its job."""
        return ask_name(self.round, self.phase, self.number)


class VaultMark(Struct, frozen=True):
    """A keyed hash of a party's vault, signed by the party. The aggregator hands back the newest one it has, with the
    certificate (PEM) of the key that signed it: a party restored from an older backup does not know that key."""

    mark: Digest
    signature: Signature
    certificate: Annotated[bytes, Meta(max_length=CERTIFICATE)] = b""


class Answer(Struct, frozen=True):
    """A party's reply: a blob and its weight, or the reason `why` there is none.

    `staged` says that the party staged memory, to be committed if the reply is fused. `signature` covers the party's
    statement (`hansa.net.audit.evidence`). `vault` is the mark of its vault.
    """

    message: Digest
    signature: Signature
    blob: Blob | None = None
    weight: Weight | None = None
    staged: bool = False
    why: Reason | None = None
    model: Digest | None = None
    shown: bool = False
    vault: VaultMark | None = None


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


class Letter(Struct, frozen=True):
    """A sealed message of a session, to or from a party. A pair's messages are numbered from 0."""

    party: Count
    number: Count
    data: Annotated[bytes, Meta(max_length=CHUNK)]


class SessionCall(Struct, frozen=True):
    """A party's request to the mailboxes of a session: enter it, exchange messages, or leave it.

    `nonce` is drawn when the party enters. `seen` is the number of messages that it has received from each party. The
    response waits for the next message of `sender`, if it is given.
    """

    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    step: Literal["enter", "talk", "leave"]
    letters: Annotated[list[Letter], Meta(max_length=4096)] = []
    seen: Annotated[dict[Count, Count], Meta(max_length=65536)] = {}
    sender: Count | None = None


class Exchanged(Struct, frozen=True):
    """The response: `restarted`, begin the session again; `waiting`, repeat the request; else what was asked for."""

    restarted: bool = False
    waiting: bool = False
    nonces: dict[Count, Annotated[bytes, Meta(min_length=16, max_length=16)]] = {}
    letters: list[Letter] = []


class LeafWork(Struct, frozen=True):
    """What an ask has for one party behind a relay, as in `Work`. Without `message` it is that of the relay's work."""

    name: Name
    party: Count
    base: Text | None = None
    tip: Text | None = None
    pending: Text | None = None
    message: Blob | None = None


class RelayWork(Struct, frozen=True):
    """An ask for parties behind a relay.

    `work` is the ask of the first of them. With `sums` the relay checks each reply against `rules` and sends the sum,
    in which `uniform` gives every party the weight 1; without, it passes the replies on. It waits at most `seconds`. A
    reply of a party has at most `limit` bytes. The relay waits for the approval of the owners of `patient` parties.
    """

    work: Work
    leaves: Annotated[list[LeafWork], Meta(min_length=1, max_length=2**20)]
    sums: bool
    uniform: bool
    limit: Annotated[int, Meta(ge=0, le=BLOB)]
    rules: dict[str, Any] = {}
    seconds: Annotated[float, Meta(ge=0)] | None = None
    patient: Count = 0


class RelayPoll(Struct, frozen=True):
    """A relay's request for work: its parties that are connected, the jobs that their owners have not approved yet, and
    the asks that the relay works on (as `JOB/ROUND/PHASE/NUMBER`)."""

    instance: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
    wait: Annotated[float, Meta(ge=0, le=3600)]
    connected: Annotated[list[Name], Meta(max_length=2**20)] = []
    unapproved: dict[Name, Annotated[list[Name], Meta(max_length=WAITING)]] = {}
    busy: Annotated[list[Text], Meta(max_length=2**20)] = []


class RelayOrders(Struct, frozen=True):
    """The response to a relay: an ask, if there is a new one, and those of its asks that are not wanted any more.

    `strangers` are parties that it reported and that are not behind it.
    """

    work: RelayWork | None = None
    unwanted: list[Text] = []
    strangers: list[Name] = []


class LeafOutcome(Struct, frozen=True):
    """What became of an ask at one party behind a relay. `statement` is the hash of the party's signed statement."""

    party: Count
    status: Literal["accepted", "rejected", "refused", "missing"]
    statement: Digest | None = None
    staged: bool = False
    why: Reason | None = None


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


def unpack(data: bytes | bytearray, kind: type[T], limit: int = ENVELOPE) -> T:
    """Decode a message of type `kind` and at most `limit` bytes; a DataError if the bytes are invalid."""
    if len(data) > limit:
        raise DataError(f"a message of {len(data)} bytes exceeds the limit of {limit}")
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
