"""Plug-ins of the tests, installed for other processes as a package would install them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hansa.core.registry import KINDS, _parts
from hansa.testing import NetworkPool, PartyPool

HERE = Path(__file__).parent
MODULES = tuple(path.stem for path in sorted(HERE.glob("*.py")) if not path.stem.startswith(("test_", "conftest")))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let processes that a test starts find the plug-ins by their entry points."""
    for module in MODULES:
        importlib.import_module(module)
    folder = tmp_path_factory.mktemp("installed")
    package = folder / "test_plugins-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: test-plugins\nVersion: 0.1\n")
    lines = []
    for kind in KINDS:
        ours = {name: part for name, part in _parts[kind].items() if part.__module__ in MODULES}
        lines += [f"[hansa.{kind}]"] + [f"{name} = {part.__module__}:{part.__name__}" for name, part in ours.items()]
    (package / "entry_points.txt").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        path = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(HERE), *([path] if path else [])]))
        yield


@pytest.fixture(scope="session")
def pool(installed: None) -> Iterator[PartyPool]:
    """Processes of parties that have the plug-ins."""
    pool = PartyPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def network(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkPool]:
    """A federation on loopback whose members have the plug-ins."""
    network = NetworkPool(tmp_path_factory.mktemp("network"))
    yield network
    network.close()
