"""A party's approvals: the manifests that the aggregator announced, and its owner's signed decisions.

Each job has a folder in `approvals/`: `announced.json` is the last manifest that the aggregator sent, `approved.json`
the manifest of the last decision, and `decision.json` that decision, signed with the party's key. A decision counts for
the bytes of one manifest: a job with another manifest needs a new one.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from hansa.net.audit.evidence import canonical, signed_by
from hansa.net.party.approve_rules import Approve
from hansa.net.transport import certificates, keys
from hansa.net.transport.manifest import Manifest, decode_manifest, manifest_digest
from hansa.net.transport.wire import Digest, Name, Signature, Text
from hansa.plumbing import disk
from hansa.plumbing.crash_points import steps
from hansa.plumbing.errors import ConfigError, DataError

log = logging.getLogger("hansa.net")
FOLDER = "approvals"
ANNOUNCED, APPROVED, DECISION = "announced.json", "approved.json", "decision.json"
OWNER = "the owner"
JOBS = 200  # jobs whose manifests are stored; beyond that, the oldest ones are deleted, except those that are refused


class Approval(Struct, frozen=True, forbid_unknown_fields=True):
    """A decision about the manifest with the SHA-256 `manifest`: `by` whom or by which rules, and when."""

    job: Name
    manifest: Digest
    approved: bool
    by: Text
    at: float
    signature: Signature | None = None

    def signed_bytes(self) -> bytes:
        """The bytes that the party signs."""
        fields = structs.asdict(self)
        del fields["signature"]
        return b"hansa-1 approval" + canonical(fields)


@dataclass(frozen=True)
class Verdict:
    """Whether a job may go on, and why not."""

    status: Literal["approved", "waiting", "refused"]
    why: str = ""


class Approvals:
    """The approvals in a party's folder. The party and the command `hansa approve` use it at the same time."""

    def __init__(self, party_folder: Path) -> None:
        self._party, self.folder = party_folder, party_folder / FOLDER

    def jobs(self) -> list[str]:
        """The jobs whose manifests are stored, the last announced one first."""
        found = [path for path in self.folder.glob(f"*/{ANNOUNCED}")]
        return [path.parent.name for path in sorted(found, key=lambda path: -path.stat().st_mtime_ns)]

    def announced(self, job: str) -> bytes | None:
        """The last manifest of a job that the aggregator sent."""
        return _read(self.folder / job / ANNOUNCED)

    def announce(self, job: str, data: bytes) -> None:
        """Store a manifest that the aggregator sent; a DataError if it is invalid or of another job."""
        manifest = decode_manifest(data)
        if manifest.job != job:
            raise DataError(f"the manifest is of the job {manifest.job}, and the ask is of {job}")
        disk.make_folder(self.folder / job)
        disk.put(self.folder / job / ANNOUNCED, [data], steps("private"))
        for name in self.jobs()[JOBS:]:  # the aggregator names the jobs
            if not self._refused(name):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def decision(self, job: str) -> Approval | None:
        """The last decision about a job; a ConfigError if its signature is invalid."""
        data = _read(self.folder / job / DECISION)
        if data is None:
            return None
        path = self.folder / job / DECISION
        try:
            approval = msgspec.json.decode(data, type=Approval)
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}; run hansa approve {job} again") from None
        if approval.job != job or not self._signed(approval):
            raise ConfigError(f"the signature in {path} is not this party's; run hansa approve {job} again")
        return approval

    def approved(self, job: str) -> Manifest | None:
        """The manifest that was approved last, if the last decision is an approval."""
        found = self.last_decided(job)
        return decode_manifest(found[1]) if found is not None and found[0].approved else None

    def last_decided(self, job: str) -> tuple[Approval, bytes] | None:
        """The last decision, and the manifest that it is about; None if there is none."""
        approval, data = self.decision(job), _read(self.folder / job / APPROVED)
        if approval is None or data is None or manifest_digest(data) != approval.manifest:
            return None
        return approval, data

    def decide(self, job: str, data: bytes, approved: bool, by: str = OWNER) -> Approval:
        """Sign and store a decision about a manifest."""
        key = keys.read_key(self._party / "key.pem")
        approval = Approval(job, manifest_digest(data), approved, by, time.time())
        approval = structs.replace(approval, signature=key.sign(approval.signed_bytes()).hex())
        disk.make_folder(self.folder / job)
        disk.put(self.folder / job / APPROVED, [data], steps("private"))
        disk.put(self.folder / job / DECISION, [msgspec.json.encode(approval)], steps("private"))
        return approval

    def review(self, job: str, approve: Approve) -> Verdict:
        """Whether the announced manifest of a job is approved. Rules that approve it are recorded as the decision."""
        data = self.announced(job)
        if data is None:
            return Verdict("waiting", "the aggregator has announced no manifest")
        try:
            last = self.last_decided(job)
        except ConfigError as error:
            return Verdict("waiting", str(error))
        if last is not None and last[1] == data:
            return Verdict("approved") if last[0].approved else Verdict("refused", "its owner refuses the job")
        if approve.mode == "ask":
            unmet = ["the owner approves every job"]
        elif self._refused(job):  # the aggregator could change a manifest until rules approve it
            unmet = ["its owner has refused an earlier manifest of the job"]
        else:
            unmet = approve.unmet(decode_manifest(data))
        if not unmet:
            self.decide(job, data, True, f"the rules {', '.join(approve.rules)}")
            log.info("job approved by rules", extra={"job": job, "detail": {"rules": approve.rules}})
            return Verdict("approved")
        changed = "the manifest has changed since the last decision; " if last is not None else ""
        return Verdict("waiting", f"{changed}{'; '.join(unmet)}")

    def _refused(self, job: str) -> bool:
        """Whether the last decision refuses a job. Rules must not approve later what the owner refused."""
        try:
            last = self.decision(job)
        except ConfigError:
            return False
        return last is not None and not last.approved

    def _signed(self, approval: Approval) -> bool:
        """Whether the party signed a decision, with its present key or a former one."""
        signature, data = approval.signature or "", approval.signed_bytes()
        known = [key for name in ("cert.pem", "former.pem") for key in certificates.public_keys(self._party / name)]
        return any(signed_by(key, signature, data) for key in known)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
