"""An exported log, looked at without anybody's help: is it whole, and does everybody stand by what it says?

The first line says who signs the log. Then each entry is a line, and after an entry that closes a round comes the
round's signed head; the last line is the head of all of it. Everything here reads line by line and keeps no more of
what went before than the rest needs: certificates, and of each job, until it ends, the hashes of its models, the
updates that no round has named, and who has answered which ask. That is some hundred bytes for each answer; none can be
forgotten earlier, since a ticket may be answered, and so could be answered once more, any number of rounds later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hansa.core.errors import DataError, HansaError
from hansa.core.round_record import without_numbers
from hansa.net.audit import merkle
from hansa.net.audit.entries import Closing, Entry, Fault, member_fault
from hansa.net.audit.evidence import ANSWERS, Head, Statement, answer_kind, canonical, receipt_fault, signed_by
from hansa.net.audit.receipt_file import StoredReceipt, read_receipts
from hansa.net.transport import certificates, keys

DIGEST = re.compile(r"[0-9a-f]{64}")
LINE = 2**24  # bytes of a line, at most
SLACK = 3600.0  # seconds after a certificate's end at which what came before it may be written
ENDINGS = frozenset({"job finished", "job failed", "job stopped"})

Ask = tuple[int, str, int, str]  # an ask of a job, and who is asked: round, phase, number, party


def _ask(said: Statement) -> Ask:
    return said.round, said.phase, said.number, said.party


@dataclass
class AuditedJob:
    """What the log has said of a job so far."""

    models: list[str] = field(default_factory=list)  # after each round; the first is the one it began with
    waiting: dict[int, Statement] = field(default_factory=dict)  # updates that no round has named yet, by leaf
    answered: set[Ask] = field(default_factory=set)
    state: str | None = None  # of the server with the last model, whole; None in logs of version 0.1.0
    ended: bool = False


@dataclass
class Certificate:
    """A party's certificate, as far as the log has come."""

    who: certificates.Identity
    pem: str
    state: str = "new"  # then "valid" from its first use on, until it is "ended"


@dataclass
class Report:
    """What was found: counts, and whom it was taken from."""

    federation: str = ""
    authority: str = ""  # the fingerprint
    entries: int = 0
    updates: int = 0  # accepted, in rounds
    evaluations: int = 0  # accepted
    answers: int = 0  # accepted, other ones: descriptions of data, sums to prepare them
    refusals: int = 0
    rejected: int = 0
    rounds: int = 0
    fused: int = 0
    receipts: int = 0
    root: str = ""

    def text(self) -> str:
        """One line."""
        receipts = f"; {self.receipts} receipts are all in it" if self.receipts else ""
        return (
            f"the log of {self.federation} is whole: {self.entries} entries; {self.updates} updates, "
            f"{self.evaluations} evaluations and {self.answers} other answers, {self.rejected} answers that were "
            f"rejected and {self.refusals} refusals, all signed by their parties; {self.rounds} rounds closed with "
            f"{self.fused} of the updates{receipts}; authority {self.authority}"
        )


def verify_pem(pem: str, authority: str, role: str, federation: str) -> certificates.Identity:
    """Whom a certificate names, as a log or a proof holds it; an IdentityError where it does not count."""
    try:
        return certificates.verify_certificate(pem.encode(), authority.encode(), role, federation)
    except UnicodeError:  # a certificate in JSON may be any text
        raise keys.IdentityError("a certificate cannot be read") from None


def check_authority(pem: str, given: bytes | None) -> str:
    """The fingerprint of an authority's certificate, which must be the given one, if one is."""
    try:
        found = certificates.check_authority(pem.encode())
    except UnicodeError:  # a certificate in JSON may be any text
        raise keys.IdentityError("the authority's certificate cannot be read") from None
    if given is not None and certificates.fingerprint(given) != found:
        raise Fault(f"it is by another authority ({found}) than the one given ({certificates.fingerprint(given)})")
    return found


