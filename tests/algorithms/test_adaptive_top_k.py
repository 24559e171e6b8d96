"""Fair top-k with an adaptive k: card 3.5 of the specification."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hansa
from hansa.algorithms.adaptive_top_k import SettleTopK, derivative_sign, fair_choice, next_k, probe_point, step_size
from hansa.core.entries import refuses_payload
from hansa.local import DPSGD, Controlled
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.testing.transforms import _party as party
from hansa.transforms.error_feedback import AccumulatedTopK, returned
from small_tasks import learnable


def rows_of(parties: int, d: int, k: int, seed: int) -> list[Tensor]:
    """What parties send: their k largest numbers."""
    values = torch.randn(parties, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = values.abs() >= values.abs().topk(k, dim=1).values[:, -1:]
    return list(values * kept)


@given(st.integers(1, 6), st.integers(4, 40), st.integers(1, 40), st.integers(0, 20))
@settings(deadline=None)
def test_each_party_contributes_its_share_and_no_more_than_k_places_are_used(n: int, d: int, k: int, seed: int) -> None:
    k = min(k, d)
    rows = rows_of(n, d, k, seed)
    used = set(fair_choice(rows, k).tolist())
    tops = [row.abs().argsort(descending=True, stable=True).tolist() for row in rows]

    def union(kappa: int) -> set[int]:
        return {place for top in tops for place in top[:kappa]}

    kappa = max(c for c in range(k + 1) if len(union(c)) <= k)
    assert union(kappa) <= used and len(used) == k
    assert all(len(used & set(top[:k])) >= k // n for top in tops)
    rest = sorted(used - union(kappa))
    if rest:
        sizes: dict[int, float] = {}
        for top, row in zip(tops, rows, strict=True):
            sizes[top[kappa]] = max(sizes.get(top[kappa], 0.0), float(row.abs()[top[kappa]]))
        left = [size for place, size in sizes.items() if place not in used]
        assert set(rest) <= set(sizes) and (not left or min(sizes[place] for place in rest) >= max(left) - 1e-12)


def test_rounding_errors_decide_no_tie() -> None:
    rows = torch.tensor([[3.0, -3.0, 3.0, 1.0], [0.0, 2.0, 3.0, -3.0]], dtype=torch.float64)
    draws = torch.Generator().manual_seed(1)
    for _ in range(20):
        noisy = rows * (1 + 1e-15 * torch.randn(rows.shape, generator=draws, dtype=torch.float64))
        for k in (1, 2, 3):
            assert fair_choice(list(noisy), k).tolist() == fair_choice(list(rows), k).tolist()


TIME = (lambda k: 1 + 0.01 * (k - 300) ** 2, 300)  # per unit of the loss, convex, with its minimum


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_k_approaches_the_best_k_although_some_signs_are_wrong(wrong: float) -> None:
    _, best = TIME
    draws, k, low, high = torch.Generator().manual_seed(3), 1000.0, 1, 1000
    late = []
    for m in range(1, 4001):
        flipped = float(torch.rand(1, generator=draws)) < wrong
        k = next_k(k, m, math.copysign(1.0, k - best) * (-1 if flipped else 1), low, high)
        assert low <= k <= high
        if not wrong and m > 20:
            assert abs(k - best) <= 2 * step_size(m, low, high)  # O(1 / sqrt(m))
        late += [k] if m > 3000 else []
    assert abs(sum(late) / len(late) - best) < 0.03 * (high - low)


def test_the_sign_is_that_of_the_derivative_and_0_without_progress() -> None:
    cost, best = TIME
    for k in (100, 250, 350, 900):  # the loss falls by 1 / cost(k) per second: it falls by t(k) / cost(k) in a round
        losses = 10.0, 10.0 - 2.0 / cost(k), 10.0 - 2.0 / cost(k - 20)
        assert derivative_sign(*losses, k, k - 20, lambda _: 2.0) == math.copysign(1.0, k - 10 - best)
    for losses in ((1.0, 1.0, 0.5), (1.0, 2.0, 0.5), (1.0, 0.5, 1.0), (1.0, math.nan, 0.5)):
        assert derivative_sign(*losses, 10, 5, lambda k: 1.0 + k) == 0.0
    assert derivative_sign(1.0, 0.5, 0.5, 7, 7, lambda k: 1.0 + k) == 0.0


def test_the_other_point_is_half_a_step_below_k_or_above_it_where_none_is_below() -> None:
    assert step_size(8, 10, 90) == 20
    assert [probe_point(k, 8, 10, 90) for k in (90.0, 20.0, 19.9, 10.0)] == [80.0, 10.0, 29.9, 20.0]


@pytest.mark.parametrize(("fields", "d", "limits"), [
    ({}, 103, (1, 103)), ({}, 999, (1, 999)), ({}, 1000, (2, 1000)), ({"k_max": 3}, 5000, (3, 3)),
    ({"k_min": 7, "k_max": 9}, 5000, (7, 9)),
])  # fmt: skip
def test_k_lies_between_a_five_hundredth_of_the_model_and_all_of_it_by_default(
    fields: dict[str, int], d: int, limits: tuple[int, int]
) -> None:
    assert hansa.AdaptiveTopK(**fields).limits(d) == limits


def test_k_moves_by_one_step_of_its_round_or_stays() -> None:
    low, high = 1, 103
    ks = [run(hansa.AdaptiveTopK(LOCAL, k=50), rounds).state.slots["k"] for rounds in range(1, 6)]
    inside = 0
    for m, (before, after) in enumerate(zip([50.0, *ks[:-1]], ks, strict=True), 1):
        assert after in [next_k(before, m, sign, low, high) for sign in (-1, 0, 1)]
        inside += m > 1 and after != before and low < after < high
    assert inside


def test_what_is_not_used_goes_back_to_the_party() -> None:
    """The sum of what was used and the last error is the sum of the updates."""
    d, k, n = 30, 4, 3
    draws = torch.Generator().manual_seed(5)
    rule = AccumulatedTopK(k=k)
    memories: list[Any] = [None] * n
    used, updates = torch.zeros(n, d, dtype=torch.float64), torch.zeros(n, d, dtype=torch.float64)
    for number in range(20):
        values = torch.randn(n, d, generator=draws, dtype=torch.float64)
        updates += values
        parts, memories = rule.pack_rows([party(p, number) for p in range(n)], "w", values, memories)
        opened = rule.open_rows(parts, ((d,), torch.float64))
        places = fair_choice(list(opened), k)
        used[:, places] += opened[:, places]
        memories = [returned(memory, places) for memory in memories]
    torch.testing.assert_close(
        used + torch.stack([memory["error"] for memory in memories]), updates, rtol=0, atol=1e-12
    )
    assert all(memory["values"].numel() == 0 for memory in memories)


def task(parties: int = 5) -> hansa.Task:
    *pairs, test = learnable([20 + 5 * n for n in range(parties)] + [60], features=6)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()

    return hansa.Task(model, "cross_entropy", pairs, test=test, classes=3)


LOCAL = hansa.SGD(lr=0.1, steps=3, batch=8)


def run(algorithm: hansa.Algorithm, rounds: int = 5, **more: Any) -> hansa.Result:
    return hansa.simulate(algorithm, task(), rounds=rounds, **{"engine": "reference", **more})


def test_all_places_are_fedavg() -> None:
    d = 6 * 10 + 10 + 10 * 3 + 3
    whole, plain = run(hansa.AdaptiveTopK(LOCAL, k_min=d)), run(hansa.FedAvg(local=LOCAL))
    torch.testing.assert_close(whole.state.params.w, plain.state.params.w, rtol=0, atol=1e-12)
    assert all(line["k"] == d for line in whole.history)


@pytest.mark.parametrize("engine", ["stacked", "workers"])
def test_engines_agree_and_the_model_changes_in_k_places(engine: str) -> None:
    algorithm = hansa.AdaptiveTopK(LOCAL, k=20, k_min=5, k_max=40)
    reference, other = run(algorithm), run(algorithm, engine=engine)
    torch.testing.assert_close(reference.state.params.w, other.state.params.w, rtol=0, atol=1e-9)
    chosen = [line["k"] for line in reference.history]
    assert chosen == [line["k"] for line in other.history]
    assert all(5 <= k <= 40 for k in chosen) and len(set(chosen)) > 1
    one, two = run(algorithm, 1).state.params.w, run(algorithm, 2).state.params.w
    assert 0 < int((one != two).sum()) <= chosen[1]


def test_a_k_that_fell_to_its_least_value_can_rise_again() -> None:
    """With as few places as possible there are none below to compare with."""
    lines = run(hansa.AdaptiveTopK(LOCAL, k=2, k_min=2, beta=0.01), rounds=20).history
    assert lines[0]["k"] == 2
    assert max(line["k"] for line in lines) > 10


@pytest.mark.slow
def test_it_learns_with_a_tenth_of_the_numbers() -> None:
    few = run(hansa.AdaptiveTopK(LOCAL, k_max=10), rounds=60)
    assert few.summary["accuracy"] > 0.75


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.AdaptiveTopK(k_min=0), "k_min must be at least 1, got 0"),
        (lambda: hansa.AdaptiveTopK(k_min=5, k_max=4), "k_max must be at least k_min, got 4 and 5"),
        (lambda: hansa.AdaptiveTopK(k=3, k_min=5), r"k must lie in k_min\.\.k_max, got 3"),
        (lambda: hansa.AdaptiveTopK(beta=-1.0), "beta must be at least 0"),
        (lambda: run(hansa.AdaptiveTopK(k_max=1000)), "k_max is 1000, and the model has 103 numbers"),
        (lambda: run(hansa.AdaptiveTopK(DPSGD(sigma=1.0, epsilon=9.0))), "the parties send losses without noise"),
        (lambda: run(hansa.AdaptiveTopK(Controlled())), "scaffold|sends more than an update"),
        (lambda: run(hansa.AdaptiveTopK(), compress="int8"), "adaptive-top-k packs updates in its own way"),
        (lambda: run(hansa.AdaptiveTopK(), privacy={"secure": "masking"}), "looks at the update of each party"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"used_places": torch.tensor([9])}, "other places than those of the model"),
        ({"used_places": torch.tensor([-1])}, "used_places must be"),
        ({"used_values": torch.ones(2)}, "used_places must be"),
        ({"used_values": torch.tensor([torch.nan])}, "used_values must be a tensor of finite"),
        ({"used_values": None}, "used_values must be"),
    ],
)
def test_a_party_checks_what_it_is_told(payload: dict[str, Any], reason: str) -> None:
    model = {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
    one = {"values": torch.ones(1), "places": torch.tensor([1])}
    good = {"model": model, **{f"{use}_{name}": value for use in ("used", "probe") for name, value in one.items()}}
    assert refuses_payload(SettleTopK("top"), good) is None
    assert reason in str(refuses_payload(SettleTopK("top"), {**good, **payload}))
    with pytest.raises(PartyError, match="it has sent no update that could be settled"):
        SettleTopK("top").run(party(1), {**good, **payload}, {})
