"""Settings for all tests of data."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests must not depend on the data sets of the machine they run on."""
    monkeypatch.delenv("HANSA_DATA", raising=False)
