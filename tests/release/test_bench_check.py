"""The guard of `make bench-check`: which ratios fail, and what is recorded."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The script, with contestants that take a second each and a record of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("bench_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_check", module)
    spec.loader.exec_module(module)
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    monkeypatch.setattr(module, "RECORDED", tmp_path / "check.json")
    run_with(module, monkeypatch, {}, "--record")
    yield module
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def run_with(module: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[float]], *args: str) -> None:
    """Run the script where contestants take the given seconds, one after the other, and else one second."""

    def group() -> dict[str, object]:
        names = {each for one in module.CHECKS.values() for each in (one.path, one.floor)}
        left = {name: iter(values) for name, values in seconds.items()}
        return {name: lambda name=name: next(left.get(name, iter([])), 1.0) for name in names}

    monkeypatch.setattr(module, "GROUPS", (group,))
    monkeypatch.setattr(sys, "argv", ["check.py", "--repeats", "2", *args])
    module.main()


def test_every_check_is_recorded() -> None:
    source = SCRIPT.with_suffix(".json")
    spec = importlib.util.spec_from_file_location("bench_check_names", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_check_names"] = module
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
        del sys.modules["bench_check_names"]
    assert json.loads(source.read_text()).keys() == module.CHECKS.keys()


def test_a_path_that_is_a_third_slower_fails_by_name(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="Adam / FedAvg") as stopped:
        run_with(check, monkeypatch, {"adam": [1.33] * 6})
    assert "1 of " in str(stopped.value) and "mean" not in str(stopped.value)


def test_a_path_within_the_slack_passes(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(check, monkeypatch, {"adam": [1.24] * 6, "mean by hand": [0.9] * 6})


def test_a_slow_spell_is_measured_again(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(check, monkeypatch, {"adam": [3.0, 3.0, 1.1]})


def test_a_check_without_a_record_fails(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    check.RECORDED.write_text("{}")
    with pytest.raises(SystemExit, match="recorded"):
        run_with(check, monkeypatch, {}, "--only", "mean / by hand")
