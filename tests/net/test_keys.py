"""Keys, certificates, tokens and TLS: in memory, in private files and in real handshakes on loopback."""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hansa.core.registry import KINDS, registered
from hansa.net.transport import certificates, keys
from hansa.net.transport.keys import IdentityError
from hansa.net.transport.names import check_distinct, valid_name
from hansa.net.transport.tls import client_context, server_context, unverified_context
from hansa.net.transport.tokens import Token, new_token
from hansa.net.transport.wire import Order, pack, unpack
from hansa.plumbing.errors import ConfigError, HansaError

PATIENCE = 600.0  # seconds until a stuck socket fails its test


def der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def one_sentence(error: pytest.ExceptionInfo[HansaError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 300
    return text


@dataclass(frozen=True)
class Member:
    """A member with a key and a certificate, in files."""

    key: Path
    cert: Path


@dataclass(frozen=True)
class Authority:
    """A federation's CA, and the folder with its files and those of its members."""

    key: Ed25519PrivateKey
    pem: bytes
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "ca.pem"

    def member(self, name: str, role: str, hosts: tuple[str, ...] = (), days: int = 30) -> Member:
        key = keys.new_key()
        member = Member(self.folder / f"{name}.key", self.folder / f"{name}.pem")
        keys.write_private(member.key, keys.key_bytes(key))
        member.cert.write_bytes(
            certificates.issue(self.key, self.pem, key.public_key(), name, role, "heart", days, hosts)
        )
        return member


def authority(folder: Path) -> Authority:
    folder.mkdir(exist_ok=True)
    key, pem = certificates.make_ca("heart")
    made = Authority(key, pem, folder)
    made.path.write_bytes(pem)
    return made


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return authority(tmp_path / "heart")


@pytest.fixture
def server(ca: Authority) -> Member:
    return ca.member("aggregator", "server", ("localhost", "127.0.0.1"))


# Names


@pytest.mark.parametrize("name", ["a", "7", "Cleveland", "va-2.old_x", "a" * 64])
def test_plain_names_are_kept_as_they_are(name: str) -> None:
    assert valid_name(name) == name


def test_the_name_of_every_registered_part_is_a_valid_name_of_a_job() -> None:
    for name in {name for kind in KINDS for name, part in registered(kind).items() if part.__module__[:6] == "hansa."}:
        assert unpack(pack(Order(valid_name(name), {})), Order).name == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "_a", "+a", "a" * 65, "a/b", "a b", "a\n", "a\0", "é", "٣", "a\\b", "a" * 10_000]
)
def test_other_names_are_refused_with_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        valid_name(name)
    assert "a name is 1 to 64" in one_sentence(error)


@pytest.mark.parametrize(("name", "other"), [("Alice", "alice"), ("ALICE", "alice"), ("alice.", "alice"),
                                             ("a.B..", "A.b")])  # fmt: skip
def test_names_that_are_easily_taken_for_each_other_cannot_stand_side_by_side(name: str, other: str) -> None:
    check_distinct([name])
    check_distinct([name, "bob"], [name, "carol"])
    for names, others in (([name, other], []), ([name], [other])):
        with pytest.raises(ConfigError, match="differ only in case or in trailing dots") as error:
            check_distinct(names, others)
        assert one_sentence(error)


# Keys, requests and certificates in memory


def test_a_key_survives_its_bytes() -> None:
    key = keys.new_key()
    assert keys.key_bytes(keys.load_key(keys.key_bytes(key))) == keys.key_bytes(key)


def test_a_key_of_another_kind_or_an_encrypted_one_is_refused_without_quoting_it() -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, pkcs8, serialization.NoEncryption())
    locked = keys.new_key().private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"x"))
    for data in (other, locked, b"", b"secret words", certificates.make_ca("heart")[1]):
        with pytest.raises(IdentityError, match="Ed25519") as error:
            keys.load_key(data)
        assert "secret words" not in one_sentence(error)


