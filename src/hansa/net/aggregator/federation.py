"""The folder of a federation at the aggregator: `federation.toml`, certificate authority, tokens and state."""

from __future__ import annotations

import dataclasses
import json
import secrets
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hansa.core.plain_data import fill
from hansa.net.aggregator.serve_settings import ADMIN, Serve
from hansa.net.audit.evidence import Notary
from hansa.net.transport import certificates, keys
from hansa.net.transport.client import https_url
from hansa.net.transport.limits import Limits
from hansa.net.transport.names import check_distinct, valid_name
from hansa.net.transport.tokens import Token, new_token
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError, nearest
from hansa.track.tracker import Tracker, trackers

LOG_DAYS = 3650  # validity of the certificate of the log's key
SERVER_DAYS = 365  # validity of the aggregator's own certificate, which is renewed at every start
TOML = """\
# The federation {name}. `hansa serve {folder}/federation.toml` runs its aggregator.
name = "{name}"
parties = [{parties}]  # a party's number is its position here; `hansa invite` adds new parties
url = "{url}"  # where parties and the operator reach the aggregator

[limits]
# connections = 16384     # in all; a quarter of them without a certificate
# per_address = 512       # connections from one address (IPv6: a /64); raise it for parties behind one NAT or balancer
# handshakes = 256        # TLS handshakes at the same time, at most an eighth of them from one address; others wait
# handshake = 10          # seconds for one handshake
# head = 10               # seconds for the head of a request
# stall = 30              # seconds for every 128 KiB of a request's body or of a response
# idle = 25               # seconds after which a connection without requests is closed
# stranger_rate = 20      # connections and requests per second without a certificate, from one address
# stranger_burst = 200    # of them at once
# wrong_token = 10        # cost of a wrong enrolment token, in such requests
# party_connections = 16  # of one certificate, at the same time
# party_requests = 8      # of one certificate, at the same time
# party_rate = 200        # requests per second of one certificate
# party_burst = 1000      # of them at once
# bodies = 536870912      # bytes of request bodies in memory, in all; at most a quarter of one certificate
# shutdown = 20           # seconds for open requests to end when the aggregator shuts down

[serve]
host = "{host}"  # the address of this machine to listen on; `hansa serve --listen` overrides it
port = {port}
# absent_after = 300  # seconds without contact after which the aggregator does not wait for a party
# poll = 300          # most seconds that a party's poll for work is held open: 25, and longer for many parties
# lease = 60          # seconds before another instance of a party may take over its ask
# jobs = 4            # jobs that run at the same time; others wait
# min_free = 268435456  # bytes that uploads leave free on the disk, for the ledger and for checkpoints
# functions = []      # parts of your own that a job may name: ["my_models:net", "mine:MyFusion"]
# evidence = []       # the command that makes attestation evidence: ["/opt/evidence"] (docs: attestation)
admin = "{admin}"  # the live page, health, readiness and Prometheus metrics over plain HTTP; "" for none
# admin_open = false  # whether `admin` may be an address that other machines can reach
# admin_hosts = []    # host names under which the live page may be opened, besides addresses

{relays}# [track.mlflow]        # track every job as a run; also jsonl, tensorboard (docs: tracking)
# uri = "http://127.0.0.1:5000"
"""
ADMIN_TOKEN = "admin-token"  # file of the admin token


