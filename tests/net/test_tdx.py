"""Intel TDX quotes: a genuine quote of Intel hardware with its collateral, verified offline when it was valid.

The quote and the collateral in `data` are samples of the package dcap-qvl (MIT licence).
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from hansa.net.attestation import AttestationError, Evidence, Tdx
from hansa.plumbing.errors import ConfigError

library = pytest.importorskip("dcap_qvl", reason="needs the extra tdx")
DATA = Path(__file__).parent / "data"
QUOTE, COLLATERAL = (DATA / "tdx_quote.bin").read_bytes(), (DATA / "tdx_collateral.json").read_text()
NOW = datetime.datetime(2025, 6, 25, tzinfo=datetime.UTC).timestamp()
REPORT = library.parse_quote(QUOTE).report
BODY = 48  # bytes of the header of a quote, before the report
ATTRIBUTES, DATA_AT = BODY + 120, BODY + 520  # TDATTRIBUTES and REPORTDATA


def verify(quote: bytes = QUOTE, collateral: str = COLLATERAL, data: bytes | None = None, now: float = NOW,
           root: str = "intel_root.pem", **settings: Any) -> str:  # fmt: skip
    verifier = Tdx(**{"measurements": (REPORT.mr_td.hex(),), "roots": root, **settings})
    verifier.check(DATA)
    evidence = Evidence("tdx", quote, collateral=collateral)
    return verifier.verify(evidence, REPORT.report_data if data is None else data, DATA, now)


def test_a_genuine_quote_is_accepted() -> None:
    registers = {str(number): getattr(REPORT, f"rt_mr{number}").hex() for number in range(4)}
    assert verify() == verify(rtmrs=registers) == REPORT.mr_td.hex()
    assert QUOTE[DATA_AT : DATA_AT + 64] == REPORT.report_data
    assert QUOTE[ATTRIBUTES : ATTRIBUTES + 8] == REPORT.td_attributes


def flipped(at: int) -> bytes:
    return QUOTE[:at] + bytes([QUOTE[at] ^ 1]) + QUOTE[at + 1 :]


@pytest.mark.parametrize(("given", "message"), [
    ({"measurements": ("cd" * 48,)}, "is not on this party's list"),
    ({"rtmrs": {"1": "cd" * 48}}, "its register RTMR1 is 0084452c"),
    ({"data": bytes(64)}, "was not made for this connection"),
    ({"quote": QUOTE[:300]}, "its TDX quote is invalid: it is truncated"),
    ({"quote": b""}, "its TDX quote is invalid"),
    ({"quote": b"\x07" + QUOTE[1:]}, "its TDX quote is invalid: it is truncated, or has an unknown version"),
    ({"quote": flipped(DATA_AT)}, "its TDX quote is not genuine: .*signature is invalid"),
    ({"quote": flipped(ATTRIBUTES)}, "its TDX quote is not genuine"),
    ({"collateral": "{}"}, "the collateral of its TDX quote is invalid"),
    ({"collateral": COLLATERAL.replace("UpToDate", "Revoked", 1)}, "its TDX quote is not genuine"),
    ({"now": NOW + 90 * 86400}, "its TDX quote is not genuine: .*"),
    ({"now": NOW - 90 * 86400}, "its TDX quote is not genuine: .*in the future"),
    ({"status": ("OutOfDate",)}, "its TDX platform is in the state UpToDate; this party accepts OutOfDate"),
], ids=range(13))  # fmt: skip
def test_a_quote_that_is_not_as_it_must_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(AttestationError, match=message) as refused:
        verify(**given)
    assert "\n" not in str(refused.value)


def test_a_domain_that_may_be_debugged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No genuine quote of such a domain exists here, so the signature of this one is not checked."""
    accepted = library.verify_with_root_ca(QUOTE, library.QuoteCollateralV3.from_json(COLLATERAL), _root(), int(NOW))
    monkeypatch.setattr(library, "verify_with_root_ca", lambda *given: accepted)
    with pytest.raises(AttestationError, match="may be debugged"):
        verify(flipped(ATTRIBUTES))


def _root() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    pem = (DATA / "intel_root.pem").read_bytes()
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def test_another_root_is_refused(tmp_path: Path) -> None:
    import snp

    made = snp.make_chain()
    (tmp_path / "other.pem").write_bytes(made.certificate)
    with pytest.raises(AttestationError, match="its TDX quote is not genuine"):
        verify(root=str(tmp_path / "other.pem"))
    (tmp_path / "two.pem").write_bytes(made.roots)
    with pytest.raises(ConfigError, match="must have one certificate, Intel's root"):
        verify(root=str(tmp_path / "two.pem"))


def test_without_the_package_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dcap_qvl", None)
    with pytest.raises(ConfigError, match=r"needs the package dcap-qvl: pip install 'hansa\[tdx\]'"):
        verify()
