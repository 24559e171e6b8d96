"""Intel TDX quotes, verified by `dcap-qvl` (Phala Network's implementation of Intel's DCAP quote verification)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from hansa.core.registry import register
from hansa.net.attestation.verifier import AttestationError, AttestationVerifier, Evidence, check_bound
from hansa.plumbing.errors import ConfigError

DEBUG = 1  # bit of TDATTRIBUTES
REGISTERS = ("0", "1", "2", "3")  # RTMR0 to RTMR3


@register("tdx")
@dataclass(frozen=True)
class Tdx(AttestationVerifier):
    """Intel TDX: the measurement of a trust domain (MRTD), signed by Intel's quoting enclave.

    `roots` has Intel's SGX root certificate. The collateral (TCB information, identity of the quoting enclave, lists of
    revoked certificates) comes with the evidence: Intel signed it, and it must be current. MRTD measures the firmware
    alone; `rtmrs` has the values of run-time registers by number, which measure the kernel and what it loads. `status`
    lists the accepted states of the platform. Domains that may be debugged are refused. Needs the extra `tdx`.
    """

    rtmrs: dict = field(default_factory=dict)  # type: ignore[type-arg]
    status: tuple[str, ...] = ("UpToDate",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.rtmrs.items():
            if name not in REGISTERS:
                raise ConfigError(f"rtmrs: unknown register {name!r}; known: {', '.join(REGISTERS)}")
            if not isinstance(value, str) or len(value) != 96:
                raise ConfigError(f"rtmrs.{name}: expected 96 hex digits, got {str(value)[:120]!r}")

    def check(self, folder: Path) -> None:
        _library()
        if len(self.authorities(folder)) != 1:
            raise ConfigError(f"trust.attestation.roots: {folder / self.roots} must have one certificate, Intel's root")

    def verify(self, evidence: Evidence, data: bytes, folder: Path, now: float) -> str:
        library, (root, *_) = _library(), self.authorities(folder)
        try:
            collateral = library.QuoteCollateralV3.from_json(evidence.collateral)
        except ValueError:
            raise AttestationError("the collateral of its TDX quote is invalid") from None
        try:
            quote = library.parse_quote(evidence.report)
        except ValueError:
            raise AttestationError("its TDX quote is invalid: it is truncated, or has an unknown version") from None
        if not quote.is_tdx():
            raise AttestationError("its quote is of an SGX enclave; expected a TDX quote")
        try:
            verified = library.verify_with_root_ca(evidence.report, collateral,
                                                   root.public_bytes(serialization.Encoding.DER), int(now))  # fmt: skip
        except ValueError as error:
            why = " ".join(str(error).removeprefix("Verification failed: ").split())[:200]
            raise AttestationError(f"its TDX quote is not genuine: {why}") from None
        if verified.status not in self.status:
            raise AttestationError(
                f"its TDX platform is in the state {verified.status}; this party accepts {', '.join(self.status)} "
                "(trust.attestation.status)"
            )
        report = quote.report
        check_bound(report.report_data, data)
        if report.td_attributes[0] & DEBUG:
            raise AttestationError("its TDX domain may be debugged, so its memory can be read")
        for name, value in self.rtmrs.items():
            found = getattr(report, f"rt_mr{name}").hex()
            if found != value:
                raise AttestationError(f"its register RTMR{name} is {found}; this party accepts another value "
                                       "(trust.attestation.rtmrs)")  # fmt: skip
        return self.accepted(report.mr_td)


def _library() -> Any:
    try:
        return importlib.import_module("dcap_qvl")
    except ImportError:
        raise ConfigError("trust.attestation 'tdx' needs the package dcap-qvl: pip install 'hansa[tdx]'") from None
