"""How a party proves to the others what it said, and knows what they said, where the aggregator is not believed.

A party signs with the key of its certificate. Others know it by that certificate, which comes through the aggregator
and is checked here: it must be by the federation's authority, for a party of this federation, and not have ended. Who
holds the authority's key could certify parties that do not exist, and an aggregator which is that somebody could have
a party share its masks with nobody else. Against that a party pins the others in `party.toml`: then it knows only those
whom the table `[peers]` names, and each only by the certificate whose fingerprint is there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from hansa.core.errors import HansaError, PartyError
from hansa.net.transport import certificates, keys


class Peers:
    """The party in a folder, and the others as it knows them; `pins` are the fingerprints of their certificates, by
    name."""

    def __init__(self, folder: Path, pins: Mapping[str, str]) -> None:
        self._folder, self._pins = folder, dict(pins)

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        """This party's certificate (PEM), and its signature."""
        certificate = certificates.read_certificate(self._folder / "cert.pem", self._folder / "ca.pem")
        return certificate, keys.read_key(self._folder / "key.pem").sign(data)

    @property
    def federation(self) -> str:
        """The federation that this party is in."""
        found: str = json.loads((self._folder / "party.json").read_text())["federation"]
        return found

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        """The name and the public key of the party whose certificate this is; a PartyError where it is not believed."""
        try:
            who = certificates.verify_certificate(
                certificate, (self._folder / "ca.pem").read_bytes(), "party", self.federation
            )
        except (HansaError, OSError, ValueError, KeyError) as error:
            raise PartyError(f"a party of the secure sum is not known: {error}") from None
        if who.not_after < time.time():
            raise PartyError(f"the certificate of {who.name} has ended")
        mine = (self._folder / "cert.pem").read_bytes()
        if who.name == certificates.identity_of_pem(mine).name:
            if certificate != mine:
                raise PartyError("somebody else is said to be this party in the secure sum")
        elif self._pins and self._pins.get(who.name) != certificates.fingerprint(certificate):
            raise PartyError(
                f"its policy pins the parties that it sums with, and does not know {who.name} by the certificate "
                f"{certificates.fingerprint(certificate)}; see peers in party.toml"
            )
        return who.name, who.key.public_bytes_raw()
