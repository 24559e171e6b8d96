"""Replies as integers: the sum of vectors decodes to the weighted sum; a few values that do not fit are cut off."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hansa.core.ask import Reduced
from hansa.core.op import Op, Payload, Reply, Shape
from hansa.core.predictor import Evaluate
from hansa.core.quantities import AnyCount
from hansa.plumbing.errors import OutOfRange, RoundAborted
from hansa.secure.encoding import LARGEST, SMALLEST, Encoding, FixedPoint, SumLayout, WideFixedPoint


@dataclass(frozen=True)
class Something(Op):
    """An op with an update, counts beside it and a metric."""

    size: AnyCount = 3
    counts: AnyCount = 2
    measures = frozenset({"train_loss"})
    update = "w"

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"w": ((2, self.size), torch.float32), "count": ((self.counts,), torch.int64)}


@dataclass(frozen=True)
class Moments(Op):
    """An op whose numbers are not an update."""

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((2,), torch.float64)}


POINT = FixedPoint(16.0, 32)


def encoding(parties: int = 4, max_weight: int = 1000, point: FixedPoint = POINT) -> Encoding:
    return Encoding(SumLayout(Something(), {}, WideFixedPoint(2.0**30, 32)), point, parties, max_weight)


def reply(seed: int, weight: int = 3, **metrics: float) -> Reply:
    draws = np.random.default_rng(seed)
    w = torch.from_numpy(draws.normal(size=(2, 3)).astype(np.float32))
    return Reply({"w": w, "count": torch.from_numpy(draws.integers(-50, 50, 2))}, weight, metrics=metrics)


@pytest.mark.parametrize("uniform", [False, True])
def test_the_sum_of_the_vectors_is_the_weighted_sum(uniform: bool) -> None:
    replies = [reply(k, weight=k + 1, train_loss=0.5 * k) for k in range(4)]
    total = sum(encoding().encode(r, uniform) for r in replies)
    answer = encoding().decode(np.asarray(total), 4)
    shares = [1 if uniform else r.weight for r in replies]
    plain = sum(r.tensors["w"].double() * s for r, s in zip(replies, shares, strict=True))
    assert torch.allclose(answer.sums["w"], torch.as_tensor(plain), rtol=0, atol=sum(shares) * 0.51 / POINT.scale)
    count = sum(r.tensors["count"] * s for r, s in zip(replies, shares, strict=True))
    assert torch.equal(answer.sums["count"], torch.as_tensor(count))
    assert (answer.weight, answer.count) == (sum(shares), 4)
    loss = sum(0.5 * k * s for k, s in enumerate(shares)) / sum(shares)
    assert answer.metrics["train_loss"] == pytest.approx(loss, abs=1e-8)


def test_a_metric_that_a_party_leaves_out_does_not_count_for_it() -> None:
    total = encoding().encode(reply(0, train_loss=2.0), False) + encoding().encode(reply(1), False)
    assert encoding().decode(total, 2).metrics == {"train_loss": 2.0}


def test_what_cannot_be_a_sum_of_weights_or_a_mean_of_metrics_is_not_taken_for_one() -> None:
    code = encoding(parties=2)
    total = code.encode(reply(0, train_loss=2.0), False) + code.encode(reply(1, train_loss=4.0), False)
    for weight in (-5, 0, 1, 2001, 2**62):
        wrong = total.copy()
        wrong[0] = weight
        with pytest.raises(RoundAborted, match=f"2 parties cannot add up to {weight}: some party sent wrong numbers"):
            code.decode(wrong, 2)
    for heard in (-1, 0, 7, 2**40):  # more samples than there are, or none
        wrong = total.copy()
        wrong[-1] = heard
        assert code.decode(wrong, 2).metrics == {}
    assert code.decode(total, 2).metrics == {"train_loss": 3.0}
    layout = SumLayout(Evaluate(), {}, WideFixedPoint(2.0**30, 32))
    code = Encoding(layout, POINT, 2, 1000)
    sent = [code.encode(Reply({}, 10, metrics={"accuracy": 1.0, "loss": 0.5}), False) for _ in range(2)]
    assert code.decode(sent[0] + sent[1], 2).metrics == {"accuracy": 1.0, "loss": 0.5}
    liar = code.encode(Reply({}, 10, metrics={"accuracy": 1e8, "loss": 0.5}), False)
    assert code.decode(sent[0] + liar, 2).metrics == {"loss": 0.5}


def test_the_sum_fits_its_width_at_the_extremes() -> None:
    code = encoding(parties=4, max_weight=1000)
    for sign in (1.0, -1.0):
        extreme = Reply({"w": torch.full((2, 3), sign * 16.0), "count": torch.zeros(2, dtype=torch.int64)}, 1000)
        total = 4 * code.encode(extreme, False)
        assert np.abs(total).max() < 2 ** (code.width - 1)
        assert torch.allclose(code.decode(total, 4).sums["w"] / 4000, torch.tensor(sign * 16.0, dtype=torch.float64))


def told(code: Encoding, reply: Reply, uniform: bool = False, **settings: Any) -> tuple[Reduced, str]:
    """The decoded numbers of one party, and what its log says."""
    said: list[str] = []
    return code.decode(code.encode(reply, uniform, **settings, tell=said.append), 1), " | ".join(said)


def test_a_few_values_without_room_are_cut_off_and_said() -> None:
    whole, said = told(encoding(), reply(0, weight=1001))
    assert whole.weight == 1000 and "number of samples is over 1000" in said and "privacy.max_weight" in said
    layout = SumLayout(Something(100, 100), {}, WideFixedPoint(2.0**30, POINT.bits))
    far = Reply({"w": torch.ones(2, 100), "count": torch.ones(100, dtype=torch.int64)})
    far.tensors["w"][0, :2] = torch.tensor([16.001, -1e30])
    far.tensors["count"][0] = -(2**63)
    whole, said = told(Encoding(layout, POINT, 4, 1000), far)
    assert torch.allclose(whole.sums["w"][0, :3], torch.tensor([16, -16, 1]).double(), atol=1e-8)
    assert whole.sums["count"][:2].tolist() == [-(2**31 - 1), 1]
    assert "w has values over 16, where they are cut off" in said and "privacy.range" in said
    assert "count has values over" in said and "privacy.bound" in said
    assert told(encoding(), reply(0, weight=1000, train_loss=2.0**30))[1] == ""


@pytest.mark.parametrize(("name", "values"), [
    ("w", torch.full((2, 3), 17.0)), ("w", torch.tensor([[0, 0, 0], [0, 0, torch.nan]])),
    ("w", torch.tensor([[0, 0, 0], [0, 0, -torch.inf]])), ("count", torch.tensor([0, 2**31])),
])  # fmt: skip
def test_a_party_whose_values_have_no_room_declines(name: str, values: torch.Tensor) -> None:
    """What it would send instead is known to the aggregator, and leaves the others' updates alone in the sum."""
    far = reply(0)
    far.tensors[name] = values
    with pytest.raises(OutOfRange, match=f"{name} has values over"):
        told(encoding(), far)


