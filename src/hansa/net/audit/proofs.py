"""Proofs from a log: that a party's updates were fused in a round, for who does not have the log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from hansa.core.errors import DataError, HansaError
from hansa.net.audit import merkle
from hansa.net.audit.entries import Closing, Entry, Fault, member_fault
from hansa.net.audit.evidence import Head, Statement, canonical, signed_by
from hansa.net.audit.verify import Audit, check_authority, read_lines, verify_pem
from hansa.net.transport.wire import printable

UPDATE = "update accepted"  # the entries that a proof is about


class IncludedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry, and the audit path from it to the root of the log."""

    entry: dict[str, Any]
    path: list[str]


class IncludedUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of an update, its audit path, and the certificate of its party."""

    entry: dict[str, Any]
    path: list[str]
    certificate: str


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That a party's updates were fused in a round, for who does not have the log: their entries and the round's, with
    their places in the log of which the round's head is signed, and whose keys signed all that."""

    format: Literal["hansa-1 proof"]
    authority: str
    log: str
    head: Head
    closing: IncludedEntry
    updates: list[IncludedUpdate]


def prove(path: Path, job: str, party: str, round: int, authority: bytes | None = None) -> Proof:
    """The proof that a party's updates were fused in a round of a job. The log is looked at as by `verify`."""
    audit, nodes = Audit(authority), merkle.InMemoryNodes()
    updates: dict[int, Entry] = {}
    closing: Entry | None = None
    head: Head | None = None
    for line in read_lines(path):
        found = audit.add_line(line)
        if isinstance(found, Head):
            head = found if (found.job, found.round) == (job, round) else head
            continue
        merkle.append(nodes, found.seq - 1, merkle.leaf_hash(line))
        if found.job == job and found.event == UPDATE and found.party == party:
            updates[found.seq - 1] = found
        elif found.job == job and found.event == "round closed" and found.round == round:
            closing = found
    audit.finish()
    if closing is None or head is None:
        raise DataError(f"the log has no closed round {round} of the job {job!r}")
    told = Closing.of(closing)
    named = [member.index for member in told.members if member.party == party]
    if not named:
        why = f"the round is empty: {told.empty}" if told.empty is not None else _absence(closing, party)
        raise DataError(f"no update of {party!r} was fused in round {round} of {job!r}; {printable(why)}")

    def included(entry: Entry) -> tuple[dict[str, Any], list[str]]:
        assert head is not None
        return json.loads(entry.line), [node.hex() for node in merkle.inclusion(nodes, entry.seq - 1, head.size)]

    signed = [(updates[index], audit.certificates[updates[index].detail["certificate"]].pem) for index in named]
    return Proof(
        "hansa-1 proof",
        audit.beginning["authority"],
        audit.beginning["log"],
        head,
        IncludedEntry(*included(closing)),
        [IncludedUpdate(*included(entry), pem) for entry, pem in signed],
    )


def _absence(closing: Entry, party: str) -> str:
    """Why a party is not in a round."""
    for name in ("rejected", "missing"):
        reasons = closing.detail.get(name)
        if isinstance(reasons, dict) and party in reasons:
            return f"{name}: {reasons[party]}"
    return "it was not asked, or its answer was not used"


def read_proof(path: Path) -> Proof:
    """The proof in a file; a DataError where it holds none."""
    try:
        data = path.read_bytes()
        return msgspec.json.decode(data, type=Proof)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no proof: {printable(str(error)[:200])}") from None


@dataclass(frozen=True)
class ProvedUpdates:
    """What a proof proves. Each update has its `entry`, hash, `weight`, `message`, and the hash `base` of the model
    that its round began with, and says whether the party was `shown` that model."""

    federation: str
    authority: str
    job: str
    round: int
    party: str
    before: str
    model: str
    updates: list[dict[str, Any]]

    def text(self) -> str:
        """In one sentence."""
        each = "; and ".join(
            f"the update {one['update']} with the weight {one['weight']}, "
            f"{'made from the model' if one['shown'] else 'for the round that began with'} {one['base']}"
            for one in self.updates
        )
        return (
            f"{self.party} sent {each}; it was fused in round {self.round} of the job {self.job} of the federation "
            f"{self.federation} into the model {self.model}; authority {self.authority}"
        )


def check(proof: Proof, given: bytes | None = None) -> ProvedUpdates:
    """What a proof proves, by itself; a Fault where it proves nothing."""
    head = proof.head
    try:
        authority = check_authority(proof.authority, given)
        log = verify_pem(proof.log, proof.authority, "log", head.federation)
    except HansaError as error:
        raise Fault(str(error)) from None
    if not signed_by(log.key, head.signature, head.signed_bytes()):
        raise Fault("the round's head is not signed by the federation's log key")
    closing = _included(proof.closing.entry, proof.closing.path, head)
    told = Closing.of(closing)
    said = (closing.event, closing.job, closing.round, told.model)
    if said != ("round closed", head.job, head.round, head.model) or closing.job is None or closing.round is None:
        raise closing.fault("the head is that of another round")
    updates: list[dict[str, Any]] = []
    party = ""
    for shown in proof.updates:
        entry = _included(shown.entry, shown.path, head)
        statement = _signed(entry, shown.certificate, proof.authority, head.federation)
        member = next((m for m in told.members if m.index == entry.seq - 1), None)
        if entry.event != UPDATE or entry.job != closing.job or member is None:
            raise entry.fault(f"round {closing.round} of {closing.job} does not name it")
        base = told.before if statement.round == closing.round - 1 else None
        fault = member_fault(member, statement, closing.round, base)
        if fault is not None:
            raise entry.fault(fault)
        party = statement.party
        updates.append({"entry": entry.seq, "update": statement.update, "weight": statement.weight,
                        "base": statement.model, "shown": statement.shown, "message": statement.message})  # fmt: skip
    if not updates or [one["entry"] - 1 for one in updates] != [m.index for m in told.members if m.party == party]:
        raise Fault("the proof does not show all updates of one party that the round names, each once")
    return ProvedUpdates(
        head.federation, authority, closing.job, closing.round, party, told.before, told.model, updates
    )


def _included(tree: dict[str, Any], path: list[str], head: Head) -> Entry:
    """An entry that a head's log has."""
    try:
        line = canonical(tree)
        entry, nodes = Entry.of(line, tree), [bytes.fromhex(node) for node in path]
    except (ValueError, TypeError, RecursionError) as error:
        raise Fault(f"an entry or its path is not well-formed: {error}") from None
    if not merkle.included(merkle.leaf_hash(line), entry.seq - 1, head.size, nodes, bytes.fromhex(head.root)):
        raise entry.fault("it is not in the log that the head is for")
    return entry


def _signed(entry: Entry, pem: str, authority: str, federation: str) -> Statement:
    """What a party has said by an entry, by its certificate."""
    said, signature, mark = entry.statement(federation)
    try:
        who = verify_pem(pem, authority, "party", federation)
    except HansaError as error:
        raise entry.fault(str(error)) from None
    if (who.name, who.fingerprint) != (said.party, mark) or not signed_by(who.key, signature, said.signed_bytes()):
        raise entry.fault(f"the signature is not that of {said.party} under what it says")
    return said
