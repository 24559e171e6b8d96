"""Signatures of parties (Ed25519, RFC 8032), where the aggregator may lie about what others said.

A deployed party signs with the key of its certificate, and knows others by certificates of the federation's authority;
see `Vault`. In a simulation keys come from the run's seed.
"""

from __future__ import annotations

import hashlib

from hansa.core.errors import PartyError
from hansa.core.op import Party

SIGNATURE, KEY = 64, 32  # bytes
CERTIFICATE = 2048  # bytes that a certificate is sent in


def sign(party: Party, data: bytes) -> tuple[bytes, bytes]:
    """A party's certificate, padded to its place, and its signature of some data."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    signed = party.vault.sign(data)
    if signed is None:
        signed = b"", Ed25519PrivateKey.from_private_bytes(_simulated(party.seed, party.id)).sign(data)
    certificate, signature = signed
    if len(certificate) > CERTIFICATE - 2:
        raise PartyError(f"its certificate has {len(certificate)} bytes, and there is room for {CERTIFICATE - 2}")
    return (len(certificate).to_bytes(2, "little") + certificate).ljust(CERTIFICATE, b"\0"), signature


def known(party: Party, other: int, certificate: bytes) -> tuple[str, bytes]:
    """The name and the public key of another party, from its padded certificate; a PartyError where it is none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    found = party.vault.known(certificate[2 : 2 + int.from_bytes(certificate[:2], "little")])
    if found is not None:
        return found
    key = Ed25519PrivateKey.from_private_bytes(_simulated(party.seed, other))
    return str(other), key.public_key().public_bytes_raw()


def verify(key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the owner of that public key signed the data."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _simulated(seed: int, party: int) -> bytes:
    return hashlib.blake2b(repr((seed, "signs", party)).encode(), digest_size=KEY).digest()
