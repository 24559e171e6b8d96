"""What holds for all tests."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from hansa.plumbing.forking import CannotFork
from tiers import SKIPPED, TIERS, Records, is_marked, scope, thin

if TYPE_CHECKING:
    from hansa.testing import NetworkPool, PartyPool

settings.register_profile(
    "hansa", deadline=None, database=None, derandomize=True, print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],  # which says how busy the machine is
)  # fmt: skip
settings.register_profile("few", settings.get_profile("hansa"), max_examples=25)  # at night: 100
settings.load_profile("hansa")
torch.set_num_threads(1)  # the models are tiny, and tests run side by side
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that the tests start would ignore it too


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fast: without slow tests; rest: what fast left out or skipped; night: all. Record skipped tests and costs."
    parser.addoption("--tier", choices=TIERS, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tier is not None:
        config.option.markexpr = TIERS[config.option.tier]
        config.pluginmanager.register(Records(config, config.option.tier))
    if "not night" in config.option.markexpr:
        settings.load_profile("few")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    marks = [mark for mark in ("slow", "night") if f"not {mark}" in config.option.markexpr]
    return True if collection_path.suffix == ".py" and any(is_marked(collection_path, mark) for mark in marks) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, or folders (`tiers.scope`)."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thin(items)
    if config.option.tier == "rest":
        assert config.cache is not None
        skipped = set(config.cache.get(SKIPPED.format("fast"), []))
        runs = [bool(item.get_closest_marker("slow") or skipped & {item.nodeid, item.nodeid.partition("::")[0]})
                for item in items]  # fmt: skip
        config.hook.pytest_deselected(items=[item for item, run in zip(items, runs, strict=True) if not run])
        items[:] = itertools.compress(items, runs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Function) -> Iterator[None]:
    try:
        yield
    except CannotFork:
        item.runtest = lambda: _run_apart(item)  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    try:
        return (yield)
    except CannotFork:
        _run_apart(pyfuncitem)
        return True


def _run_apart(item: pytest.Function) -> None:
    """Run a test in a process that may fork: on a machine with a GPU, this one has computed gradients before."""
    if "HANSA_TEST_APART" in os.environ:
        raise CannotFork("the process of a single test must not fork either")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", item.nodeid], cwd=item.config.rootpath,
        env=kept | {"CUDA_VISIBLE_DEVICES": "", "HANSA_TEST_APART": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


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
