"""8-bit updates: without bias, with bounded errors, exact where they can be, and a quarter of the bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hansa.core.op import Reply, like
from hansa.local import SGD
from hansa.plumbing.errors import ConfigError, DataError
from hansa.replies.reply_checks import Rules, received
from hansa.testing.transforms import _party as party
from hansa.transforms import Int8, Packed

DTYPES = [torch.float32, torch.float64]


def vector(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(value: Tensor, transform: Int8 | None = None, number: int = 1, round: int = 1, name: str = "w") -> Tensor:
    """A vector, packed and opened."""
    rule = transform or Int8()
    return rule.open(rule.pack(party(number, round), name, value, None)[0], like(value))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_expectation_of_the_opened_vector_is_the_vector(dtype: torch.dtype) -> None:
    value, draws = vector(300, dtype), 4000
    rule = Int8(block=100)
    rows, _ = rule.pack_rows([party(k) for k in range(draws)], "w", value.expand(draws, -1), [None] * draws)
    opened = rule.open_rows(rows, like(value)).double()
    error = opened.mean(0) - value.double()
    deviation = opened.std(0) / math.sqrt(draws)
    rounded = deviation > 0
    assert int(rounded.sum()) > 290
    assert bool((error.abs() <= 4 * deviation)[rounded].all())
    assert bool((error.abs() <= 1e-6)[~rounded].all())
    total = float(error[rounded].sum()) / float(deviation[rounded].square().sum().sqrt())
    assert abs(total) < 4  # the numbers are drawn independently: no common drift


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-35, 1e-3, 1.0, 1e35])
def test_no_error_exceeds_one_step_of_its_block(dtype: torch.dtype, size: float) -> None:
    value = vector(2500, dtype) * size
    error = (through(value) - value).abs()
    for begin in range(0, 2500, 1024):
        block = slice(begin, begin + 1024)
        step = float(value[block].abs().max()) / 127
        assert 0 < float(error[block].max()) <= step * (1 + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_largest_numbers_are_exact(dtype: torch.dtype) -> None:
    assert torch.equal(through(torch.zeros(2000, dtype=dtype)), torch.zeros(2000, dtype=dtype))
    value = vector(2000, dtype)
    value[5], value[70], value[9] = 10.0, -10.0, 0.0
    opened = through(value)
    assert (float(opened[5]), float(opened[70]), float(opened[9])) == (10.0, -10.0, 0.0)
    signs = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=dtype) * 0.3
    assert torch.equal(through(signs), signs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_vector_has_the_same_codes(dtype: torch.dtype) -> None:
    value = vector(1500, dtype)
    parts, _ = Int8().pack(party(1), "w", value, None)
    for factor in (2.0**-40, 0.5, 1024.0):
        scaled, _ = Int8().pack(party(1), "w", value * factor, None)
        assert torch.equal(scaled["codes"], parts["codes"])
        assert torch.equal(scaled["scales"], parts["scales"] * factor)


def test_parties_rounds_and_vectors_draw_different_numbers() -> None:
    value = vector(500)
    drawn = [through(value), through(value, number=2), through(value, round=2), through(value, name="c")]
    assert torch.equal(drawn[0], through(value))
    for k, one in enumerate(drawn):
        assert all(not torch.equal(one, other) for other in drawn[k + 1 :])


def test_a_vector_takes_one_byte_per_number_and_one_scale_per_block() -> None:
    value = vector(10_000, torch.float32)
    parts, _ = Int8().pack(party(1), "w", value, None)
    size = sum(part.numel() * part.element_size() for part in parts.values())
    assert size == 10_000 + 4 * 10 and size < 0.252 * value.numel() * 4


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025])
@pytest.mark.parametrize("block", [1, 7, 1024, 10**15])
def test_any_length_and_any_block_size_work_and_take_no_more_memory_than_the_vector(n: int, block: int) -> None:
    value = vector(n, torch.float32)
    parts, _ = Int8(block).pack(party(1), "w", value, None)
    assert {name: like(part) for name, part in parts.items()} == Int8(block).packed(like(value))
    torch.testing.assert_close(Int8(block).open(parts, like(value)), value, rtol=0, atol=0.05)


def test_a_block_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="block must be at least 1, got 0"):
        Int8(0)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [("codes", -128, "a code is below -127"), ("scales", -1.0, "a scale is negative")],
)
def test_parts_that_no_party_can_have_packed_are_refused(part: str, value: float, reason: str) -> None:
    parts, _ = Int8().pack(party(1), "w", vector(10), None)
    parts[part][-1] = value
    with pytest.raises(DataError, match=reason):
        Int8().open(parts, ((10,), torch.float64))


MODEL: dict[str, Any] = {"model": {"w": torch.zeros(10), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}}


@pytest.mark.parametrize(
    ("scale", "rules", "reason"),
    [
        (math.nan, Rules(), "w.scales has values that are not finite"),
        (math.inf, Rules(), "w.scales has values that are not finite"),
        (-1.0, Rules(), "it cannot be opened: a scale is negative"),
        (3e38, Rules(max_norm=10.0), "the norm of its update"),
        (3e38, Rules(growth=1e9), "the norm of its update"),
        (1.0, Rules(max_norm=10.0), None),
    ],
)
def test_the_aggregator_checks_what_it_opens(scale: float, rules: Rules, reason: str | None) -> None:
    op = Packed(SGD(), Int8())
    reply, _ = op.after(party(1), MODEL, Reply({"w": vector(10, torch.float32)}, 3), {})
    reply.tensors["w.scales"] = torch.tensor([scale])
    found = received(reply, op, MODEL, rules)
    assert reason in found if isinstance(found, str) else reason is None, found


def test_an_update_that_is_not_finite_is_rejected_and_does_not_look_finite() -> None:
    op = Packed(SGD(), Int8())
    for bad in (math.nan, math.inf):
        w = vector(10, torch.float32)
        w[3] = bad
        reply, _ = op.after(party(1), MODEL, Reply({"w": w}, 3), {})
        assert received(reply, op, MODEL, Rules()) == "w.scales has values that are not finite"
