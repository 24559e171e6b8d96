"""Federations that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from league import League


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Callable[..., League]]:
    """Makes federations."""
    made: list[League] = []

    def make(**given: Any) -> League:
        made.append(League(tmp_path / f"league-{len(made)}", **given))
        return made[-1]

    yield make
    for league in made:
        league.close()


@pytest.fixture
def league(found: Callable[..., League]) -> League:
    """A federation of three parties."""
    return found()
