"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

from slow_tests import CASES, FILES

if TYPE_CHECKING:
    from hansa.testing import NetworkPool, PartyPool

settings.register_profile(
    "hansa", deadline=None, database=None, derandomize=True, print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],  # which says how busy the machine is
)  # fmt: skip
settings.register_profile("few", settings.get_profile("hansa"), max_examples=25)  # make test; make test-all: 100
settings.load_profile("hansa")
torch.set_num_threads(1)  # the models are tiny, and tests run side by side
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that the tests start would ignore it too


def _path(path: Path) -> str:
    here = Path(__file__).parent
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else ""


def _is_slow(item: pytest.Item) -> bool:
    path, (name, _, case) = _path(item.path), item.name.partition("[")
    kept = CASES.get(path, {}).get(name)
    return path in FILES or (kept is not None and not case.startswith(tuple(kept)))


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        settings.load_profile("few")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.markexpr == "not slow" and _path(collection_path) in FILES else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow(item):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def pool() -> Iterator[PartyPool]:
    """Processes of parties, for all tests of a worker."""
    from hansa.testing import PartyPool  # imports what a machine with a GPU may lack

    pool = PartyPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkPool]:
    """A federation on loopback, for the tests of a module."""
    from hansa.testing import NetworkPool

    network = NetworkPool(tmp_path_factory.mktemp("network"))
    yield network
    network.close()