def test_a_party_goes_from_its_request_to_an_identity() -> None:
    ca_key, ca_pem = certificates.make_ca("heart")
    key = keys.new_key()
    name, public = certificates.read_request(certificates.make_request(key, "cleveland"))
    pem = certificates.issue(ca_key, ca_pem, public, name, "party", "heart", days=30)
    found = certificates.identity_of_der(der(pem))
    cert = x509.load_pem_x509_certificate(pem)
    assert (found.name, found.role, found.key) == ("cleveland", "party", key.public_key())
    assert found.serial == cert.serial_number
    assert found.not_after == cert.not_valid_after_utc.timestamp()
    assert found.fingerprint == certificates.fingerprint(pem) == cert.fingerprint(hashes.SHA256()).hex()
    assert hash(found) == hash(certificates.identity_of_der(der(pem))) and found == certificates.identity_of_der(
        der(pem)
    )
    cert.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem))
    with pytest.raises(ValueError, match="Issuer"):
        cert.verify_directly_issued_by(x509.load_pem_x509_certificate(certificates.make_ca("other")[1]))


@pytest.mark.parametrize("role", certificates.ROLES)
def test_a_certificate_is_no_authority_and_serves_its_role_alone(role: str, ca: Authority) -> None:
    member = ca.member("x", role, ("example.org", "::1", "example.org") if role == "server" else ())
    cert = x509.load_pem_x509_certificate(member.cert.read_bytes())
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = cert.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature and not usage.key_cert_sign
    uses = list(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    if role == "server":
        assert uses == [ExtendedKeyUsageOID.SERVER_AUTH]
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["example.org"]
        assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["::1"]
    elif role == "log":
        assert uses == [ExtendedKeyUsageOID.TIME_STAMPING]  # for no connection
    else:
        assert uses == [ExtendedKeyUsageOID.CLIENT_AUTH]
    subject = {a.oid: a.value for a in cert.subject}
    assert subject[NameOID.ORGANIZATION_NAME] == "heart"
    assert subject[NameOID.ORGANIZATIONAL_UNIT_NAME] == role
    assert subject[NameOID.COMMON_NAME] == "x"


def test_a_certificate_is_backdated_by_two_days_and_does_not_outlive_its_authority() -> None:
    now = datetime.datetime.now(datetime.UTC)
    ca_key, ca_pem = certificates.make_ca("heart", days=10)
    ca = x509.load_pem_x509_certificate(ca_pem)
    public = keys.new_key().public_key()
    short, long = (
        x509.load_pem_x509_certificate(certificates.issue(ca_key, ca_pem, public, "a", "party", "heart", days))
        for days in (3, 999)
    )
    minute = datetime.timedelta(minutes=1)
    for cert in (ca, short):
        assert abs(now - datetime.timedelta(days=2) - cert.not_valid_before_utc) < minute
    assert abs(now + datetime.timedelta(days=3) - short.not_valid_after_utc) < minute
    assert long.not_valid_after_utc == ca.not_valid_after_utc
    assert short.serial_number != long.serial_number


def test_what_cannot_be_issued_is_refused_with_one_sentence(ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    public = keys.new_key().public_key()
    good = {"name": "a", "role": "party", "federation": "heart", "days": 3}
    for change, words in [
        ({"name": "a/b"}, "a name is"),
        ({"federation": ""}, "a name is"),
        ({"role": "ca"}, "unknown role 'ca'"),
        ({"days": 0}, "cannot be valid for 0 days"),
        ({"days": 10**12}, "cannot be valid for"),
        ({"role": "server"}, "names at least one host"),
        ({"hosts": ["localhost"]}, "other certificates name none"),
        ({"role": "server", "hosts": ["a b"]}, "neither a host name nor an IP address"),
        ({"role": "server", "hosts": ["*.example.org"]}, "neither a host name nor an IP address"),
    ]:
        with pytest.raises(ConfigError, match=words) as error:
            certificates.issue(ca.key, ca.pem, public, **(good | change))  # type: ignore[arg-type]
        one_sentence(error)
    with pytest.raises(ConfigError, match="does not belong"):
        certificates.issue(keys.new_key(), ca.pem, public, **good)  # type: ignore[arg-type]
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3651)
    monkeypatch.setattr(certificates, "_now", lambda: later)
    with pytest.raises(ConfigError, match="the CA's certificate expired on"):
        certificates.issue(ca.key, ca.pem, public, **good)  # type: ignore[arg-type]


def csr(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey, names: list[str]) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    algorithm = None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256()
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm)  # type: ignore[arg-type]
    return made.public_bytes(serialization.Encoding.PEM)


