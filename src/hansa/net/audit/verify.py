"""Offline verification of an exported log: completeness, signatures and consistency.

The first line states who signs the log. Then each entry is a line. The entry that closes a round is followed by the
round's signed head. The last line is the head of the whole log. The log is read line by line. Only what later lines
need stays in memory: certificates and, of each job until it ends, the hashes of its models, the updates that no round
has fused yet, and which party has answered which ask. That is some hundred bytes per answer. None can be dropped
earlier: a ticket may be answered, or illegally answered again, any number of rounds later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hansa.core.round_record import without_numbers
from hansa.net.audit import merkle
from hansa.net.audit.entries import Closing, Entry, Fault, member_fault
from hansa.net.audit.evidence import ANSWERS, Head, Statement, answer_kind, canonical, receipt_fault, signed_by
from hansa.net.audit.receipt_file import StoredReceipt, read_receipts
from hansa.net.transport import certificates, keys
from hansa.plumbing.errors import DataError, HansaError

DIGEST = re.compile(r"[0-9a-f]{64}")
LINE = 2**24  # bytes: the longest line
SLACK = 3600.0  # seconds that an entry may be written after its certificate has expired
ENDINGS = frozenset({"job finished", "job failed", "job stopped"})

Ask = tuple[int, str, int, str]  # round, phase, number and party of an ask, within a job


def _ask(statement: Statement) -> Ask:
    return statement.round, statement.phase, statement.number, statement.party


@dataclass
class AuditedJob:
    """The state of a job after the lines read so far."""

    models: list[str] = field(default_factory=list)  # the initial model, then the model after each round
    waiting: dict[int, Statement] = field(
        default_factory=dict
    )  # updates that no round has fused yet, by index in the log
    answered: set[Ask] = field(default_factory=set)
    state: str | None = None  # hash of the server's state with the last model; None in logs of version 0.1.0
    ended: bool = False
    # At a relay, which closes no round: the model with which each round began.
    relayed: dict[int, str] | None = None

    def base(self, statement: Statement) -> str | None:
        """The model for which a statement must have been made.

        At a relay all answers of a round name the same model, or none: those from before the first model.
        """
        if self.relayed is not None:
            return statement.model and self.relayed.setdefault(statement.round, statement.model)
        return self.models[statement.round] if statement.round < len(self.models) else None


@dataclass
class Certificate:
    """A party's certificate and its state after the lines read so far."""

    identity: certificates.Identity
    pem: str
    state: str = "new"  # then "valid" from its first use, then "ended"


@dataclass
class Report:
    """The result of a verification: counts, and the identity of the log."""

    federation: str = ""
    authority: str = ""  # fingerprint of the CA's certificate
    entries: int = 0
    updates: int = 0  # accepted, in rounds
    evaluations: int = 0  # accepted
    answers: int = 0  # accepted, of other phases: descriptions and preparations of data
    refusals: int = 0
    rejected: int = 0
    rounds: int = 0
    fused: int = 0
    receipts: int = 0
    root: str = ""

    def text(self) -> str:
        """One sentence."""
        receipts = f"; all {self.receipts} receipts match it" if self.receipts else ""
        return (
            f"the log of {self.federation} is complete and valid: {self.entries} entries; {self.updates} updates, "
            f"{self.evaluations} evaluations and {self.answers} other answers, {self.rejected} rejected answers and "
            f"{self.refusals} refusals, all signed by their parties; {self.rounds} closed rounds, which fused "
            f"{self.fused} of the updates{receipts}; authority {self.authority}"
        )


def verify_pem(pem: str, authority: str, role: str, federation: str) -> certificates.Identity:
    """Verify a certificate from a log or proof; return its identity, or raise an IdentityError."""
    try:
        return certificates.verify_certificate(pem.encode(), authority.encode(), role, federation)
    except UnicodeError:  # a certificate in JSON may be any text
        raise keys.IdentityError("a certificate is not valid text") from None


def check_authority(pem: str, expected: bytes | None) -> str:
    """Return the fingerprint of an authority's certificate; a Fault if it is not the expected one."""
    try:
        fingerprint = certificates.check_authority(pem.encode())
    except UnicodeError:  # a certificate in JSON may be any text
        raise keys.IdentityError("the authority's certificate is not valid text") from None
    if expected is not None and certificates.fingerprint(expected) != fingerprint:
        raise Fault(f"its authority is {fingerprint}; expected {certificates.fingerprint(expected)}")
    return fingerprint


