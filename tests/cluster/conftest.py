"""A real Ray cluster on this machine: a head without CPUs, and machines that are processes of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

STORE = 100 * 2**20  # bytes of a machine's object store


class LocalCluster:
    """The processes of a cluster. The driver connects with `address`."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE})  # fmt: skip
        self.address = self._cluster.address

    def grow(self, machines: int) -> None:
        """Add machines of one CPU until so many are alive."""
        alive = [node for node in self._cluster.list_all_nodes()[1:] if node.remaining_processes_alive()]
        for _ in range(machines - len(alive)):
            self._cluster.add_node(num_cpus=1, object_store_memory=STORE)

    @contextmanager
    def cards(self, count: int) -> Iterator[None]:
        """Add a machine with 8 CPUs and this many GPUs, which do not exist: Ray believes what it is told."""
        node = self._cluster.add_node(num_cpus=8, num_gpus=count, object_store_memory=STORE)
        try:
            yield
        finally:
            self._cluster.remove_node(node)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder with a short path for Ray, because the paths of its sockets may have 107 characters.

    Ray reads its environment when it is imported, so tests must not import it before.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray-hansa-", dir="/tmp"))
    before = dict(os.environ)
    (folder / "ray").mkdir()
    # Ray gives its actors the niceness 15, by which they would hardly run beside other tests.
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
                   "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_worker_niceness": "0"}  # fmt: skip
    (folder / "token").write_text("0123456789abcdef" * 4)
    yield folder
    os.environ.clear()
    os.environ |= before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(short_folder: Path) -> Iterator[LocalCluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (make extras)")
    running = LocalCluster()
    yield running
    running.close()


@pytest.fixture
def engine(cluster: LocalCluster) -> Iterator[Any]:
    """An engine on two machines of the cluster."""
    from hansa.cluster.engines import Ray

    cluster.grow(2)
    return Ray(address=cluster.address, actors=2)
