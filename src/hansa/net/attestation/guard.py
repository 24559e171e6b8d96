"""A party's guard: no request but the one for evidence before the aggregator's TLS key is attested.

The key of every TLS handshake is compared with the attested one. A new connection is attested again before the next
work, and a connection to another key fails in its handshake, before anything is sent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from hansa.net.attestation.verifier import (
    LIMIT,
    NONCE,
    AttestationError,
    AttestationVerifier,
    Evidence,
    bound_data,
    public_key_bytes,
)
from hansa.net.transport.client import Client, Refusal
from hansa.net.transport.wire import unpack
from hansa.plumbing.errors import ConfigError

log = logging.getLogger("hansa.net")


class KeyPin:
    """The aggregator's TLS key: that of the last handshake, and whether it was attested since."""

    def __init__(self) -> None:
        self.key: bytes | None = None
        self.attested = self.changed = False

    def install(self, context: ssl.SSLContext) -> None:
        """Check the key in every handshake of a client's connections."""
        pin = self

        class PinnedSSLObject(ssl.SSLObject):
            def do_handshake(self) -> None:
                super().do_handshake()
                pin.meet(self.getpeercert(binary_form=True))

        context.sslobject_class = PinnedSSLObject

    def meet(self, certificate: bytes | None) -> None:
        """Note the key of a new connection; an error ends its handshake if the key is another one."""
        key = public_key_bytes(x509.load_der_x509_certificate(certificate)) if certificate else b""
        if self.key is not None and key != self.key:
            self.changed = True
            raise ssl.SSLCertVerificationError("its TLS key is another one than the one that was attested")
        self.key, self.attested = key, False

    def forget(self) -> None:
        """Accept another key, which is not attested yet."""
        self.key, self.attested, self.changed = None, False, False


class AttestationGuard:
    """Attests the aggregator before a party works for it. Without a verifier it does nothing."""

    def __init__(self, verifier: AttestationVerifier | None, pin: KeyPin | None, client: Client, folder: Path,
                 name: str, now: Callable[[], float] = time.time) -> None:  # fmt: skip
        self._verifier, self._pin, self._client, self._folder, self._now = verifier, pin, client, folder, now
        self._who = f"the aggregator of {name} at {client.url}"

    async def check(self) -> None:
        """Attest the aggregator, unless its connection was attested; a ConfigError if its evidence is refused."""
        if self._verifier is None or self._pin is None or self._pin.attested:
            return
        nonce = secrets.token_bytes(NONCE)
        try:
            _, data = await self._client.call("POST", "/v1/attest", nonce, limit=LIMIT)
            measurement = await asyncio.to_thread(self._verify, self._verifier, unpack(data, Evidence, LIMIT), nonce)
        except AttestationError as error:
            raise ConfigError(f"this party refuses {self._who}: {error}") from None
        except Refusal as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"this party refuses {self._who}: it has no attestation evidence, which trust.attestation requires"
            ) from None
        log.info("aggregator attested", extra={"detail": {"kind": self._verifier.name, "measurement": measurement}})
        self._pin.attested = True

    def _verify(self, verifier: AttestationVerifier, evidence: Evidence, nonce: bytes) -> str:
        if evidence.kind != verifier.name:
            raise AttestationError(
                f"its evidence is of the kind {evidence.kind[:40]!r}; this party requires {verifier.name!r}"
            )
        assert self._pin is not None and self._pin.key is not None
        return verifier.verify(evidence, bound_data(self._pin.key, nonce), self._folder, self._now())

    def renewed(self) -> bool:
        """Whether a connection failed because the aggregator has another key; that one is attested next."""
        if self._pin is None or not self._pin.changed:
            return False
        log.warning("%s has another TLS key: it is attested again", self._who)
        self._pin.forget()
        return True
