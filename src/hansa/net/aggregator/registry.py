"""Parties and their certificates: tokens, enrolment, rotation, revocation.

A certificate is accepted only while the ledger lists it as valid; the CA's signature is not enough. A new certificate
replaces the owner's older ones when it is first used, so that a lost response locks no party out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hansa.net.aggregator.federation import FederationFolder
from hansa.net.aggregator.ledger import Ledger, Writer
from hansa.net.transport import certificates, keys
from hansa.net.transport.names import check_distinct, valid_name
from hansa.net.transport.tokens import Token, new_token, secret_digest
from hansa.plumbing.errors import ConfigError, HansaError, nearest

DAYS = 90  # validity of a party's certificate
TOKEN_DAYS = 30  # validity of a token
DECLARE = "INSERT INTO parties (number, name) VALUES ((SELECT coalesce(max(max(number), -1), -1) + 1 FROM parties), ?)"
DECLARE_RELAY = (
    "INSERT INTO parties (number, name) VALUES ((SELECT coalesce(min(min(number), 0), 0) - 1 FROM parties), ?)"
)


class Denied(HansaError):
    """The client's identity is not valid, or it may not do this."""


class Registry:
    """Parties by name and number, and the valid certificates."""

    def __init__(self, federation: FederationFolder, ledger: Ledger) -> None:
        self.federation, self.ledger = federation, ledger
        self.relay_of = {leaf: relay for relay, leaves in federation.relays.items() for leaf in leaves}
        ledger.now(self._declare(federation.parties))
        ledger.now(
            _trust(certificates.identity_of_pem(federation.read("operator.pem")), federation.read("operator.pem"))
        )
        self._valid: dict[str, str] = {}  # fingerprint: state
        self.numbers: dict[str, int] = {}
        self.met: set[str] = set()  # parties that have joined
        self.reload()

    def reload(self) -> None:
        """Read everything from the ledger."""
        rows = self.ledger.all("SELECT fingerprint, state FROM certificates WHERE state IN ('new', 'valid')")
        self._valid = {row["fingerprint"]: row["state"] for row in rows}
        parties = self.ledger.all("SELECT name, number, joined FROM parties")
        self.numbers = {row["name"]: row["number"] for row in parties}
        self.met = {row["name"] for row in parties if row["joined"]}

    def reload_of(self, name: str) -> None:
        """Read one name from the ledger: cheap also when thousands of parties enrol."""
        for row in self.ledger.all("SELECT fingerprint, state FROM certificates WHERE name = ?", name):
            if row["state"] in ("new", "valid"):
                self._valid[row["fingerprint"]] = row["state"]
            else:
                self._valid.pop(row["fingerprint"], None)
        party = self.ledger.one("SELECT number, joined FROM parties WHERE name = ?", name)
        if party is not None:
            self.numbers[name] = party["number"]
            (self.met.add if party["joined"] else self.met.discard)(name)

    @property
    def names(self) -> list[str]:
        """The names of the parties, in the order of their numbers; relays are no parties, and have negative numbers."""
        return sorted((name for name, number in self.numbers.items() if number >= 0), key=self.numbers.__getitem__)

    def relays(self) -> dict[int, list[int]]:
        """The numbers of the parties behind each relay, by the relay's number."""
        return {self.number(relay): [self.number(leaf) for leaf in leaves]
                for relay, leaves in self.federation.relays.items()}  # fmt: skip

    def lapsed(self) -> set[str]:
        """The parties that cannot connect: they have no valid certificate and no valid token. A party behind a relay
        can connect if its relay can."""
        rows = self.ledger.all(
            "SELECT name FROM parties p WHERE NOT EXISTS (SELECT 1 FROM certificates WHERE name = p.name AND role = "
            "'party' AND state IN ('new', 'valid')) AND NOT EXISTS (SELECT 1 FROM tokens WHERE party = p.name AND "
            "void = 0 AND certificate IS NULL AND expires > ?)",
            time.time(),
        )
        lapsed = {row["name"] for row in rows}
        return {name for name in lapsed if self.relay_of.get(name, name) in lapsed}

    def number(self, name: str) -> int:
        if name not in self.numbers:
            raise ConfigError(f"there is no party {name!r}{nearest(name, self.numbers)}")
        return self.numbers[name]

    def _declare(self, parties: Sequence[str]) -> Callable[[Writer], None]:
        def change(db: Writer) -> None:
            _enter(db, parties)
            _enter(db, tuple(self.federation.relays), DECLARE_RELAY)
            for name in self.federation.connecting:
                if (token := self.federation.token(name)) is not None:
                    db.run("INSERT OR IGNORE INTO tokens (digest, party, expires) VALUES (?, ?, ?)",
                           token.digest(), name, time.time() + TOKEN_DAYS * 86400)  # fmt: skip

        return change

    def admits(self, identity: certificates.Identity) -> bool:
        """Whether a certificate is valid now."""
        return identity.fingerprint in self._valid and time.time() < identity.not_after

    def used(self, identity: certificates.Identity) -> Callable[[Writer], None] | None:
        """The change at the first use of a certificate: its owner's older ones end. None at later uses."""
        if self._valid.get(identity.fingerprint) != "new":
            return None

        def change(db: Writer) -> None:
            first = db.run("UPDATE certificates SET state = 'valid' WHERE fingerprint = ? AND state = 'new'",
                           identity.fingerprint).rowcount > 0  # fmt: skip
            if first:  # unless it was revoked meanwhile
                db.run("UPDATE certificates SET state = 'superseded' WHERE name = ? AND role = ? AND state = 'valid' "
                       "AND fingerprint != ?", identity.name, identity.role, identity.fingerprint)  # fmt: skip
                db.log("certificate in use", party=identity.name, certificate=identity.fingerprint)

        return change

    def joined(self, name: str) -> Callable[[Writer], bool]:
        """Note that a party has joined; True the first time."""

        def change(db: Writer) -> bool:
            first = db.run("UPDATE parties SET joined = 1 WHERE name = ? AND joined = 0", name).rowcount > 0
            if first:
                db.log("party joined", party=name)
            return first

        return change

    def enrol(self, secret: str, request: bytes) -> Callable[[Writer], tuple[str, bytes]]:
        """Issue a certificate for a token; returns the party's name and the PEM. A token is valid for one key; the same
        request again gets the same certificate."""
        name, key = certificates.read_request(request)
        digest, text = secret_digest(secret), key.public_bytes_raw().hex()

        def change(db: Writer) -> tuple[str, bytes]:
            token = db.one("SELECT party, expires, certificate, void FROM tokens WHERE digest = ?", digest)
            if token is None or token["party"] != name:
                raise Denied("unknown token for this party; ask the operator for a new one")
            if token["certificate"] is not None:
                issued = db.one("SELECT key, pem, state FROM certificates WHERE fingerprint = ?", token["certificate"])
                if issued is None or issued["key"] != text or issued["state"] not in ("new", "valid"):
                    raise Denied("the token was already used; ask the operator for a new one")
                return name, issued["pem"]
            if token["void"] or token["expires"] < time.time():
                raise Denied("the token has expired; ask the operator for a new one")
            pem, fingerprint = self._issue(db, key, name)
            db.run("UPDATE tokens SET certificate = ? WHERE digest = ?", fingerprint, digest)
            db.log("enrolled", party=name, certificate=fingerprint, pem=pem.decode())
            return name, pem

        return change

    def rotate(self, identity: certificates.Identity, request: bytes) -> Callable[[Writer], tuple[str, bytes]]:
        """Issue a certificate for a new key of the same party; the same request again gets the same one."""
        name, key = certificates.read_request(request)
        if name != identity.name:
            raise Denied(f"{identity.name} may not request a certificate for {name}")
        text = key.public_bytes_raw().hex()

        def change(db: Writer) -> tuple[str, bytes]:
            issued = db.one("SELECT pem FROM certificates WHERE key = ? AND name = ? AND state IN ('new', 'valid')",
                            text, name)  # fmt: skip
            if issued is not None:
                return name, issued["pem"]
            pem, fingerprint = self._issue(db, key, name)
            db.log("certificate rotated", party=name, certificate=fingerprint, pem=pem.decode())
            return name, pem

        return change

    def _issue(self, db: Writer, key: keys.PublicKey, name: str) -> tuple[bytes, str]:
        pem = self.federation.issue(key, name, "party", DAYS)
        identity = certificates.identity_of_pem(pem)
        db.run("INSERT INTO certificates VALUES (?, ?, 'party', 'new', ?, ?)", identity.fingerprint, name,
               key.public_bytes_raw().hex(), pem)  # fmt: skip
        return pem, identity.fingerprint

    def invite(self, name: str) -> tuple[Token, Callable[[Writer], None]]:
        """Make a token for a known or a new party; its unused older tokens become void."""
        token = new_token(valid_name(name), self.federation.read("ca.pem"))

        def change(db: Writer) -> None:
            _enter(db, [name])
            db.run("UPDATE tokens SET void = 1 WHERE party = ? AND certificate IS NULL", name)
            db.run("INSERT INTO tokens (digest, party, expires) VALUES (?, ?, ?)", token.digest(), name,
                   time.time() + TOKEN_DAYS * 86400)  # fmt: skip
            db.log("invited", party=name)

        return token, change

    def revoke(self, name: str) -> Callable[[Writer], int]:
        """Revoke all certificates and tokens of a party; returns the number of certificates."""
        self.number(name)

        def change(db: Writer) -> int:
            ended = db.all("SELECT fingerprint, pem FROM certificates WHERE name = ? AND role = 'party' AND state IN "
                           "('new', 'valid') ORDER BY fingerprint", name)  # fmt: skip
            for row in ended:
                db.run("UPDATE certificates SET state = 'revoked' WHERE fingerprint = ?", row["fingerprint"])
            db.run("UPDATE tokens SET void = 1 WHERE party = ?", name)
            db.run("UPDATE parties SET joined = 0 WHERE name = ?", name)
            db.log("revoked", party=name, certificates={row["fingerprint"]: row["pem"].decode() for row in ended})
            return len(ended)

        return change


def _enter(db: Writer, names: Sequence[str], declare: str = DECLARE) -> None:
    """Add parties that are not in the ledger. A name that is easily mistaken for another party's is refused."""
    known = {row["name"] for row in db.all("SELECT name FROM parties")}
    new = [name for name in names if name not in known]
    check_distinct(new, known)
    for name in new:
        db.run(declare, name)


def _trust(identity: certificates.Identity, pem: bytes) -> Callable[[Writer], None]:
    def change(db: Writer) -> None:
        key = identity.key.public_bytes_raw().hex()
        db.run("INSERT OR IGNORE INTO certificates VALUES (?, ?, ?, 'valid', ?, ?)", identity.fingerprint,
               identity.name, identity.role, key, pem)  # fmt: skip

    return change
