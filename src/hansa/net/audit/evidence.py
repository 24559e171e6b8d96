"""Signed evidence: statements of parties, receipts and heads of the aggregator, and the form of log entries.

A party signs a statement about each answer. In a receipt the aggregator confirms that the statement is an entry of its
log, and gives the log's root after that entry. In a head it signs the root of the whole log up to an entry. Each
signature (Ed25519) covers a prefix for its kind and then each field after its length, so that no signature is valid for
another message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct, structs

from hansa.core.algorithm import Algorithm, State
from hansa.core.other_model import OtherModel
from hansa.net.transport import certificates
from hansa.net.transport.wire import Answer, Count, Digest, Name, Receipt, Signature, Text, Weight
from hansa.numerics.params import Params
from hansa.plumbing import codec

OUTCOMES = ("accepted", "rejected", "refused")  # of an answer; the aggregator rejects, the party refuses
KINDS = {"round": "update", "evaluate": "evaluation"}  # of answers, by the prefix of the phase's name
OTHER = "answer"  # to describe or prepare data, to select parties, to publish the model
ANSWERS = frozenset(f"{kind} {outcome}" for kind in (*KINDS.values(), OTHER) for outcome in OUTCOMES)
ENTRY = ("seq", "at", "job", "round", "party", "event", "detail")  # the fields of an entry
NOTHING = b"\xff" * 8  # stands for the length of a missing field


def answer_kind(phase: str) -> str:
    """The name that the log gives to answers of a phase."""
    return next((kind for name, kind in KINDS.items() if phase.startswith(name)), OTHER)


def length_prefixed(kind: str, fields: list[str | int | None]) -> bytes:
    """The bytes to sign: the kind, then each field after its length; different fields give different bytes."""
    out = [b"hansa-1 " + kind.encode()]
    for value in fields:
        data = None if value is None else str(value).encode(errors="surrogatepass")
        out.append(NOTHING if data is None else len(data).to_bytes(8, "big") + data)
    return b"".join(out)


def signed_by(key: Ed25519PublicKey, signature: str, data: bytes) -> bool:
    """Whether a signature (hex) of `data` is valid under a key."""
    try:
        key.verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Statement(Struct, frozen=True):
    """A party's statement about its answer to an ask.

    `model` is the hash of the global model at the start of the ask's round, or None before the first model. `shown`
    says that the message contained that model and that the party compared the hash. `message` is the hash of the ask's
    message, `update` the hash of the reply's bytes, `weight` its weight; or `why` is the reason for a refusal.
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
        """The `detail` of the log entry: everything but federation, party, job and round."""
        tree = structs.asdict(self)
        fields = {name: tree[name] for name in tree if name not in ("federation", "party", "job", "round")}
        return {**fields, "signature": signature, "certificate": certificate}


def make_statement(federation: str, party: str, key: tuple[str, int, str, int], answer: Answer) -> Statement:
    """The statement about an answer to the ask `key`: job, round, phase, number."""
    update = answer.blob.digest if answer.blob is not None else None
    return Statement(federation, party, *key, answer.model, answer.shown, answer.message, update, answer.weight,
                     answer.staged, answer.why)  # fmt: skip


def vault_bytes(federation: str, party: str, mark: str) -> bytes:
    """The bytes of a mark of a party's vault to sign."""
    return length_prefixed("vault", [federation, party, mark])


class Head(Struct, frozen=True):
    """The aggregator's signed statement: the log up to entry `size` has this root.

    After the closing of a job's round it also states the model from then on.
    """

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
    """The bytes of a receipt to sign; its other fields are in the statement, whose hash is covered."""
    return length_prefixed("receipt", [federation, receipt.statement, receipt.signature, receipt.status, receipt.index,
                              receipt.size, receipt.root, receipt.why])  # fmt: skip


