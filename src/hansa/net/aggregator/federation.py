"""A federation's folder at the aggregator: `federation.toml`, the certificate authority, tokens, and the state."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hansa.core import disk
from hansa.core.errors import ConfigError
from hansa.core.registry import fill
from hansa.net.audit.evidence import Notary
from hansa.net.transport import certificates, keys
from hansa.net.transport.client import https_url
from hansa.net.transport.limits import Limits
from hansa.net.transport.names import check_distinct, valid_name
from hansa.net.transport.tokens import Token, new_token
from hansa.track.tracker import Tracker, trackers

LOG_DAYS = 3650  # that the certificate of the log's key lasts
SERVER_DAYS = 365  # that the aggregator's own certificate lasts; it is made anew as it starts
TOML = """\
# The federation {name}. `hansa serve {folder}/federation.toml` runs its aggregator.
name = "{name}"
parties = [{parties}]  # a party's number is its place here; new ones are added by `hansa invite`
url = "{url}"  # where parties and the operator reach the aggregator

[limits]
# connections = 16384     # in all; a quarter of them without a certificate
# per_address = 512       # connections from one address (IPv6: a /64); raise it for parties behind one NAT or balancer
# handshakes = 256        # TLS handshakes at the same time, an eighth of them of one address; others wait
# handshake = 10          # seconds that one may take
# head = 10               # seconds that the head of a request may take
# stall = 30              # seconds for every 128 KiB of a body to come, or of an answer to be taken
# idle = 25               # seconds after which a connection is closed on which nothing is asked
# stranger_rate = 20      # connections and requests a second without a certificate, from one address
# stranger_burst = 200    # of them that may come at once
# wrong_token = 10        # what a wrong enrolment token costs of them
# party_connections = 16  # of one certificate, at the same time
# party_requests = 8      # of one certificate, at the same time
# party_rate = 200        # requests a second of one certificate
# party_burst = 1000      # of them that may come at once
# bodies = 536870912      # bytes of request bodies in memory, in all; a quarter of them of one certificate
# shutdown = 20           # seconds that requests under way have to end when the aggregator shuts down

[serve]
host = "{host}"  # the address of this machine to listen on; `hansa serve --listen` goes before it
port = {port}
# absent_after = 300  # seconds without a word after which a party is not waited for
# poll = 300          # seconds that a party's question for work is held open, at most: 25, and longer for many parties
# lease = 60          # seconds that a party's second instance leaves the work of the first alone
# jobs = 4            # that run at the same time; others wait
# min_free = 268435456  # bytes of the disk that uploads leave free, for the record and for checkpoints
# functions = []      # models of your own that a job may name: ["my_models:net"]
admin = "{admin}"  # the live page, health, readiness and Prometheus metrics over plain HTTP; "" for none
# admin_open = false  # whether `admin` may be an address that other machines reach
# admin_hosts = []    # names under which the live page may be reached there, beside addresses

