"""Authentication between parties, in a secure sum or for messages, where the aggregator is not trusted.

A party signs with the key of its certificate. The others receive that certificate through the aggregator and check it:
the federation's authority must have issued it, for a party of this federation, and it must not have expired. The holder
of the authority's key could certify parties that do not exist. If the aggregator holds it, a party could end up sharing
its masks, or its messages, with fake parties only. Against that, a party pins the others in `party.toml`: then it
accepts only the parties in the table `[peers]`, each by the fingerprint of its certificate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hansa.net.transport import certificates, keys
from hansa.plumbing.errors import HansaError, PartyError

Signer = Callable[[bytes], tuple[bytes, bytes]]  # data -> certificate (PEM) and signature


class Peers:
    """Signs for the party of a folder and checks other parties; `pins` maps names to certificate fingerprints.

    A worker process has its agent sign (`signer`).
    """

    def __init__(self, folder: Path, pins: Mapping[str, str], signer: Signer | None = None) -> None:
        self._folder, self._pins, self._signer = folder, dict(pins), signer

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        """Return this party's certificate (PEM) and its signature of `data`."""
        if self._signer is not None:
            return self._signer(data)
        certificate = certificates.read_certificate(self._folder / "cert.pem", self._folder / "ca.pem")
        return certificate, keys.read_key(self._folder / "key.pem").sign(data)

    @property
    def federation(self) -> str:
        """The name of this party's federation."""
        name: str = json.loads((self._folder / "party.json").read_text())["federation"]
        return name

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        """Return the name and public key in a party's certificate; a PartyError if it is not trusted."""
        try:
            identity = certificates.verify_certificate(
                certificate, (self._folder / "ca.pem").read_bytes(), "party", self.federation
            )
        except (HansaError, OSError, ValueError, KeyError) as error:
            raise PartyError(f"cannot trust another party: {error}") from None
        if identity.not_after < time.time():
            raise PartyError(f"the certificate of {identity.name} has expired")
        mine = (self._folder / "cert.pem").read_bytes()
        if identity.name == certificates.identity_of_pem(mine).name:
            if certificate != mine:
                raise PartyError("the aggregator lists this party with another certificate")
        elif self._pins and self._pins.get(identity.name) != certificates.fingerprint(certificate):
            raise PartyError(
                f"its policy names its peers, and has no pin for {identity.name} with the "
                f"certificate {certificates.fingerprint(certificate)}; see peers in party.toml"
            )
        return identity.name, identity.key.public_bytes_raw()
