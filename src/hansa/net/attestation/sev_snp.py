"""AMD SEV-SNP attestation reports (AMD, SEV Secure Nested Paging Firmware ABI Specification, publication 56860).

The report has 1184 bytes. The processor signs the first 672 with its VCEK (a key of the chip and its firmware versions)
or with a VLEK (a key of the cloud provider), ECDSA on P-384 with SHA-384. AMD's intermediate key (ASK, for a VLEK the
ASVK) signs the certificate of that key, and AMD's root key (ARK) signs the intermediate one.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.x509.oid import NameOID
from msgspec import Meta

from hansa.core.registry import register
from hansa.net.attestation.verifier import AttestationError, AttestationVerifier, Evidence, check_bound
from hansa.plumbing.errors import ConfigError

SIZE, SIGNED = 0x4A0, 0x2A0  # bytes of a report, and how many of them are signed
NUMBER = 72  # bytes of r and of s, least significant first
VERSIONS = (2, 3, 5)
ECDSA_P384 = 1  # SIGNATURE_ALGO
DEBUG, MIGRATION = 1 << 19, 1 << 18  # bits of POLICY
KEYS = {0: "SEV-VCEK", 1: "SEV-VLEK"}  # SIGNING_KEY, and the subject of the key's certificate
TURIN = 0x1A  # CPUID family whose TCB version has another layout
OID = "1.3.6.1.4.1.3704.1"  # extensions of AMD's certificates
TCB_OIDS = {"bootloader": 1, "tee": 2, "snp": 3, "microcode": 8, "fmc": 9}
CERTIFICATES = 4  # the most certificates in evidence
INVALID = (ValueError, TypeError, InvalidSignature)


@dataclass(frozen=True)
class SnpReport:
    """The fields of a report that are checked."""

    policy: int
    vmpl: int
    signing_key: int
    data: bytes
    measurement: bytes
    tcb: dict[str, int]
    chip: bytes
    signed: bytes
    signature: tuple[int, int]

    @classmethod
    def read(cls, raw: bytes) -> SnpReport:
        """Read the bytes of a report; an AttestationError if they have another layout."""
        if len(raw) != SIZE:
            raise AttestationError(f"its SEV-SNP report has {len(raw)} bytes; expected {SIZE}")
        version, _, policy = struct.unpack_from("<IIQ", raw)
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise AttestationError(f"its SEV-SNP report has version {version}; known are {known}")
        vmpl, algorithm = struct.unpack_from("<II", raw, 0x30)
        if algorithm != ECDSA_P384:
            raise AttestationError(f"its SEV-SNP report is signed by algorithm {algorithm}; expected 1 (ECDSA P-384)")
        (flags,) = struct.unpack_from("<I", raw, 0x48)
        tcb, family = raw[0x180:0x188], raw[0x188] if version >= 3 else 0
        r, s = (int.from_bytes(raw[at : at + NUMBER], "little") for at in (SIGNED, SIGNED + NUMBER))
        return cls(policy, vmpl, (flags >> 2) & 7, raw[0x50:0x90], raw[0x90:0xC0], _tcb(tcb, family), raw[0x1A0:0x1E0],
                   raw[:SIGNED], (r, s))  # fmt: skip


def _tcb(raw: bytes, family: int) -> dict[str, int]:
    """The security versions of the firmware's parts in a TCB_VERSION."""
    if family == TURIN:
        return {"fmc": raw[0], "bootloader": raw[1], "tee": raw[2], "snp": raw[3], "microcode": raw[7]}
    return {"bootloader": raw[0], "tee": raw[1], "snp": raw[6], "microcode": raw[7]}


