from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from hansa.numerics import rng

KEY = torch.tensor(rng.key(3, "step", 0, 1))
extents = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(extents, st.integers(-(2**63), 2**63 - 1), st.data())
def test_what_an_element_draws_does_not_depend_on_the_extent(shape: list[int], k: int, data: st.DataObject) -> None:
    key = torch.tensor(k)
    smaller = [data.draw(st.integers(1, extent)) for extent in shape]
    inside = tuple(slice(0, extent) for extent in smaller)
    for draw in (rng.uniform, rng.normal):
        assert torch.equal(draw(key, shape)[inside], draw(key, smaller))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 8), st.integers(0, 8))
def test_the_keys_of_steps_do_not_depend_on_how_many_there_are(k: int, steps: int, more: int) -> None:
    assert torch.equal(rng.step_keys(k, steps + more)[:steps], rng.step_keys(k, steps))


def test_stacked_keys_draw_what_each_draws_alone() -> None:
    keys = rng.step_keys(rng.key(0, "a"), 5)
    for draw in (rng.uniform, rng.normal):
        together = vmap(lambda k, draw=draw: draw(k, (3, 4)))(keys)
        assert torch.equal(together, torch.stack([draw(k, (3, 4)) for k in keys]))


def test_uniform_numbers_have_the_moments_of_the_uniform_distribution() -> None:
    draws = rng.uniform(KEY, (400, 500))
    assert draws.dtype == torch.float64
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    n = draws.numel()
    # Each bound is five standard errors of the estimate.
    assert float(draws.mean()) == pytest.approx(1 / 2, abs=5 * math.sqrt(1 / 12 / n))
    assert float(draws.var()) == pytest.approx(1 / 12, abs=5 * math.sqrt(1 / 180 / n))
    shares = torch.histc(draws, 20, 0, 1) / n
    assert torch.allclose(shares, torch.full((20,), 1 / 20, dtype=torch.float64), atol=5 * math.sqrt(0.05 * 0.95 / n))


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    draws = rng.normal(KEY, (400, 500)).flatten()
    n = draws.numel()
    assert float(draws.mean()) == pytest.approx(0.0, abs=5 / math.sqrt(n))
    assert float((draws**2).mean()) == pytest.approx(1.0, abs=5 * math.sqrt(2 / n))
    assert float((draws**3).mean()) == pytest.approx(0.0, abs=5 * math.sqrt(15 / n))
    assert float((draws**4).mean()) == pytest.approx(3.0, abs=5 * math.sqrt(96 / n))
    assert bool(torch.isfinite(draws).all())


@pytest.mark.parametrize("shape", [(2, 40_000), (40_000, 2), (200, 2, 200)])
def test_neighbouring_elements_are_not_correlated(shape: tuple[int, ...]) -> None:
    draws = rng.uniform(KEY, shape)
    for axis in range(len(shape)):
        here = draws.narrow(axis, 0, shape[axis] - 1).flatten()
        there = draws.narrow(axis, 1, shape[axis] - 1).flatten()
        found = float(torch.corrcoef(torch.stack([here, there]))[0, 1])
        assert abs(found) < 5 / math.sqrt(len(here))


def test_no_two_elements_and_no_two_steps_draw_the_same() -> None:
    assert len(torch.unique(rng.uniform(KEY, (50, 50, 20)))) == 50 * 50 * 20
    assert len(torch.unique(rng.step_keys(rng.key(1, "x"), 10_000))) == 10_000
    first, second = rng.step_keys(rng.key(1, "x"), 2)
    assert not torch.equal(rng.uniform(first, (4,)), rng.uniform(second, (4,)))


def test_streams_with_other_names_differ_and_the_same_name_repeats() -> None:
    names: list[tuple[int | str, ...]] = [
        (0, "shuffle", 0, 0), (1, "shuffle", 0, 0), (0, "select", 0, 0), (0, "shuffle", 1, 0), (0, "shuffle", 0, 1),
        (0, "shuffle", 0), (0, "shuffle", 0, 0, 0), (0, "shuffle", "0", 0), (0, "shuffle", 10), (0, "shuffle", 1, 0, 0),
    ]  # fmt: skip
    assert len({rng.key(*name) for name in names}) == len(names)
    draws = [tuple(rng.generator(*name).integers(0, 2**62, 4)) for name in names]
    assert len(set(draws)) == len(names)
    assert [tuple(rng.generator(*name).integers(0, 2**62, 4)) for name in names] == draws


def test_keys_do_not_depend_on_the_process() -> None:
    # From blake2b of repr((0, 'step', 0, 0)), computed once with hashlib; hash() would change with PYTHONHASHSEED.
    import hashlib

    expected = int.from_bytes(hashlib.blake2b(b"(0, 'step', 0, 0)", digest_size=8).digest(), "little", signed=True)
    assert rng.key(0, "step", 0, 0) == expected


