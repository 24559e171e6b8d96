"""One sentence for a cluster that cannot be used."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.cluster.engines import Ray
from hansa.plumbing.errors import ConfigError


def task(**fields: Any) -> hansa.Task:
    return hansa.Task(**{"model": lambda: nn.Linear(2, 1), "loss": "mse",
                         "parties": [(torch.ones(4, 2), torch.zeros(4, 1))] * 3, **fields})  # fmt: skip


def run(engine: Any, **fields: Any) -> Any:
    return hansa.simulate(hansa.FedAvg(), task(**fields), rounds=1, engine=engine)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed; install the extra: pip install 'hansa\[ray\]'"):
        run("ray")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"actors": 0}, "actors must be at least 1"), ({"cpus": 0.0}, "cpus must be above 0 and at most 1024"),
     ({"gpus": 2.0}, r"gpus must be at least 0.0001 and at most 1, got 2; an actor trains on one card"),
     ({"gpus": 0.0}, "gpus must"),
     ({"gpus": 0.5}, r"gpus is 0.5, and run.device is 'cpu'; set run.device = 'cuda'"),
     ({"address": "ray://head:10001"}, "that of a Ray client"), ({"inner": "workers"}, "inner"),
     ({"nodes": 3}, "unknown field 'nodes'")],
)  # fmt: skip
def test_settings_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run({"name": "ray", **fields})


@pytest.mark.slow
def test_an_address_that_does_not_answer_is_named(short_folder: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (make extras)")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"):
            run(Ray(address=address))
    for wrong in ("somewhere", ":6379", "host:port"):
        with pytest.raises(ConfigError, match="is not 'local', 'auto' or HOST:PORT"):
            run(Ray(address=wrong))


@contextmanager
def web_server() -> Iterator[str]:
    """The address of a server that is no Ray cluster: it answers in HTTP/1.1, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # closed at the end
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
def test_a_server_that_is_no_cluster_is_named_at_once(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed (make extras)")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    message = "the program that answers at {} is not the head of a Ray cluster; check the address"
    with web_server() as address:
        with pytest.raises(ConfigError, match=message.format(address)):
            run(Ray(address=address))
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match="is not the head of a Ray cluster"):
            run(Ray(address="auto"))


@pytest.mark.slow
def test_the_address_of_a_cluster_that_has_ended_is_named(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps the address of the last cluster in a file, and would try to reach it for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed (make extras)")
    from hansa.cluster import connection

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        stale = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # no other cluster runs
        monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: stale)
        assert connection._last_cluster() == stale
        with pytest.raises(ConfigError, match=rf"no Ray cluster answers at {stale} .*; it was the last cluster of this "
                                              r"machine; start one \(ray start --head\)"):  # fmt: skip
            run(Ray(address="auto"))


@pytest.mark.slow
def test_another_cluster_than_that_of_the_process_is_refused(cluster: Any) -> None:
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        with pytest.raises(ConfigError, match=rf"address is '127.0.0.1:9', and this process is connected to the Ray "
                                              rf"cluster at {cluster.address}; call ray.shutdown"):  # fmt: skip
            run(Ray(address="127.0.0.1:9"))
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_cluster_with_too_few_resources_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"99 actors of 1 CPUs each do not fit the cluster, which has \d CPUs on"):
        run(replace(engine, actors=99))
    with pytest.raises(ConfigError, match="1 actors of 64 CPUs each do not fit"):
        run(replace(engine, actors=None, cpus=64.0))


OTHER_RAY = """
import sys, ray
ray.__version__ = "2.0.0"
from hansa.cluster.connection import RayConnection
try:
    RayConnection(sys.argv[1], None, 1.0)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_another_version_of_ray_is_named(cluster: Any) -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_RAY, cluster.address], capture_output=True, text=True)
    assert done.stdout.startswith("ConfigError run.engine (ray): the cluster runs another version of Ray or Python")
    assert "2.0.0" in done.stdout
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_other_versions_and_other_models_on_a_machine_are_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hansa.cluster import engine as running

    own = running.versions()
    monkeypatch.setattr(running, "versions", lambda: {**own, "torch": "0.1"})
    with pytest.raises(
        ConfigError, match=f"has torch {own['torch'].replace('+', '.')} instead of 0.1; install the same"
    ):
        run(engine)
    monkeypatch.undo()

    def unequal() -> nn.Module:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, os.getpid())
        return model

    with pytest.raises(ConfigError, match="the model has other initial numbers on the machine"):
        run(engine, model=unequal)


@pytest.mark.slow
def test_a_model_that_cannot_be_sent_is_named(engine: Any) -> None:
    lock = threading.Lock()

    def held() -> nn.Module:
        with lock:
            return nn.Linear(2, 1)

    with pytest.raises(ConfigError, match=r"cannot be sent to other machines .*define them as functions of a module"):
        run(engine, model=held)


@pytest.mark.slow
def test_an_error_of_a_party_is_that_of_one_machine(engine: Any) -> None:
    def broken(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss today")

    errors = []
    for each in ("reference", replace(engine, inner="reference")):
        with pytest.raises(hansa.HansaError) as error:
            run(each, loss=broken)
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]
    assert "party 0 failed" in errors[0][1] and "no loss today" in errors[0][1]