def test_a_metric_without_room_is_cut_off_or_left_out() -> None:
    for loss in (2.0**30 + 1, -(2.0**31)):
        whole, said = told(encoding(), reply(0, train_loss=loss))
        assert "train_loss has values over 1.0" in said and "; raise privacy.statistics" in said
        assert whole.metrics == {"train_loss": np.sign(loss) * 2.0**30}
    for loss in (math.nan, math.inf):
        assert told(encoding(), reply(0, train_loss=loss))[0].metrics == {}


@pytest.mark.parametrize("stochastic", [False, True])
def test_coarse_sums_with_known_weights_do_not_tell_parties_apart(stochastic: bool) -> None:
    """If values were rounded before they are weighted, one sum would have one solution: the update of each party."""
    weights, coarse = (101, 307, 911), FixedPoint(4.0, 3)
    code = encoding(3, 1000, coarse)
    sums, solutions = np.zeros(6, dtype=np.int64), set[int]()
    for k, weight in enumerate(weights):
        one = Reply({"w": reply(k).tensors["w"], "count": torch.zeros(2, dtype=torch.int64)}, weight)
        sums += code.encode(one, False, b"secret", stochastic)[3:9]
    places = range(-coarse.largest, coarse.largest + 1)
    for first, other, last in itertools.product(places, repeat=3):
        solutions.add(first * weights[0] + other * weights[1] + last * weights[2])
    assert not set(sums.tolist()) <= solutions


@pytest.mark.slow
@given(st.lists(st.floats(-(2.0**30), 2.0**30), min_size=1, max_size=8), st.integers(2, 53), st.integers(1, 2**10))
def test_wide_numbers_add_up_in_their_places(values: list[float], bits: int, weight: int) -> None:
    wide = WideFixedPoint(2.0**30, bits)
    places = wide.split(np.array(values)) * weight
    assert np.abs(places).max() <= (2 ** (bits - 1) - 1) * weight
    sums = wide.join(np.add.reduce([places, places, -places]))
    exact = np.rint(np.array(values) * wide.scale) / wide.scale * weight
    assert np.allclose(sums, exact, rtol=2.0**-52, atol=0)
    assert np.allclose(sums, np.array(values) * weight, rtol=2.0**-52, atol=0.51 * weight / wide.scale)


def steps(rows: Any, bits: int) -> list[int]:
    """Numbers that were split, in whole steps."""
    return [sum(int(entry) << (bits - 1) * k for k, entry in enumerate(row)) for row in rows]


