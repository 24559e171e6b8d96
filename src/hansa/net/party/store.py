"""A party's folder: private key (created here, never leaves), certificate, policy and memory."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from hansa.core.op import Memory
from hansa.net.attestation.guard import AttestationGuard, KeyPin
from hansa.net.party.policy import Policy
from hansa.net.transport import certificates, keys
from hansa.net.transport.client import Client, enrol, https_url
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.tokens import Token
from hansa.net.transport.wire import IssuedCertificate, unpack
from hansa.plumbing import codec, disk
from hansa.plumbing.crash_points import reach, steps
from hansa.plumbing.errors import ConfigError, DataError

TASK = "fetch-task"  # the file of the last task that was fetched
ENDING = 5.0  # seconds that the worker of a killed party may take to end


class PartyStore:
    """The folder of one party. Only one process at a time may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            disk.make_folder(folder)
            locked = f"another process runs this party in {folder}; stop it, or give another --state"
            self._lock = _lock(folder / ".lock", locked)
        except OSError as error:
            raise ConfigError(f"cannot use the folder {folder}: {error.strerror}") from None
        self.policy = Policy.read(folder / "party.toml")
        self.pin: KeyPin | None = None  # the aggregator's key, where the policy requires attestation
        if self.policy.trust.attestation is not None:
            self.policy.trust.attestation.check(folder)
        self.next_policy: Policy | None = None  # read while the party runs; it counts from the next ask on
        for partial in folder.glob("fetch-*"):  # downloads that the last process did not complete
            shutil.rmtree(partial, ignore_errors=True)
        (folder / TASK).unlink(missing_ok=True)
        for path in (folder, *folder.glob("memory/*")):
            disk.sweep(path)

    def close(self) -> None:
        """Release the lock on the folder."""
        self._lock.close()

    @property
    def enrolled(self) -> bool:
        return (self.folder / "party.json").exists()

    def registration(self) -> dict[str, Any]:
        """The content of `party.json`: the party's name, its federation, the aggregator's URL, the instance."""
        try:
            tree: dict[str, Any] = json.loads((self.folder / "party.json").read_text())
            if not {"party", "federation", "url", "instance"} <= set(tree):
                raise ValueError("it lacks party, federation, url or instance")
            if tree.pop("sum", None) not in (None, _sum(tree)):
                raise ValueError("its checksum is wrong")
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"cannot read {self.folder / 'party.json'}: {error}; enrol again, with the aggregator's URL and a new "
                "token"
            ) from None
        return tree

    def enrolled_with(self, token: Token) -> bool:
        """Whether the party enrolled with this token; False if `party.json` is unreadable: enrolling rewrites it."""
        return bool(self._registered("token") == token.digest())

    def _registered(self, name: str) -> Any:
        """A field of `party.json`; None if it is missing or unreadable."""
        try:
            return self.registration().get(name)
        except ConfigError:
            return None

    async def enrol(self, url: str, token: Token) -> None:
        """Create a key, get a certificate for it, and store both.

        After an interruption, enrolling can be repeated with the same token. With a new token the party enrols again
        and keeps its policy and its memory.
        """
        key = self._pending_key("key.enrol.pem")
        authority, issued = await enrol(url, token, certificates.make_request(key, token.party))
        self._set_aside_other_federation(authority)
        keys.write_private(self.folder / "ca.pem", authority)
        keys.write_private(self.folder / "cert.enrol.pem", issued.certificate)
        about = {"party": issued.party, "federation": issued.federation, "url": https_url(url),
                 "instance": secrets.token_hex(16), "token": token.digest(),
                 "certificate": certificates.fingerprint(issued.certificate)}  # fmt: skip
        about["sum"] = _sum(about)
        keys.write_private(self.folder / "party.json", json.dumps(about).encode())
        self.install_new_keys()

    def _set_aside_other_federation(self, authority: bytes) -> None:
        """Set aside the files of a federation with another authority: its log's certificate, receipts, memory."""
        before = self.folder / "ca.pem"
        if before.exists() and before.read_bytes() != authority:
            digest = hashlib.sha256(before.read_bytes()).hexdigest()[:8]
            disk.set_aside([self.folder / name for name in ("log.pem", "receipts", "memory", "public", "approvals")],
                           self.folder / f"before-{digest}")  # fmt: skip

    def _pending_key(self, name: str) -> keys.PrivateKey:
        """A key that is not in use yet; one that was created and not certified is used again."""
        path = self.folder / name
        if not path.exists():
            keys.write_private(path, keys.key_bytes(keys.new_key()))
        return keys.load_key(keys.read_private(path))

    def client(self, url: str | None = None) -> Client:
        """A client of the aggregator with this party's certificate."""
        key, authority = self.folder / "key.pem", self.folder / "ca.pem"
        for path in (authority, self.folder / "cert.pem"):  # OpenSSL does not check its own side's certificates
            certificates.read_certificate(path, authority)
        tls = client_context(authority, self.folder / "cert.pem", key)
        if self.policy.trust.attestation is not None:
            self.pin = KeyPin()
            self.pin.install(tls)
        return Client(url or self.registration()["url"], tls, keys.read_key(key))

    def guard(self, client: Client) -> AttestationGuard:
        """The guard of a client that `client` made."""
        verifier, name = self.policy.trust.attestation, self.registration()["federation"]
        return AttestationGuard(verifier, self.pin, client, self.folder, name)

    def identity(self) -> certificates.Identity:
        return certificates.identity_of_pem(
            certificates.read_certificate(self.folder / "cert.pem", self.folder / "ca.pem")
        )

    def party_of(self, certificate: bytes) -> certificates.Identity:
        """The party of a certificate that the federation issued, now or earlier; an IdentityError for another one."""
        authority = (self.folder / "ca.pem").read_bytes()
        return certificates.verify_certificate(certificate, authority, "party", self.registration()["federation"])

    async def rotate(self, client: Client) -> None:
        """Get a certificate for a new key. The old ones stay valid until the new ones are first used."""
        key = self._pending_key("key.new.pem")
        _, data = await client.call(
            "POST", "/v1/rotate", certificates.make_request(key, self.registration()["party"]), About()
        )
        keys.write_private(self.folder / "cert.new.pem", unpack(data, IssuedCertificate).certificate)
        reach("rotation.certified")
        self.install_new_keys()

    def install_new_keys(self) -> None:
        """Install a new key and its certificate; also completes an interrupted installation."""
        enrolled = self.folder / "cert.enrol.pem"
        known = self._registered("certificate") if enrolled.exists() else None
        if known is not None and known == certificates.fingerprint(enrolled.read_bytes()):
            self._install("enrol")  # only if party.json was written before an interruption
        self._install("new")

    def _install(self, suffix: str) -> None:
        fresh, certificate = self.folder / f"key.{suffix}.pem", self.folder / f"cert.{suffix}.pem"
        if not certificate.exists():
            return
        if fresh.exists():
            disk.rename(fresh, self.folder / "key.pem")
            reach("rotation.key")
        self._keep_former_certificate()
        disk.sync_folder(self.folder)  # otherwise a power failure could leave the certificate without its key
        reach("rotation.kept")
        disk.rename(certificate, self.folder / "cert.pem")
        reach("rotation.certificate")
        disk.sync_folder(self.folder)
        reach("rotation.settled")

    def _keep_former_certificate(self) -> None:
        """Add the replaced certificate to `former.pem`: receipts for its signatures may still arrive."""
        try:
            certificate = (self.folder / "cert.pem").read_bytes()
        except FileNotFoundError:
            return
        path = self.folder / "former.pem"
        before = path.read_bytes() if path.exists() else b""
        if certificate not in before:
            keys.write_private(path, before + certificate)


