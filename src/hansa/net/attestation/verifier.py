"""Base of attestation verifiers, the evidence that they read, and how evidence is bound to a TLS key and a nonce."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from msgspec import Meta, Struct

from hansa.core.registry import Part
from hansa.plumbing.errors import ConfigError, HansaError

NONCE = 32  # bytes that a party draws for each attestation
LIMIT = 2**19  # bytes: the largest evidence
ROOTS = 2**16  # bytes read of a file of roots
DOMAIN = b"hansa attestation 1\0"


class AttestationError(HansaError):
    """Evidence that a party refuses; the message says why."""


class Evidence(Struct, frozen=True):
    """Evidence of a trusted execution environment, as its platform makes it.

    `kind` names the verifier. `report` is the signed report or quote, `certificates` the chain of the key that signed
    it (PEM), `collateral` what else the verifier needs, as text.
    """

    kind: Annotated[str, Meta(max_length=64)]
    report: Annotated[bytes, Meta(max_length=2**16)]
    certificates: Annotated[bytes, Meta(max_length=2**16)] = b""
    collateral: Annotated[str, Meta(max_length=2**18)] = ""


def public_key_bytes(certificate: x509.Certificate) -> bytes:
    """The public key of a certificate (DER, SubjectPublicKeyInfo)."""
    return certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def bound_data(key: bytes, nonce: bytes) -> bytes:
    """The 64 bytes of report data that bind evidence to a TLS public key and to a party's nonce (SHA-512)."""
    return hashlib.sha512(DOMAIN + key + nonce).digest()


@dataclass(frozen=True)
class AttestationVerifier(Part):
    """Base of attestation verifiers. A party accepts the `measurements` listed (hex) and no other.

    `roots` is a file with the manufacturer's certificates (PEM), which the party's owner has fetched: nothing is
    fetched when evidence is verified. A relative path begins at the folder of `party.toml`.
    """

    measurements: tuple[str, ...] = ()
    roots: str = ""
    kind: ClassVar[str] = "attestation"
    length: ClassVar[int] = 48  # bytes of a measurement

    def __post_init__(self) -> None:
        if not self.measurements:
            raise ConfigError("measurements: list the measurements of the aggregator's program that you accept, in hex")
        for value in self.measurements:
            if not re.fullmatch(rf"[0-9a-f]{{{2 * self.length}}}", value):
                digits = 2 * self.length
                raise ConfigError(f"measurements: expected {digits} hex digits (lower case), got {value[:120]!r}")
        if not self.roots:
            raise ConfigError("roots: name the file with the manufacturer's root certificates (PEM)")

    def authorities(self, folder: Path) -> list[x509.Certificate]:
        """The pinned certificates; a ConfigError if the file is missing or invalid."""
        path = folder / self.roots
        try:
            with open(path, "rb") as file:
                return x509.load_pem_x509_certificates(file.read(ROOTS))
        except OSError as error:
            raise ConfigError(f"trust.attestation.roots: cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise ConfigError(f"trust.attestation.roots: {path} has no certificates in PEM") from None

    def check(self, folder: Path) -> None:
        """Raise a ConfigError if no evidence could be verified here: invalid roots, or a package is missing."""
        self.authorities(folder)

    def verify(self, evidence: Evidence, data: bytes, folder: Path, now: float) -> str:
        """Return the measurement in the evidence if it is genuine, accepted, and has this report data (`bound_data`).

        `now` is the time in seconds since 1970. An AttestationError says why the evidence is refused.
        """
        raise TypeError(f"the verifier {self.name!r} does not define verify()")

    def accepted(self, measurement: bytes) -> str:
        """The measurement in hex, if it is on the list."""
        value = measurement.hex()
        if value not in self.measurements:
            raise AttestationError(
                f"its measurement {value} is not on this party's list (trust.attestation.measurements)"
            )
        return value


def check_bound(found: bytes, data: bytes) -> None:
    """Refuse a report that was not made for this TLS key and this nonce."""
    if found != data:
        raise AttestationError(
            "its report was not made for this connection: the report data are not those of the aggregator's TLS key "
            "and of this party's nonce (an old report, or that of another machine)"
        )
