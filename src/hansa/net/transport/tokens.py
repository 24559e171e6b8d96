"""Enrolment tokens: one-time invitations for parties.

A token invites one party. It carries a secret, to be shown once, and the fingerprint of the certificate authority, so
that the party recognises the right aggregator before it trusts it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass, field

import msgspec

from hansa.net.transport.certificates import fingerprint
from hansa.net.transport.keys import LIMIT, IdentityError
from hansa.net.transport.names import valid_name
from hansa.plumbing.errors import HansaError

_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in base64url
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_TOKEN = "hansa-1."


@dataclass(frozen=True)
class Token:
    """An invitation for one party. Its text is secret: it is kept in private files and shown once, to enrol."""

    party: str
    secret: str = field(repr=False)
    ca: str  # fingerprint of the certificate authority

    def __post_init__(self) -> None:
        valid_name(self.party)
        if not _SECRET.fullmatch(self.secret):
            raise IdentityError("the token's secret is not 32 bytes in base64url")
        if not _FINGERPRINT.fullmatch(self.ca):
            raise IdentityError("the token's CA fingerprint is not a SHA-256 in hex")

    def text(self) -> str:
        """Encode the token as one word: `hansa-1.` and base64url."""
        return _TOKEN + base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Token:
        """Decode what `text()` wrote; surrounding whitespace is ignored."""
        text = text.strip()
        if not text.startswith(_TOKEN) or len(text) > LIMIT:
            raise IdentityError(f"invalid token: expected one word that begins with {_TOKEN!r}")
        body = text.removeprefix(_TOKEN)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            return msgspec.json.decode(data, type=cls)
        except (ValueError, HansaError):  # ValueError: not base64, not ASCII, not JSON, or not these fields
            raise IdentityError("the token is damaged; copy all of it, or ask the operator for a new one") from None

    def digest(self) -> str:
        """SHA-256 of the secret in hex: the aggregator stores only this."""
        return secret_digest(self.secret)


def secret_digest(secret: str) -> str:
    """SHA-256 in hex of a token's secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_token(party: str, ca_pem: bytes) -> Token:
    """Create an invitation for `party` to the federation of this CA."""
    return Token(party, secrets.token_urlsafe(32), fingerprint(ca_pem))
