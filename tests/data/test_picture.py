from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hansa.data import draw, table
from hansa.plumbing.errors import ConfigError


def test_the_table_counts_labels_party_by_party() -> None:
    y = torch.tensor([0, 0, 1, 2, 2, 2])
    parts = [np.array([0, 2]), np.array([1, 3, 4, 5]), np.array([], dtype=int)]
    assert table(parts, y, 4) == [[1, 1, 0, 0], [1, 0, 3, 0], [0, 0, 0, 0]]


def test_the_table_of_a_regression_counts_rows() -> None:
    assert table([np.arange(3), np.arange(3, 5)], torch.randn(5), None) == [[3], [2]]


def test_the_table_of_sequences_counts_characters() -> None:
    y = torch.tensor([[0, 1], [1, 1]])
    assert table([np.array([0, 1])], y, 2) == [[1, 3]]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("parties", "classes"), [(3, 2), (130, 15), (4, 30), (5, None)])
def test_a_picture_is_written(tmp_path: Path, parties: int, classes: int | None) -> None:
    y = np.arange(600) % (classes or 7)
    parts = [*np.array_split(np.arange(600), parties - 1), np.array([], dtype=int)]
    draw(parts, y, classes, tmp_path / "parties.png", names=[f"site {i}" for i in range(parties)])
    assert (tmp_path / "parties.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["parties.xyz", "parties", "."])
def test_a_picture_needs_a_known_ending(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.png"):
        draw([np.arange(3)], np.zeros(3, dtype=int), 1, tmp_path / name)