class Audit:
    """Verifies a log line by line; the first inconsistency raises a Fault."""

    def __init__(self, authority: bytes | None = None, receipts: Iterable[tuple[str, StoredReceipt]] = ()) -> None:
        self.report, self.tree = Report(), merkle.Frontier()
        self.beginning: Mapping[str, Any] = {}
        self.certificates: dict[str, Certificate] = {}
        self._alive: dict[str | None, dict[str, Certificate]] = {}  # not ended, by party and fingerprint
        self._valid: dict[str | None, str] = {}  # by party: fingerprint of the certificate in use
        self._expected_authority = authority
        self._jobs: dict[str, AuditedJob] = {}
        self._due: Entry | None = None  # the closing whose head must be the next line
        self._complete = False
        self._late: dict[tuple[str, Ask], str] = {}
        self._last: tuple[str, str, str, str | None] | None = (
            None  # statement, signature, status and reason of the last entry
        )
        self._receipts: dict[int, list[tuple[str, StoredReceipt]]] = {}  # by their log size
        for where, stored in receipts:
            self._expect(where, stored)

    def _expect(self, where: str, stored: StoredReceipt) -> None:
        if stored.receipt.status == "late" or stored.receipt.size is None:
            self._late[stored.statement.job, _ask(stored.statement)] = where
        self._receipts.setdefault(stored.receipt.size or 0, []).append((where, stored))

    def add_line(self, line: bytes) -> Entry | Head:
        """Verify the next line; return its entry or head."""
        place = f"after entry {self.tree.size}"
        if self._complete:
            raise Fault(f"{place}: there are lines after the log's last head")
        try:
            tree = json.loads(line)
            head = isinstance(tree, dict) and set(tree) == {"head"}
            item = _head(line, tree["head"]) if head else Entry.of(line, tree)
        except (ValueError, TypeError, RecursionError, msgspec.ValidationError) as error:
            raise Fault(f"{place}: invalid line: {str(error)[:200]}") from None
        if isinstance(item, Head):
            self._head(item)
            return item
        if self._due is not None:
            raise self._due.fault("it is not followed by a signed head")
        if item.seq != self.tree.size + 1:
            raise Fault(f"{place}: the next entry is {item.seq}; entries are missing or out of order")
        self.tree.append(merkle.leaf_hash(line))
        self._entry(item)
        self._check_receipts()
        return item

    def finish(self) -> Report:
        """Return the report after the last line; a Fault if the log is incomplete."""
        if not self._complete:
            raise Fault(f"after entry {self.tree.size}: the log is truncated; it does not end with its signed head")
        for size, receipts in sorted(self._receipts.items()):
            if size:
                raise Fault(f"{receipts[0][0]}: its log had {size} entries, but this log has {self.tree.size}")
        self.report.entries, self.report.root = self.tree.size, self.tree.root().hex()
        return self.report

    # Heads

    def _head(self, head: Head) -> None:
        place = f"the head after entry {self.tree.size}"
        if self.tree.size == 0:
            raise Fault("the log must begin with the entry 'log begun', not with a head")
        if head.size != self.tree.size or head.root != self.tree.root().hex():
            raise Fault(f"{place} is for {head.size} entries with a different root")
        if head.federation != self.report.federation or not signed_by(
            self.log.key, head.signature, head.signed_bytes()
        ):
            raise Fault(f"{place} is not signed with the federation's log key")
        closed = self._due
        if closed is None:
            if (head.job, head.round, head.model) != (None, None, None):
                raise Fault(f"{place} is the head of a round, but no round was closed there")
            self._complete = True
        elif (head.job, head.round, head.model) != (closed.job, closed.round, closed.detail["model"]):
            raise Fault(f"{place} is for a different round or model than the entry before it")
        self._due = None

    # Entries

    def _entry(self, entry: Entry) -> None:
        self._last = None
        if entry.seq == 1 or entry.event == "log begun":
            self._begin(entry)
        elif entry.event in ("enrolled", "certificate rotated"):
            self._certify(entry)
        elif entry.event == "certificate in use":
            self._use(entry)
        elif entry.event == "revoked":
            self._revoke(entry)
        elif entry.event in ANSWERS:
            self._answer(entry)
        elif entry.event in ("job submitted", "job relayed"):
            if entry.job is None or entry.job in self._jobs:
                raise entry.fault("it names no job, or a job that was submitted before")
            self._jobs[entry.job] = AuditedJob(relayed={} if entry.event == "job relayed" else None)
        elif entry.event == "job begun":
            job = self._job(entry)
            if job.models:
                raise entry.fault("the job had begun before")
            job.models.append(_digest(entry, "model"))
            job.state = _digest(entry, "state") if "state" in entry.detail else None
        elif entry.event == "round closed":
            self._close(entry)
        elif entry.event in ENDINGS:
            self._end(entry)

    def _begin(self, entry: Entry) -> None:
        if entry.seq != 1 or entry.event != "log begun":
            raise entry.fault("'log begun' must be the first entry, and occur only once")
        self.beginning = entry.detail
        try:
            name, authority, log = (str(entry.detail[key]) for key in ("federation", "authority", "log"))
            self.report.authority = check_authority(authority, self._expected_authority)
            self.log = verify_pem(log, authority, "log", name)
        except KeyError as error:
            raise entry.fault(f"it has no {error.args[0]}") from None
        except HansaError as error:
            raise entry.fault(str(error)) from None
        self.report.federation = name

    def _certify(self, entry: Entry) -> None:
        pem = entry.detail.get("pem")
        try:
            if not isinstance(pem, str):
                raise keys.IdentityError("it has no certificate")
            identity = verify_pem(pem, self.beginning["authority"], "party", self.report.federation)
        except HansaError as error:
            raise entry.fault(str(error)) from None
        if identity.name != entry.party or identity.fingerprint != entry.detail.get("certificate"):
            raise entry.fault(f"the certificate belongs to {identity.name}, or its fingerprint differs from the entry")
        if identity.fingerprint in self.certificates:
            raise entry.fault("the certificate was issued before")
        issued = self.certificates[identity.fingerprint] = Certificate(identity, pem)
        self._alive.setdefault(identity.name, {})[identity.fingerprint] = issued

    def _use(self, entry: Entry) -> None:
        alive = self._alive.get(entry.party, {})
        used = alive.get(str(entry.detail.get("certificate")))
        if used is None or used.state != "new":
            raise entry.fault(f"{entry.party} had no new certificate with this fingerprint")
        before = self._valid.get(entry.party)
        if before is not None:
            alive.pop(before).state = "ended"
        used.state, self._valid[entry.party] = "valid", used.identity.fingerprint

    def _revoke(self, entry: Entry) -> None:
        alive = self._alive.get(entry.party, {})
        named = entry.detail.get("certificates")
        if not isinstance(named, dict) or set(named) != set(alive):
            raise entry.fault(f"the certificates are not those of {entry.party}")
        for certificate in alive.values():
            certificate.state = "ended"
        alive.clear()
        self._valid.pop(entry.party, None)

    def _job(self, entry: Entry) -> AuditedJob:
        if entry.job is None:
            raise entry.fault("it names no job")
        job = self._jobs.get(entry.job)
        if job is None:
            raise entry.fault(f"no job {entry.job} was submitted before")
        if job.ended:
            raise entry.fault(f"the job {entry.job} had ended before")
        return job

    def _end(self, entry: Entry) -> None:
        job, finished = self._job(entry), entry.event == "job finished"
        if finished and not job.models:
            raise entry.fault("the job had not begun")
        if finished or entry.detail.get("model") is not None:
            _digest(entry, "model")
        assert entry.job is not None
        self._jobs[entry.job] = AuditedJob(ended=True)  # frees its models and updates

    def _answer(self, entry: Entry) -> None:
        statement, signature, mark = entry.statement(self.report.federation)
        signer = self.certificates.get(mark)
        if signer is None or signer.identity.name != statement.party or signer.state != "valid" or (
            entry.at > signer.identity.not_after + SLACK
        ):  # fmt: skip
            raise entry.fault(f"the certificate {mark[:16]} was not a valid certificate of {statement.party} then")
        if not signed_by(signer.identity.key, signature, statement.signed_bytes()):
            raise entry.fault(f"the signature of {statement.party} does not match the statement")
        job = self._job(entry)
        if _ask(statement) in job.answered:
            raise entry.fault(f"{statement.party} had answered this ask before")
        late = self._late.get((statement.job, _ask(statement)))
        if late is not None:
            raise Fault(f"{late}: the receipt says that the answer was late, but entry {entry.seq} contains it")
        if statement.model != job.base(statement):
            raise entry.fault(
                f"it was made for a different model than the one at the start of round {statement.round + 1}"
            )
        job.answered.add(_ask(statement))
        rejected, kind = entry.event.endswith(" rejected"), answer_kind(statement.phase)
        status = "rejected" if rejected else "accepted"
        self._last = (statement.digest(), signature, status, entry.detail.get("rejected"))
        if statement.why is not None:
            self.report.refusals += 1
        elif rejected:
            self.report.rejected += 1
        elif kind == "update":
            self.report.updates += 1
            job.waiting[entry.seq - 1] = statement
        elif kind == "evaluation":
            self.report.evaluations += 1
        else:
            self.report.answers += 1

    def _close(self, entry: Entry) -> None:
        closing, job = Closing.of(entry), self._job(entry)
        if not job.models:
            raise entry.fault("the job had not begun")
        if entry.round != len(job.models):
            raise entry.fault(f"the job's next round is {len(job.models)}, but this is round {entry.round}")
        if closing.before != job.models[-1]:
            raise entry.fault("its model before the round is not the model after the previous round")
        if (closing.state is None) != (job.state is None):
            raise entry.fault("either it or the entry 'job begun' has no hash of the state")
        if closing.empty is not None and closing.state != job.state:
            raise entry.fault("the round is empty, but it changed the state")
        for member in closing.members:
            waiting = job.waiting.pop(member.index, None)
            if waiting is None:
                raise entry.fault(f"entry {member.index + 1} is not an unfused update of this job")
            fault = member_fault(member, waiting, entry.round, None)  # the base was checked with the answer
            if fault is not None:
                raise entry.fault(fault)
        self.report.rounds += 1
        self.report.fused += len(closing.members)
        job.models.append(closing.model)
        job.state = closing.state
        self._due = entry

    # Receipts

    def _check_receipts(self) -> None:
        receipts = self._receipts.pop(self.tree.size, [])
        if self.tree.size == 1:
            receipts += self._receipts.pop(0, [])  # of late answers, which have no entry
        for where, stored in receipts:
            receipt = stored.receipt
            fault = receipt_fault(receipt, stored.statement, receipt.signature, self.log)
            if stored.statement.federation != self.report.federation:
                fault = f"it belongs to the federation {stored.statement.federation}"
            if fault is not None:
                raise Fault(f"{where}: {fault}")
            if receipt.size is None:
                self.report.receipts += 1
                continue
            if receipt.root != self.tree.root().hex():
                raise Fault(f"{where}: the receipt has a different root for the log of {receipt.size} entries")
            acknowledged = (receipt.statement, receipt.signature, receipt.status)
            # Under a minimum cohort the log leaves out the numbers in a reason.
            whys = {receipt.why, receipt.why and without_numbers(receipt.why)}
            last = self._last or (None,) * 4
            if receipt.index != self.tree.size - 1 or last[:3] != acknowledged or last[3] not in whys:
                raise Fault(f"{where}: entry {self.tree.size} is not the one that the receipt confirms")
            self.report.receipts += 1


