"""A party's own folder: its key, which is born here and never leaves, its certificate, its policy, and its memory."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hansa.core import codec, disk
from hansa.core.crash_points import reach, steps
from hansa.core.errors import ConfigError, DataError
from hansa.core.op import Memory
from hansa.net.party.policy import Policy
from hansa.net.transport import certificates, keys
from hansa.net.transport.client import Client, enrol, https_url
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.tokens import Token
from hansa.net.transport.wire import IssuedCertificate, unpack


class PartyStore:
    """The folder. One process at a time works in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            disk.make_folder(folder)
            taken = f"another process runs this party in {folder}; stop it, or give another --state"
            self._lock = disk.lock(folder / ".lock", taken)
        except OSError as error:
            raise ConfigError(f"cannot work in the folder {folder}: {error.strerror}") from None
        self.policy = Policy.read(folder / "party.toml")
        for cut_off in folder.glob("fetch-*"):  # what was being fetched when the last process ended
            shutil.rmtree(cut_off, ignore_errors=True)
        for place in (folder, *folder.glob("memory/*")):
            disk.sweep(place)

    def close(self) -> None:
        """Let another process work here."""
        self._lock.close()

    @property
    def enrolled(self) -> bool:
        return (self.folder / "party.json").exists()

    def registration(self) -> dict[str, Any]:
        """The party's name, its federation, where the aggregator is, and which instance of the party this is."""
        try:
            tree: dict[str, Any] = json.loads((self.folder / "party.json").read_text())
            if not {"party", "federation", "url", "instance"} <= set(tree):
                raise ValueError("it does not say whose it is")
            if tree.pop("sum", None) not in (None, _sum(tree)):
                raise ValueError("it is damaged")
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.folder / 'party.json'} cannot be read: {error}; enrol again, with the aggregator's URL "
                "and a new token"
            ) from None
        return tree

    def enrolled_with(self, token: Token) -> bool:
        """Whether this is the token that the party enrolled with; not where that cannot be read any more: enrolling
        again writes it anew."""
        return bool(self._registered("token") == token.digest())

    def _registered(self, name: str) -> Any:
        """What `party.json` says about something; None where it does not, or cannot be read."""
        try:
            return self.registration().get(name)
        except ConfigError:
            return None

    async def enrol(self, url: str, token: Token) -> None:
        """Make a key, have it certified, keep both. Interrupted, it can be done again with the same token; with another
        token the party enrols anew, and keeps its policy and its memory."""
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
        """Set aside what belongs to a federation with another authority: its log's certificate, receipts and memory."""
        before = self.folder / "ca.pem"
        if before.exists() and before.read_bytes() != authority:
            mark = hashlib.sha256(before.read_bytes()).hexdigest()[:8]
            disk.set_aside([self.folder / name for name in ("log.pem", "receipts", "memory")],
                           self.folder / f"before-{mark}")  # fmt: skip

    def _pending_key(self, name: str) -> keys.PrivateKey:
        """A key that is not in use yet; one that was made and not certified is taken again."""
        path = self.folder / name
        if not path.exists():
            keys.write_private(path, keys.key_bytes(keys.new_key()))
        return keys.load_key(keys.read_private(path))

    def client(self, url: str | None = None) -> Client:
        """A connection to the aggregator with this party's certificate."""
        key, authority = self.folder / "key.pem", self.folder / "ca.pem"
        for path in (authority, self.folder / "cert.pem"):  # OpenSSL does not look whether its own side is whole
            certificates.read_certificate(path, authority)
        tls = client_context(authority, self.folder / "cert.pem", key)
        return Client(url or self.registration()["url"], tls, keys.read_key(key))

    def identity(self) -> certificates.Identity:
        return certificates.identity_of_pem(
            certificates.read_certificate(self.folder / "cert.pem", self.folder / "ca.pem")
        )

    async def rotate(self, client: Client) -> None:
        """A new key and a certificate for it. The old ones are good until the new one is used."""
        key = self._pending_key("key.new.pem")
        _, data = await client.call(
            "POST", "/v1/rotate", certificates.make_request(key, self.registration()["party"]), About()
        )
        keys.write_private(self.folder / "cert.new.pem", unpack(data, IssuedCertificate).certificate)
        reach("rotation.certified")
        self.install_new_keys()

    def install_new_keys(self) -> None:
        """Take up a new key whose certificate has come; after a crash in the middle too."""
        enrolled = self.folder / "cert.enrol.pem"
        known = self._registered("certificate") if enrolled.exists() else None
        if known is not None and known == certificates.fingerprint(enrolled.read_bytes()):
            self._install("enrol")  # not if it was cut off before the party was written down
        self._install("new")

    def _install(self, which: str) -> None:
        fresh, certificate = self.folder / f"key.{which}.pem", self.folder / f"cert.{which}.pem"
        if not certificate.exists():
            return
        if fresh.exists():
            disk.rename(fresh, self.folder / "key.pem")
            reach("rotation.key")
        self._keep_former_certificate()
        disk.sync_folder(self.folder)  # or a power failure could leave the certificate without its key
        reach("rotation.kept")
        disk.rename(certificate, self.folder / "cert.pem")
        reach("rotation.certificate")
        disk.sync_folder(self.folder)
        reach("rotation.settled")

    def _keep_former_certificate(self) -> None:
        """Keep the certificate whose time is over: receipts of what its key signed may still come."""
        try:
            certificate = (self.folder / "cert.pem").read_bytes()
        except FileNotFoundError:
            return
        path = self.folder / "former.pem"
        before = path.read_bytes() if path.exists() else b""
        if certificate not in before:
            keys.write_private(path, before + certificate)