class Audit:
    """A log that is taken in line by line; the first thing that is wrong is a Fault."""

    def __init__(self, authority: bytes | None = None, receipts: Iterable[tuple[str, StoredReceipt]] = ()) -> None:
        self.report, self.tree = Report(), merkle.Frontier()
        self.beginning: Mapping[str, Any] = {}
        self.certificates: dict[str, Certificate] = {}
        self._alive: dict[
            str | None, dict[str, Certificate]
        ] = {}  # by party and fingerprint: those that have not ended
        self._valid: dict[str | None, str] = {}  # by party: the fingerprint of the one in use
        self._given = authority
        self._jobs: dict[str, AuditedJob] = {}
        self._due: Entry | None = None  # the closing whose head must come next
        self._whole = False
        self._late: dict[tuple[str, Ask], str] = {}
        self._last: tuple[str, str, str, str | None] | None = None  # of the last entry, as its receipt has it
        self._kept: dict[int, list[tuple[str, StoredReceipt]]] = {}  # by the size of the log that they name
        for where, kept in receipts:
            self._expect(where, kept)

    def _expect(self, where: str, kept: StoredReceipt) -> None:
        if kept.receipt.status == "late" or kept.receipt.size is None:
            self._late[kept.statement.job, _ask(kept.statement)] = where
        self._kept.setdefault(kept.receipt.size or 0, []).append((where, kept))

    def add_line(self, line: bytes) -> Entry | Head:
        """Take in a line; gives what it is."""
        place = f"after entry {self.tree.size}"
        if self._whole:
            raise Fault(f"{place}: there are lines after the log's last head")
        try:
            tree = json.loads(line)
            head = isinstance(tree, dict) and set(tree) == {"head"}
            found = _head(line, tree["head"]) if head else Entry.of(line, tree)
        except (ValueError, TypeError, RecursionError, msgspec.ValidationError) as error:
            raise Fault(f"{place}: a line is not one of a log: {str(error)[:200]}") from None
        if isinstance(found, Head):
            self._head(found)
            return found
        if self._due is not None:
            raise self._due.fault("no signed head follows it")
        if found.seq != self.tree.size + 1:
            raise Fault(f"{place} comes entry {found.seq}: entries are missing, or not in order")
        self.tree.append(merkle.leaf_hash(line))
        self._entry(found)
        self._check_receipts()
        return found

    def finish(self) -> Report:
        """What the whole log came to."""
        if not self._whole:
            raise Fault(f"after entry {self.tree.size}: the log is cut off, it does not end with its signed head")
        for size, rest in sorted(self._kept.items()):
            if size:
                raise Fault(f"{rest[0][0]}: its log had {size} entries, and this one has {self.tree.size}")
        self.report.entries, self.report.root = self.tree.size, self.tree.root().hex()
        return self.report

    # Heads

    def _head(self, head: Head) -> None:
        place = f"the head after entry {self.tree.size}"
        if self.tree.size == 0:
            raise Fault("the log begins with a head, and not with who signs it")
        if head.size != self.tree.size or head.root != self.tree.root().hex():
            raise Fault(f"{place} is for {head.size} entries with another root than these have")
        if head.federation != self.report.federation or not signed_by(
            self.log.key, head.signature, head.signed_bytes()
        ):
            raise Fault(f"{place} is not signed by the federation's log key")
        closed = self._due
        if closed is None:
            if (head.job, head.round, head.model) != (None, None, None):
                raise Fault(f"{place} is that of a round, and no round was closed there")
            self._whole = True
        elif (head.job, head.round, head.model) != (closed.job, closed.round, closed.detail["model"]):
            raise Fault(f"{place} is for another round or model than the entry says")
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
        elif entry.event == "job submitted":
            if entry.job is None or entry.job in self._jobs:
                raise entry.fault("it names no job, or one that was submitted before")
            self._jobs[entry.job] = AuditedJob()
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
            raise entry.fault("a log begins with who signs it, and only once")
        self.beginning = entry.detail
        try:
            name, authority, log = (str(entry.detail[key]) for key in ("federation", "authority", "log"))
            self.report.authority = check_authority(authority, self._given)
            self.log = verify_pem(log, authority, "log", name)
        except KeyError as error:
            raise entry.fault(f"it does not say the {error.args[0]}") from None
        except HansaError as error:
            raise entry.fault(str(error)) from None
        self.report.federation = name

    def _certify(self, entry: Entry) -> None:
        pem = entry.detail.get("pem")
        try:
            if not isinstance(pem, str):
                raise keys.IdentityError("it holds no certificate")
            who = verify_pem(pem, self.beginning["authority"], "party", self.report.federation)
        except HansaError as error:
            raise entry.fault(str(error)) from None
        if who.name != entry.party or who.fingerprint != entry.detail.get("certificate"):
            raise entry.fault(f"the certificate is that of {who.name}, or another than it says")
        if who.fingerprint in self.certificates:
            raise entry.fault("the certificate was issued before")
        made = self.certificates[who.fingerprint] = Certificate(who, pem)
        self._alive.setdefault(who.name, {})[who.fingerprint] = made

    def _use(self, entry: Entry) -> None:
        alive = self._alive.get(entry.party, {})
        used = alive.get(str(entry.detail.get("certificate")))
        if used is None or used.state != "new":
            raise entry.fault(f"{entry.party} had no new certificate of that fingerprint")
        before = self._valid.get(entry.party)
        if before is not None:
            alive.pop(before).state = "ended"
        used.state, self._valid[entry.party] = "valid", used.who.fingerprint

    def _revoke(self, entry: Entry) -> None:
        alive = self._alive.get(entry.party, {})
        named = entry.detail.get("certificates")
        if not isinstance(named, dict) or set(named) != set(alive):
            raise entry.fault(f"it names other certificates than {entry.party} had")
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
        self._jobs[entry.job] = AuditedJob(ended=True)  # what it had is needed no more

    def _answer(self, entry: Entry) -> None:
        said, signature, mark = entry.statement(self.report.federation)
        signer = self.certificates.get(mark)
        if signer is None or signer.who.name != said.party or signer.state != "valid" or (
            entry.at > signer.who.not_after + SLACK
        ):  # fmt: skip
            raise entry.fault(f"the certificate {mark[:16]} was not one of {said.party} that was valid then")
        if not signed_by(signer.who.key, signature, said.signed_bytes()):
            raise entry.fault(f"the signature is not that of {said.party} under what it says")
        job = self._job(entry)
        if _ask(said) in job.answered:
            raise entry.fault(f"{said.party} had answered this ask before")
        late = self._late.get((said.job, _ask(said)))
        if late is not None:
            raise Fault(f"{late}: it says that the answer was late, and entry {entry.seq} has it")
        if said.model != (job.models[said.round] if said.round < len(job.models) else None):
            raise entry.fault(f"it was made for another model than the one with which round {said.round + 1} began")
        job.answered.add(_ask(said))
        rejected, kind = entry.event.endswith(" rejected"), answer_kind(said.phase)
        status = "rejected" if rejected else "accepted"
        self._last = (said.digest(), signature, status, entry.detail.get("rejected"))
        if said.why is not None:
            self.report.refusals += 1
        elif rejected:
            self.report.rejected += 1
        elif kind == "update":
            self.report.updates += 1
            job.waiting[entry.seq - 1] = said
        elif kind == "evaluation":
            self.report.evaluations += 1
        else:
            self.report.answers += 1

    def _close(self, entry: Entry) -> None:
        closing, job = Closing.of(entry), self._job(entry)
        if not job.models:
            raise entry.fault("the job had not begun")
        if entry.round != len(job.models):
            raise entry.fault(f"the job's next round was {len(job.models)}, and this is {entry.round}")
        if closing.before != job.models[-1]:
            raise entry.fault("the model before it is another than the one after the round before")
        if (closing.state is None) != (job.state is None):
            raise entry.fault("it has no hash of the state, or one that the entry 'job begun' has not")
        if closing.empty is not None and closing.state != job.state:
            raise entry.fault("the round is empty, and yet changed the state")
        for member in closing.members:
            waiting = job.waiting.pop(member.index, None)
            if waiting is None:
                raise entry.fault(f"entry {member.index + 1} is no update of the job that no round has fused yet")
            fault = member_fault(member, waiting, entry.round, None)  # the base was looked at before
            if fault is not None:
                raise entry.fault(fault)
        self.report.rounds += 1
        self.report.fused += len(closing.members)
        job.models.append(closing.model)
        job.state = closing.state
        self._due = entry

    # Receipts

    def _check_receipts(self) -> None:
        kept = self._kept.pop(self.tree.size, [])
        if self.tree.size == 1:
            kept += self._kept.pop(0, [])  # late: they name no entry
        for where, one in kept:
            receipt = one.receipt
            fault = receipt_fault(receipt, one.statement, receipt.signature, self.log)
            if one.statement.federation != self.report.federation:
                fault = f"it is of the federation {one.statement.federation}"
            if fault is not None:
                raise Fault(f"{where}: {fault}")
            if receipt.size is None:
                self.report.receipts += 1
                continue
            if receipt.root != self.tree.root().hex():
                raise Fault(f"{where}: the log that it was given for had another root at {receipt.size} entries")
            said = (receipt.statement, receipt.signature, receipt.status)
            whys = {receipt.why, receipt.why and without_numbers(receipt.why)}  # which a least cohort keeps from others
            last = self._last or (None,) * 4
            if receipt.index != self.tree.size - 1 or last[:3] != said or last[3] not in whys:
                raise Fault(f"{where}: entry {self.tree.size} is another than the one it was given for")
            self.report.receipts += 1