def _head(line: bytes, tree: Any) -> Head:
    """Parse a head; a ValueError if it is invalid."""
    head = msgspec.convert(tree, Head)
    if canonical({"head": msgspec.structs.asdict(head)}) != line:
        raise ValueError("it is not a head in canonical JSON")
    return head


def _digest(entry: Entry, name: str) -> str:
    value = entry.detail.get(name)
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise entry.fault(f"its {name} is not a SHA-256")
    return value


# Files


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of an exported log."""
    try:
        with open(path, "rb") as file:
            while line := file.readline(LINE + 1):
                if not line.endswith(b"\n"):
                    raise Fault(f"{path} is truncated within a line, or has a line of more than {LINE} bytes")
                yield line[:-1]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def read_all_receipts(paths: Sequence[Path]) -> list[tuple[str, StoredReceipt]]:
    """Read the receipts of files or of parties' folders, each with its file and line."""
    out = []
    for path in paths:
        inner = path / "receipts"
        files = sorted((inner if inner.is_dir() else path).glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise DataError(f"there are no receipts in {path}; expected files JOB.jsonl")
        out += [
            (f"{file}, line {number}", stored) for file in files for number, stored in enumerate(read_receipts(file), 1)
        ]
    return out


def verify(path: Path, authority: bytes | None = None, receipts: Sequence[Path] = ()) -> Report:
    """Verify a log in a file; a Fault names the first inconsistency."""
    return verify_lines(read_lines(path), authority, receipts)


def verify_lines(lines: Iterable[bytes], authority: bytes | None = None, receipts: Sequence[Path] = ()) -> Report:
    """Verify the lines of a log."""
    audit = Audit(authority, read_all_receipts(receipts))
    for line in lines:
        audit.add_line(line)
    if audit.tree.size == 0:
        raise DataError("the log is empty; export one with `hansa log FEDERATION --out FILE`")
    return audit.finish()
