"""Signatures of parties (Ed25519, RFC 8032), for sums whose aggregator may lie about what others sent.

A deployed party signs with the key of its certificate. It knows others by certificates of the federation's authority;
see `Vault`. In a simulation the keys are derived from the run's seed.
"""

from __future__ import annotations

import functools
import hashlib

from hansa.core.op import Party
from hansa.plumbing.errors import PartyError

SIGNATURE, KEY = 64, 32  # bytes
CERTIFICATE = 2048  # bytes of a certificate on the wire, padded


def sign(party: Party, data: bytes) -> tuple[bytes, bytes]:
    """The party's certificate, padded to `CERTIFICATE` bytes, and its signature of the data."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    signed = party.vault.sign(data)
    if signed is None:
        signed = b"", Ed25519PrivateKey.from_private_bytes(_simulated_key(party.seed, party.id)).sign(data)
    certificate, signature = signed
    if len(certificate) > CERTIFICATE - 2:
        raise PartyError(f"its certificate has {len(certificate)} bytes, and at most {CERTIFICATE - 2} can be sent")
    return (len(certificate).to_bytes(2, "little") + certificate).ljust(CERTIFICATE, b"\0"), signature


def signer(party: Party, other: int, certificate: bytes) -> tuple[str, bytes]:
    """The name and the public key of another party, from its padded certificate; a PartyError if it is invalid."""
    identity = party.vault.known(certificate[2 : 2 + int.from_bytes(certificate[:2], "little")])
    if identity is not None:
        return identity
    return str(other), _simulated_public(party.seed, other)


@functools.lru_cache(maxsize=2**14)  # in a simulation each party verifies the same signatures as all others
def verify(key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the owner of the public key signed the data."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _simulated_key(seed: int, party: int) -> bytes:
    return hashlib.blake2b(repr((seed, "signs", party)).encode(), digest_size=KEY).digest()


@functools.lru_cache(maxsize=2**14)
def _simulated_public(seed: int, party: int) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(_simulated_key(seed, party)).public_key().public_bytes_raw()