@register("sev-snp")
@dataclass(frozen=True)
class SevSnp(AttestationVerifier):
    """AMD SEV-SNP: the launch measurement of a virtual machine, signed by the processor.

    `roots` has AMD's ARK and ASK (or ASVK, for keys of a cloud provider) of the processor's family. `tcb` has the least
    security version of parts of the firmware: bootloader, tee, snp, microcode and, for Turin, fmc. The report may come
    from a privilege level (VMPL) of at most `vmpl`. Machines that may be debugged or migrated are refused.
    """

    tcb: dict = field(default_factory=dict)  # type: ignore[type-arg]
    vmpl: Annotated[int, Meta(ge=0, le=3)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.tcb.items():
            if name not in TCB_OIDS:
                raise ConfigError(f"tcb: unknown part of the firmware {name!r}; known: {', '.join(TCB_OIDS)}")
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
                raise ConfigError(f"tcb.{name}: expected a whole number from 0 to 255, got {value!r}")

    def check(self, folder: Path) -> None:
        if not any(_issued(root, root) for root in self.authorities(folder)):
            raise ConfigError(f"trust.attestation.roots: {folder / self.roots} has no root (ARK) that signed itself")

    def verify(self, evidence: Evidence, data: bytes, folder: Path, now: float) -> str:
        report = SnpReport.read(evidence.report)
        key = self._signing_certificate(evidence, report, folder, now)
        public = key.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP384R1):
            raise AttestationError("the key that signed its SEV-SNP report is not on the curve P-384")
        try:
            public.verify(encode_dss_signature(*report.signature), report.signed, ec.ECDSA(hashes.SHA384()))
        except INVALID:
            raise AttestationError("the signature of its SEV-SNP report is wrong") from None
        _check_endorsed(key, report)
        check_bound(report.data, data)
        if report.policy & DEBUG:
            raise AttestationError("its SEV-SNP machine may be debugged (policy bit 19), so its memory can be read")
        if report.policy & MIGRATION:
            raise AttestationError("its SEV-SNP machine may be migrated by another one (policy bit 18)")
        if report.vmpl > self.vmpl:
            raise AttestationError(
                f"its SEV-SNP report comes from privilege level {report.vmpl}; this party accepts at most {self.vmpl} "
                "(trust.attestation.vmpl)"
            )
        for name, least in self.tcb.items():
            if report.tcb.get(name, -1) < least:
                raise AttestationError(
                    f"the {name} of its processor has security version {report.tcb.get(name, 'none')}; this party "
                    f"requires {least} (trust.attestation.tcb)"
                )
        return self.accepted(report.measurement)

    def _signing_certificate(self, evidence: Evidence, report: SnpReport, folder: Path, now: float) -> x509.Certificate:
        """The certificate of the key that signed a report, whose chain ends at a pinned root."""
        if report.signing_key not in KEYS:
            raise AttestationError(f"its SEV-SNP report was signed by no key of AMD (SIGNING_KEY {report.signing_key})")
        name = KEYS[report.signing_key]
        try:
            sent = x509.load_pem_x509_certificates(evidence.certificates)
        except ValueError:
            sent = []
        key = next((each for each in sent[:CERTIFICATES] if _name(each) == name), None)
        if key is None:
            raise AttestationError(f"its evidence has no certificate of the key that signed its report ({name})")
        pinned = self.authorities(folder)
        roots = [root for root in pinned if _issued(root, root)]
        chain = next(([key, middle, root] for middle in pinned for root in roots
                      if middle not in roots and _issued(key, middle) and _issued(middle, root)), None)  # fmt: skip
        if chain is None:
            raise AttestationError(
                f"the certificate of the key that signed its report ({name}) does not end at this party's roots "
                "(trust.attestation.roots)"
            )
        when = datetime.datetime.fromtimestamp(now, datetime.UTC)
        for each in chain:
            if not each.not_valid_before_utc <= when <= each.not_valid_after_utc:
                raise AttestationError(
                    f"the certificate {_name(each)} of its evidence is valid from "
                    f"{each.not_valid_before_utc:%Y-%m-%d} to {each.not_valid_after_utc:%Y-%m-%d}, and not now"
                )
        return key


def _check_endorsed(key: x509.Certificate, report: SnpReport) -> None:
    """Refuse a key whose certificate is for another chip, or for other versions of the firmware than the report's."""
    extensions = {each.oid.dotted_string: each.value for each in key.extensions}
    for name, version in report.tcb.items():
        value = extensions.get(f"{OID}.3.{TCB_OIDS[name]}")
        if not isinstance(value, x509.UnrecognizedExtension) or _integer(value.value) != version:
            raise AttestationError(
                f"the certificate of the key that signed its report is not for version {version} of the {name}, as the "
                "report says"
            )
    chip = extensions.get(f"{OID}.4")
    if report.signing_key != 0 or not any(report.chip):  # a VLEK has no chip, and a report may hide it
        return
    if not isinstance(chip, x509.UnrecognizedExtension) or chip.value[-len(report.chip) :] != report.chip:
        raise AttestationError("the certificate of the key that signed its report is for another chip")


def _integer(der: bytes) -> int:
    """The value of a short DER integer, at most 255; -1 for anything else."""
    short = len(der) in (3, 4) and der[0] == 2 and der[1] == len(der) - 2
    value = int.from_bytes(der[2:], "big", signed=True) if short else -1
    return value if 0 <= value <= 255 else -1


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except INVALID:
        return False
    return True


def _name(certificate: x509.Certificate) -> str:
    return "".join(str(each.value) for each in _common_names(certificate))[:80]


def _common_names(certificate: x509.Certificate) -> Iterator[x509.NameAttribute[str | bytes]]:
    try:
        yield from certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:  # an invalid name
        return
