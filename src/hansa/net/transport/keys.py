"""Who is who in a federation: keys, certificates, enrolment tokens, and the TLS contexts made of them.

A federation has one certificate authority (CA) of its own. Everyone's key is Ed25519 and is born where it is used; the
CA signs a certificate over the public half. The certificate's subject says who that is: CN is the name, OU the role, O
the federation. A token invites one party: it carries a secret to be shown once, and the fingerprint of the CA, so that
the party knows the right aggregator before it trusts it.

Nothing here listens, connects or logs, and no error repeats a secret.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import re
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hansa.core import disk
from hansa.core.crash_points import steps
from hansa.core.errors import ConfigError, HansaError
from hansa.net.transport.names import valid_name

ROLES = ("party", "operator", "server", "log")
USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "log": ExtendedKeyUsageOID.TIME_STAMPING}  # others: to connect
LIMIT = 16 * 1024  # bytes of any key, certificate, request or token that is read: the real ones are under 2 KiB
BACKDATED = datetime.timedelta(days=2)  # a certificate is good at once, also where the clock is behind
LONGEST = 36500  # days that a certificate may be asked to last

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in base64url
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_TOKEN = "hansa-1."


PublicKey = Ed25519PublicKey
PrivateKey = Ed25519PrivateKey


class IdentityError(HansaError):
    """A key, certificate, request or token that is malformed or not what it should be."""


# Keys


def new_key() -> Ed25519PrivateKey:
    """A fresh private key."""
    return Ed25519PrivateKey.generate()


def key_bytes(key: Ed25519PrivateKey) -> bytes:
    """The private key as PEM (PKCS #8, not encrypted): for `write_private` and nowhere else."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_of(data: bytes) -> Ed25519PrivateKey:
    """The private key that `key_bytes` wrote."""
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except Exception:  # the parser has many ways to refuse, and its messages may quote what it read
        raise IdentityError("this is no private key: expected an unencrypted Ed25519 key in PEM (PKCS #8)") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"the private key is of type {type(key).__name__}; expected Ed25519")
    return key


# Certificates


@dataclass(frozen=True)
class Identity:
    """Whom a certificate names. It is worth what the check of the certificate's chain was worth."""

    name: str
    role: str
    serial: int  # up to 160 bits: too long for an integer column of SQLite
    key: Ed25519PublicKey = field(repr=False, hash=False)
    not_after: float  # seconds since 1970
    fingerprint: str  # SHA-256 of the certificate's DER, in hex