class Notary:
    """Signs a federation's log with a key that the authority has certified for this use only."""

    def __init__(self, federation: str, key: Ed25519PrivateKey, certificate: bytes, authority: bytes) -> None:
        self.federation, self._key = federation, key
        self.certificate, self.authority = certificate, authority

    def beginning(self) -> dict[str, Any]:
        """The content of the log's first entry: who signs the log."""
        return {"federation": self.federation, "authority": self.authority.decode(), "log": self.certificate.decode()}

    def receipt(self, statement: Statement, signature: str, status: str, index: int | None = None,
                size: int | None = None, root: str | None = None, why: str | None = None) -> Receipt:  # fmt: skip
        """Create and sign a receipt."""
        receipt = Receipt(statement.job, statement.round, statement.phase, statement.number, statement.party,
                          statement.update, status, statement.digest(), signature, index, size, root, why,
                          "")  # fmt: skip
        return structs.replace(receipt, countersignature=self._sign(receipt_bytes(self.federation, receipt)))

    def head(self, job: str | None, round: int | None, model: str | None, size: int, root: str) -> Head:
        """Create and sign a head."""
        head = Head(self.federation, job, round, model, size, root, "")
        return structs.replace(head, signature=self._sign(head.signed_bytes()))

    def _sign(self, data: bytes) -> str:
        return self._key.sign(data).hex()


def receipt_fault(receipt: Receipt, statement: Statement, signature: str, log: certificates.Identity) -> str | None:
    """Why a receipt does not prove that the aggregator has a statement, or None."""
    received = (receipt.job, receipt.round, receipt.phase, receipt.number, receipt.party, receipt.digest)
    sent = statement.job, statement.round, statement.phase, statement.number, statement.party, statement.update
    if received != sent or receipt.statement != statement.digest() or receipt.signature != signature:
        return "it does not match the statement that was sent"
    placed = [value is not None for value in (receipt.index, receipt.size, receipt.root)]
    if any(placed) if receipt.status == "late" else not all(placed):
        return f"its status is {receipt.status!r}, which does not fit its index, size and root in the log"
    if receipt.index is not None and receipt.size is not None and not receipt.index < receipt.size:
        return f"its entry {receipt.index + 1} is beyond its log size of {receipt.size}"
    if not signed_by(log.key, receipt.countersignature, receipt_bytes(statement.federation, receipt)):
        return "it is not signed with the key of the federation's log"
    return None


def entry_line(seq: int, at: float, job: str | None, round: int | None, party: str | None, event: str,
               detail: str) -> bytes:  # fmt: skip
    """An entry as a leaf of the Merkle tree, which is also its line in an exported log.

    It is canonical JSON: ASCII, sorted names, no whitespace outside strings. `detail` is canonical JSON already.
    """
    rest = {"event": event, "job": job, "party": party, "round": round, "seq": seq}
    return b'{"at":%s,"detail":%s,%s' % (canonical(at), detail.encode(), canonical(rest)[1:])


def canonical(tree: Any) -> bytes:
    """Encode a tree as canonical JSON."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def head_line(head: str) -> bytes:
    """A head, stored as JSON, as a line of an exported log."""
    return canonical({"head": json.loads(head)}) + b"\n"


def state_digests(state: Mapping[str, Any]) -> tuple[str, str]:
    """The hash of the server's parameters, and the hash of its whole state.

    The state is the parameters and everything else that the algorithm keeps (a tree, moments, an optimiser's
    velocities). Neither hash depends on the order in which the slots were set.
    """
    params, slots = codec.digest(state["params"]), codec.digest(_sorted(state["slots"]))
    return params, hashlib.sha256(length_prefixed("state", [params, slots])).hexdigest()


def model_digest(algorithm: Algorithm, state: State) -> str | None:
    """The hash of an algorithm's model: its parameters, with the architecture if it is not the task's.

    None if the algorithm has no network.
    """
    model = algorithm.model(state)
    if isinstance(model, OtherModel):
        return codec.digest(model.payload())
    return codec.digest(model) if algorithm.trains else None


def _sorted(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _sorted(tree[name]) for name in sorted(tree)}
    return [_sorted(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def payload_model_digest(payload: Any) -> str | None:
    """The hash of the model in a payload, as in the closing of a round; None if it has no whole model."""
    model = payload.get("model") if isinstance(payload, Mapping) else None
    if not isinstance(model, Mapping) or set(model) != set(Params._fields):
        return None
    return codec.digest(Params(**model))
