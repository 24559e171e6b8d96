"""Flower deployed: one SuperLink and N SuperNodes, processes on loopback, FedAvg over all of them.

    .envs/flower/bin/python peers/flower/deployment.py [--nodes 4] [--rounds 20] [--pull 0.5]

How it is set up, and why:
- TLS and CLI-managed authentication of SuperNodes, Flower's strongest documented mode: `--enable-supernode-auth`, each
  node's key registered by `flwr supernode register` before it starts. (The nodes sign a time stamp in every request;
  there are no client certificates.) Between a SuperNode and its own ClientApp there is plain HTTP, as by default.
- The SuperLink's state is in memory, as by default: nothing is written to disk, which a database file would add.
- Isolation is `subprocess`. With `process` one starts the same SuperExec by hand: in either mode it starts a
  `flwr-clientapp` process for every message, and warm executors are for Kubernetes and for other kinds of apps.
  The ClientApp therefore imports numpy and no PyTorch, and the model is one array.
- The SuperNode's looks for messages (every 3 s) and for its ClientApp's reply (0.5 s), and those of
  `Grid.send_and_receive` for replies (3 s), are written into Flower. `--pull` replaces the last of them from within the
  ServerApp, by `push_messages` and `pull_messages`: no option of Flower's, but a user could write it.
- SuperExec looks for tasks every `FLWR_SUPEREXEC_TASK_POLL_INTERVAL` seconds, here 0.1, but 1.2 a node (60 at most)
  where there are more than ten. A ClientApp takes 1.3 s of processor time before it does anything. A task that was
  taken and has not begun within 30 s is given out again, to one more process: 50 that start within 2 s on two cores
  with other work did not make it, and their number grew until memory was almost gone (268 processes, 23 GB); within
  30 s neither. Long intervals spread the starts, and are then what a round takes.
- SuperNodes run at a lower priority than the SuperLink, which in a first run of 50 did not answer its ServerApp in
  time; in earnest they would be on other machines.
- No telemetry, no installation of dependencies at run time, one thread for numpy.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import ipaddress
import itertools
import os
import platform
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from compare import answer_for_all, clear_away, descendants
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from workload import report

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def write_certificates(folder: Path) -> None:
    """ca.pem, and server.pem and server.key for localhost."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, by: str, by_key: ec.EllipticCurvePrivateKey) -> bytes:
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, by)]
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = (
            x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == by, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        )  # fmt: skip
        return made.sign(by_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    (folder / "ca.pem").write_bytes(certificate("benchmark", ca, "benchmark", ca))
    (folder / "server.pem").write_bytes(certificate("localhost", server, "benchmark", ca))
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").write_bytes(server.private_bytes(*pem))


def write_node_key(folder: Path) -> None:
    """node.key and node.pub: a SuperNode's identity."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP384R1())
    private = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (folder / "node.key").write_bytes(key.private_bytes(*private))
    public = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (folder / "node.pub").write_bytes(key.public_key().public_bytes(*public))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def answers(port: int, ca: Path) -> bool:
    """Whether somebody speaks TLS there."""
    context = ssl.create_default_context(cafile=str(ca))
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as plain:
            context.wrap_socket(plain, server_hostname="localhost").close()
    except OSError:
        return False
    return True


class Deployment:
    """A SuperLink and SuperNodes in a folder, each node with a home of its own; ended with the block."""

    def __init__(self, folder: Path, poll: float) -> None:
        self.folder = folder
        self.environment = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_HOME": str(folder / "home"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(poll),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        write_certificates(folder)

    def start(self, name: str, *command: str, home: str = "home", nice: int = 0) -> subprocess.Popen[bytes]:
        """Start one of Flower's programs; what it says is in NAME.log."""
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                ["nice", "-n", str(nice), str(BIN / command[0]), *command[1:]], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, env={**self.environment, "FLWR_HOME": str(self.folder / home)},
            )  # fmt: skip

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def call(self, *command: str) -> str:
        """Run one of Flower's programs to its end."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *error: object) -> None:
        clear_away()


def deploy(flower: Deployment, nodes: int, limit: float) -> None:
    """Start the SuperLink, register the nodes' keys, start the nodes."""
    folder = flower.folder
    port, *ports = free_ports(nodes + 1)
    (folder / "home").mkdir()
    (folder / "home/config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder / "ca.pem"}"\n'
    )
    superlink = flower.start(
        "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth",
        "--disable-runtime-dependency-installation", "--ssl-certfile", str(folder / "server.pem"),
        "--ssl-keyfile", str(folder / "server.key"), "--ssl-ca-certfile", str(folder / "ca.pem"),
    )  # fmt: skip
    end = time.monotonic() + limit
    while not answers(port, folder / "ca.pem"):
        if superlink.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the SuperLink did not start: {flower.said('superlink')}")
        time.sleep(0.2)
    for index in range(nodes):
        write_node_key(folder / f"node{index}")
        flower.call("flwr", "supernode", "register", str(folder / f"node{index}/node.pub"))
        flower.start(
            f"node{index}", "flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(ports[index]),
            "--root-certificates", str(folder / "ca.pem"), "--node-config", f"party={index}",
            "--auth-supernode-private-key", str(folder / f"node{index}/node.key"), home=f"node{index}", nice=10,
        )  # fmt: skip


def run(flower: Deployment, nodes: int, rounds: int, pull: float, limit: float) -> list[float]:
    """Run the app; the moments at which its rounds ended."""
    file = flower.folder / "rounds"
    file.touch()
    flower.call(
        "flwr", "run", str(HERE / "deployed"), "-c", f'nodes={nodes} rounds={rounds} pull={pull} report="{file}"'
    )
    end = time.monotonic() + limit
    while len(ended := file.read_text().split()) < rounds:
        if file.with_suffix(".failure").exists():
            raise RuntimeError(file.with_suffix(".failure").read_text())
        if time.monotonic() > end:
            raise RuntimeError(f"{len(ended)} rounds after {limit:.0f} s: {ended}\n{flower.said('superlink')}")
        if (running := len(descendants())) > 4 * nodes + 10:
            raise RuntimeError(f"{running} processes for {nodes} nodes: tasks are given out again and again")
        time.sleep(1)
    return [float(moment) for moment in ended]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds, after the first")
    parser.add_argument("--poll", type=float, help="seconds between SuperExec's looks for tasks (see above)")
    parser.add_argument("--pull", type=float, default=0.0, help="seconds between the ServerApp's looks (0: Flower's 3)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds to wait for the run")
    given = parser.parse_args()
    answer_for_all()
    poll = given.poll or (0.1 if given.nodes <= 10 else min(60.0, 1.2 * given.nodes))
    with tempfile.TemporaryDirectory(prefix="flower-") as folder, Deployment(Path(folder), poll) as flower:
        deploy(flower, given.nodes, limit=60)
        ended = run(flower, given.nodes, given.rounds + 1, given.pull, given.limit)
    report({
        "rounds": [b - a for a, b in itertools.pairwise(ended)], "first_round_ended": ended[0],
        "versions": {"python": platform.python_version(), "numpy": np.__version__,
                     "flwr": importlib.metadata.version("flwr")},
    })  # fmt: skip


if __name__ == "__main__":
    main()