@dataclass(frozen=True)
class FederationFolder:
    """The settings of `federation.toml`, and the files beside it."""

    name: str
    parties: tuple[str, ...]
    url: str
    serve: Serve = Serve()
    limits: Limits = Limits()
    track: tuple[Tracker, ...] = ()
    relays: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by relay: the parties behind it
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        valid_name(self.name)
        check_relays(self.relays, self.parties)
        for name in self.parties:
            valid_name(name)
        twice = [name for name, count in Counter(self.parties).items() if count > 1]
        if twice:
            raise ConfigError(f"parties: {min(twice)!r} is listed twice")
        check_distinct(self.parties)
        https_url(self.url)

    @classmethod
    def open(cls, path: str | Path) -> FederationFolder:
        """Open the federation of a `federation.toml`, or of the folder that holds one."""
        path = Path(path)
        path = path / "federation.toml" if path.is_dir() else path
        try:
            tree = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"there is no file {path}; `hansa init-federation NAME` makes one") from None
        except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, a too long number
            raise ConfigError(f"cannot read {path}: {error}") from None
        for name in ("serve", "limits", "relays"):
            if not isinstance(tree.get(name, {}), dict):
                raise ConfigError(f"{path}: {name} must be a table, with the heading [{name}]")
        serve = fill(Serve, tree.pop("serve", {}), where=f"{path}: serve")
        limits = fill(Limits, tree.pop("limits", {}), where=f"{path}: limits")
        track = trackers(tree.pop("track", None), where=f"{path}: track")
        relays = _relays(tree.pop("relays", {}), path)
        for name in tree:
            if name not in ("name", "parties", "url"):
                raise ConfigError(
                    f"{path}: unknown field {name!r}; known: name, parties, url and the tables [serve], [limits], "
                    "[relays], [track]"
                )
        federation: FederationFolder = fill(cls, tree, where=str(path))
        return dataclasses.replace(
            federation, serve=serve, limits=limits, track=track, relays=relays, folder=path.parent
        )

    @property
    def connecting(self) -> tuple[str, ...]:
        """Who connects to this aggregator: the parties that are behind no relay, and the relays."""
        inner = {name for leaves in self.relays.values() for name in leaves}
        return (*(name for name in self.parties if name not in inner), *self.relays)

    def read(self, name: str) -> bytes:
        """The content of one of the folder's public files."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {self.folder / name}: {error.strerror}") from error

    def private(self, name: str) -> Path:
        """The path of one of the folder's private files; a ConfigError if other users may read it."""
        keys.read_private(self.folder / name)
        return self.folder / name

    def token(self, party: str) -> Token | None:
        """The token that was made for a party with the federation, if its file still exists."""
        path = self.folder / "tokens" / f"{party}.token"
        if not path.exists():
            return None
        try:
            return Token.parse(keys.read_private(path).decode())
        except (keys.IdentityError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}; remove it, and make a new one with `hansa invite`") from None

    def check(self) -> None:
        """Check that the authority's key and certificate match, and the operator's certificate; the error names the
        invalid file."""
        authority = self.folder / "ca.pem"
        key, shown = keys.read_key(self.folder / "ca.key"), certificates.read_certificate(authority, authority)
        if not certificates.matches_key(key, shown):
            raise ConfigError(f"the key {self.folder / 'ca.key'} does not match the certificate {authority}")
        certificates.read_certificate(self.folder / "operator.pem", authority)

    def issue(self, key: keys.PublicKey, name: str, role: str, days: int, hosts: Sequence[str] = ()) -> bytes:
        """Issue a certificate by the federation's authority."""
        authority = keys.read_key(self.folder / "ca.key")
        return certificates.issue(authority, self.read("ca.pem"), key, name, role, self.name, days, hosts)

    def notary(self) -> Notary:
        """The key that signs the log, with its certificates."""
        if not any((self.folder / name).exists() for name in ("log.pem", "log.key")):
            raise ConfigError(
                f"{self.folder} has no log.key and no log.pem: an older version of hansa made this federation; "
                "finish its jobs with the version that made it, or make a new federation with `hansa init-federation` "
                "and enrol the parties again"
            )
        authority, certificate = self.read("ca.pem"), self.read("log.pem")
        key = keys.read_key(self.folder / "log.key")
        if certificates.verify_certificate(certificate, authority, "log", self.name).key != key.public_key():
            raise ConfigError(f"{self.folder / 'log.pem'} is not the certificate of {self.folder / 'log.key'}")
        return Notary(self.name, key, certificate, authority)

    def renew_server(self) -> None:
        """Make a new certificate for the aggregator itself, for the host names in the file `hosts`."""
        hosts = self.read("hosts").decode().split()
        key = keys.new_key()
        certificate = self.issue(key.public_key(), "aggregator", "server", SERVER_DAYS, hosts)
        keys.write_private(self.folder / "server.key", keys.key_bytes(key))
        disk.put(self.folder / "server.pem", [certificate], mode=disk.SHARED)


