"""Certificates: the certificate authority (CA) of a federation, requests, issuing and checks.

A federation has one CA of its own. The CA signs a certificate for the public key of each member. The certificate's
subject identifies the member: CN is the name, OU the role, O the federation.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hansa.net.transport.keys import LIMIT, IdentityError, check_size, new_key
from hansa.net.transport.names import valid_name
from hansa.plumbing.errors import ConfigError

ROLES = ("party", "operator", "server", "log")
USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "log": ExtendedKeyUsageOID.TIME_STAMPING}  # others: client auth
BACKDATED = datetime.timedelta(days=2)  # so that a new certificate is valid also where the clock is behind
LONGEST = 36500  # days: the longest lifetime of a certificate

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class Identity:
    """The subject of a certificate; only as trustworthy as the check of the certificate's chain."""

    name: str
    role: str
    serial: int  # up to 160 bits: too long for a SQLite integer
    key: Ed25519PublicKey = field(repr=False, hash=False)
    not_after: float  # seconds since 1970
    fingerprint: str  # SHA-256 of the certificate's DER, in hex


def make_ca(federation: str, days: int = 3650) -> tuple[Ed25519PrivateKey, bytes]:
    """Create a certificate authority: its private key, and its self-signed certificate as PEM."""
    key = new_key()
    subject = _subject(federation, "ca", federation)
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _unsigned(subject, subject, key.public_key(), key.public_key(), _now() + _lifetime(days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return key, _pem(builder.sign(key, algorithm=None))


def fingerprint(cert_pem: bytes) -> str:
    """SHA-256 in hex of the DER of the single certificate in `cert_pem`."""
    return parse_certificate(cert_pem).fingerprint(hashes.SHA256()).hex()


def make_request(key: Ed25519PrivateKey, name: str) -> bytes:
    """Create a certificate signing request (PEM) for `name`, signed with `key`."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, valid_name(name))])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm=None)
    return csr.public_bytes(serialization.Encoding.PEM)


def read_request(csr_pem: bytes) -> tuple[str, Ed25519PublicKey]:
    """Return the name and the public key of a request, after checking its signature; an IdentityError if invalid.

    Everything else in the request is ignored: the issuer decides role, federation and lifetime.
    """
    check_size(csr_pem, "certificate request")
    try:
        csr = x509.load_pem_x509_csr(csr_pem)
        signed, subject, key = csr.is_signature_valid, csr.subject, csr.public_key()
    except Exception:  # the bytes are not trusted, and the parser raises many types
        raise IdentityError("invalid certificate request: expected PEM (PKCS #10)") from None
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(f"the certificate request has a key of type {type(key).__name__}; expected Ed25519")
    if not signed:
        raise IdentityError("the certificate request is not signed with the key that it contains")
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
    """Issue a certificate (PEM) in which the CA binds `public_key` to `name` and `role`.

    A server's certificate names its `hosts` (DNS names or IP addresses) and is for accepting connections only. Those
    of parties and operators are for opening connections only. The log's is for no connection, only for signing log
    heads and receipts. No certificate outlives the CA's own.
    """
    ca = parse_certificate(ca_pem)
    if ca.public_key() != ca_key.public_key():
        raise ConfigError(
            "the CA's private key does not belong to the CA's certificate; use the key that it was created with"
        )
    if ca.not_valid_after_utc <= _now():
        raise ConfigError(f"the CA's certificate expired on {ca.not_valid_after_utc:%Y-%m-%d}; it cannot issue another")
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}; expected one of {', '.join(ROLES)}")
    if (role == "server") != bool(hosts):
        raise ConfigError("a server's certificate names at least one host; other certificates name none")
    use = USES.get(role, ExtendedKeyUsageOID.CLIENT_AUTH)
    until = min(_now() + _lifetime(days), ca.not_valid_after_utc)
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


def identity_of_der(cert_der: bytes) -> Identity:
    """Read the identity in a certificate (DER, as TLS provides it); an IdentityError if the subject is invalid.

    This function reads and does not verify. In a handshake with `server_context`, TLS has checked the certificate's
    chain. The caller checks whether it was revoked, or has expired since the connection was opened.
    """
    check_size(cert_der, "certificate")
    try:
        cert = x509.load_der_x509_certificate(cert_der)
        subject, key = cert.subject, cert.public_key()
        serial, until = cert.serial_number, cert.not_valid_after_utc.timestamp()
    except Exception:  # as in read_request
        raise IdentityError("invalid certificate: expected DER (X.509)") from None
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


def matches_key(key: Ed25519PrivateKey, cert_pem: bytes) -> bool:
    """Whether a certificate is for the public half of `key`."""
    return parse_certificate(cert_pem).public_key() == key.public_key()


def identity_of_pem(cert_pem: bytes) -> Identity:
    """As `identity_of_der`, for a certificate in PEM."""
    return identity_of_der(parse_certificate(cert_pem).public_bytes(serialization.Encoding.DER))


# What the check of a certificate's signature may raise
INVALID = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm)


def verify_certificate(cert_pem: bytes, ca_pem: bytes, role: str, federation: str) -> Identity:
    """Return a certificate's identity if the CA signed it for that role and federation; an IdentityError if not.

    The caller checks whether the certificate has expired.
    """
    cert, ca, identity = parse_certificate(cert_pem), parse_certificate(ca_pem), identity_of_pem(cert_pem)
    try:
        cert.verify_directly_issued_by(ca)
        constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints).value
        organization = _only(cert.subject, NameOID.ORGANIZATION_NAME, "certificate", "federation (O)")
    except (*INVALID, x509.ExtensionNotFound):
        raise IdentityError(
            f"the certificate of {identity.name} was not issued by the federation's authority"
        ) from None
    if identity.role != role or organization != federation or constraints.ca:
        raise IdentityError(
            f"the certificate of {identity.name} is for the role {identity.role} in {organization[:80]!r}; expected "
            f"{role} in {federation!r}"
        )
    return identity


def check_authority(ca_pem: bytes) -> str:
    """Return the fingerprint of a CA's certificate; an IdentityError unless it is signed with its own key."""
    ca = parse_certificate(ca_pem)
    try:
        ca.verify_directly_issued_by(ca)
    except INVALID:
        raise IdentityError("not a certificate authority: the certificate is not signed with its own key") from None
    return ca.fingerprint(hashes.SHA256()).hex()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _lifetime(days: int) -> datetime.timedelta:
    if not 1 <= days <= LONGEST:
        raise ConfigError(f"a certificate cannot be valid for {days} days; expected 1 to {LONGEST}")
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
    """The fields of every certificate; strict verification (RFC 5280) requires the two key identifiers."""
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


def parse_certificate(cert_pem: bytes) -> x509.Certificate:
    """Parse the single certificate in `cert_pem`: a second one would be trusted without a check of its fingerprint."""
    check_size(cert_pem, "certificate")
    try:
        certs = x509.load_pem_x509_certificates(cert_pem)
    except Exception:  # as in read_request
        raise IdentityError("invalid certificate: expected PEM (X.509)") from None
    if len(certs) != 1:
        raise IdentityError(f"expected one certificate, found {len(certs)}")
    return certs[0]


def _only(subject: x509.Name, oid: x509.ObjectIdentifier, where: str, field: str) -> str:
    values = [attribute.value for attribute in subject.get_attributes_for_oid(oid)]
    if len(values) != 1 or not isinstance(values[0], str):
        raise IdentityError(f"the {where} has {len(values)} entries for the {field}; expected one text")
    return values[0]


def _name_in(subject: x509.Name, where: str) -> str:
    try:
        return valid_name(_only(subject, NameOID.COMMON_NAME, where, "name (CN)"))
    except ConfigError as error:
        raise IdentityError(f"in the {where}, {error}") from None


def read_certificate(path: Path, authority: Path) -> bytes:
    """Read a certificate from a file and check that the authority signed it (also its own); errors name the file."""
    data, issuer = read_pem(path), read_pem(authority)
    try:
        certificate = parse_certificate(data)
    except IdentityError as error:
        raise IdentityError(f"{path}: {error}") from None
    try:
        certificate.verify_directly_issued_by(parse_certificate(issuer))
    except (ValueError, TypeError, InvalidSignature, IdentityError):
        raise IdentityError(f"{path} is damaged, or was not signed by the authority in {authority}") from None
    return data


def public_keys(path: Path) -> list[Ed25519PublicKey]:
    """The public keys of the certificates in a file; none if it is missing or unreadable."""
    try:
        found = [certificate.public_key() for certificate in x509.load_pem_x509_certificates(path.read_bytes())]
    except (OSError, ValueError):
        return []
    return [key for key in found if isinstance(key, Ed25519PublicKey)]


def read_pem(path: Path) -> bytes:
    """Read a certificate's file, at most one byte more than `parse_certificate` accepts."""
    try:
        with open(path, "rb") as file:
            return file.read(LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
