"""What parties and aggregator sign so that neither can deny it later: statements, receipts and heads, and the form of
the log's entries.

A statement is what a party says with an answer. A receipt is the aggregator's word that the statement is an entry of
its log, with the log's root right after it. A head is its word on the whole log up to an entry. Each signature
(Ed25519) covers a beginning of its own and then each field after its length, so that none can be taken for another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct, structs

from hansa.core import codec
from hansa.core.params import Params
from hansa.net.transport import certificates
from hansa.net.transport.wire import Answer, Count, Digest, Name, Receipt, Signature, Text, Weight

OUTCOMES = ("accepted", "rejected", "refused")  # of an answer: the aggregator rejects, the party refuses
KINDS = {"round": "update", "evaluate": "evaluation"}  # of answers, by how the name of their phase begins
OTHER = "answer"  # to what was asked to describe or prepare the data, to select parties, to publish the model
ANSWERS = frozenset(f"{kind} {outcome}" for kind in (*KINDS.values(), OTHER) for outcome in OUTCOMES)
ENTRY = ("seq", "at", "job", "round", "party", "event", "detail")  # the columns of an entry
NOTHING = b"\xff" * 8  # the length of a field that is not there


def answer_kind(phase: str) -> str:
    """What the log calls an answer that was given in a phase."""
    return next((kind for name, kind in KINDS.items() if phase.startswith(name)), OTHER)


def length_prefixed(what: str, fields: list[str | int | None]) -> bytes:
    """What is signed: what it is, then each field after its length; no two lists of fields give the same bytes."""
    out = [b"hansa-1 " + what.encode()]
    for value in fields:
        data = None if value is None else str(value).encode(errors="surrogatepass")
        out.append(NOTHING if data is None else len(data).to_bytes(8, "big") + data)
    return b"".join(out)


def signed_by(key: Ed25519PublicKey, signature: str, data: bytes) -> bool:
    """Whether the holder of a key signed this."""
    try:
        key.verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Statement(Struct, frozen=True):
    """What a party says of its answer to an ask.

    `model` is the hash of the global model that the ask's round began with, None where there was none yet; `shown`
    says that the message held that model, and that the party compared the hash. `message` is the hash of what it was
    asked, `update` that of its reply's bytes with the `weight` that it asks for, or there is a reason `why` it did not
    answer.
    """

    federation: Name
    party: Name
    job: Name
    round: Count
    phase: Name
    number: Count
    model: Digest | None
    shown: bool
    message: Digest
    update: Digest | None
    weight: Weight | None
    staged: bool
    why: Text | None

    def signed_bytes(self) -> bytes:
        return length_prefixed("statement", [int(v) if isinstance(v, bool) else v for v in structs.astuple(self)])

    def digest(self) -> str:
        return hashlib.sha256(self.signed_bytes()).hexdigest()

    def detail(self, signature: str, certificate: str) -> dict[str, Any]:
        """What the log's entry says beside job, round and party."""
        tree = structs.asdict(self)
        kept = {name: tree[name] for name in tree if name not in ("federation", "party", "job", "round")}
        return {**kept, "signature": signature, "certificate": certificate}


def make_statement(federation: str, party: str, key: tuple[str, int, str, int], answer: Answer) -> Statement:
    """The statement that goes with an answer to an ask (job, round, phase, number)."""
    update = answer.blob.digest if answer.blob is not None else None
    return Statement(federation, party, *key, answer.model, answer.shown, answer.message, update, answer.weight,
                     answer.staged, answer.why)  # fmt: skip


class Head(Struct, frozen=True):
    """The aggregator's word that its log, up to entry `size`, has that root; and where it closes a round of a job, that
    this is the model from then on."""

    federation: Name
    job: Name | None
    round: Count | None
    model: Digest | None
    size: Count
    root: Digest
    signature: Signature

    def signed_bytes(self) -> bytes:
        return length_prefixed("head", [self.federation, self.job, self.round, self.model, self.size, self.root])


def receipt_bytes(federation: str, receipt: Receipt) -> bytes:
    """What the aggregator signs of a receipt; all else in it is in the statement, whose hash this covers."""
    return length_prefixed("receipt", [federation, receipt.statement, receipt.signature, receipt.status, receipt.index,
                              receipt.size, receipt.root, receipt.why])  # fmt: skip