def check_relays(relays: Mapping[str, Sequence[str]], parties: Sequence[str]) -> None:
    """Raise a ConfigError unless every party is behind at most one relay, and the relays have names of their own."""
    above: dict[str, str] = {}
    check_distinct([*parties, *relays])
    for relay, leaves in relays.items():
        valid_name(relay)
        if relay in parties:
            raise ConfigError(f"relays: {relay!r} is also a party; give the relay another name")
        if not leaves:
            raise ConfigError(f"relays.{relay}: no party is behind this relay; list its parties, or leave it out")
        for name in leaves:
            if name == relay:
                raise ConfigError(f"relays.{relay}: a relay cannot be behind itself; list the parties behind it")
            if name not in parties:
                raise ConfigError(
                    f"relays.{relay}: there is no party {name!r}{nearest(name, parties)}; add it to parties"
                )
            if above.setdefault(name, relay) != relay:
                raise ConfigError(
                    f"relays: {name!r} is behind two relays, {above[name]} and {relay}, and its replies would count "
                    "twice; list it behind one of them"
                )
        if len(set(leaves)) < len(leaves):
            raise ConfigError(f"relays.{relay}: a party is listed twice")


def _relays(tree: Mapping[str, Any], path: Path) -> dict[str, tuple[str, ...]]:
    for name, leaves in tree.items():
        if not isinstance(leaves, list) or not all(isinstance(leaf, str) for leaf in leaves):
            raise ConfigError(f'{path}: relays.{name} must be a list of parties, for example ["ann", "bob"]')
    return {name: tuple(leaves) for name, leaves in tree.items()}


def init(folder: Path, name: str, parties: Sequence[str], hosts: Sequence[str], port: int,
         listen: str | None = None, relays: Mapping[str, Sequence[str]] | None = None) -> FederationFolder:  # fmt: skip
    """Make a new federation's folder: its file, its authority, the operator's key and a token for each party.

    Parties behind relays (`relays`) get their tokens from their relay, and each relay gets one here. Parties reach the
    aggregator under the names in `hosts`. `listen` is the address of this machine (with another port, where one is
    mapped to it) on which the aggregator listens: by default all addresses.
    """
    url_host = hosts[0] if hosts else "localhost"
    url = f"https://{f'[{url_host}]' if ':' in url_host else url_host}:{port}"
    groups = {relay: tuple(leaves) for relay, leaves in (relays or {}).items()}
    serve = Serve(port=port, admin=_admin_beside(port)).listening(listen)
    federation = FederationFolder(name, tuple(parties), url, serve, relays=groups, folder=folder)
    if not parties:
        raise ConfigError("a federation needs parties: --parties cleveland,hungary")
    authority, certificate = certificates.make_ca(name)
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))
    certificates.issue(
        authority, certificate, keys.new_key().public_key(), "aggregator", "server", name, 1, names
    )  # checks that all names are valid hosts
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
    for party in federation.connecting:
        token = new_token(party, certificate)
        keys.write_private(folder / "tokens" / f"{party}.token", token.text().encode() + b"\n")
    text = TOML.format(name=name, folder=folder, parties=", ".join(f'"{p}"' for p in parties), url=url,
                       host=federation.serve.host, port=federation.serve.port, admin=federation.serve.admin,
                       relays=_relays_text(groups))  # fmt: skip
    disk.put(folder / "federation.toml", [text.encode()], mode=disk.SHARED)  # last: only now the folder is complete
    return federation


def _relays_text(relays: Mapping[str, Sequence[str]]) -> str:
    """The table [relays] of a new federation, if it has relays."""
    if not relays:
        return ""
    lines = [f"{relay} = [{', '.join(json.dumps(leaf) for leaf in leaves)}]" for relay, leaves in relays.items()]
    return "\n".join(["[relays]  # the parties behind each relay (docs: topologies/relays)", *lines, "", ""])


def new_admin_token(folder: Path) -> Path:
    """Make a new admin token, with which jobs are started and stopped on the live page; returns its file."""
    path = folder / ADMIN_TOKEN
    keys.write_private(path, secrets.token_urlsafe(32).encode() + b"\n")
    return path


def _admin_beside(port: int) -> str:
    """The admin address of a new federation. It depends on the port, so that several federations fit on one machine.
    For a port in the ephemeral range it is any free port."""
    return f"127.0.0.1:{port + ADMIN - 8443 if 0 < port < 2**15 else 0}"
