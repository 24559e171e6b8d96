"""The table `[trust]` of `party.toml`: what the aggregator must prove before this party works for it."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.net.attestation.verifier import AttestationVerifier


@dataclass(frozen=True)
class Trust:
    """With `attestation` the party works only for an aggregator whose trusted execution environment it has verified."""

    attestation: AttestationVerifier | None = None
