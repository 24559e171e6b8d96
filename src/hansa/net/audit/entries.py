"""The log's entries as an auditor reads them: an answer that its party signed, the closing of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hansa.core.errors import HansaError
from hansa.net.audit.evidence import ANSWERS, Statement, answer_kind, canonical
from hansa.net.transport.wire import Digest, printable

FIELDS = frozenset({"at", "detail", "event", "job", "party", "round", "seq"})
LATEST = 1e12  # seconds: no clock shows that
LONGEST = 2000  # letters of a fault, which may quote what others wrote


class Fault(HansaError):
    """What is wrong with a log, a receipt or a proof, in one sentence, which can be printed whatever it quotes."""

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
        """The entry in a line; a ValueError where it is none, or written in another way than it is hashed."""
        if not isinstance(tree, dict) or set(tree) != FIELDS or canonical(tree) != line:
            raise ValueError("it is not written as an entry is")
        entry = cls(line=line, **tree)
        right = type(entry.seq) is int and type(entry.at) in (int, float) and type(entry.detail) is dict
        texts = all(value is None or type(value) is str for value in (entry.job, entry.party))
        if not right or not texts or type(entry.event) is not str or type(entry.round) not in (int, type(None)):
            raise ValueError("it does not have the types that an entry has")
        if not 0 <= entry.at < LATEST:  # which no NaN is
            raise ValueError("its time is none")
        return entry

    def fault(self, why: str) -> Fault:
        return Fault(f"entry {self.seq} ({self.event}): {why}")

    def statement(self, federation: str) -> tuple[Statement, str, str]:
        """What a party said by an answer, its signature, and the certificate whose key is said to have made it. In logs
        of version 0.1.0 every answer is called an update."""
        if self.event not in ANSWERS:
            raise self.fault("it is not a party's answer")
        kind, outcome = self.event.split(" ")
        rejected = outcome == "rejected" and isinstance(self.detail.get("rejected"), str)
        told = {name: value for name, value in self.detail.items() if not (rejected and name == "rejected")}
        tree = {**told, "federation": federation, "party": self.party, "job": self.job, "round": self.round}
        signature, certificate = (tree.pop(name, None) for name in ("signature", "certificate"))
        if not isinstance(signature, str) or not isinstance(certificate, str):
            raise self.fault("it has no signature, or no certificate")
        try:
            if set(tree) != set(Statement.__struct_fields__):
                raise ValueError("other fields than a statement has")
            said = msgspec.convert(tree, Statement)
        except (ValueError, msgspec.ValidationError) as error:
            raise self.fault(f"it is not a statement: {error}") from None
        if (said.update is None) == (said.why is None) or (said.update is None) != (said.weight is None):
            raise self.fault("it has both an update and a reason why there is none, or neither")
        if (outcome == "refused") != (said.why is not None) or kind not in ("update", answer_kind(said.phase)):
            raise self.fault("its name and what it says do not fit")
        return said, signature, certificate


class Member(msgspec.Struct, frozen=True):
    """An update that a round fused, as the round's entry names it."""

    party: str
    index: int
    update: str


class Closing(msgspec.Struct, frozen=True):
    """What the entry of a closed round says. Logs of version 0.1.0 have no `state`."""

    members: list[Member]
    before: Digest
    model: Digest
    empty: str | None
    state: Digest | None = None

    @classmethod
    def of(cls, entry: Entry) -> Closing:
        """The closing in an entry; a Fault where it says none, or one that cannot be."""
        try:
            closing = msgspec.convert(entry.detail, cls)
        except msgspec.ValidationError as error:
            raise entry.fault(f"it does not say how the round was closed: {error}") from None
        if closing.empty is not None and (closing.members or closing.model != closing.before):
            raise entry.fault("the round is empty, and yet something was fused")
        if not closing.members and closing.model != closing.before:
            raise entry.fault("the round has fused nothing, and yet changed the model")
        named = Counter(member.index for member in closing.members)
        if len(named) < len(closing.members):
            raise entry.fault(f"it names entry {named.most_common(1)[0][0] + 1} more than once")
        return closing


def member_fault(member: Member, said: Statement, round: int, base: str | None) -> str | None:
    """Why a round cannot have fused what a party said, or None; `base` is the model that its ask's round began with,
    None where that is not known here."""
    if (member.party, member.update) != (said.party, said.update) or not said.phase.startswith("round"):
        return f"entry {member.index + 1} is another update than the round names"
    if said.round >= round or said.model is None or (base is not None and base != said.model):
        return f"the update in entry {member.index + 1} was made for another model, or for a later round"
    return None
