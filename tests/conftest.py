"""What holds for all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "hansa", deadline=None, database=None, derandomize=True, print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],  # which says how busy the machine is
)  # fmt: skip
settings.load_profile("hansa")
torch.set_num_threads(1)  # the models are tiny, and tests run side by side
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that the tests start would ignore it too

# Files whose tests are all slow. `make test` does not import them: MLflow alone takes seconds, in each worker.
SLOW = {
    "chaos/test_masked_kills.py",
    "chaos/test_network_faults.py",
    "chaos/test_power_loss.py",
    "chaos/test_random_kills.py",
    "docs/test_docs_site.py",
    "dst/test_dst.py",
    "notebooks/test_notebooks.py",
    "study/test_report_browser.py",
    "track/test_track_mlflow.py",
    "ui/test_ui_browser.py",
}


def _all_slow(path: Path) -> bool:
    here = Path(__file__).parent
    return path.is_relative_to(here) and path.relative_to(here).as_posix() in SLOW


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.markexpr == "not slow" and _all_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _all_slow(item.path):
            item.add_marker(pytest.mark.slow)