def test_a_request_that_its_key_did_not_sign_is_refused() -> None:
    data = x509.load_pem_x509_csr(certificates.make_request(keys.new_key(), "a")).public_bytes(
        serialization.Encoding.DER
    )
    signature = bytes(64)  # comes last
    pem = ssl.DER_cert_to_PEM_cert(data[:-64] + signature).replace("CERTIFICATE", "CERTIFICATE REQUEST")
    with pytest.raises(IdentityError, match="not signed with the key that it contains"):
        certificates.read_request(pem.encode())


def test_requests_of_another_kind_are_refused_with_one_sentence() -> None:
    for data, words in [
        (b"", "invalid certificate request"),
        (certificates.make_ca("heart")[1], "invalid certificate request"),
        (csr(ec.generate_private_key(ec.SECP256R1()), ["a"]), "expected Ed25519"),
        (csr(keys.new_key(), ["a/../b"]), "a name is"),
        (csr(keys.new_key(), []), "0 entries for the name"),
        (csr(keys.new_key(), ["a", "b"]), "2 entries for the name"),
        (certificates.make_request(keys.new_key(), "a") + b"\n" * keys.LIMIT, "at most 16384"),
    ]:
        with pytest.raises(IdentityError, match=words) as error:
            certificates.read_request(data)
        one_sentence(error)


