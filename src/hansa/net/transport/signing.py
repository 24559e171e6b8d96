"""Signed requests: a request that changes state carries its sender's signature, which is kept as evidence.

A signature (Ed25519) covers the method, the path, the SHA-256 of the body, the job, round and ask, and a nonce. The
functions are pure; the caller checks that the key belongs to the authenticated sender. The nonce distinguishes two
signatures of one request in the log. It does not prevent replays: every route tolerates repeated requests.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hansa.plumbing.errors import HansaError

JOB, ROUND, ASK = "Hansa-Job", "Hansa-Round", "Hansa-Ask"
NONCE, SIGNATURE = "Hansa-Nonce", "Hansa-Signature"
Body = bytes | bytearray | memoryview

_WORD = re.compile(r"[!-~]{0,128}")  # visible ASCII, safe in a header
_ROUND = re.compile(r"-1|0|[1-9][0-9]{0,17}")  # canonical decimal
_NONCE = re.compile(r"[0-9a-f]{32}")


class SignatureError(HansaError):
    """A request whose signature is missing, malformed or invalid."""


@dataclass(frozen=True)
class About:
    """The job, round and ask that a request is about; the defaults mean none."""

    job: str = ""
    round: int = -1
    ask: str = ""


def signed_bytes(method: str, path: str, body: Body, about: About, nonce: str) -> bytes:
    """The bytes to sign: a fixed prefix, then each field after its length, so that different requests differ.

    `path` is the request's target as sent, with its query.
    """
    fields = [method, path, hashlib.sha256(body).hexdigest(), about.job, str(about.round), about.ask, nonce]
    encoded = [text.encode() for text in fields]
    return b"hansa-1 request" + b"".join(len(data).to_bytes(8, "big") + data for data in encoded)


def sign(key: Ed25519PrivateKey, method: str, path: str, body: Body, about: About) -> dict[str, str]:
    """Return the headers of a signed request: job, round, ask, a new nonce, and the signature."""
    headers = {JOB: about.job, ROUND: str(about.round), ASK: about.ask, NONCE: secrets.token_hex(16)}
    signature = key.sign(signed_bytes(method, path, body, _about(headers), headers[NONCE]))
    return headers | {SIGNATURE: base64.b64encode(signature).decode()}


def verify(public_key: Ed25519PublicKey, method: str, path: str, body: Body, headers: Mapping[str, str]) -> About:
    """Return the job, round and ask of a request signed with `public_key`; a SignatureError if invalid.

    Use the returned values, not the headers: only they are covered by the signature.
    """
    about = _about(headers)
    nonce = _field(headers, NONCE, _NONCE)
    try:
        signature = base64.b64decode(_field(headers, SIGNATURE, _WORD), validate=True)
        public_key.verify(signature, signed_bytes(method, path, body, about, nonce))
    except (ValueError, InvalidSignature):  # ValueError: invalid base64, or a path that is not valid text
        raise SignatureError(f"the signature of this {method} request does not match its content and sender") from None
    return about


def _about(headers: Mapping[str, str]) -> About:
    """Read job, round and ask from headers; `sign` uses it too, so that it signs only valid values."""
    return About(_field(headers, JOB, _WORD), int(_field(headers, ROUND, _ROUND)), _field(headers, ASK, _WORD))


def _field(headers: Mapping[str, str], name: str, pattern: re.Pattern[str]) -> str:
    value = headers.get(name)
    if value is None:
        raise SignatureError(f"the request has no header {name}; requests that change state must be signed")
    if not pattern.fullmatch(value):
        raise SignatureError(f"the header {name} is malformed: {value[:80]!r}")
    return value