class Notary:
    """The key that signs a federation's log, which the authority has certified for that alone."""

    def __init__(self, federation: str, key: Ed25519PrivateKey, certificate: bytes, authority: bytes) -> None:
        self.federation, self._key = federation, key
        self.certificate, self.authority = certificate, authority

    def beginning(self) -> dict[str, Any]:
        """What the log's first entry says."""
        return {"federation": self.federation, "authority": self.authority.decode(), "log": self.certificate.decode()}

    def receipt(self, statement: Statement, signature: str, status: str, index: int | None = None,
                size: int | None = None, root: str | None = None, why: str | None = None) -> Receipt:  # fmt: skip
        """A receipt, signed."""
        said = statement
        receipt = Receipt(said.job, said.round, said.phase, said.number, said.party, said.update, status,
                          said.digest(), signature, index, size, root, why, "")  # fmt: skip
        return structs.replace(receipt, countersignature=self._sign(receipt_bytes(self.federation, receipt)))

    def head(self, job: str | None, round: int | None, model: str | None, size: int, root: str) -> Head:
        """A head, signed."""
        head = Head(self.federation, job, round, model, size, root, "")
        return structs.replace(head, signature=self._sign(head.signed_bytes()))

    def _sign(self, data: bytes) -> str:
        return self._key.sign(data).hex()


def receipt_fault(receipt: Receipt, statement: Statement, signature: str, log: certificates.Identity) -> str | None:
    """Why a receipt does not show that the aggregator has that statement, or None."""
    said = (receipt.job, receipt.round, receipt.phase, receipt.number, receipt.party, receipt.digest)
    meant = statement.job, statement.round, statement.phase, statement.number, statement.party, statement.update
    if said != meant or receipt.statement != statement.digest() or receipt.signature != signature:
        return "it is for something else than was sent"
    placed = [value is not None for value in (receipt.index, receipt.size, receipt.root)]
    if any(placed) if receipt.status == "late" else not all(placed):
        return f"it does not say where the log has it, though it says {receipt.status!r}"
    if receipt.index is not None and receipt.size is not None and not receipt.index < receipt.size:
        return f"it says that entry {receipt.index + 1} is among {receipt.size}"
    if not signed_by(log.key, receipt.countersignature, receipt_bytes(statement.federation, receipt)):
        return "it is not signed by the key of the federation's log"
    return None


def entry_line(seq: int, at: float, job: str | None, round: int | None, party: str | None, event: str,
               detail: str) -> bytes:  # fmt: skip
    """An entry as a leaf of the tree, which is its line in an exported log: JSON, in ASCII, the names in the order of
    the alphabet and no blanks outside texts. `detail` is such JSON already."""
    rest = {"event": event, "job": job, "party": party, "round": round, "seq": seq}
    return b'{"at":%s,"detail":%s,%s' % (canonical(at), detail.encode(), canonical(rest)[1:])


def canonical(tree: Any) -> bytes:
    """The one way to write a tree as JSON."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def head_line(head: str) -> bytes:
    """A head, kept as JSON, as a line of an exported log."""
    return canonical({"head": json.loads(head)}) + b"\n"


def state_digests(state: Mapping[str, Any]) -> tuple[str, str]:
    """The hash of a server's parameters, and that of its whole state: they and whatever else the algorithm keeps (a
    tree, moments, an optimiser's velocities). Neither depends on the order in which the slots were set."""
    params, slots = codec.digest(state["params"]), codec.digest(_sorted(state["slots"]))
    return params, hashlib.sha256(length_prefixed("state", [params, slots])).hexdigest()


def _sorted(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _sorted(tree[name]) for name in sorted(tree)}
    return [_sorted(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def payload_model_digest(payload: Any) -> str | None:
    """The hash of the whole model that a payload holds, as rounds are closed with it; None where it holds none."""
    model = payload.get("model") if isinstance(payload, Mapping) else None
    if not isinstance(model, Mapping) or set(model) != set(Params._fields):
        return None
    return codec.digest(Params(**model))
