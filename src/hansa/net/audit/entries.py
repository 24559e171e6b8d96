"""Entries of the audit log: a party's signed answer, the closing of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hansa.net.audit.evidence import ANSWERS, Statement, answer_kind, canonical
from hansa.net.transport.wire import Digest, printable
from hansa.plumbing.errors import HansaError

FIELDS = frozenset({"at", "detail", "event", "job", "party", "round", "seq"})
LATEST = 1e12  # seconds since 1970: later times are invalid
LONGEST = 2000  # characters of a fault, which may quote untrusted text


class Fault(HansaError):
    """What is wrong with a log, receipt or proof: one sentence, safe to print."""

    def __init__(self, why: str) -> None:
        super().__init__(printable(why[:LONGEST]))


@dataclass(frozen=True)
class Entry:
    """A line of the log."""

    seq: int
    at: float
    job: str | None
    round: int | None
    party: str | None
    event: str
    detail: Mapping[str, Any]
    line: bytes

    @classmethod
    def of(cls, line: bytes, tree: Any) -> Entry:
        """Parse an entry; a ValueError if it is malformed, or not in the canonical form that is hashed."""
        if not isinstance(tree, dict) or set(tree) != FIELDS or canonical(tree) != line:
            raise ValueError("it is not an entry in canonical JSON")
        entry = cls(line=line, **tree)
        types = type(entry.seq) is int and type(entry.at) in (int, float) and type(entry.detail) is dict
        texts = all(value is None or type(value) is str for value in (entry.job, entry.party))
        if not types or not texts or type(entry.event) is not str or type(entry.round) not in (int, type(None)):
            raise ValueError("a field has the wrong type")
        if not 0 <= entry.at < LATEST:  # also refuses NaN
            raise ValueError("its time is invalid")
        return entry

    def fault(self, why: str) -> Fault:
        return Fault(f"entry {self.seq} ({self.event}): {why}")

    def statement(self, federation: str) -> tuple[Statement, str, str]:
        """The statement in an answer's entry, its signature, and the fingerprint of the signer's certificate.

        Logs of version 0.1.0 call every answer an update.
        """
        if self.event not in ANSWERS:
            raise self.fault("it is not an answer of a party")
        kind, outcome = self.event.split(" ")
        rejected = outcome == "rejected" and isinstance(self.detail.get("rejected"), str)
        fields = {name: value for name, value in self.detail.items() if not (rejected and name == "rejected")}
        tree = {**fields, "federation": federation, "party": self.party, "job": self.job, "round": self.round}
        signature, certificate = (tree.pop(name, None) for name in ("signature", "certificate"))
        if not isinstance(signature, str) or not isinstance(certificate, str):
            raise self.fault("it has no signature, or no certificate")
        try:
            if set(tree) != set(Statement.__struct_fields__):
                raise ValueError("the fields are not those of a statement")
            statement = msgspec.convert(tree, Statement)
        except (ValueError, msgspec.ValidationError) as error:
            raise self.fault(f"it is not a valid statement: {error}") from None
        if (statement.update is None) == (statement.why is None) or (statement.update is None) != (
            statement.weight is None
        ):
            raise self.fault("it must have either an update or a reason why there is none")
        if (outcome == "refused") != (statement.why is not None) or kind not in (
            "update",
            answer_kind(statement.phase),
        ):
            raise self.fault("its event name does not match its content")
        return statement, signature, certificate


class Member(msgspec.Struct, frozen=True):
    """An update that a round fused, as named in the round's entry."""

    party: str
    index: int
    update: str


class Closing(msgspec.Struct, frozen=True):
    """The content of a closed round's entry. Logs of version 0.1.0 have no `state`."""

    members: list[Member]
    before: Digest
    model: Digest
    empty: str | None
    state: Digest | None = None

    @classmethod
    def of(cls, entry: Entry) -> Closing:
        """Parse the closing of a round; a Fault if it is malformed or contradicts itself."""
        try:
            closing = msgspec.convert(entry.detail, cls)
        except msgspec.ValidationError as error:
            raise entry.fault(f"the closing of the round is malformed: {error}") from None
        if closing.empty is not None and (closing.members or closing.model != closing.before):
            raise entry.fault("the round is empty, but it fused updates or changed the model")
        if not closing.members and closing.model != closing.before:
            raise entry.fault("the round fused nothing, but it changed the model")
        named = Counter(member.index for member in closing.members)
        if len(named) < len(closing.members):
            raise entry.fault(f"it names entry {named.most_common(1)[0][0] + 1} more than once")
        return closing


def member_fault(member: Member, statement: Statement, round: int, base: str | None) -> str | None:
    """Why a round cannot have fused this statement's update, or None.

    `base` is the model at the start of the statement's round; None if it is not known here.
    """
    if (member.party, member.update) != (statement.party, statement.update) or not statement.phase.startswith("round"):
        return f"entry {member.index + 1} is not the update that the round names"
    if statement.round >= round or statement.model is None or (base is not None and base != statement.model):
        return f"the update in entry {member.index + 1} was made for a different model or a later round"
    return None
