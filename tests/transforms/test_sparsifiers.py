"""Top-k, rand-k and signs: what they keep, how much they lose, and what a liar may not send."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hansa.core.op import Reply, like
from hansa.local import SGD
from hansa.plumbing.errors import ConfigError
from hansa.replies.reply_checks import Rules, received
from hansa.testing.transforms import _party as party
from hansa.testing.transforms import _payload as model
from hansa.transforms import Packed, RandK, Sign, TopK, Transform


def vector(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(rule: Transform, value: Tensor, number: int = 1) -> Tensor:
    return rule.open(rule.pack(party(number), "w", value, None)[0], like(value))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9), st.sampled_from([torch.float32, torch.float64]))
def test_top_k_loses_at_most_its_share_of_the_squared_norm(d: int, k: int, seed: int, dtype: torch.dtype) -> None:
    value, k = vector(d, dtype, seed), min(k, d)
    opened = through(TopK(k=k), value)
    kept = opened != 0
    assert int(kept.sum()) == k and torch.equal(opened[kept], value[kept])
    lost = float((opened - value).double().square().sum())
    assert lost <= (1 - k / d) * float(value.double().square().sum()) * (1 + 1e-9)
    assert set(kept.nonzero().flatten().tolist()) == set(value.abs().topk(k).indices.tolist())
    assert lost <= float((through(RandK(k=k, scaled=False), value) - value).double().square().sum()) + 1e-9


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_equal_absolute_values_are_taken_in_the_order_of_their_places(k: int) -> None:
    value = torch.tensor([1.0, -2.0, 2.0, 0.0, 2.0, -2.0, 2.0, 1.0]).double()
    order = [1, 2, 4, 5, 6, 0, 7, 3]
    for noise in (0.0, 1e-13):  # rounding errors of an engine do not decide
        moved = value * (1 + noise * vector(8))
        opened = through(TopK(k=k), moved)
        expected = torch.zeros(8).double()
        expected[order[:k]] = moved[order[:k]]
        assert torch.equal(opened, expected)


def test_places_travel_as_numbers_or_as_bits_whichever_is_shorter() -> None:
    value = vector(1000, torch.float32)
    few, _ = TopK(k=10).pack(party(1), "w", value, None)
    half, _ = TopK(share=0.5).pack(party(1), "w", value, None)
    assert like(few["places"]) == ((10,), torch.int32) and like(half["places"]) == ((125,), torch.uint8)
    assert int((through(TopK(share=0.5), value) != 0).sum()) == 500


@pytest.mark.parametrize("rule", [TopK(k=40), TopK(share=1.0), RandK(k=40), RandK(share=1.0, shared=True)], ids=str)
def test_all_numbers_are_the_vector(rule: Transform) -> None:
    value = vector(40)
    assert torch.equal(through(rule, value), value)


@pytest.mark.parametrize("rule", [TopK(k=1), TopK(share=0.5), Sign()], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_rejected(rule: Transform, bad: float) -> None:
    op, w = Packed(SGD(), rule), vector(40, torch.float32)
    w[17] = bad
    reply, _ = op.after(party(1), model(), Reply({"w": w}, 3), {})
    found = received(reply, op, model(), Rules())
    assert isinstance(found, str) and "not finite" in found


@pytest.mark.slow
@pytest.mark.parametrize("d", [50, 5000])
def test_the_mean_of_scaled_rand_k_is_the_vector_and_its_error_that_of_the_card(d: int) -> None:
    value, draws, k = vector(d), 3000, d // 10
    rule = RandK(k=k)
    rows, _ = rule.pack_rows([party(n) for n in range(draws)], "w", value.expand(draws, -1), [None] * draws)
    opened = rule.open_rows(rows, like(value))
    error, deviation = opened.mean(0) - value, opened.std(0) / math.sqrt(draws)
    assert bool((error.abs() <= 5 * deviation).all())
    squared = float((opened - value).square().sum(1).mean() / value.square().sum())
    assert abs(squared / (d / k - 1) - 1) < 0.05
    unscaled = RandK(k=k, scaled=False).open_rows(rows, like(value))
    assert abs(float((unscaled - value).square().sum(1).mean() / value.square().sum()) - (1 - k / d)) < 0.02


def test_shared_places_are_the_same_for_all_parties_and_differ_between_rounds() -> None:
    value = vector(200)
    rule = RandK(share=0.1, shared=True)
    first, second = rule.in_round(5), rule.in_round(6)
    masks = [through(rule, value, number) != 0 for rule in (first, second) for number in (1, 2)]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3]) and not torch.equal(masks[0], masks[2])
    assert set(first.pack(party(1), "w", value, None)[0]) == {"values"} and first.adds and not RandK().adds
    assert not torch.equal(through(RandK(), value, 1) != 0, through(RandK(), value, 2) != 0)


def test_signs_and_their_mean_absolute_value() -> None:
    value = torch.tensor([3.0, -1.0, 0.0, -4.0])
    assert torch.equal(through(Sign(), value), torch.tensor([2.0, -2.0, 2.0, -2.0]))
    value = vector(1000)
    lost = float((through(Sign(), value) - value).square().sum())
    expected = float(value.square().sum() - value.abs().sum().square() / 1000)
    assert lost == pytest.approx(expected)
    parts, _ = Sign().pack(party(1), "w", value.float(), None)
    assert sum(part.numel() * part.element_size() for part in parts.values()) == 125 + 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: TopK(k=0), "k must be at least 1, got 0"),
        (lambda: RandK(k=-3), "k must be at least 1, got -3"),
        (lambda: TopK(share=0.0), "share must be above 0 and at most 1, got 0"),
        (lambda: RandK(share=1.5), "share must be above 0 and at most 1, got 1.5"),
        (lambda: TopK(k=41).of_model([("a", 30), ("b", 10)]), "top-k: k is 41, and there are 40 numbers"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Transform], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def at(*places: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["w.places"][: len(places)] = torch.tensor(places)

    return change


LIES: dict[str, tuple[Transform, Callable[[dict[str, Tensor]], None], str]] = {
    "negative": (TopK(k=1), at(-1), "a place is outside of 0..39"),
    "too large": (TopK(k=1), at(40), "a place is outside of 0..39"),
    "huge": (TopK(k=1), at(2**31 - 1), "a place is outside of 0..39"),
    "duplicate": (TopK(k=1), at(3), ""),
    "no bits": (TopK(k=20), lambda tensors: tensors["w.places"].zero_().sum(), "its places are not 20"),
    "all bits": (TopK(k=20), lambda tensors: tensors["w.places"].fill_(255).sum(), "its places are not 20"),
    "nan": (TopK(k=20), lambda tensors: tensors["w.values"].fill_(math.nan).sum(), "not finite"),
    "scale": (Sign(), lambda tensors: tensors["w.scale"].fill_(-1).sum(), "the scale is negative"),
    "nan scale": (Sign(), lambda tensors: tensors["w.scale"].fill_(math.nan).sum(), "not finite"),
    "key": (RandK(), lambda tensors: tensors["w.key"].fill_(-(2**63)).sum(), ""),
}


@pytest.mark.parametrize("lie", LIES)
def test_hostile_places_reject_the_reply(lie: str) -> None:
    rule, change, reason = LIES[lie]
    op = Packed(SGD(), rule)
    reply, _ = op.after(party(1), model(), Reply({"w": vector(40, torch.float32)}, 3), {})
    change(reply.tensors)
    found = received(reply, op, model(), Rules())
    assert reason in found if isinstance(found, str) else not reason


@pytest.mark.parametrize("places", [(5, 5), (7, 5)])
def test_places_ascend_and_differ(places: tuple[int, int]) -> None:
    op, payload = Packed(SGD(), TopK(k=2)), model()
    payload["model"]["w"] = torch.zeros(100)
    reply, _ = op.after(party(1), payload, Reply({"w": vector(100, torch.float32)}, 3), {})
    assert isinstance(received(reply, op, payload, Rules()), Reply)
    at(*places)(reply.tensors)
    assert received(reply, op, payload, Rules()) == (
        "it cannot be opened: its places are not in ascending order, or two are the same"
    )