def make_ca(federation: str, days: int = 3650) -> tuple[Ed25519PrivateKey, bytes]:
    """A new certificate authority for a federation: its private key, and its self-signed certificate as PEM."""
    key = new_key()
    subject = _subject(federation, "ca", federation)
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _unsigned(subject, subject, key.public_key(), key.public_key(), _now() + _lasting(days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return key, _pem(builder.sign(key, algorithm=None))


def fingerprint(cert_pem: bytes) -> str:
    """SHA-256, in hex, of the DER of the one certificate in `cert_pem`."""
    return _certificate(cert_pem).fingerprint(hashes.SHA256()).hex()


def request(key: Ed25519PrivateKey, name: str) -> bytes:
    """A certificate signing request (PEM) by which the holder of `key` asks to be called `name`."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, valid_name(name))])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm=None)
    return csr.public_bytes(serialization.Encoding.PEM)


def read_request(csr_pem: bytes) -> tuple[str, Ed25519PublicKey]:
    """The name that a request asks for and the public key whose holder signed it; an IdentityError for anything else.

    Whatever else the request asks for is ignored: role, federation and lifetime are the issuer's to decide.
    """
    _check_size(csr_pem, "certificate request")
    try:
        csr = x509.load_pem_x509_csr(csr_pem)
        signed, subject, key = csr.is_signature_valid, csr.subject, csr.public_key()
    except Exception:  # the bytes are a stranger's, and the parser has many ways to refuse them
        raise IdentityError("this is no certificate request: expected one in PEM (PKCS #10)") from None
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(f"the certificate request has a key of type {type(key).__name__}; expected Ed25519")
    if not signed:
        raise IdentityError("the certificate request is not signed by the key that it names")
    return _name_in(subject, "certificate request"), key


def issue(
    ca_key: Ed25519PrivateKey,
    ca_pem: bytes,
    public_key: Ed25519PublicKey,
    name: str,
    role: str,
    federation: str,
    days: int,
    hosts: Sequence[str] = (),
) -> bytes:
    """A certificate (PEM) by which the CA says that `public_key` belongs to `name` in `role`.

    A server's certificate names its `hosts` (DNS names or IP addresses) and serves to accept connections only; a
    party's or an operator's serves to open them only; the log's serves for no connection, but to say what was there
    and when. It never outlives the CA's own certificate.
    """
    ca = _certificate(ca_pem)
    if ca.public_key() != ca_key.public_key():
        raise ConfigError("the CA's private key does not belong to the CA's certificate")
    if ca.not_valid_after_utc <= _now():
        raise ConfigError(f"the CA's certificate ended on {ca.not_valid_after_utc:%Y-%m-%d}; it can issue no other")
    if role not in ROLES:
        raise ConfigError(f"there is no role {role!r}; expected one of {', '.join(ROLES)}")
    if (role == "server") != bool(hosts):
        raise ConfigError("a server's certificate names one host or more, any other names none")
    use = USES.get(role, ExtendedKeyUsageOID.CLIENT_AUTH)
    until = min(_now() + _lasting(days), ca.not_valid_after_utc)
    builder = (
        _unsigned(_subject(name, role, federation), ca.subject, public_key, ca_key.public_key(), until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=True)
    )
    if hosts:
        names = [_host(host) for host in dict.fromkeys(hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return _pem(builder.sign(ca_key, algorithm=None))


def identity(cert_der: bytes) -> Identity:
    """Whom a certificate (DER, as TLS hands it over) names; an IdentityError if it names no member of a federation.

    This reads and does not verify. TLS has checked the chain of a certificate that came out of a handshake with
    `server_context`; whether it was revoked, or ended while the connection stayed open, is the caller's to check.
    """
    _check_size(cert_der, "certificate")
    try:
        cert = x509.load_der_x509_certificate(cert_der)
        subject, key = cert.subject, cert.public_key()
        serial, until = cert.serial_number, cert.not_valid_after_utc.timestamp()
    except Exception:  # as for requests
        raise IdentityError("this is no certificate: expected one in DER (X.509)") from None
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(f"the certificate has a key of type {type(key).__name__}; expected Ed25519")
    role = _only(subject, NameOID.ORGANIZATIONAL_UNIT_NAME, "certificate", "role (OU)")
    if role not in ROLES:
        raise IdentityError(f"the certificate has the role {role[:80]!r}; expected one of {', '.join(ROLES)}")
    return Identity(
        _name_in(subject, "certificate"),
        role,
        serial,
        key,
        until,
        cert.fingerprint(hashes.SHA256()).hex(),
    )


def belong(key: Ed25519PrivateKey, cert_pem: bytes) -> bool:
    """Whether a certificate is one of that key."""
    return _certificate(cert_pem).public_key() == key.public_key()


def identity_of(cert_pem: bytes) -> Identity:
    """As `identity`, of a certificate in PEM."""
    return identity(_certificate(cert_pem).public_bytes(serialization.Encoding.DER))


UNFIT = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm)  # what checking a signature may say


def certified(cert_pem: bytes, ca_pem: bytes, role: str, federation: str) -> Identity:
    """Whom a certificate (PEM) names, if the CA's key signed it for that role in that federation; an IdentityError if
    not. Whether its time is over is the caller's to see to."""
    cert, ca, who = _certificate(cert_pem), _certificate(ca_pem), identity_of(cert_pem)
    try:
        cert.verify_directly_issued_by(ca)
        lasting = cert.extensions.get_extension_for_class(x509.BasicConstraints).value
        named = _only(cert.subject, NameOID.ORGANIZATION_NAME, "certificate", "federation (O)")
    except (*UNFIT, x509.ExtensionNotFound):
        raise IdentityError(f"the certificate of {who.name} is not by the federation's authority") from None
    if who.role != role or named != federation or lasting.ca:
        raise IdentityError(
            f"the certificate of {who.name} is for the role {who.role} in {named[:80]!r}; expected {role} in "
            f"{federation!r}"
        )
    return who


def check_authority(ca_pem: bytes) -> str:
    """The fingerprint of a CA's certificate, which must be signed by its own key; an IdentityError where it is not."""
    ca = _certificate(ca_pem)
    try:
        ca.verify_directly_issued_by(ca)
    except UNFIT:
        raise IdentityError("this is no certificate authority: the certificate is not signed by its own key") from None
    return ca.fingerprint(hashes.SHA256()).hex()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _lasting(days: int) -> datetime.timedelta:
    if not 1 <= days <= LONGEST:
        raise ConfigError(f"a certificate cannot last {days} days; expected 1 to {LONGEST}")
    return datetime.timedelta(days=days)


def _subject(name: str, role: str, federation: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, valid_name(federation)),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            x509.NameAttribute(NameOID.COMMON_NAME, valid_name(name)),
        ]
    )


