"""SEV-SNP evidence for tests: a generated chain of certificates, and reports that its key signs.

As a program it makes evidence, as the platform of an aggregator would: `python snp.py FOLDER REPORT_DATA`.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import struct
import sys
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

MEASUREMENT = "ab" * 48
CHIP = bytes(range(64))
TCB = {"bootloader": 4, "tee": 0, "snp": 22, "microcode": 213}
DAY = datetime.timedelta(days=1)
PSS = padding.PSS(padding.MGF1(hashes.SHA384()), 48)
OIDS = {"bootloader": 1, "tee": 2, "snp": 3, "microcode": 8, "fmc": 9}


@dataclasses.dataclass(frozen=True)
class Chain:
    """AMD's keys, generated: root (ARK), intermediate (ASK), and the key of the chip (VCEK or VLEK)."""

    roots: bytes  # ARK and ASK, PEM
    certificate: bytes  # of the chip's key, PEM
    key: ec.EllipticCurvePrivateKey


def certificate(name: str, public: Any, issuer: str, key: rsa.RSAPrivateKey, extensions: dict[str, bytes] | None = None,
                start: datetime.datetime | None = None, days: int = 30) -> x509.Certificate:  # fmt: skip
    begin = start or datetime.datetime.now(datetime.UTC) - DAY
    subject, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    made = x509.CertificateBuilder(by, subject, public, x509.random_serial_number(), begin, begin + days * DAY)
    for oid, value in (extensions or {}).items():
        made = made.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value), critical=False)
    return made.sign(key, hashes.SHA384(), rsa_padding=PSS)


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def endorsed(tcb: dict[str, int], chip: bytes | None = CHIP) -> dict[str, bytes]:
    """The extensions of a chip key's certificate."""
    numbers = {}
    for name, value in tcb.items():
        short = bytes([1, value]) if value < 128 else bytes([2, 0, value])  # a DER integer has a sign
        numbers[f"1.3.6.1.4.1.3704.1.3.{OIDS[name]}"] = b"\x02" + short
    return numbers | ({} if chip is None else {"1.3.6.1.4.1.3704.1.4": chip})


def make_chain(name: str = "SEV-VCEK", tcb: dict[str, int] | None = None, chip: bytes | None = CHIP,
               **valid: Any) -> Chain:  # fmt: skip
    root, middle = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    leaf = ec.generate_private_key(ec.SECP384R1())
    ark = certificate("ARK-Milan", root.public_key(), "ARK-Milan", root)
    ask = certificate("SEV-Milan", middle.public_key(), "ARK-Milan", root)
    own = certificate(name, leaf.public_key(), "SEV-Milan", middle, endorsed(tcb or TCB, chip), **valid)
    return Chain(pem(ark, ask), pem(own), leaf)


def body(data: bytes, measurement: str = MEASUREMENT, version: int = 2, policy: int = 0x30000, vmpl: int = 0,
         tcb: dict[str, int] | None = None, algorithm: int = 1, flags: int = 0, chip: bytes = CHIP,
         family: int = 0) -> bytes:  # fmt: skip
    """The signed part of a report."""
    out, versions = bytearray(0x2A0), tcb or TCB
    struct.pack_into("<IIQ", out, 0, version, 0, policy)
    struct.pack_into("<II", out, 0x30, vmpl, algorithm)
    struct.pack_into("<I", out, 0x48, flags)
    out[0x50:0x90], out[0x90:0xC0], out[0x1A0:0x1E0] = data, bytes.fromhex(measurement), chip
    turin = {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7}
    places = turin if family == 0x1A else {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7}
    for part, value in versions.items():
        out[0x180 + places[part]] = value
    out[0x188] = family
    return bytes(out)


def signed(key: ec.EllipticCurvePrivateKey, part: bytes) -> bytes:
    """A whole report."""
    r, s = decode_dss_signature(key.sign(part, ec.ECDSA(hashes.SHA384())))
    return (part + r.to_bytes(72, "little") + s.to_bytes(72, "little")).ljust(0x4A0, b"\0")


def install(folder: Path, chain: Chain, **fields: Any) -> tuple[str, ...]:
    """Write the files of the program, and return its command line without the report data."""
    folder.mkdir(exist_ok=True)
    (folder / "roots.pem").write_bytes(chain.roots)
    key = chain.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                  serialization.NoEncryption())  # fmt: skip
    (folder / "key.pem").write_bytes(key)
    (folder / "certificate.pem").write_bytes(chain.certificate)
    (folder / "fields.json").write_text(json.dumps(fields))
    return sys.executable, str(Path(__file__).resolve()), str(folder)


def main(folder: Path, data: str) -> None:
    fields = json.loads((folder / "fields.json").read_text())
    with open(folder / "calls", "a") as file:
        file.write(data + "\n")
    bound = bytes.fromhex(fields.pop("data", data))
    key: Any = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    report = signed(key, body(bound, **fields))
    certificates = base64.b64encode((folder / "certificate.pem").read_bytes()).decode()
    evidence = {"kind": "sev-snp", "report": base64.b64encode(report).decode(), "certificates": certificates}
    print(json.dumps(evidence))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
