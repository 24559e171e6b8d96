"""The numbers of a grid, by hand: steps, fine steps, the longest contribution and the noise."""

from __future__ import annotations

import math

import pytest
import torch

from hansa.kernel.discrete_gaussian import discrete_gaussian
from hansa.kernel.grid import Grid
from hansa.plumbing.errors import ConfigError


@pytest.mark.parametrize(("clip", "sigma", "size", "samples", "bits", "fine", "loss"), [
    (1.0, 1.0, 100, 10, 18, 39, 10),  # a step is 2^-14 / 16 of the clip: 16 is the power of two above 10
    (1.0, 1.0, 101, 10, 18, 39, 11),  # the root of 101, rounded up
    (1.0, 1.0, 0, 10, 15, 39, 1),
    (1.0, 1.0, 1, 10, 15, 39, 1),
    (1.0, 1.0, 4, 10, 16, 39, 2),
    (1.0, 1.0, 5, 10, 16, 39, 3),
    (1.0, 2.0**-20, 1, 10, 24, 39, 1),  # so that the noise has 4 bits
    (1.0, 2.0**26, 1, 10, 9, 39, 1),  # and at most 36
    (1.0, 1.0, 100, 2**30, 18, 30, 10),  # so that a sum has 61 bits
    (1.0, 1.0, 100, 2**22 - 1, 18, 39, 10),
    (1.0, 1.0, 100, 2**22, 18, 38, 10),
])  # fmt: skip
def test_a_grid_has_the_bits_of_its_clip_its_noise_and_its_sum(
    clip: float, sigma: float, size: int, samples: int, bits: int, fine: int, loss: int
) -> None:
    grid = Grid(clip, sigma, size, samples)
    assert grid.step == 2.0**-bits and grid.fine == 2.0**-fine and grid.shift == fine - bits
    assert grid.longest == (2**bits - loss) * 2.0 ** (fine - bits) * (1 - 2.0**-50) < (2**bits - loss) * 2.0**grid.shift
    assert grid.noise == sigma * 2**bits


def test_the_noise_is_rounded_up() -> None:
    assert Grid(0.3, 0.1, 1, 1).noise >= 0.1 * 0.3 / Grid(0.3, 0.1, 1, 1).step
    grid = Grid(math.nextafter(1.0, 2), math.nextafter(1.0, 2), 1, 1)  # (1 + e)^2 = 1 + 2 e + e^2
    assert grid.noise * grid.step == 1 + 3 * 2.0**-52


def test_a_grid_without_room_for_fine_steps_is_refused() -> None:
    Grid(1.0, 1.0, 100, 2**42 - 1)  # 61 - 42 = 19 bits of a contribution, and 18 of a step
    with pytest.raises(ConfigError, match="no grid is both fine and coarse enough"):
        Grid(1.0, 1.0, 100, 2**42)
    with pytest.raises(ConfigError, match="needs a positive clip"):
        Grid(1.0, 1.0, -1, 1)


def test_rounding_takes_at_most_half_of_the_clip() -> None:
    Grid(1.0, 2.0**26, 256**2, 1)  # the clip is 512 steps, and a difference may grow by 256
    with pytest.raises(ConfigError, match="no grid is both fine and coarse enough"):
        Grid(1.0, 2.0**26, 256**2 + 1, 1)


def test_each_tensor_of_a_sum_of_contributions_gets_noise_of_its_own() -> None:
    grid = Grid(0.7, 1.0, 4, 10)
    whole = {"a": torch.tensor([[3, -2]]), "b": torch.tensor([7, 0])}  # in steps
    covered = grid.exactly_covered({name: value * grid.step for name, value in whole.items()}, b"n")
    for name, value in whole.items():
        noise = torch.from_numpy(discrete_gaussian(grid.noise, b"n" + name.encode(), 2)).view(value.shape)
        assert torch.equal(covered[name], (value + noise) * grid.step)
    near = grid.exactly_covered({"a": torch.tensor([0.5, 0.25, -0.5]) * grid.step + 0.4 * grid.fine}, b"n")["a"]
    noise = torch.from_numpy(discrete_gaussian(grid.noise, b"na", 3))
    assert (near / grid.step - noise).tolist() == [1, 0, 0]  # the last bits of a sum of floats do not count
