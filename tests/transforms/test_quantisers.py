"""QSGD and stochastic rounding: without bias, with bounded errors, in few bits; hostile codes are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hansa.core.op import Reply, like
from hansa.local import SGD
from hansa.plumbing.errors import ConfigError, DataError
from hansa.replies.reply_checks import Rules, received
from hansa.testing.transforms import _party as party
from hansa.testing.transforms import _payload as model
from hansa.transforms import QSGD, Packed, StochasticRounding, Transform, elias
from hansa.transforms.rounding import ordered_sum, pack_bits, packed_length, unpack_bits

DRAWS = 4000


def vector(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def many(rule: Transform, value: Tensor, draws: int = DRAWS) -> Tensor:
    """The vector, packed and opened by many parties."""
    rows, _ = rule.pack_rows([party(k) for k in range(draws)], "w", value.expand(draws, -1), [None] * draws)
    return rule.open_rows(rows, like(value)).double()


def size_of(parts: dict[str, Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts.values())


@pytest.mark.thin(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rule", [QSGD(2, 32), QSGD(4, 100), QSGD(8), StochasticRounding(0.25, 4), StochasticRounding(0.01, 2)], ids=str
)
def test_the_mean_of_many_opened_vectors_is_the_vector(rule: Transform, dtype: torch.dtype) -> None:
    value = vector(150, dtype)
    opened = many(rule, value)
    error, deviation = opened.mean(0) - value.double(), opened.std(0) / math.sqrt(DRAWS)
    assert bool((error.abs() <= 4.5 * deviation + 1e-6).all())
    assert abs(float(error.sum())) < 4 * float(deviation.square().sum().sqrt()) + 1e-4


@pytest.mark.parametrize(("bits", "bucket"), [(2, 16), (2, 512), (4, 512), (5, 7), (8, 512)])
def test_the_levels_of_qsgd_keep_signs_and_its_error_is_within_the_bound_of_the_paper(bits: int, bucket: int) -> None:
    rule, value = QSGD(bits, bucket), vector(bucket)
    opened = many(rule, value, 400)
    levels = opened / value.norm() * rule.levels
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-9)
    assert float(levels.abs().max()) <= rule.levels + 1e-9
    assert bool((opened * value >= 0).all())
    bound = min(bucket / rule.levels**2, math.sqrt(bucket) / rule.levels)
    error = float((opened - value).square().sum(1).mean() / value.square().sum())
    assert 0 < error <= bound
    assert rule.contracts == (bound < 1)
    nonzero = float((opened != 0).double().sum(1).mean())
    assert nonzero <= rule.levels * (rule.levels + math.sqrt(bucket))


def test_four_ones_in_two_bits_are_twos_and_zeros_with_equal_chances() -> None:
    opened = many(QSGD(2, 4), torch.ones(4))
    assert set(opened.unique().tolist()) == {0.0, 2.0}
    assert abs(float(opened.mean()) - 1) < 4 / math.sqrt(4 * DRAWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_number_of_a_bucket_and_a_bucket_of_zeros_are_exact(dtype: torch.dtype) -> None:
    value = torch.zeros(30, dtype=dtype)
    value[3], value[17] = -0.1, 1e-20
    for rule in (QSGD(2, 10), QSGD(2, 10, elias=True), QSGD(8, 10)):
        assert torch.equal(rule.open(rule.pack(party(1), "w", value, None)[0], like(value)), value)


def test_multiples_of_the_step_stay_and_no_error_reaches_a_step() -> None:
    rule = StochasticRounding(2.0**-6, 8)
    multiples = torch.arange(-127, 128).double() * 2.0**-6
    assert torch.equal(many(rule, multiples, 50), multiples.expand(50, -1))
    value = vector(1000).clamp(-1.9, 1.9)
    opened = many(rule, value, 50)
    assert 0 < float((opened - value).abs().max()) < 2.0**-6
    assert torch.equal(opened * 64, (opened * 64).round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e20])
def test_numbers_that_do_not_fit_double_the_step_of_their_bucket_alone(size: float, dtype: torch.dtype) -> None:
    rule = StochasticRounding(2.0**-10, 4, bucket=50)
    value = vector(100, dtype) * 1e-3
    value[:50] *= size * 1e3
    parts, _ = rule.pack(party(1), "w", value, None)
    opened, (coarse, fine) = rule.open(parts, like(value)), parts["doublings"].tolist()
    step = 2.0 ** (coarse - 10)
    assert fine == 0 and float((opened - value)[50:].abs().max()) < 2.0**-10
    assert float((opened - value)[:50].abs().max()) <= step and float(value[:50].abs().max()) <= 7 * step
    assert coarse == 0 or float(value[:50].abs().max()) > 7 * step / 2


def test_a_quantised_vector_has_the_announced_bits_per_number() -> None:
    value = vector(10_000, torch.float32)
    for bits in range(2, 9):
        assert size_of(QSGD(bits).pack(party(1), "w", value, None)[0]) == math.ceil(10_000 * bits / 8) + 4 * 20
        assert size_of(StochasticRounding(bits=bits).pack(party(1), "w", value, None)[0]) == (
            math.ceil(10_000 * bits / 8) + 2 * 10
        )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: QSGD(1), "bits must be at least 2 and at most 8, got 1"),
        (lambda: QSGD(9), "bits must be at least 2 and at most 8, got 9"),
        (lambda: QSGD(bucket=0), "bucket must be at least 1, got 0"),
        (lambda: StochasticRounding(bits=0), "bits must be at least 2"),
        (lambda: StochasticRounding(step=0.0), "step must be at least 1e-30"),
        (lambda: StochasticRounding(step=-1.0), "step must be at least 1e-30"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Transform], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


@pytest.mark.parametrize("rule", [QSGD(3, 5), QSGD(2, elias=True), StochasticRounding()], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_rejected(rule: Transform, bad: float) -> None:
    op, w = Packed(SGD(), rule), vector(40, torch.float32)
    w[3] = bad
    reply, _ = op.after(party(1), model(), Reply({"w": w}, 3), {})
    assert isinstance(received(reply, op, model(), Rules()), str)


# Bits.


@given(st.integers(1, 8), st.integers(0, 40), st.integers(1, 3), st.randoms(use_true_random=False))
def test_packed_codes_open_to_the_codes(bits: int, count: int, rows: int, random: object) -> None:
    codes = torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (rows, packed_length(count, bits))
    assert torch.equal(unpack_bits(packed, count, bits), codes)


def test_codes_take_their_bits_from_the_low_end() -> None:
    assert pack_bits(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 3).tolist() == [[0b11010001, 0]]


def test_bits_after_the_last_code_are_refused() -> None:
    packed = pack_bits(torch.zeros(1, 3, dtype=torch.uint8), 3)
    packed[0, 1] = 2
    with pytest.raises(DataError, match="bits after the last code are set"):
        unpack_bits(packed, 3, 3)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 1023])
def test_an_ordered_sum_is_the_same_alone_and_in_a_stack(n: int) -> None:
    rows = vector(7 * n).view(7, n)
    assert torch.equal(ordered_sum(rows), torch.stack([ordered_sum(row) for row in rows]))
    torch.testing.assert_close(ordered_sum(rows), rows.sum(1))


# Elias codes.


@given(st.lists(st.integers(-127, 127), max_size=60), st.integers(0, 3000), st.integers(0, 3000))
def test_elias_codes_open_to_the_numbers(numbers: list[int], before: int, after: int) -> None:
    whole = np.array([*([0] * before), *numbers, *([0] * after)], dtype=np.int16)
    encoded = elias.encode(whole, 10**9)
    assert encoded is not None
    assert np.array_equal(elias.decode(encoded, len(whole), 127), whole)
    assert elias.encode(whole, len(encoded)) is None


def test_a_sparse_vector_travels_as_elias_codes_and_a_dense_one_does_not() -> None:
    sparse, value = QSGD(2, elias=True), vector(20_000, torch.float32)
    parts, _ = sparse.pack(party(1), "w", value, None)
    dense, _ = QSGD(2).pack(party(1), "w", value, None)
    assert size_of(parts) < 0.3 * size_of(dense)
    assert torch.equal(sparse.open(parts, like(value)), QSGD(2).open(dense, like(value)))
    ones = torch.ones(64)
    parts, _ = QSGD(2, 1, elias=True).pack(party(1), "w", ones, None)
    assert parts["codes"].shape == (16,) and torch.equal(QSGD(2, 1, elias=True).open(parts, like(ones)), ones)


def _random_bytes(sent: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    out = sent.copy()
    out[8:] = np.random.default_rng(0).integers(0, 256, len(out) - 8)
    return out


ELIAS_LIES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {  # type: ignore[type-arg]
    "empty": (lambda sent: sent[:0], "end within the lengths"),
    "short": (lambda sent: sent[:-1], "bytes by their lengths"),
    "long": (lambda sent: np.concatenate([sent, sent[:1]]), "bytes by their lengths"),
    "huge lane": (lambda sent: np.concatenate([[255, 255], sent[2:]]).astype(np.uint8), "bytes by their lengths"),
    "zeros": (lambda sent: np.concatenate([sent[:8], np.zeros_like(sent[8:])]), "longer than any number"),
    "ones": (lambda sent: np.concatenate([sent[:8], np.full_like(sent[8:], 255)]), "runs past the end of its lane"),
    "noise": (_random_bytes, "Elias code"),
}


@pytest.mark.parametrize("lie", ELIAS_LIES)
def test_hostile_elias_codes_reject_the_reply(lie: str) -> None:
    change, reason = ELIAS_LIES[lie]
    op, payload = Packed(SGD(), QSGD(2, elias=True)), model()
    payload["model"]["w"] = torch.zeros(4000)
    reply, _ = op.after(party(1), payload, Reply({"w": vector(4000, torch.float32)}, 3), {})
    assert isinstance(received(reply, op, payload, Rules()), Reply)
    reply.tensors["w.codes"] = torch.from_numpy(change(reply.tensors["w.codes"].numpy()))
    found = received(reply, op, payload, Rules())
    assert isinstance(found, str) and found.startswith("it cannot be opened: ") and reason in found


def test_elias_codes_have_no_level_above_the_largest_and_stay_in_their_lane() -> None:
    encoded = elias.encode(np.array([0, 3, 0], dtype=np.int16), 100)
    assert encoded is not None
    with pytest.raises(DataError, match="a level above 1"):
        elias.decode(encoded, 3, 1)
    with pytest.raises(DataError, match="names a place after the last number"):
        elias.decode(encoded, 1, 3)


@given(st.binary(max_size=400), st.integers(0, 3000))
def test_any_bytes_are_refused_or_open_to_levels(data: bytes, count: int) -> None:
    try:
        opened = elias.decode(np.frombuffer(data, dtype=np.uint8), count, 7)
    except DataError:
        return
    assert len(opened) == count and (count == 0 or np.abs(opened).max() <= 7)


@pytest.mark.parametrize(
    ("rule", "part", "value", "reason"),
    [
        (QSGD(3), "norms", -1.0, "a norm is negative"),
        (QSGD(3), "norms", math.nan, "w.norms has values that are not finite"),
        (QSGD(3), "codes", 255, "a code is above 3"),
        (StochasticRounding(), "codes", 255, "a code is above 127"),
        (StochasticRounding(), "doublings", -1, "a step is doubled fewer than 0"),
        (StochasticRounding(), "doublings", 1101, "or more than 1100 times"),
        (StochasticRounding(), "doublings", 1100, "w has values that are not finite"),
    ],
    ids=str,
)
def test_hostile_codes_and_norms_reject_the_reply(rule: Transform, part: str, value: float, reason: str) -> None:
    op = Packed(SGD(), rule)
    reply, _ = op.after(party(1), model(), Reply({"w": vector(40, torch.float32)}, 3), {})
    reply.tensors[f"w.{part}"].fill_(value)
    found = received(reply, op, model(), Rules())
    assert isinstance(found, str) and reason in found