# [track.mlflow]        # every job is a run there; also jsonl, tensorboard (docs: tracking)
# uri = "http://127.0.0.1:5000"
"""
ADMIN_TOKEN = "admin-token"  # its file
ADMIN = 9464  # the admin port beside port 8443


@dataclass(frozen=True)
class Serve:
    """The [serve] table."""

    host: str = "0.0.0.0"
    port: int = 8443
    absent_after: float = 300.0
    poll: float = 300.0
    lease: float = 60.0
    jobs: int = 4
    functions: tuple[str, ...] = ()
    min_free: int = 2**28
    admin: str = f"127.0.0.1:{ADMIN}"
    admin_open: bool = False
    admin_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must lie in 0..65535, got {self.port}")
        if self.admin:
            host, port = self.admin_at
            if not self.admin_open and not _is_loopback(host):
                raise ConfigError(
                    f"admin: others than this machine could reach {host}:{port}, where there are neither TLS nor "
                    "certificates; use 127.0.0.1, or set admin_open = true if the network is closed to them"
                )
        for name in ("absent_after", "poll", "lease", "jobs"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.min_free < 0:
            raise ConfigError(f"min_free must not be negative, got {self.min_free}")

    @property
    def admin_at(self) -> tuple[str, int]:
        """Host and port of the admin listener."""
        host, port = _address(self.admin, None) or ("", None)
        if not host or port is None:
            raise ConfigError(
                f'admin: expected HOST:PORT as in 127.0.0.1:{ADMIN}, or "" for none; got {self.admin[:80]!r}'
            )
        return host, port

    def listening(self, listen: str | None = None, admin: str | None = None) -> Serve:
        """The table with other addresses to listen on: ADDRESS or ADDRESS:PORT for parties, HOST:PORT for the admin."""
        at = (self.host, self.port) if listen is None else _address(listen, self.port)
        if at is None or at[1] is None:
            raise ConfigError(
                f"--listen: expected ADDRESS or ADDRESS:PORT of this machine, as in 10.0.0.5, 127.0.0.1:8443 or "
                f"[::]:8443; got {str(listen)[:80]!r}"
            )
        return dataclasses.replace(self, host=at[0], port=at[1], admin=self.admin if admin is None else admin)


def _address(text: str, port: int | None) -> tuple[str, int | None] | None:
    """The host and port of HOST:PORT, [HOST]:PORT or HOST, which has that port; None where it is none of them."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text)), port  # an IPv6 address needs no brackets where no port follows
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::([0-9]{1,5}))?", text)
    if found is None or int(found[3] or 0) > 65535:
        return None
    return found[1] or found[2], port if found[3] is None else int(found[3])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class FederationFolder:
    """What `federation.toml` says, and the files beside it."""

    name: str
    parties: tuple[str, ...]
    url: str
    serve: Serve = Serve()
    limits: Limits = Limits()
    track: tuple[Tracker, ...] = ()
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        valid_name(self.name)
        for name in self.parties:
            valid_name(name)
        twice = [name for name, count in Counter(self.parties).items() if count > 1]
        if twice:
            raise ConfigError(f"parties: {min(twice)!r} is there twice")
        check_distinct(self.parties)
        https_url(self.url)

    @classmethod
    def open(cls, path: str | Path) -> FederationFolder:
        """The federation of a `federation.toml`, or of the folder that holds one."""
        path = Path(path)
        path = path / "federation.toml" if path.is_dir() else path
        try:
            tree = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"there is no file {path}; `hansa init-federation NAME` makes one") from None
        except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, a number too long
            raise ConfigError(f"cannot read {path}: {error}") from None
        for name in ("serve", "limits"):
            if not isinstance(tree.get(name, {}), dict):
                raise ConfigError(f"{path}: {name} must be a table, which begins with the line [{name}]")
        serve = fill(Serve, tree.pop("serve", {}), where=f"{path}: serve")
        limits = fill(Limits, tree.pop("limits", {}), where=f"{path}: limits")
        track = trackers(tree.pop("track", None), where=f"{path}: track")
        for name in tree:
            if name not in ("name", "parties", "url"):
                raise ConfigError(
                    f"{path}: unknown field {name!r}; known: name, parties, url and the tables [serve], [limits], "
                    "[track]"
                )
        federation: FederationFolder = fill(cls, tree, where=str(path))
        return dataclasses.replace(federation, serve=serve, limits=limits, track=track, folder=path.parent)

    def read(self, name: str) -> bytes:
        """One of the folder's public files."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {self.folder / name}: {error.strerror}") from error

    def private(self, name: str) -> Path:
        """One of its private files, which nobody else may read."""
        keys.read_private(self.folder / name)
        return self.folder / name

    def token(self, party: str) -> Token | None:
        """The token that was made for a party with the federation, if it still lies there."""
        path = self.folder / "tokens" / f"{party}.token"
        if not path.exists():
            return None
        try:
            return Token.parse(keys.read_private(path).decode())
        except (keys.IdentityError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}; remove it, and make a new one with `hansa invite`") from None

    def check(self) -> None:
        """That the authority's key and certificate and the operator's certificate are what they were; the error names
        the file that is not."""
        authority = self.folder / "ca.pem"
        key, shown = keys.read_key(self.folder / "ca.key"), certificates.read_certificate(authority, authority)
        if not certificates.matches_key(key, shown):
            raise ConfigError(f"the key {self.folder / 'ca.key'} and the certificate {authority} do not go together")
        certificates.read_certificate(self.folder / "operator.pem", authority)

    def issue(self, key: keys.PublicKey, name: str, role: str, days: int, hosts: Sequence[str] = ()) -> bytes:
        """A certificate by the federation's authority."""
        authority = keys.read_key(self.folder / "ca.key")
        return certificates.issue(authority, self.read("ca.pem"), key, name, role, self.name, days, hosts)

    def notary(self) -> Notary:
        """The key that signs the log, with the certificates that show whose it is."""
        if not any((self.folder / name).exists() for name in ("log.pem", "log.key")):
            raise ConfigError(
                f"{self.folder} has no log.key and no log.pem, as federations that an older version of hansa made; "
                "finish its jobs with the version that made it, or make a new federation with `hansa init-federation` "
                "and enrol the parties again"
            )
        authority, certificate = self.read("ca.pem"), self.read("log.pem")
        key = keys.read_key(self.folder / "log.key")
        if certificates.verify_certificate(certificate, authority, "log", self.name).key != key.public_key():
            raise ConfigError(f"{self.folder / 'log.pem'} is not the certificate of {self.folder / 'log.key'}")
        return Notary(self.name, key, certificate, authority)

    def renew_server(self) -> None:
        """A fresh certificate for the aggregator itself, for the hosts in `hosts`."""
        hosts = self.read("hosts").decode().split()
        key = keys.new_key()
        certificate = self.issue(key.public_key(), "aggregator", "server", SERVER_DAYS, hosts)
        keys.write_private(self.folder / "server.key", keys.key_bytes(key))
        disk.put(self.folder / "server.pem", [certificate], mode=disk.SHARED)