def _head(line: bytes, tree: Any) -> Head:
    """The head in a line; a ValueError where it is none."""
    head = msgspec.convert(tree, Head)
    if canonical({"head": msgspec.structs.asdict(head)}) != line:
        raise ValueError("it is not written as a head is")
    return head


def _digest(entry: Entry, name: str) -> str:
    value = entry.detail.get(name)
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise entry.fault(f"its {name} is no SHA-256")
    return value


# Files


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of an exported log."""
    try:
        with open(path, "rb") as file:
            while line := file.readline(LINE + 1):
                if not line.endswith(b"\n"):
                    raise Fault(f"{path} is cut off in the middle of a line, or has one of more than {LINE} bytes")
                yield line[:-1]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def read_all_receipts(places: Sequence[Path]) -> list[tuple[str, StoredReceipt]]:
    """The receipts of some files, or of parties' folders."""
    out = []
    for place in places:
        inner = place / "receipts"
        files = sorted((inner if inner.is_dir() else place).glob("*.jsonl")) if place.is_dir() else [place]
        if not files:
            raise DataError(f"there are no receipts in {place}; expected files JOB.jsonl")
        out += [
            (f"{file}, line {number}", kept) for file in files for number, kept in enumerate(read_receipts(file), 1)
        ]
    return out


def verify(path: Path, authority: bytes | None = None, receipts: Sequence[Path] = ()) -> Report:
    """Look at a whole log in a file; a Fault names the first thing that is wrong with it."""
    return verify_lines(read_lines(path), authority, receipts)


def verify_lines(lines: Iterable[bytes], authority: bytes | None = None, receipts: Sequence[Path] = ()) -> Report:
    """Look at the lines of a whole log."""
    audit = Audit(authority, read_all_receipts(receipts))
    for line in lines:
        audit.add_line(line)
    if audit.tree.size == 0:
        raise DataError("this is no log, but empty; `hansa log FEDERATION --out FILE` exports one")
    return audit.finish()