def _sum(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def append_checksum(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """A file's pieces with their hash at the end: nobody else knows it."""
    running = hashlib.sha256()
    for piece in pieces:
        running.update(piece)
        yield piece
    yield running.digest()


def strip_checksum(data: bytes) -> bytes:
    """What was append_checksum; a DataError where it is not what it was."""
    body = data[:-32]
    if hashlib.sha256(body).digest() != data[-32:]:
        raise DataError("the file is damaged")
    return body


class PartyMemory:
    """What a party remembers, by job and by the ask under which it was staged; it changes only when that was fused.

    The aggregator says with every ask under which earlier ask the memory lies that the party is to build on, and which
    others it may still need. Those stay; the rest is forgotten. The aggregator names the jobs too, so only the last
    `jobs` of them are remembered.
    """

    def __init__(self, folder: Path, jobs: int | None = None) -> None:
        self.folder, self.jobs = folder, jobs

    def _path(self, job: str, ask: str) -> Path:
        return self.folder / job / f"{quote(ask, safe='')}.safetensors"

    def recall(self, job: str, tip: str | None, others: Iterable[str | None] = ()) -> Memory | None:
        """The memory that an ask builds on, staged under `tip`; None where it was lost. What was staged neither there
        nor under `others` is forgotten."""
        keep = {self._path(job, ask) for ask in (tip, *others) if ask is not None}
        for path in (self.folder / job).glob("*.safetensors"):
            if path not in keep:
                disk.unlink(path)
                reach("party.forgot")
        if tip is None:
            return {}
        try:
            memory: Memory = codec.decode(strip_checksum(self._path(job, tip).read_bytes()))
        except (OSError, DataError):
            return None
        return memory

    def stage(self, job: str, ask: str, memory: Memory) -> None:
        """Keep what is to be remembered if this ask's reply is fused; on disk before this returns."""
        path = self._path(job, ask)
        disk.make_folder(path.parent)
        disk.put(path, append_checksum(codec.pieces(memory)), steps("memory"))
        if self.jobs is not None:
            self._forget_jobs(job, self.jobs)

    def _forget_jobs(self, current: str, most: int) -> None:
        """Forget the jobs that staged something longest ago, so that at most so many are left."""
        others = [path for path in self.folder.iterdir() if path.is_dir() and path.name != current]
        for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: max(0, len(others) + 1 - most)]:
            for file in path.iterdir():
                disk.unlink(file)
            path.rmdir()
