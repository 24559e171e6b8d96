"""Clients and servers with a wrong identity: in the handshake and after it."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from league import SPOKEN, Caller, League, draft

from hansa.net.transport import certificates, keys, signing
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import pack

DAY = datetime.timedelta(days=1)


def remade(league: League, who: Caller, begin: datetime.timedelta, end: datetime.timedelta,
           by: keys.PrivateKey | None = None, use: Any = ExtendedKeyUsageOID.CLIENT_AUTH) -> Caller:  # fmt: skip
    """A caller with the same name, key and extensions in a certificate with other dates or another signature."""
    assert who.files is not None and who.key is not None
    old = x509.load_pem_x509_certificate(who.files[0].read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    signer = by or keys.load_key((league.folder / "ca.key").read_bytes())
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), x509.random_serial_number(),
                                      now + begin, now + end)  # fmt: skip
    for extension in old.extensions:
        value: Any = extension.value
        if isinstance(value, x509.ExtendedKeyUsage):
            value = x509.ExtendedKeyUsage([use])
        if isinstance(value, x509.AuthorityKeyIdentifier):
            value = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(value, extension.critical)
    made = builder.sign(signer, None)
    return league.certified(who.name, who.key, made.public_bytes(serialization.Encoding.PEM))


def known(league: League, caller: Caller) -> None:
    """Mark a certificate as valid in the aggregator's ledger, so that only the handshake can refuse it."""
    assert caller.files is not None
    pem = caller.files[0].read_bytes()
    who = certificates.identity_of_pem(pem)
    row = (who.fingerprint, who.name, who.role, "valid", who.key.public_bytes_raw().hex(), pem)
    league.ledger.now(lambda db: db.run("INSERT INTO certificates VALUES (?, ?, ?, ?, ?, ?)", *row).rowcount)
    league.aggregator.registry.reload()


def turned_away(caller: Caller) -> None:
    """The handshake, or the first request after it, ends in an alert or a reset, without any data of the aggregator."""
    with pytest.raises((ssl.SSLError, ConnectionError)):
        caller.call("POST", f"/v1/alive?instance={caller.instance}")


def test_a_certificate_made_as_ours_are_made_is_let_in(league: League, ann: Caller) -> None:
    """The control for the tests below: they depend on dates, usage and signature only."""
    good = remade(league, ann, -DAY, DAY)
    known(league, good)
    assert good.call("POST", f"/v1/alive?instance={good.instance}").status == 204


@pytest.mark.parametrize(
    ("begin", "end"), [(-3 * DAY, -DAY), (-3 * DAY, -datetime.timedelta(seconds=5)), (DAY, 3 * DAY)]
)
def test_a_certificate_that_has_ended_or_not_begun_opens_no_connection(
    league: League, ann: Caller, begin: datetime.timedelta, end: datetime.timedelta
) -> None:
    bad = remade(league, ann, begin, end)
    known(league, bad)
    turned_away(bad)
    assert ann.call("POST", f"/v1/alive?instance={ann.instance}").status == 204


def test_the_same_names_by_another_authority_open_no_connection(
    league: League, ann: Caller, found: Callable[..., League]
) -> None:
    """The other federation has the same names for federation, parties and authority, but another key."""
    other = found().enrolled("ann")
    assert other.files is not None
    stranger = league.certified("ann", other.key, other.files[0].read_bytes())  # type: ignore[arg-type]
    forged = remade(league, ann, -DAY, DAY, by=keys.new_key())
    itself = remade(league, ann, -DAY, DAY, by=ann.key)  # self-signed, though it names the authority
    for caller in (stranger, forged, itself):
        known(league, caller)
        turned_away(caller)


def test_a_self_signed_certificate_opens_no_connection(league: League, ann: Caller) -> None:
    key, pem = certificates.make_ca("league")
    own = league.certified("ann", key, pem)
    turned_away(own)


def test_the_servers_certificate_does_not_make_a_client(league: League, ann: Caller) -> None:
    """A thief of it can act neither as a party nor as the operator, with it or with another one for the same usage."""
    files = league.folder / "server.pem", league.folder / "server.key"
    server = league.caller(keys.load_key(files[1].read_bytes()), files, "aggregator")
    turned_away(server)
    served = remade(league, ann, -DAY, DAY, use=ExtendedKeyUsageOID.SERVER_AUTH)
    known(league, served)
    turned_away(served)


def test_the_authoritys_own_certificate_is_nobodys(league: League, ann: Caller) -> None:
    """The authority's key can make any certificate, so it stays private; a certificate that is not in the ledger is
    refused."""
    files = league.folder / "ca.pem", league.folder / "ca.key"
    league.caller(keys.load_key(files[1].read_bytes()), files, "league")
    authority = league._callers[-1]
    try:
        got = authority.call("POST", f"/v1/alive?instance={authority.instance}")
    except (ssl.SSLError, ConnectionError):
        return
    assert got.status in (400, 403)


def test_a_certificate_by_the_authority_that_is_not_on_record_is_denied_and_logged(league: League, ann: Caller) -> None:
    unknown = remade(league, ann, -DAY, DAY)
    got = unknown.call("POST", f"/v1/alive?instance={unknown.instance}")
    assert got.status == 403 and "not valid here" in got.error
    (entry,) = league.events("denied")
    assert entry["party"] == "ann" and '"path":"/v1/alive"' in entry["detail"]


