"""A federation's folder at the aggregator: `federation.toml`, the certificate authority, tokens, and the state."""

from __future__ import annotations

import dataclasses
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hansa.core.errors import ConfigError
from hansa.core.registry import fill
from hansa.net import keys
from hansa.net.client import https_url
from hansa.net.evidence import Notary

LOG_DAYS = 3650  # that the certificate of the log's key lasts
SERVER_DAYS = 365  # that the aggregator's own certificate lasts; it is made anew as it starts
TOML = """\
# The federation {name}. `hansa serve {folder}/federation.toml` runs its aggregator.
name = "{name}"
parties = [{parties}]  # a party's number is its place here; new ones are added by `hansa invite`
url = "{url}"  # where parties and the operator reach the aggregator

[serve]
host = "{host}"  # the address to listen on
port = {port}
# absent_after = 300  # seconds without a word after which a party is not waited for
# poll = 300          # seconds that a party's question for work is held open, at most: 25, and longer for many parties
# lease = 60          # seconds that a party's second instance leaves the work of the first alone
# jobs = 4            # that run at the same time; others wait
# functions = []      # models of your own that a job may name: ["my_models:net"]
"""


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

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must lie in 0..65535, got {self.port}")
        for name in ("absent_after", "poll", "lease", "jobs"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Federation:
    """What `federation.toml` says, and the files beside it."""

    name: str
    parties: tuple[str, ...]
    url: str
    serve: Serve = Serve()
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        keys.valid_name(self.name)
        for name in self.parties:
            keys.valid_name(name)
        twice = [name for name, count in Counter(self.parties).items() if count > 1]
        if twice:
            raise ConfigError(f"parties: {min(twice)!r} is there twice")
        https_url(self.url)

    @classmethod
    def open(cls, path: str | Path) -> Federation:
        """The federation of a `federation.toml`, or of the folder that holds one."""
        path = Path(path)
        path = path / "federation.toml" if path.is_dir() else path
        try:
            tree = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"there is no file {path}; `hansa init-federation NAME` makes one") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        serve = fill(Serve, tree.pop("serve", {}), where=f"{path}: serve")
        for name in tree:
            if name not in ("name", "parties", "url"):
                raise ConfigError(f"{path}: unknown field {name!r}; known: name, parties, url and the table [serve]")
        federation: Federation = fill(cls, tree, where=str(path))
        return dataclasses.replace(federation, serve=serve, folder=path.parent)

    def read(self, name: str) -> bytes:
        """One of the folder's public files."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {self.folder / name}: {error.strerror}") from None

    def private(self, name: str) -> Path:
        """One of its private files, which nobody else may read."""
        keys.read_private(self.folder / name)
        return self.folder / name

    def token(self, party: str) -> keys.Token | None:
        """The token that was made for a party with the federation, if it still lies there."""
        path = self.folder / "tokens" / f"{party}.token"
        return keys.Token.of(keys.read_private(path).decode()) if path.exists() else None

    def issue(self, key: keys.PublicKey, name: str, role: str, days: int, hosts: Sequence[str] = ()) -> bytes:
        """A certificate by the federation's authority."""
        authority = keys.key_of(keys.read_private(self.folder / "ca.key"))
        return keys.issue(authority, self.read("ca.pem"), key, name, role, self.name, days, hosts)

    def notary(self) -> Notary:
        """The key that signs the log, with the certificates that show whose it is."""
        authority, certificate = self.read("ca.pem"), self.read("log.pem")
        key = keys.key_of(keys.read_private(self.folder / "log.key"))
        if keys.certified(certificate, authority, "log", self.name).key != key.public_key():
            raise ConfigError(f"{self.folder / 'log.pem'} is not the certificate of {self.folder / 'log.key'}")
        return Notary(self.name, key, certificate, authority)

    def renew_server(self) -> None:
        """A fresh certificate for the aggregator itself, for the hosts in `hosts`."""
        hosts = self.read("hosts").decode().split()
        key = keys.new_key()
        certificate = self.issue(key.public_key(), "aggregator", "server", SERVER_DAYS, hosts)
        keys.write_private(self.folder / "server.key", keys.key_bytes(key))
        (self.folder / "server.pem").write_bytes(certificate)


def init(folder: Path, name: str, parties: Sequence[str], hosts: Sequence[str], port: int) -> Federation:
    """Make a new federation's folder: its file, its authority, the operator's key and a token for each party."""
    url_host = hosts[0] if hosts else "localhost"
    url = f"https://{f'[{url_host}]' if ':' in url_host else url_host}:{port}"
    federation = Federation(name, tuple(parties), url, Serve(port=port), folder)
    if not parties:
        raise ConfigError("a federation needs parties: --parties cleveland,hungary")
    authority, certificate = keys.make_ca(name)
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))
    keys.issue(
        authority, certificate, keys.new_key().public_key(), "aggregator", "server", name, 1, names
    )  # all are hosts
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise ConfigError(f"{folder} exists already; choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    (folder / "ca.pem").write_bytes(certificate)
    keys.write_private(folder / "ca.key", keys.key_bytes(authority))
    (folder / "hosts").write_text("\n".join(names) + "\n")
    federation.renew_server()
    log = keys.new_key()
    keys.write_private(folder / "log.key", keys.key_bytes(log))
    (folder / "log.pem").write_bytes(federation.issue(log.public_key(), "log", "log", LOG_DAYS))
    operator = keys.new_key()
    keys.write_private(folder / "operator.key", keys.key_bytes(operator))
    (folder / "operator.pem").write_bytes(federation.issue(operator.public_key(), "operator", "operator", 3650))
    (folder / "tokens").mkdir(mode=0o700)
    for party in parties:
        token = keys.new_token(party, certificate)
        keys.write_private(folder / "tokens" / f"{party}.token", token.text().encode() + b"\n")
    text = TOML.format(name=name, folder=folder, parties=", ".join(f'"{p}"' for p in parties), url=url,
                       host=federation.serve.host, port=port)  # fmt: skip
    (folder / "federation.toml").write_text(text)
    return federation