def test_splitmix64_is_that_of_steele_lea_and_flood() -> None:
    # The first outputs of the reference generator (prng.di.unimi.it/splitmix64.c) from state 0.
    expected = np.array([0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F], dtype=np.uint64)
    assert rng.step_keys(0, 3).numpy().view(np.uint64).tolist() == expected.tolist()


# Draws of transforms.

MANY = rng.keys_of_steps(torch.tensor([rng.key(0, "many")]), 20_000)[0]


@given(st.integers(0, 40), st.integers(0, 80), st.integers(1, 4))
def test_a_fraction_depends_on_its_key_and_its_place_alone(half: int, count: int, keys: int) -> None:
    whole = rng.fractions(MANY[:4], 0, 200)
    part = rng.fractions(MANY[:keys], 2 * half, 2 * half + count)
    assert torch.equal(part, whole[:keys, 2 * half : 2 * half + count])


def test_fractions_are_uniform_float32_numbers_below_one() -> None:
    drawn = rng.fractions(MANY[:5], 0, 40_000)
    assert drawn.dtype == torch.float32 and float(drawn.min()) >= 0 and float(drawn.max()) < 1
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
    counts = torch.histc(drawn.double(), 50, 0, 1)
    expected = drawn.numel() / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 100  # chi-square with 49 degrees of freedom
    pairs = torch.corrcoef(torch.stack([drawn[:, ::2].flatten(), drawn[:, 1::2].flatten()]))[0, 1]
    assert abs(float(pairs)) < 4 / math.sqrt(drawn.numel() / 2)
    with pytest.raises(ValueError, match="start must be even, got 3"):
        rng.fractions(KEY.view(1), 3, 5)


def test_fractions_have_the_bits_that_every_machine_draws() -> None:
    key = torch.tensor([rng.key(3, "step", 0, 1)])
    first, stride = (rng.folded(int(key), index) % 2**64 for index in (0, 1))

    def mixed(z: int) -> int:  # SplitMix64 in whole numbers
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    hashes = [mixed((first + n * (stride | 1)) % 2**64) for n in range(20)]
    halves = [half % 2**24 for z in hashes for half in (z % 2**32, z >> 32)]
    assert rng.fractions(key, 0, 40)[0].tolist() == [half / 2**24 for half in halves]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 3), (4096, 4096), (4097, 4097), (70_000, 50)])
def test_coordinates_are_different_places_and_each_is_as_likely(size: int, count: int) -> None:
    drawn = rng.coordinates(MANY[:50], size, count)
    assert drawn.shape == (50, count) and int(drawn.min()) >= 0 and int(drawn.max()) < size
    assert all(len(set(row.tolist())) == count for row in drawn)
    assert torch.equal(drawn[3:4], rng.coordinates(MANY[3:4], size, count))
    rows = rng.coordinates(MANY, size, min(count, 20))
    for column in rows.T[:3]:
        counts = torch.histc(column.double(), min(size, 64), 0, size - 1 if size > 1 else 1)
        cells = torch.histc(torch.arange(size).double(), min(size, 64), 0, size - 1 if size > 1 else 1)
        expected = len(rows) * cells[cells > 0] / size
        degrees = max(1, len(expected) - 1)
        chi = float(((counts[cells > 0] - expected) ** 2 / expected).sum())
        assert chi < degrees + 6 * math.sqrt(2 * degrees)


def test_more_coordinates_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"count must lie in 0\.\.3, got 4"):
        rng.coordinates(MANY[:1], 3, 4)


@pytest.mark.parametrize(("count", "dtype", "apart"), [
    (1, torch.float64, 1e-12), (70_001, torch.float64, 1e-12), (70_001, torch.float32, 2e-5),
])  # fmt: skip
def test_noise_on_a_cpu_is_the_noise_of_other_devices(count: int, dtype: torch.dtype, apart: float) -> None:
    drawn = rng.noise(KEY, count, dtype)
    assert drawn.shape == (count,) and drawn.dtype == dtype
    torch.testing.assert_close(drawn, rng.by_torch(KEY, count, dtype), rtol=0, atol=apart)


def test_noise_is_box_and_muller_of_a_hash_per_pair() -> None:
    first, stride = (rng.folded(int(KEY), index) % 2**64 for index in (0, 1))
    pairs = []
    for n in range(5):
        z = (first + n * (stride | 1)) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
        radius, angle = math.sqrt(-2 * math.log(((z >> 24) + 0.5) / 2**40)), 2 * math.pi * (z % 2**24) / 2**24
        pairs.append((radius * math.cos(angle), radius * math.sin(angle)))
    expected = [cosine for cosine, _ in pairs] + [sine for _, sine in pairs]
    assert rng.noise(KEY, 9, torch.float64).tolist() == pytest.approx(expected[:9], abs=1e-12)