def test_a_party_cannot_make_itself_the_operator(league: League, ann: Caller) -> None:
    """By its name, by its routes, or with the operator's requests over its own connection."""
    chief = league.chief()
    before = len(league.events("denied"))
    for method, path, body in (
        ("GET", "/v1/parties", b""), ("POST", "/v1/parties/bob/revoke", b""), ("POST", "/v1/parties/eve/invite", b""),
        ("POST", "/v1/jobs", b"{}"), ("GET", "/v1/log", b""), ("GET", "/v1/jobs", b""),
    ):  # fmt: skip
        for key in (ann.key, chief.key):
            got = ann.call(method, path, body, About(), key=key)
            assert got.status == 403 and "role operator" in got.error
    assert len(league.events("denied")) > before and league.events("revoked") == league.events("invited") == []
    got = ann.call("POST", "/v1/rotate", certificates.make_request(keys.new_key(), "operator"), About())
    assert got.status == 403


def test_what_bob_signed_does_not_come_from_ann(league: League, ann: Caller) -> None:
    bob, ask = league.enrolled("bob"), league.ask()
    for signer, sender in ((bob, ann), (ann, bob)):
        got = sender.call("POST", f"{ask.path}/reply", pack(draft(why="no")), ask.about, key=signer.key)
        assert got.status == 401 and "does not match its content and sender" in got.error
    assert league.replies(ask) == {} and [e["party"] for e in league.events("denied")] == ["ann", "bob"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("round/0/reply", "round/1/reply"),
        ("job-1", "job-2"),
        ("/reply", "/reply?x=1"),
        ("/reply", "/reply?"),
        ("/reply", "//reply"),
        ("/v1", "/v1/../v1"),
        ("/reply", "%2Freply"),
        ("reply", "repl%79"),
        ("asks", "ask%73"),
    ],
)
def test_a_path_other_than_the_signed_one_is_refused_however_it_is_written(
    league: League, ann: Caller, old: str, new: str
) -> None:
    """Even if the router treats both paths alike, the signature covers only one of them."""
    ask, other = league.ask(), league.ask(number=1)
    body = pack(ann.signed(ask, draft(why="no")))
    league.ask(job="job-2")
    path = f"{ask.path}/reply"
    headers = signing.sign(ann.key, "POST", path, body, ask.about)  # type: ignore[arg-type]
    got = ann.call("POST", path.replace(old, new), body, headers=headers)
    assert got.status in (400, 401, 404)
    assert league.replies(ask) == league.replies(other) == {}
    assert ann.call("POST", path, body, headers=headers).status == 200


def test_a_header_twice_is_one_too_many(league: League, ann: Caller) -> None:
    """Two values of one header, one to be verified and one to be used: in either order, the unsigned value is
    refused."""
    ask, body = league.ask(), pack(draft(why="no"))
    later = league.ask(round=1)
    path = f"{later.path}/reply"
    signed = signing.sign(ann.key, "POST", f"{ask.path}/reply", body, ask.about)  # type: ignore[arg-type]
    wanted = signing.sign(ann.key, "POST", path, b"other", later.about)  # type: ignore[arg-type]
    for first, second in ((signed, wanted), (wanted, signed)):
        ann.connection.putrequest("POST", path)
        ann.connection.putheader("Hansa-Protocol", SPOKEN)
        ann.connection.putheader("Content-Length", str(len(body)))
        for headers in (first, second):
            for name, value in headers.items():
                ann.connection.putheader(name, value)
        ann.connection.endheaders(body)
        with ann.connection.getresponse() as got:
            assert got.status in (400, 401)
            got.read()
    assert league.replies(ask) == league.replies(later) == {}


def test_a_party_is_not_deceived_by_another_aggregator(league: League, ann: Caller, found: Callable[..., League],
                                                       tmp_path: Path) -> None:  # fmt: skip
    """From another authority, of a party, for another host, or expired."""
    assert ann.files is not None
    tls = client_context(league.folder / "ca.pem", *ann.files)
    authority = keys.load_key((league.folder / "ca.key").read_bytes())
    ca = (league.folder / "ca.pem").read_bytes()
    key = keys.new_key()
    elsewhere = certificates.issue(
        authority, ca, key.public_key(), "aggregator", "server", "league", 1, ["elsewhere.example"]
    )
    for pem, private in ((ann.files[0].read_bytes(), keys.key_bytes(ann.key)), (elsewhere, keys.key_bytes(key))):  # type: ignore[arg-type]
        (tmp_path / "cert").write_bytes(pem)
        keys.write_private(tmp_path / "key", private)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tmp_path / "cert", tmp_path / "key")
        assert "certificate verify failed" in _shaken(server, tls)
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs = found()
    other.load_cert_chain(theirs.folder / "server.pem", theirs.folder / "server.key")
    assert "certificate verify failed" in _shaken(other, tls)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(league.folder / "server.pem", league.folder / "server.key")
    assert _shaken(own, tls) == ""


def _shaken(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """A handshake in memory; returns the client's error."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    done = False
    for _ in range(10):
        for side in (near, far):
            try:
                side.do_handshake()
                done = done or side is near
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                if side is near:
                    return str(error)
        if done:
            return ""
    raise AssertionError("the handshake does not end")
