"""Verifiers of attestation evidence: genuine evidence is accepted, and every forged part is refused in one sentence."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import time
from pathlib import Path
from typing import Any

import pytest
import snp
from cryptography.hazmat.primitives.asymmetric import ec

from hansa.net.attestation import AttestationError, Evidence, SevSnp, bound_data
from hansa.net.party.policy import Policy
from hansa.plumbing.errors import ConfigError

KEY, NONCE = b"k" * 44, b"n" * 32
DATA = bound_data(KEY, NONCE)


@functools.cache
def chain(name: str = "SEV-VCEK", days: int = 30) -> snp.Chain:
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) if days != 30 else None
    return snp.make_chain(name, start=start, days=days, chip=None if name == "SEV-VLEK" else snp.CHIP)


def verify(tmp_path: Path, made: snp.Chain | None = None, pinned: bytes | None = None, report: bytes | None = None,
           settings: dict[str, Any] | None = None, certificates: bytes | None = None,
           **fields: Any) -> str:  # fmt: skip
    """Verify evidence whose report has these fields."""
    made = made or chain()
    (tmp_path / "amd.pem").write_bytes(made.roots if pinned is None else pinned)
    verifier = SevSnp(**{"measurements": (snp.MEASUREMENT,), "roots": "amd.pem", **(settings or {})})
    verifier.check(tmp_path)
    raw = report if report is not None else snp.signed(made.key, snp.body(fields.pop("data", DATA), **fields))
    evidence = Evidence("sev-snp", raw, made.certificate if certificates is None else certificates)
    return verifier.verify(evidence, DATA, tmp_path, time.time())


@pytest.mark.parametrize("fields", [
    {}, {"version": 3}, {"version": 5}, {"policy": 0xB0000 & ~(1 << 19)}, {"chip": bytes(64)},
], ids=str)  # fmt: skip
def test_a_genuine_report_is_accepted(fields: dict[str, Any], tmp_path: Path) -> None:
    assert verify(tmp_path, settings={"tcb": snp.TCB}, **fields) == snp.MEASUREMENT


def test_a_report_signed_by_the_key_of_a_cloud_provider_is_accepted(tmp_path: Path) -> None:
    assert verify(tmp_path, chain("SEV-VLEK"), flags=1 << 2) == snp.MEASUREMENT


def test_the_firmware_versions_of_turin_have_their_own_places(tmp_path: Path) -> None:
    tcb = {"fmc": 1, "bootloader": 2, "tee": 3, "snp": 4, "microcode": 200}
    turin = {"tcb": tcb, "version": 3, "family": 0x1A}
    made = snp.make_chain(tcb=tcb)
    assert verify(tmp_path, made, settings={"tcb": tcb}, **turin) == snp.MEASUREMENT
    with pytest.raises(
        AttestationError, match="the fmc of its processor has security version 1; this party requires 2"
    ):
        verify(tmp_path, made, settings={"tcb": {"fmc": 2}}, **turin)
    with pytest.raises(AttestationError, match="the fmc of its processor has security version none"):
        verify(tmp_path, settings={"tcb": {"fmc": 0}})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another measurement": ({"measurement": "cd" * 48}, "its measurement cdcd.* is not on this party's list"),
    "unknown version": ({"version": 1}, "its SEV-SNP report has version 1; known are 2, 3, 5"),
    "another algorithm": ({"algorithm": 2}, "is signed by algorithm 2; expected 1"),
    "another nonce": ({"data": bound_data(KEY, b"m" * 32)}, "was not made for this connection"),
    "another key": ({"data": bound_data(b"l" * 44, NONCE)}, "was not made for this connection"),
    "debug": ({"policy": 0x30000 | 1 << 19}, r"may be debugged \(policy bit 19\)"),
    "migration": ({"policy": 0x30000 | 1 << 18}, r"may be migrated by another one \(policy bit 18\)"),
    "privilege level": ({"vmpl": 1}, "comes from privilege level 1; this party accepts at most 0"),
    "no key": ({"flags": 7 << 2}, r"was signed by no key of AMD \(SIGNING_KEY 7\)"),
    "another kind of key": ({"flags": 1 << 2}, r"has no certificate of the key that signed its report \(SEV-VLEK\)"),
    "old firmware": ({"settings": {"tcb": {"snp": 23}}},
                     "the snp of its processor has security version 22; this party requires 23"),
    "firmware that is not endorsed": ({"tcb": {**snp.TCB, "snp": 99}}, "is not for version 99 of the snp"),
    "another chip": ({"chip": bytes(63) + b"\x01"}, "is for another chip"),
    "no certificates": ({"certificates": b"x"}, "has no certificate of the key"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_report_that_is_not_as_it_must_be_is_refused(kind: str, tmp_path: Path) -> None:
    given, message = REFUSED[kind]
    with pytest.raises(AttestationError, match=message):
        verify(tmp_path, **given)


@pytest.mark.parametrize("length", [0, 100, 0x4A0 - 1, 0x4A0 + 1])
def test_a_report_of_another_length_is_refused(length: int, tmp_path: Path) -> None:
    raw = snp.signed(chain().key, snp.body(DATA)).ljust(0x4A0 + 1, b"\0")[:length]
    with pytest.raises(AttestationError, match=f"its SEV-SNP report has {length} bytes; expected 1184"):
        verify(tmp_path, report=raw)


@pytest.mark.parametrize("at", [4, 0x10, 0xC0, 0x140, 0x29F, 0x2A0, 0x2E8])
def test_every_signed_byte_and_the_signature_count(at: int, tmp_path: Path) -> None:
    raw = bytearray(snp.signed(chain().key, snp.body(DATA)))
    raw[at] ^= 1
    with pytest.raises(AttestationError, match="the signature of its SEV-SNP report is wrong"):
        verify(tmp_path, report=bytes(raw))


@pytest.mark.parametrize("number", [b"\0" * 144, b"\xff" * 144])
def test_signatures_out_of_range_are_refused(number: bytes, tmp_path: Path) -> None:
    with pytest.raises(AttestationError, match="the signature of its SEV-SNP report is wrong"):
        verify(tmp_path, report=(snp.body(DATA) + number).ljust(0x4A0, b"\0"))


def test_a_chain_to_another_root_is_refused(tmp_path: Path) -> None:
    other = snp.make_chain()
    with pytest.raises(AttestationError, match="does not end at this party's roots"):
        verify(tmp_path, other, pinned=chain().roots)
    forged = other.certificate + other.roots  # the aggregator sends its own root too
    with pytest.raises(AttestationError, match="does not end at this party's roots"):
        verify(tmp_path, other, pinned=chain().roots, certificates=forged)


def test_an_intermediate_certificate_signs_no_reports_and_the_root_no_chips(tmp_path: Path) -> None:
    root = snp.rsa.generate_private_key(65537, 2048)
    leaf = ec.generate_private_key(ec.SECP384R1())
    ark = snp.certificate("ARK-Milan", root.public_key(), "ARK-Milan", root)
    own = snp.certificate("SEV-VCEK", leaf.public_key(), "ARK-Milan", root, snp.endorsed(snp.TCB))
    made = dataclasses.replace(chain(), roots=snp.pem(ark), certificate=snp.pem(own), key=leaf)
    with pytest.raises(AttestationError, match="does not end at this party's roots"):
        verify(tmp_path, made)


def test_expired_and_future_certificates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AttestationError, match="SEV-VCEK of its evidence is valid from 2020-01-01 to 2020-01-03, and not"
    ):
        verify(tmp_path, chain(days=2))


def test_a_key_on_another_curve_is_refused(tmp_path: Path) -> None:
    root, middle = (snp.rsa.generate_private_key(65537, 2048) for _ in range(2))
    leaf = ec.generate_private_key(ec.SECP256R1())
    ark = snp.certificate("ARK-Milan", root.public_key(), "ARK-Milan", root)
    ask = snp.certificate("SEV-Milan", middle.public_key(), "ARK-Milan", root)
    own = snp.certificate("SEV-VCEK", leaf.public_key(), "SEV-Milan", middle, snp.endorsed(snp.TCB))
    made = dataclasses.replace(chain(), roots=snp.pem(ark, ask), certificate=snp.pem(own), key=leaf)
    with pytest.raises(AttestationError, match="is not on the curve P-384"):
        verify(tmp_path, made)


def test_report_data_bind_the_key_and_the_nonce() -> None:
    assert len(DATA) == 64
    assert len({DATA, bound_data(b"l" * 44, NONCE), bound_data(KEY, b"m" * 32)}) == 3


LIST = f'measurements = ["{snp.MEASUREMENT}"]'


@pytest.mark.parametrize(("text", "message"), [
    ('[trust.attestation]\nname = "sgx"', "unknown attestation verifier 'sgx'"),
    ('[trust]\nattestation = "sev-snp"', "measurements: list the measurements"),
    (f'[trust.attestation]\nname = "sev-snp"\n{LIST}', "roots: name the file"),
    ('[trust.attestation]\nname = "sev-snp"\nmeasurements = ["AB"]\nroots = "x"', "expected 96 hex digits"),
    (f'[trust.attestation]\nname = "sev-snp"\n{LIST}\nroots = "x"\ntcb = {{ bios = 1 }}', "unknown part of the"),
    (f'[trust.attestation]\nname = "sev-snp"\n{LIST}\nroots = "x"\ntcb = {{ snp = 300 }}', "expected a whole number"),
    (f'[trust.attestation]\nname = "sev-snp"\n{LIST}\nroots = "x"\nvmpl = 4', r"vmpl must be at least 0 and at most 3"),
    (f'[trust.attestation]\nname = "tdx"\n{LIST}\nroots = "x"\nrtmrs = {{ 4 = "00" }}', "unknown register '4'"),
    (f'[trust.attestation]\nname = "tdx"\n{LIST}\nroots = "x"\nrtmrs = {{ 1 = "00" }}', "rtmrs.1: expected 96 hex"),
])  # fmt: skip
def test_a_mistake_in_the_table_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "party.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Policy.read(tmp_path / "party.toml")


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot read .*amd.pem: No such file"), (b"nothing", "has no certificates in PEM"),
    (b"intermediate", r"has no root \(ARK\) that signed itself"),
])  # fmt: skip
def test_roots_that_cannot_be_used_are_refused_at_the_start(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        wanted = chain().certificate if content == b"intermediate" else content
        (tmp_path / "amd.pem").write_bytes(wanted)
    with pytest.raises(ConfigError, match=message):
        SevSnp(measurements=(snp.MEASUREMENT,), roots="amd.pem").check(tmp_path)