def _lock(path: Path, locked: str) -> BinaryIO:
    """Lock the folder. The worker of a party that was killed holds the lock until it has ended too, moments later."""
    end = time.monotonic() + ENDING
    while True:
        try:
            return disk.lock(path, locked)
        except ConfigError:
            if time.monotonic() > end:
                raise
        time.sleep(0.02)


def _sum(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def append_checksum(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a file, then their SHA-256, so that damage is detected."""
    running = hashlib.sha256()
    for piece in pieces:
        running.update(piece)
        yield piece
    yield running.digest()


def strip_checksum(data: bytes) -> bytes:
    """Check and remove the checksum; a DataError if the file is damaged."""
    body = data[:-32]
    if hashlib.sha256(body).digest() != data[-32:]:
        raise DataError("the file is damaged")
    return body


class PartyMemory:
    """The memory of a party, by job and by the ask that staged it; committed only when that ask's reply was fused.

    Every ask names the earlier ask whose staged memory it builds on, and the others that may still be needed. Those
    stay; the rest is deleted. Since the aggregator also names the jobs, only the last `jobs` of them are kept.
    """

    def __init__(self, folder: Path, jobs: int | None = None) -> None:
        self.folder, self.jobs = folder, jobs

    def _path(self, job: str, ask: str) -> Path:
        return self.folder / job / f"{quote(ask, safe='')}.safetensors"

    def recall(self, job: str, tip: str | None, others: Iterable[str | None] = ()) -> Memory | None:
        """Load the memory staged under the ask `tip`; None if it was lost.

        Memory staged under neither `tip` nor `others` is deleted.
        """
        keep = {self._path(job, ask) for ask in (tip, *others) if ask is not None}
        for path in (self.folder / job).glob("*.safetensors"):
            if path not in keep:
                disk.unlink(path)
                reach("party.forgot")
        if tip is None:
            return {}
        try:
            memory: Memory | None = self.get(job, self._path(job, tip).name)
        except (OSError, DataError):
            return None
        return memory

    def stage(self, job: str, ask: str, memory: Memory) -> None:
        """Store memory to be used if this ask's reply is fused; it is on disk on return."""
        self.put(job, self._path(job, ask).name, memory)

    def put(self, job: str, name: str, tree: Any) -> None:
        """Store a file beside the memory of a job; it is deleted when the job is forgotten."""
        path = self.folder / job / name
        disk.make_folder(path.parent)
        disk.put(path, append_checksum(codec.pieces(tree)), steps("memory"))
        if self.jobs is not None:
            self._forget_jobs(job, self.jobs)

    def get(self, job: str, name: str) -> Any:
        """Load a file beside the memory of a job; None if there is none, and a DataError if it is damaged."""
        path = self.folder / job / name
        return codec.decode(strip_checksum(path.read_bytes())) if path.exists() else None

    def _forget_jobs(self, current: str, most: int) -> None:
        """Delete the memory of the jobs that staged longest ago, so that at most `most` jobs remain."""
        others = [path for path in self.folder.iterdir() if path.is_dir() and path.name != current]
        for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: max(0, len(others) + 1 - most)]:
            for file in path.iterdir():
                disk.unlink(file)
            path.rmdir()
