"""Attestation: a party verifies which program serves the aggregator, in which trusted execution environment."""

from hansa.net.attestation.sev_snp import SevSnp
from hansa.net.attestation.tdx import Tdx
from hansa.net.attestation.verifier import AttestationError, AttestationVerifier, Evidence, bound_data

__all__ = ["AttestationError", "AttestationVerifier", "Evidence", "SevSnp", "Tdx", "bound_data"]
