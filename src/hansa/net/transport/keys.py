"""Private keys and private files.

Every key is Ed25519 and is created where it is used; it never leaves that machine. No error repeats a secret.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hansa.plumbing import disk
from hansa.plumbing.crash_points import steps
from hansa.plumbing.errors import ConfigError, HansaError

LIMIT = 16 * 1024  # bytes read of any key, certificate, request or token: valid ones are under 2 KiB

PublicKey = Ed25519PublicKey
PrivateKey = Ed25519PrivateKey


class IdentityError(HansaError):
    """A key, certificate, certificate request or token that is malformed or has the wrong content."""


def new_key() -> Ed25519PrivateKey:
    """Generate a private key."""
    return Ed25519PrivateKey.generate()


def key_bytes(key: Ed25519PrivateKey) -> bytes:
    """Encode a private key as unencrypted PEM (PKCS #8), only for `write_private`."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(data: bytes) -> Ed25519PrivateKey:
    """Decode what `key_bytes` wrote."""
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except Exception:  # the parser raises many types, and its messages may quote the key
        raise IdentityError("invalid private key: expected an unencrypted Ed25519 key in PEM (PKCS #8)") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"the private key is of type {type(key).__name__}; expected Ed25519")
    return key


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; replace an existing one atomically."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link; private files must be regular files")
    try:
        disk.put(path, [data], steps("private"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def read_private(path: Path) -> bytes:
    """Read what `write_private` wrote; a ConfigError if the file is missing or others have access to it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777  # of the open file: a path could be swapped in between
            if mode & 0o077:
                raise ConfigError(f"{path} is accessible to others (mode {mode:04o}); make it private: chmod 600")
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    check_size(data, f"file {path}")
    return data


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key from a private file; errors name the file."""
    data = read_private(path)
    try:
        return load_key(data)
    except IdentityError as error:
        raise IdentityError(f"{path}: {error}") from None


def check_size(data: bytes, noun: str) -> None:
    """Refuse data of more than LIMIT bytes, before it is parsed."""
    if len(data) > LIMIT:
        raise IdentityError(f"the {noun} has {len(data)} bytes; at most {LIMIT} are read")
