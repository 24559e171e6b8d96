"""The health check against a real TLS server, and the data to try a federation with."""

from __future__ import annotations

import datetime
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from hansa.data.heart import SITES, Heart
from hansa.data.party_files import load_party_file

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def certificate(
    name: str, key: Ed25519PrivateKey, issuer: str, issuer_key: Ed25519PrivateKey, host: str | None
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
    )
    if host is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    return builder.sign(issuer_key, None).public_bytes(serialization.Encoding.PEM)


class Aggregator(BaseHTTPRequestHandler):
    """Answers GET /v1/ca only."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v1/ca" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class QuietServer(HTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # some tests make the client abort the handshake


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, bytes]]:
    """The port of an aggregator whose certificate names localhost, and its CA's certificate."""
    folder = tmp_path_factory.mktemp("served")
    ca_key, key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    ca = certificate("ca", ca_key, "ca", ca_key, None)
    (folder / "cert.pem").write_bytes(certificate("server", key, "ca", ca_key, "localhost"))
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*encoding))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server = QuietServer(("127.0.0.1", 0), Aggregator)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, ca
    server.shutdown()
    thread.join()
    server.server_close()


def other_ca() -> bytes:
    key = Ed25519PrivateKey.generate()
    return certificate("ca", key, "ca", key, None)


def federation(state: Path, port: int, ca: bytes) -> None:
    (state / "heart").mkdir()
    (state / "heart" / "federation.toml").write_text(
        f'name = "heart"\n[serve]\nhost = "0.0.0.0"\nport = {port}\nadmin = ""\n'
    )
    (state / "heart" / "ca.pem").write_bytes(ca)


def party(state: Path, url: str, ca: bytes) -> None:
    (state / "party.json").write_text(json.dumps({"url": url}))
    (state / "ca.pem").write_bytes(ca)


def check(state: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(DEPLOY / "healthcheck.py"), *words]
    done = subprocess.run(command, cwd=state, capture_output=True, text=True, timeout=600)
    assert done.stderr.count("\n") <= 1, done.stderr
    return done.returncode, done.stderr


def is_well(state: Path, *words: str) -> bool:
    """Whether it is well at some time: an aggregator on a busy machine may take longer than a check waits."""
    return any(check(state, *words) == (0, "") for _ in range(20))


def test_an_aggregator_that_answers_is_well_whatever_host_its_certificate_names(
    served: tuple[int, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # a proxy is not used for this machine
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    federation(tmp_path, *served)
    assert is_well(tmp_path)


class Unready(BaseHTTPRequestHandler):
    """An admin port that is alive and not ready."""

    def do_GET(self) -> None:
        self.send_response({"/healthz": 200, "/readyz": 503}.get(self.path, 404))
        self.end_headers()
        self.wfile.write(b"the disk has 3 bytes left\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_aggregator_with_an_admin_port_is_well_if_it_says_so(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Unready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        (tmp_path / "federation.toml").write_text(f'[serve]\nadmin = "127.0.0.1:{server.server_port}"\n')
        assert check(tmp_path) == (1, "not well: the disk has 3 bytes left\n")
        assert is_well(tmp_path, "--alive")
        assert is_well(tmp_path, "--alive", str(tmp_path))
        server.shutdown()
        thread.join()
    assert check(tmp_path, "--alive")[0] == 1


def test_a_party_that_reaches_the_aggregator_is_well(served: tuple[int, bytes], tmp_path: Path) -> None:
    party(tmp_path, f"https://localhost:{served[0]}", served[1])
    assert is_well(tmp_path)


def test_an_aggregator_with_a_certificate_of_another_ca_is_not_well(served: tuple[int, bytes], tmp_path: Path) -> None:
    federation(tmp_path, served[0], other_ca())
    status, sentence = check(tmp_path)
    assert status == 1 and sentence.startswith("not well: ")


def test_a_party_trusts_its_own_ca_alone_and_checks_the_host(served: tuple[int, bytes], tmp_path: Path) -> None:
    party(tmp_path, f"https://localhost:{served[0]}", other_ca())
    assert check(tmp_path)[0] == 1
    party(tmp_path, f"https://127.0.0.1:{served[0]}", served[1])  # the certificate names localhost
    assert check(tmp_path)[0] == 1


def test_nobody_listening_is_not_well(served: tuple[int, bytes], tmp_path: Path) -> None:
    federation(tmp_path, 1, served[1])
    assert check(tmp_path)[0] == 1


def test_a_party_that_is_not_enrolled_yet_is_not_well(tmp_path: Path) -> None:
    status, sentence = check(tmp_path)
    assert status == 1 and "nor an enrolled party" in sentence


@pytest.mark.slow
def test_the_hospitals_files_hold_the_hospitals_patients(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DEPLOY / "heart_data.py"), str(tmp_path)], check=True, timeout=600)
    data = Heart().load()
    assert data.parties is not None
    for site, rows in zip(SITES, data.parties, strict=True):
        x, y = load_party_file(tmp_path / f"{site}.csv")
        assert torch.equal(y, data.y[rows])
        assert torch.allclose(x, data.x[rows], rtol=0, atol=0, equal_nan=True)
