"""Inner products of encrypted numbers: only the weights of the key are decrypted, and only valid points are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hansa.plumbing.errors import DataError

pytest.importorskip("rbcl")
from hansa.vertical import inner_products
from hansa.vertical.inner_products import bases_of, decrypt, encrypt, key_of, logarithm, secrets_of, valid

ROWS, COLUMNS = 6, 3


@pytest.fixture(autouse=True)
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_products, "STEPS", 2**10)


def numbers() -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(0).integers(-300, 300, (ROWS, COLUMNS))


def test_a_key_decrypts_the_weighted_sums_of_columns() -> None:
    secrets, bases, weights = secrets_of(b"a" * 32, "rows", ROWS), bases_of("x", COLUMNS), [3, -1, 0, 7, 1, -20]
    sealed = encrypt(numbers(), secrets, bases)
    assert decrypt(sealed, weights, key_of(weights, secrets), bases) == (np.array(weights) @ numbers()).tolist()


def test_a_key_decrypts_the_sums_over_parties() -> None:
    secrets, bases = secrets_of(b"b" * 32, "parties", ROWS), bases_of("y", COLUMNS)
    sealed = encrypt(numbers(), secrets, bases)  # a row per party
    assert decrypt(sealed, [1] * ROWS, key_of([1] * ROWS, secrets), bases) == numbers().sum(0).tolist()


@pytest.mark.parametrize("change", ["weights", "label", "secrets"])
def test_another_key_decrypts_nothing(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_products, "LARGEST", 2**14)
    secrets, bases, weights = secrets_of(b"a" * 32, "rows", ROWS), bases_of("x", COLUMNS), [1] * ROWS
    sealed = encrypt(numbers(), secrets, bases)
    key = key_of(weights, secrets if change != "secrets" else secrets_of(b"a" * 32, "others", ROWS))
    used = [1] * (ROWS - 1) + [2] if change == "weights" else weights
    with pytest.raises(DataError, match="the largest that can be found"):
        decrypt(sealed, used, key, bases if change != "label" else bases_of("z", COLUMNS))


def test_logarithms_are_found_on_both_sides_up_to_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_products, "LARGEST", 2**14)
    for number in (0, 1, -1, 1024, 1025, -1025, 2049, 12_345, -16_000):
        assert logarithm(inner_products._generated(number)) == number
    with pytest.raises(DataError, match="over 16384"):
        logarithm(inner_products._generated(2**17))
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"over 1000, the largest that can be found"):
        logarithm(inner_products._generated(2**20), 1000)


def test_only_points_of_the_group_are_valid() -> None:
    points = encrypt(numbers(), secrets_of(b"a" * 32, "rows", ROWS), bases_of("x", COLUMNS))
    assert valid(points)
    points[2, 1] = 255
    assert not valid(points)
    assert not valid(torch.ones(1, 32, dtype=torch.uint8))