@pytest.mark.parametrize("bits", [2, 22, 53])
def test_sums_without_a_bound_keep_the_digits_of_a_float_at_every_scale(bits: int) -> None:
    wide = WideFixedPoint.unbounded(bits)
    draws = np.random.default_rng(0)
    values = np.append(draws.normal(size=60) * 10.0 ** np.linspace(-34, 40, 60), [0.0, LARGEST, -LARGEST, SMALLEST])
    for secret in (b"", b"secret"):
        rows = wide.split(values, secret)
        assert rows[:, :-1].min() >= 0 and np.abs(rows).max() <= max(1, 2 ** (bits - 1) - 1)
        for value, step in zip(values.tolist(), steps(rows, bits), strict=True):
            off = Fraction(step) / int(wide.scale) - Fraction(value)
            assert abs(off) <= Fraction(SMALLEST) / 2 or (secret and 0 <= off < np.spacing(abs(value)))
        sums = wide.join(rows + rows[::-1])
        assert np.allclose(sums, values + values[::-1], rtol=2.0**-50, atol=SMALLEST)
    assert np.abs(wide.split(np.array([LARGEST, -LARGEST]), b"s")).max() * 2**11 < 2**63  # with 2,048 parties


def test_a_large_number_leaves_no_digits_of_a_small_one_in_a_sum() -> None:
    """Without random digits, all that is below the last digit of the large number would be the small one's."""
    wide, large, small = WideFixedPoint.unbounded(53), 3e6, 1e-12
    unit = int(np.spacing(large) * wide.scale)
    assert 0 < small * wide.scale < unit
    below = []
    for k in range(100):
        one, other = wide.split(np.array([large]), bytes([k])), wide.split(np.array([small]), b"other")
        assert steps(one, 53)[0] // unit * unit == int(large) * int(wide.scale)
        below.append(steps(one + other, 53)[0] % unit / unit)
    assert np.abs(np.quantile(below, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.15
    assert not wide.split(np.zeros(3), b"s").any()  # as exact as a float is


def test_sums_without_a_bound_are_told_by_what_one_sample_adds() -> None:
    layout = SumLayout(Moments(), {}, WideFixedPoint(2.0**30, 53))
    code = Encoding(layout, FixedPoint(2.0**30, 53), 4, 1)
    assert layout.length == 1 + 2 * 5
    moments = torch.tensor([-1.7e-20, 2.9e33], dtype=torch.float64)
    assert torch.allclose(told(code, Reply({"sum": moments}), True)[0].sums["sum"], moments, rtol=1e-15, atol=0)
    weighted = Encoding(layout, FixedPoint(2.0**30, 45), 4, 1000)
    entries = weighted.encode(Reply({"sum": moments}, 1000), False, b"secret")[1:]
    assert math.gcd(*entries.tolist()) == 1  # multiples of known weights could be told apart in a sum
    assert torch.allclose(told(weighted, Reply({"sum": moments}, 7))[0].sums["sum"], 7 * moments, rtol=1e-15, atol=0)
    for far in (math.inf, math.nan, 2 * LARGEST):
        with pytest.raises(OutOfRange, match=r"over 2\.787\S*e\+42, or values that are not finite; scale the data"):
            told(code, Reply({"sum": torch.tensor([1.0, far], dtype=torch.float64)}), True)


def test_noise_that_leaves_the_range_is_cut_off() -> None:
    whole, said = told(encoding(), reply(0), True, secret=b"secret", noise=100.0)
    assert "values with their noise are over 16, where they are cut off; raise privacy.range" in said
    assert float(whole.sums["w"].abs().max()) == pytest.approx(16.0)


@given(st.lists(st.floats(-16, 16), min_size=1, max_size=8), st.binary(min_size=1, max_size=8))
def test_stochastic_rounding_takes_one_of_the_two_nearest(values: list[float], secret: bytes) -> None:
    from hansa.kernel.secret_draws import secret_uniform

    coarse = FixedPoint(16.0, 8)
    wide = np.array(values)
    out = coarse.encode(wide, secret_uniform(secret, len(values)))
    inside = np.clip(wide * coarse.scale, -coarse.largest, coarse.largest)
    assert np.all(np.abs(out - inside) < 1.0)


def test_stochastic_rounding_is_right_on_average() -> None:
    from hansa.kernel.secret_draws import secret_uniform

    coarse = FixedPoint(16.0, 8)
    out = coarse.encode(np.full(40_000, 0.3), secret_uniform(b"x", 40_000)) / coarse.scale
    assert abs(out.mean() - 0.3) < 5 * out.std() / 200


def test_noise_is_added_to_each_value_of_the_tensors_and_to_nothing_else() -> None:
    @dataclass(frozen=True)
    class Large(Op):
        update = "w"

        def expects(self, payload: Payload) -> dict[str, Shape]:
            return {"w": ((50_000,), torch.float32)}

    code = Encoding(SumLayout(Large(), {}, WideFixedPoint(2.0**30, 32)), POINT, 4, 1)
    zero = Reply({"w": torch.zeros(50_000)})
    noisy = code.encode(zero, True, b"secret", noise=0.25)
    values = noisy[1:] / POINT.scale
    assert noisy[0] == 1
    assert abs(values.std() / 0.25 - 1) < 0.02
    assert abs(values.mean()) < 5 * 0.25 / np.sqrt(50_000)
    assert np.array_equal(noisy, code.encode(zero, True, b"secret", noise=0.25))
    assert not np.array_equal(noisy, code.encode(zero, True, b"other", noise=0.25))
