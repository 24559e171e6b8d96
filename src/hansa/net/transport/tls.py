"""TLS 1.3 contexts: the aggregator's, and those of its clients."""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from hansa.net.transport.certificates import parse_certificate, read_pem
from hansa.net.transport.keys import read_key
from hansa.plumbing.errors import ConfigError


def server_context(server_cert: Path, server_key: Path, ca: Path) -> ssl.SSLContext:
    """The aggregator's side of TLS 1.3. A client needs no certificate; if it shows one, this CA must have issued it.

    Sessions are not resumed: every connection shows its certificate, so that an expired one is refused.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = 0
    _trust_only(context, read_pem(ca))
    _load_identity(context, server_cert, server_key)
    return context


def client_context(ca: Path | bytes, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """A party's or operator's side of TLS 1.3: the server must show a certificate of this CA for its host name.

    `ca` is the CA's certificate (PEM) or its file; the system's list of authorities is not used.
    """
    if (cert is None) != (key is None):
        raise ConfigError("a client needs both a certificate and its private key, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False
    _trust_only(context, ca if isinstance(ca, bytes) else read_pem(ca))
    if cert is not None and key is not None:
        _load_identity(context, cert, key)
    return context


def unverified_context() -> ssl.SSLContext:
    """TLS 1.3 without verification: only to fetch the CA's certificate, whose fingerprint is then compared."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _trust_only(context: ssl.SSLContext, ca_pem: bytes) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    # The parsed certificate, not the file's text: OpenSSL might find a second certificate in the text.
    context.load_verify_locations(cadata=parse_certificate(ca_pem).public_bytes(serialization.Encoding.DER))


def _load_identity(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    read_key(key)  # must not be encrypted: OpenSSL would prompt for a password
    parse_certificate(read_pem(cert))
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ConfigError(f"the certificate {cert} does not belong to the key {key}: {error.reason}") from error
