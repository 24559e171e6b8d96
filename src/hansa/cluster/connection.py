"""Connection to a Ray cluster: checks that Ray is installed, that the cluster answers and that it has room."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from hansa.plumbing.errors import ConfigError
from hansa.sim.stacked import cores

ANSWER = 10.0  # seconds in which the head of a cluster must accept a connection
WHERE = "run.engine (ray)"
OWN_CLUSTER = "use address = 'local'"
SETTINGS = 4  # type of a frame of HTTP/2


def import_ray() -> Any:
    """Ray's module; a ConfigError if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{WHERE}: Ray is not installed; install the extra: pip install 'hansa[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to Ray's makers
    # Ray 2 warns that a later version will let tasks without GPUs see them; actors that train on CPUs use none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A local cluster's actors would have the niceness 15; they should run as worker processes do.
    os.environ.setdefault("RAY_worker_niceness", "0")
    return importlib.import_module("ray")


class RayConnection:
    """A connection to a cluster. One that was there before, made by the user, is used and stays open."""

    def __init__(self, address: str, slots: int | None, cpus: float) -> None:
        self.ray = import_ray()
        self._own = not self.ray.is_initialized()
        if self._own:
            self._connect(address, slots, cpus)
            return
        here = self.ray.get_runtime_context().gcs_address
        if address not in ("local", "auto") and not _same(address, here):
            raise ConfigError(
                f"{WHERE}: address is {address!r}, and this process is connected to the Ray cluster at {here}; call "
                "ray.shutdown() first, or leave address out"
            )

    def _connect(self, address: str, slots: int | None, cpus: float) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or "auto"
        if address == "local":
            room = max(1, round((slots or cores()) * cpus))
            self.ray.init(address="local", num_cpus=room, include_dashboard=False, **quiet)
            return
        advice = "check the address that `ray start --head` printed"
        try:
            if address == "auto":
                address = _last_cluster()
                advice = f"it was the last cluster of this machine; start one (ray start --head), or {OWN_CLUSTER}"
            if address != "auto":
                _check_answers(address, advice)
            self.ray.init(address=address, **quiet)
        except ConfigError:
            raise
        except Exception as error:  # Ray raises many kinds
            raise ConfigError(f"{WHERE}: {_reason(error, address)}") from None

    def room(self, actors: int | None, cpus: float, gpus: float = 0.0) -> int:
        """The number of actors for which the cluster has room; a ConfigError if it is too small."""
        machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        fit = sum(fitting(machine, cpus, gpus) for machine in machines)
        if fit < (actors or 1):
            have = {name: sum(machine.get(name, 0) for machine in machines) for name in ("CPU", "GPU")}
            each, all_ = f"{cpus:g} CPUs", f"{have['CPU']:g} CPUs"
            advice = "lower actors or cpus, or add machines"
            if gpus:
                each, all_ = f"{each} and {gpus:g} GPUs", f"{all_} and {have['GPU']:g} GPUs"
                advice = "lower actors, cpus or gpus, add machines, or set run.device = 'cpu'"
            raise ConfigError(
                f"{WHERE}: {actors or 1} actors of {each} each do not fit the cluster, which has {all_} on "
                f"{len(machines)} machines; {advice}"
            )
        return actors or fit

    def close(self) -> None:
        """Disconnect, and stop a local cluster."""
        if self._own and self.ray.is_initialized():
            self.ray.shutdown()


def fitting(machine: Mapping[str, float], cpus: float, gpus: float) -> int:
    """The number of actors for which a machine has room. Ray gives an actor a share of one card, not of several."""
    fit = shares(machine.get("CPU", 0), cpus)
    return min(fit, int(machine.get("GPU", 0)) * shares(1, gpus)) if gpus else fit


def shares(whole: float, part: float) -> int:
    """How many parts the whole has room for; Ray counts ten thousandths."""
    return round(whole * 1e4) // max(1, round(part * 1e4))


def _last_cluster() -> str:
    """The address that Ray finds for "auto", which a file of the last cluster may name; or "auto"."""
    services = importlib.import_module("ray._private.services")
    find = getattr(services, "get_ray_address_from_environment", None)  # not part of Ray's public interface
    return "auto" if find is None else str(find("auto", None))


def _same(one: str, other: str) -> bool:
    """Whether two addresses HOST:PORT are the same; a loopback address may be any host."""
    (host, _, port), (there, _, at) = one.rpartition(":"), other.rpartition(":")
    try:
        hosts = {socket.gethostbyname(host), socket.gethostbyname(there)}
    except OSError:
        return False
    return port == at and (len(hosts) == 1 or any(address.startswith("127.") for address in hosts))


def _check_answers(address: str, advice: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{WHERE}: address {address!r} is not 'local', 'auto' or HOST:PORT")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER) as connection:
            speaks = os.environ.get("RAY_USE_TLS") == "1" or _speaks_grpc(connection)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{WHERE}: no Ray cluster answers at {address} ({getattr(error, 'strerror', None) or error}); {advice}"
        ) from None
    if not speaks:  # Ray itself would try for minutes, and then end this process
        raise ConfigError(f"{WHERE}: the program that answers at {address} is not the head of a Ray cluster; {advice}")


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a server speaks HTTP/2, as the head of a cluster does: it begins with a frame of its settings."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0)))
    head = b""
    with contextlib.suppress(OSError):  # a timeout, or a reset
        while len(head) < 4 and (more := connection.recv(4 - len(head))):
            head += more
    return head[3:] == bytes((SETTINGS,))


def _reason(error: Exception, address: str) -> str:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        return f"the cluster runs another version of Ray or Python; install the same on all machines ({text[:300]})"
    if isinstance(error, ConnectionError) and address == "auto":
        return f"this machine belongs to no running Ray cluster; start one (ray start --head), or {OWN_CLUSTER}"
    return f"cannot connect to the Ray cluster at {address}: {text[:300] or type(error).__name__}"