def with_a_bit_flipped(data: bytes) -> Iterator[bytes]:
    for place in range(len(data) * 8):
        bad = bytearray(data)
        bad[place // 8] ^= 1 << place % 8
        yield bytes(bad)


def test_a_request_with_a_bit_flipped_is_refused_or_says_the_same() -> None:
    key = keys.new_key()
    good = x509.load_pem_x509_csr(certificates.make_request(key, "a")).public_bytes(serialization.Encoding.DER)
    refused = 0
    for bad in with_a_bit_flipped(good):
        pem = ssl.DER_cert_to_PEM_cert(bad).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode()
        try:
            assert certificates.read_request(pem) == ("a", key.public_key())
        except IdentityError:
            refused += 1
    assert refused >= len(good) * 8 - 7  # the count of unused bits before the signature is not signed


def test_a_certificate_with_a_bit_flipped_is_another_one_or_refused(ca: Authority) -> None:
    good = der(ca.member("a", "party").cert.read_bytes())
    for bad in with_a_bit_flipped(good):
        with contextlib.suppress(IdentityError):
            assert certificates.identity_of_der(bad).fingerprint != certificates.identity_of_der(good).fingerprint


def test_a_certificate_names_a_member_or_is_refused(ca: Authority) -> None:
    def made(units: list[str], key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
        parts = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit) for unit in units]
        now = datetime.datetime.now(datetime.UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a"), *parts])
        builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        return builder.sign(ca.key, None).public_bytes(serialization.Encoding.DER)

    assert certificates.identity_of_der(made(["party"], keys.new_key())).role == "party"
    for data, words in [
        (der(ca.pem), "role 'ca'"),
        (made(["root"], keys.new_key()), "role 'root'"),
        (made([], keys.new_key()), "0 entries for the role"),
        (made(["party", "operator"], keys.new_key()), "2 entries for the role"),
        (made(["party"], ec.generate_private_key(ec.SECP256R1())), "expected Ed25519"),
        (b"garbage", "invalid certificate"),
        (b"\0" * (keys.LIMIT + 1), "at most 16384"),
    ]:
        with pytest.raises(IdentityError, match=words) as error:
            certificates.identity_of_der(data)
        one_sentence(error)


def test_a_fingerprint_is_of_one_certificate_or_refused(ca: Authority) -> None:
    other = certificates.make_ca("other")[1]
    for data in (ca.pem + other, b"", b"garbage", ca.pem + b"\n" * keys.LIMIT):
        with pytest.raises(IdentityError):
            certificates.fingerprint(data)


# Private files


def test_a_private_file_is_0600_whatever_the_umask_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(b"old and open to all")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        keys.write_private(path, b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.read_private(path) == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["key.pem"]


def test_a_private_file_is_private_before_it_has_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    opened = os.fdopen

    def spy(descriptor: int, *args: str) -> object:
        modes.append((stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_size))
        return opened(descriptor, *args)

    monkeypatch.setattr(os, "fdopen", spy)
    before = os.umask(0)
    try:
        keys.write_private(tmp_path / "key.pem", b"x")
    finally:
        os.umask(before)
    assert modes == [(0o600, 0)]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.pem"
    keys.write_private(path, b"old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        keys.write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["key.pem"]


def test_a_private_file_is_on_disk_before_its_name_is_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size}")
        fsync(descriptor)

    def spy_replace(part: Path, path: Path) -> None:
        events.append("rename")
        replace(part, path)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    keys.write_private(tmp_path / "key.pem", b"four")
    assert events == ["file of 4", "rename", "folder"]


def test_a_private_file_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "key.pem"
    target.write_bytes(b"untouched")
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"):
        keys.write_private(link, b"new")
    assert target.read_bytes() == b"untouched" and link.is_symlink()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_file_that_others_may_touch_is_refused_with_one_sentence(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key.pem"
    keys.write_private(path, b"secret words")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600") as error:
        keys.read_private(path)
    assert f"{mode:04o}" in one_sentence(error) and "secret words" not in str(error.value)


def test_what_is_no_private_file_is_refused_with_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    big = tmp_path / "big"
    keys.write_private(big, b"x" * (keys.LIMIT + 1))
    for path in (tmp_path / "missing", folder, big):
        with pytest.raises(HansaError, match=path.name) as error:
            keys.read_private(path)
        one_sentence(error)


# Tokens


def test_a_token_round_trips_and_does_not_show_its_secret(ca: Authority) -> None:
    token = new_token("cleveland", ca.pem)
    text = token.text()
    assert text.startswith("hansa-1.") and len(text.split()) == 1 and "=" not in text
    assert Token.parse(f"  {text}\n") == token
    assert (token.party, token.ca) == ("cleveland", certificates.fingerprint(ca.pem))
    assert token.secret not in repr(token) and len(token.digest()) == 64 and token.secret not in token.digest()
    other = new_token("cleveland", ca.pem)
    assert other.secret != token.secret and other.digest() != token.digest()


def encoded(tree: object) -> str:
    return "hansa-1." + base64.urlsafe_b64encode(msgspec.json.encode(tree)).decode().rstrip("=")


GOOD = {"party": "a", "secret": "s" * 43, "ca": "0" * 64}


def test_a_token_in_other_words_is_the_same_token() -> None:
    assert Token.parse(encoded(GOOD)) == Token("a", "s" * 43, "0" * 64)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "hansa-2.e30",
        "hansa-1.",
        "hansa-1.!!!",
        "hansa-1.é",
        "hansa-1.e30",
        "hansa-1.W10",
        "hansa-1.AAAAA",
        encoded(GOOD | {"party": "a/b"}),
        encoded(GOOD | {"party": 7}),
        encoded(GOOD | {"secret": "secret words"}),
        encoded(GOOD | {"secret": "s" * 42}),
        encoded(GOOD | {"ca": "0" * 63}),
        encoded(GOOD | {"ca": None}),
        encoded({k: v for k, v in GOOD.items() if k != "ca"}),
        encoded(GOOD)[:-7],
        encoded(GOOD)[:20] + "!!!!" + encoded(GOOD)[20:],
        encoded(GOOD)[:20] + "\n" + encoded(GOOD)[20:],
        "hansa-1." + "e" * 100_000,
    ],
)
def test_a_text_that_is_no_token_gives_one_sentence(text: str) -> None:
    with pytest.raises(IdentityError, match="token") as error:
        Token.parse(text)
    assert "secret words" not in one_sentence(error)


# TLS on loopback


@dataclass
class AskOutcome:
    """The observations of both sides of a handshake. In TLS 1.3 a client learns only later that its certificate is
    refused."""

    peer: bytes | None = None  # the client's certificate as the server has it
    served: bool = False
    server_error: Exception | None = None
    client_error: Exception | None = None


def meet(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> AskOutcome:
    """One connection over a socket: a handshake, a byte to the server and a byte back."""
    outcome = AskOutcome()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)

        def accept() -> None:
            raw, _ = listener.accept()
            raw.settimeout(PATIENCE)
            with raw:
                try:
                    with server.wrap_socket(raw, server_side=True) as stream:
                        outcome.peer = stream.getpeercert(binary_form=True)
                        outcome.served = stream.recv(1) == b"?"
                        stream.sendall(b"!")
                except OSError as error:
                    outcome.server_error = error

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            raw = socket.create_connection(listener.getsockname(), timeout=PATIENCE)
            with raw, client.wrap_socket(raw, server_hostname=host) as stream:
                stream.sendall(b"?")
                if stream.recv(1) != b"!":
                    raise ConnectionResetError("closed without an answer")
        except OSError as error:
            outcome.client_error = error
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return outcome


def serving(ca: Authority, server: Member) -> ssl.SSLContext:
    return server_context(server.cert, server.key, ca.path)


def refused_by_server(outcome: AskOutcome, words: str) -> None:
    assert isinstance(outcome.server_error, ssl.SSLError) and words in str(outcome.server_error)
    assert outcome.peer is None and not outcome.served and outcome.client_error is not None


def refused_by_client(outcome: AskOutcome, words: str) -> None:
    assert isinstance(outcome.client_error, ssl.SSLError) and words in str(outcome.client_error)
    assert not outcome.served


@pytest.mark.parametrize("role", ["party", "operator"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_member_is_let_in_and_known(ca: Authority, server: Member, role: str, host: str) -> None:
    member = ca.member("cleveland", role)
    outcome = meet(serving(ca, server), client_context(ca.path, member.cert, member.key), host)
    assert outcome.served and outcome.server_error is None and outcome.client_error is None
    assert outcome.peer == der(member.cert.read_bytes())
    assert (certificates.identity_of_der(outcome.peer).name, certificates.identity_of_der(outcome.peer).role) == (
        "cleveland",
        role,
    )


def test_a_client_without_a_certificate_is_served_and_is_nobody(ca: Authority, server: Member) -> None:
    for client in (client_context(ca.pem, None, None), unverified_context()):
        outcome = meet(serving(ca, server), client)
        assert outcome.served and outcome.client_error is None and outcome.peer is None


def test_a_certificate_of_another_authority_is_refused_in_the_handshake(
    ca: Authority, server: Member, tmp_path: Path
) -> None:
    stranger = authority(tmp_path / "other").member("cleveland", "party")
    client = client_context(ca.path, stranger.cert, stranger.key)
    refused_by_server(meet(serving(ca, server), client), "CERTIFICATE_VERIFY_FAILED")


def test_a_servers_certificate_cannot_be_used_as_a_clients(ca: Authority, server: Member) -> None:
    client = client_context(ca.path, server.cert, server.key)
    refused_by_server(meet(serving(ca, server), client), "CERTIFICATE_VERIFY_FAILED")


def test_a_partys_certificate_cannot_be_used_as_a_servers(ca: Authority) -> None:
    party = ca.member("localhost", "party")
    outcome = meet(serving(ca, party), client_context(ca.path, None, None))
    refused_by_client(outcome, "unsuitable certificate purpose")


def test_a_member_cannot_issue_certificates(ca: Authority, server: Member) -> None:
    party = ca.member("cleveland", "party")
    key = keys.load_key(keys.read_private(party.key))
    forged = certificates.issue(key, party.cert.read_bytes(), key.public_key(), "va", "party", "heart", days=3)
    chain = ca.folder / "chain.pem"
    chain.write_bytes(forged + party.cert.read_bytes())
    client = client_context(ca.path, None, None)
    client.load_cert_chain(chain, party.key)
    refused_by_server(meet(serving(ca, server), client), "CERTIFICATE_VERIFY_FAILED")


def test_an_expired_certificate_is_refused_on_either_side(
    ca: Authority, server: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
        patch.setattr(certificates, "_now", lambda: then)
        party = ca.member("cleveland", "party", days=8)
        old_server = ca.member("old", "server", ("localhost",), days=8)
    outcome = meet(serving(ca, server), client_context(ca.path, party.cert, party.key))
    refused_by_server(outcome, "certificate has expired")
    refused_by_client(meet(serving(ca, old_server), client_context(ca.path, None, None)), "certificate has expired")


@pytest.mark.parametrize("host", ["example.org", "127.0.0.2", "aggregator"])
def test_a_server_under_another_host_name_is_refused(ca: Authority, server: Member, host: str) -> None:
    outcome = meet(serving(ca, server), client_context(ca.path, None, None), host)
    refused_by_client(outcome, "mismatch")


def test_a_servers_own_name_is_no_host_name(ca: Authority) -> None:
    server = ca.member("aggregator", "server", ("127.0.0.1",))
    outcome = meet(serving(ca, server), client_context(ca.path, None, None), "aggregator")
    refused_by_client(outcome, "mismatch")


def test_a_server_of_another_authority_is_refused(ca: Authority, server: Member, tmp_path: Path) -> None:
    other = authority(tmp_path / "other")
    refused_by_client(meet(serving(ca, server), client_context(other.path, None, None)), "VERIFY_FAILED")


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("side", ["client", "server"])
def test_nobody_speaks_tls_1_2(ca: Authority, server: Member, side: str, verified: bool) -> None:
    serving_context = serving(ca, server)
    client = client_context(ca.path, None, None) if verified else unverified_context()
    old = serving_context if side == "server" else client
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    outcome = meet(serving_context, client)
    assert not outcome.served and outcome.client_error is not None and outcome.server_error is not None
    refusing = outcome.server_error if side == "client" else outcome.client_error
    assert "PROTOCOL" in str(refusing)


def test_no_session_is_resumed_and_chains_are_checked_strictly(ca: Authority, server: Member) -> None:
    assert serving(ca, server).num_tickets == 0
    for context in (serving(ca, server), client_context(ca.path, None, None)):
        assert context.verify_flags & ssl.VERIFY_X509_STRICT


def test_an_encrypted_key_is_refused_and_no_password_is_asked_for(ca: Authority) -> None:
    party = ca.member("cleveland", "party")
    key = keys.load_key(keys.read_private(party.key))
    encryption = serialization.BestAvailableEncryption(b"x")
    locked = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    keys.write_private(party.key, locked)
    with pytest.raises(IdentityError, match="expected an unencrypted Ed25519 key"):
        client_context(ca.path, party.cert, party.key)


def test_a_second_certificate_beside_the_right_one_is_not_trusted(
    ca: Authority, server: Member, tmp_path: Path
) -> None:
    other = authority(tmp_path / "other")
    for pem in (ca.pem + other.pem, other.pem + ca.pem):
        with pytest.raises(IdentityError, match="found 2"):
            client_context(pem, None, None)
        ca.path.write_bytes(pem)
        with pytest.raises(IdentityError, match="found 2"):
            serving(ca, server)


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_key_that_others_may_read_opens_no_connection(ca: Authority, server: Member, mode: int) -> None:
    party = ca.member("cleveland", "party")
    party.key.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        client_context(ca.path, party.cert, party.key)
    server.key.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        serving(ca, server)


def test_files_that_do_not_go_together_are_refused_with_one_sentence(ca: Authority, server: Member) -> None:
    party = ca.member("cleveland", "party")
    missing = ca.folder / "missing"
    for cert, key, words in [
        (party.cert, server.key, "does not belong to the key"),
        (party.cert, None, "both a certificate and its private key, or neither"),
        (None, party.key, "both a certificate and its private key, or neither"),
        (missing, party.key, "cannot read"),
        (party.cert, missing, "cannot read"),
        (party.key, party.key, "invalid certificate"),
    ]:
        with pytest.raises(HansaError, match=words) as error:
            client_context(ca.path, cert, key)
        one_sentence(error)
    with pytest.raises(ConfigError, match="cannot read"):
        client_context(missing, None, None)
