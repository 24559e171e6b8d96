"""Proofs that a party's updates were fused in a round; checking one does not need the log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from hansa.net.audit import merkle
from hansa.net.audit.entries import Closing, Entry, Fault, member_fault
from hansa.net.audit.evidence import Head, Statement, canonical, signed_by
from hansa.net.audit.verify import Audit, check_authority, read_lines, verify_pem
from hansa.net.transport.wire import printable
from hansa.plumbing.errors import DataError, HansaError

UPDATE = "update accepted"  # the event of the entries in a proof


class IncludedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry, and its audit path to the root of the log."""

    entry: dict[str, Any]
    path: list[str]


class IncludedUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of an update, its audit path, and its party's certificate."""

    entry: dict[str, Any]
    path: list[str]
    certificate: str


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proof that a party's updates were fused in a round.

    It contains the entries of the updates and of the round's closing, their audit paths to the root in the round's
    signed head, and the certificates of all signers.
    """

    format: Literal["hansa-1 proof"]
    authority: str
    log: str
    head: Head
    closing: IncludedEntry
    updates: list[IncludedUpdate]


def prove(path: Path, job: str, party: str, round: int, authority: bytes | None = None) -> Proof:
    """Create the proof that a party's updates were fused in a round of a job; verifies the whole log."""
    audit, nodes = Audit(authority), merkle.InMemoryNodes()
    updates: dict[int, Entry] = {}
    closing: Entry | None = None
    head: Head | None = None
    for line in read_lines(path):
        item = audit.add_line(line)
        if isinstance(item, Head):
            head = item if (item.job, item.round) == (job, round) else head
            continue
        merkle.append(nodes, item.seq - 1, merkle.leaf_hash(line))
        if item.job == job and item.event == UPDATE and item.party == party:
            updates[item.seq - 1] = item
        elif item.job == job and item.event == "round closed" and item.round == round:
            closing = item
    audit.finish()
    if closing is None or head is None:
        raise DataError(f"the log has no closed round {round} of the job {job!r}")
    content = Closing.of(closing)
    indices = [member.index for member in content.members if member.party == party]
    if not indices:
        why = f"the round is empty: {content.empty}" if content.empty is not None else _absence(closing, party)
        raise DataError(f"no update of {party!r} was fused in round {round} of {job!r}; {printable(why)}")

    def included(entry: Entry) -> tuple[dict[str, Any], list[str]]:
        assert head is not None
        return json.loads(entry.line), [node.hex() for node in merkle.inclusion(nodes, entry.seq - 1, head.size)]

    signed = [(updates[index], audit.certificates[updates[index].detail["certificate"]].pem) for index in indices]
    return Proof(
        "hansa-1 proof",
        audit.beginning["authority"],
        audit.beginning["log"],
        head,
        IncludedEntry(*included(closing)),
        [IncludedUpdate(*included(entry), pem) for entry, pem in signed],
    )


def _absence(closing: Entry, party: str) -> str:
    """Why a round fused no update of a party."""
    for name in ("rejected", "missing"):
        reasons = closing.detail.get(name)
        if isinstance(reasons, dict) and party in reasons:
            return f"{name}: {reasons[party]}"
    return "the party was not asked, or its answer was not used"


def read_proof(path: Path) -> Proof:
    """Read a proof from a file; a DataError if it is invalid."""
    try:
        data = path.read_bytes()
        return msgspec.json.decode(data, type=Proof)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a valid proof: {printable(str(error)[:200])}") from None


@dataclass(frozen=True)
class ProvedUpdates:
    """The facts that a valid proof establishes.

    Each update has its `entry`, hash, `weight`, `message`, the hash `base` of the model at the start of its round, and
    whether the party was `shown` that model.
    """

    federation: str
    authority: str
    job: str
    round: int
    party: str
    before: str
    model: str
    updates: list[dict[str, Any]]

    def text(self) -> str:
        """One sentence."""
        updates = "; and ".join(
            f"the update {update['update']} with the weight {update['weight']}, "
            f"{'made from the model' if update['shown'] else 'for the round that began with'} {update['base']}"
            for update in self.updates
        )
        return (
            f"{self.party} sent {updates}; it was fused in round {self.round} of the job {self.job} of the federation "
            f"{self.federation} into the model {self.model}; authority {self.authority}"
        )


def check(proof: Proof, authority: bytes | None = None) -> ProvedUpdates:
    """Check a proof without the log; a Fault if it is invalid. `authority` is the expected CA certificate."""
    head = proof.head
    try:
        fingerprint = check_authority(proof.authority, authority)
        log = verify_pem(proof.log, proof.authority, "log", head.federation)
    except HansaError as error:
        raise Fault(str(error)) from None
    if not signed_by(log.key, head.signature, head.signed_bytes()):
        raise Fault("the round's head is not signed with the federation's log key")
    closing = _included(proof.closing.entry, proof.closing.path, head)
    content = Closing.of(closing)
    closed = (closing.event, closing.job, closing.round, content.model)
    if closed != ("round closed", head.job, head.round, head.model) or closing.job is None or closing.round is None:
        raise closing.fault("the head belongs to a different round")
    updates: list[dict[str, Any]] = []
    party = ""
    for update in proof.updates:
        entry = _included(update.entry, update.path, head)
        statement = _signed(entry, update.certificate, proof.authority, head.federation)
        member = next((m for m in content.members if m.index == entry.seq - 1), None)
        if entry.event != UPDATE or entry.job != closing.job or member is None:
            raise entry.fault(f"round {closing.round} of {closing.job} does not name this entry")
        base = content.before if statement.round == closing.round - 1 else None
        fault = member_fault(member, statement, closing.round, base)
        if fault is not None:
            raise entry.fault(fault)
        party = statement.party
        updates.append({"entry": entry.seq, "update": statement.update, "weight": statement.weight,
                        "base": statement.model, "shown": statement.shown, "message": statement.message})  # fmt: skip
    named = [m.index for m in content.members if m.party == party]
    if not updates or [update["entry"] - 1 for update in updates] != named:
        raise Fault("the proof must contain every update of one party that the round names, each once")
    return ProvedUpdates(
        head.federation, fingerprint, closing.job, closing.round, party, content.before, content.model, updates
    )


def _included(tree: dict[str, Any], path: list[str], head: Head) -> Entry:
    """Parse an entry and check its audit path to the head's root."""
    try:
        line = canonical(tree)
        entry, nodes = Entry.of(line, tree), [bytes.fromhex(node) for node in path]
    except (ValueError, TypeError, RecursionError) as error:
        raise Fault(f"an entry or its audit path is malformed: {error}") from None
    if not merkle.included(merkle.leaf_hash(line), entry.seq - 1, head.size, nodes, bytes.fromhex(head.root)):
        raise entry.fault("it is not in the head's log")
    return entry


def _signed(entry: Entry, pem: str, authority: str, federation: str) -> Statement:
    """The statement in an entry, after a check of its signature and certificate."""
    statement, signature, mark = entry.statement(federation)
    try:
        identity = verify_pem(pem, authority, "party", federation)
    except HansaError as error:
        raise entry.fault(str(error)) from None
    if (identity.name, identity.fingerprint) != (statement.party, mark) or not signed_by(
        identity.key, signature, statement.signed_bytes()
    ):
        raise entry.fault(f"the signature of {statement.party} does not match the statement")
    return statement
