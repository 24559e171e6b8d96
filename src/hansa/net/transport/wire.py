"""The envelope of the wire: what parties, operators and the aggregator say to each other, with limits on all of it.

Tensors travel as safetensors (`hansa.core.codec`), addressed by their SHA-256; what stands around them is MessagePack
with the schema below. Nothing here is decoded before its length was checked, and nothing in it names code to run.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from hansa.core.errors import DataError

CHUNK = 4 * 2**20  # bytes of one upload or download request
PROTOCOLS = (2,)  # the versions spoken here, newest last
ENVELOPE = 2**20  # bytes of an envelope, at most
BLOB = 2**36  # bytes of a blob, at most
UNWANTED = "Hansa-Unwanted"  # the header that tells a party, when it says that it is there, to stop its work on an ask

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
    """What a party, by its number, is asked to do. The blob `message` holds op and payload, `task` what is learned.

    `base` is the ask under which the party staged what it is to remember for good, `tip` the one on whose memory this
    ask builds, `pending` that of a ticket under way, which may be fused later; None where there is none. `model` is the
    hash of the global model with which the ask's round began; where the message shows it, the party can compare.
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
        """The ask within its job."""
        return ask_name(self.round, self.phase, self.number)


class Answer(Struct, frozen=True):
    """A party's answer: a blob and the weight it asks for, or why there is none. `staged` says that the party will
    remember something if the answer is fused. `signature` is over its statement (`hansa.net.audit.evidence`)."""

    message: Digest
    signature: Signature
    blob: Blob | None = None
    weight: Weight | None = None
    staged: bool = False
    why: Reason | None = None
    model: Digest | None = None
    shown: bool = False


class Receipt(Struct, frozen=True):
    """What the aggregator has on disk of a party's answer; the same answer always gets the same receipt.

    It names the hash of the party's statement, the statement's signature, the place of its entry in the log and the
    log's size and root right after it, and is signed with the log's key. What is late is in no entry.
    """

    job: Name
    round: Count
    phase: Name
    number: Count
    party: Name
    digest: Digest | None
    status: Annotated[str, Meta(max_length=64)]  # "accepted", "late" (the ask was closed), "rejected": it is not fused
    statement: Digest
    signature: Signature
    index: Count | None
    size: Count | None
    root: Digest | None
    why: Text | None  # it was rejected
    countersignature: str


class Enrolment(Struct, frozen=True):
    """A one-time token's secret, and a request for a certificate."""

    secret: Annotated[str, Meta(max_length=256)]
    request: Annotated[bytes, Meta(max_length=16384)]


class IssuedCertificate(Struct, frozen=True):
    """A certificate, and whose it is."""

    federation: Name
    party: Name
    certificate: Annotated[bytes, Meta(max_length=16384)]


class Order(Struct, frozen=True):
    """A job: an experiment's tables, the aggregator's own samples as a blob, and how many parties it begins with.

    `mark` is drawn by who submits it: the same order again, mark and all, is the same job.
    """

    name: Name
    experiment: dict[str, Any]
    central: Blob | None = None
    min_parties: Count | None = None
    mark: Annotated[str, Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        if not _plain(self.experiment):
            raise DataError("an order's experiment has something else in it than tables, lists, texts and numbers")


class Trouble(Struct, frozen=True):
    """What was wrong with a request, in one sentence."""

    error: Text


def _plain(tree: Any) -> bool:
    """Whether a tree is what a TOML file can hold, dates apart: the wire can carry more."""
    if isinstance(tree, dict):
        return all(isinstance(name, str) and _plain(value) for name, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return all(map(_plain, tree))
    return tree is None or isinstance(tree, (bool, int, float, str))


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def pack(value: Struct) -> bytes:
    """An envelope as bytes."""
    return _encoder.encode(value)


def unpack(data: bytes, kind: type[T]) -> T:
    """The envelope of that kind; a DataError where the bytes are none."""
    if len(data) > ENVELOPE:
        raise DataError(f"an envelope of {len(data)} bytes is over the limit of {ENVELOPE}")
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        value: T = _decoders[kind].decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise DataError(f"not a valid {kind.__name__}: {str(error)[:200]}") from None
    return value


def printable(text: str) -> str:
    """A text of somebody else's as it may stand in a log or a message: on one line, without what steers a terminal or
    turns letters around, and valid Unicode: no surrogate is printable."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def ask_name(round: int, phase: str, number: int) -> str:
    """An ask within its job."""
    return f"{round}/{phase}/{number}"