def init(folder: Path, name: str, parties: Sequence[str], hosts: Sequence[str], port: int,
         listen: str | None = None) -> FederationFolder:  # fmt: skip
    """Make a new federation's folder: its file, its authority, the operator's key and a token for each party.

    `hosts` are the names under which parties reach the aggregator, `listen` the address of this machine (and another
    port, where one is mapped to it) on which it listens: by default all addresses.
    """
    url_host = hosts[0] if hosts else "localhost"
    url = f"https://{f'[{url_host}]' if ':' in url_host else url_host}:{port}"
    federation = FederationFolder(name, tuple(parties), url, Serve(port=port).listening(listen), folder=folder)
    if not parties:
        raise ConfigError("a federation needs parties: --parties cleveland,hungary")
    authority, certificate = certificates.make_ca(name)
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))
    certificates.issue(
        authority, certificate, keys.new_key().public_key(), "aggregator", "server", name, 1, names
    )  # all are hosts
    try:
        disk.make_folder(folder.parent)
        folder.mkdir(mode=0o700)
        disk.sync_folder(folder.parent)
    except FileExistsError:
        raise ConfigError(f"{folder} exists already; choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    disk.put(folder / "ca.pem", [certificate], mode=disk.SHARED)
    keys.write_private(folder / "ca.key", keys.key_bytes(authority))
    disk.put(folder / "hosts", ["\n".join([*names, ""]).encode()], mode=disk.SHARED)
    federation.renew_server()
    log = keys.new_key()
    keys.write_private(folder / "log.key", keys.key_bytes(log))
    disk.put(folder / "log.pem", [federation.issue(log.public_key(), "log", "log", LOG_DAYS)], mode=disk.SHARED)
    operator = keys.new_key()
    keys.write_private(folder / "operator.key", keys.key_bytes(operator))
    shown = federation.issue(operator.public_key(), "operator", "operator", 3650)
    disk.put(folder / "operator.pem", [shown], mode=disk.SHARED)
    new_admin_token(folder)
    disk.make_folder(folder / "tokens")
    for party in parties:
        token = new_token(party, certificate)
        keys.write_private(folder / "tokens" / f"{party}.token", token.text().encode() + b"\n")
    text = TOML.format(name=name, folder=folder, parties=", ".join(f'"{p}"' for p in parties), url=url,
                       host=federation.serve.host, port=federation.serve.port, admin=_admin_beside(port))  # fmt: skip
    disk.put(folder / "federation.toml", [text.encode()], mode=disk.SHARED)  # last: with it the federation is there
    return federation


def new_admin_token(folder: Path) -> Path:
    """Make the token with which jobs are started and stopped on the live page, in the place of the one that was; gives
    its file."""
    path = folder / ADMIN_TOKEN
    keys.write_private(path, secrets.token_urlsafe(32).encode() + b"\n")
    return path


def _admin_beside(port: int) -> str:
    """Where the admin listener of a new federation is: federations on one machine that differ in their port do not get
    in each other's way. Beside a port of the range that systems hand out it is any that is free."""
    return f"127.0.0.1:{port + ADMIN - 8443 if 0 < port < 2**15 else 0}"