def _unsigned(
    subject: x509.Name,
    issuer: x509.Name,
    key: Ed25519PublicKey,
    issuer_key: Ed25519PublicKey,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    """What every certificate has; the two key identifiers are what strict verification (RFC 5280) asks for."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ConfigError(f"{host[:80]!r} is neither a host name nor an IP address") from None
        return x509.DNSName(host)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _certificate(cert_pem: bytes) -> x509.Certificate:
    """The one certificate in `cert_pem`: a second would be trusted though nobody looked at its fingerprint."""
    _check_size(cert_pem, "certificate")
    try:
        certs = x509.load_pem_x509_certificates(cert_pem)
    except Exception:  # as for requests
        raise IdentityError("this is no certificate: expected one in PEM (X.509)") from None
    if len(certs) != 1:
        raise IdentityError(f"expected one certificate and found {len(certs)}")
    return certs[0]


def _check_size(data: bytes, what: str) -> None:
    if len(data) > LIMIT:
        raise IdentityError(f"the {what} has {len(data)} bytes; at most {LIMIT} are read")


def _only(subject: x509.Name, oid: x509.ObjectIdentifier, where: str, what: str) -> str:
    values = [attribute.value for attribute in subject.get_attributes_for_oid(oid)]
    if len(values) != 1 or not isinstance(values[0], str):
        raise IdentityError(f"the {where} has {len(values)} entries for the {what}; expected one text")
    return values[0]


def _name_in(subject: x509.Name, where: str) -> str:
    try:
        return valid_name(_only(subject, NameOID.COMMON_NAME, where, "name (CN)"))
    except ConfigError as error:
        raise IdentityError(f"in the {where}, {error}") from None


# Private files


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can ever read; what was there is replaced whole or not at all."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link; a private file is not written through one")
    try:
        disk.put(path, [data], steps("private"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def read_private(path: Path) -> bytes:
    """What `write_private` wrote; a ConfigError if the file is missing or if anyone but its owner may touch it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777  # of the file that is open: it cannot be swapped in between
            if mode & 0o077:
                raise ConfigError(f"others than its owner may use {path} (mode {mode:04o}); make it private: chmod 600")
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    _check_size(data, f"file {path}")
    return data


def read_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a private file; the error names the file where there is none in it."""
    data = read_private(path)
    try:
        return key_of(data)
    except IdentityError as error:
        raise IdentityError(f"{path}: {error}") from None


def read_certificate(path: Path, authority: Path) -> bytes:
    """The certificate in a file, as the authority signed it (which signed its own too); the error names the file where
    it is damaged, or somebody else's."""
    data, issuer = _read_certificate(path), _read_certificate(authority)
    try:
        certificate = _certificate(data)
    except IdentityError as error:
        raise IdentityError(f"{path}: {error}") from None
    try:
        certificate.verify_directly_issued_by(_certificate(issuer))
    except (ValueError, TypeError, InvalidSignature, IdentityError):
        raise IdentityError(f"{path} is damaged, or was not signed by the authority of {authority}") from None
    return data


# Tokens


@dataclass(frozen=True)
class Token:
    """An invitation for one party. Its text is a secret: it is kept in private files, and shown once to enrol."""

    party: str
    secret: str = field(repr=False)
    ca: str  # fingerprint of the certificate authority

    def __post_init__(self) -> None:
        valid_name(self.party)
        if not _SECRET.fullmatch(self.secret):
            raise IdentityError("the token's secret is not 32 bytes in base64url")
        if not _FINGERPRINT.fullmatch(self.ca):
            raise IdentityError("the token's fingerprint of the CA is not a SHA-256 in hex")

    def text(self) -> str:
        """The token as one word: `hansa-1.` and base64url."""
        return _TOKEN + base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def of(cls, text: str) -> Token:
        """The token that `text()` wrote; blanks around it are ignored."""
        text = text.strip()
        if not text.startswith(_TOKEN) or len(text) > LIMIT:
            raise IdentityError(f"this is no token: expected one word that begins with {_TOKEN!r}")
        body = text.removeprefix(_TOKEN)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            return msgspec.json.decode(data, type=cls)
        except (ValueError, HansaError):  # ValueError: not base64, not ASCII, not JSON, or not these fields
            raise IdentityError("the token is damaged; copy it whole, or ask for a new one") from None

    def digest(self) -> str:
        """SHA-256 of the secret in hex: all that the aggregator keeps of it."""
        return secret_digest(self.secret)


def secret_digest(secret: str) -> str:
    """What the aggregator keeps of a token's secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_token(party: str, ca_pem: bytes) -> Token:
    """A fresh invitation for `party` to the federation of this CA."""
    return Token(party, secrets.token_urlsafe(32), fingerprint(ca_pem))


# TLS


def server_context(server_cert: Path, server_key: Path, ca: Path) -> ssl.SSLContext:
    """The aggregator's side of TLS 1.3. A client may come without a certificate; one that it shows must be this CA's.

    Sessions are not resumed: each connection shows its certificate afresh, so that an ended one opens none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = 0
    _trust_only(context, _read_certificate(ca))
    _show(context, server_cert, server_key)
    return context


def client_context(ca: Path | bytes, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """A party's or operator's side of TLS 1.3: the server must show a certificate of this CA for the host it is called.

    `ca` is the CA's certificate (PEM) or its file; the machine's own list of authorities counts for nothing.
    """
    if (cert is None) != (key is None):
        raise ConfigError("a client's certificate and its private key go together: give both or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False
    _trust_only(context, ca if isinstance(ca, bytes) else _read_certificate(ca))
    if cert is not None and key is not None:
        _show(context, cert, key)
    return context


def unverified_context() -> ssl.SSLContext:
    """TLS 1.3 with whoever answers: only to fetch the CA's certificate, whose fingerprint is then compared."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _trust_only(context: ssl.SSLContext, ca_pem: bytes) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    # What was parsed here, not the text: OpenSSL might find a further certificate in it.
    context.load_verify_locations(cadata=_certificate(ca_pem).public_bytes(serialization.Encoding.DER))


def _show(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    read_key(key)  # private and not encrypted: OpenSSL would stop to ask for a password
    _certificate(_read_certificate(cert))
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ConfigError(f"the certificate {cert} and the key {key} do not go together: {error.reason}") from error


def _read_certificate(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
