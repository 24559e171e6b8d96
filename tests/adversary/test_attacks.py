"""Attacks as functions on samples and on updates: the formulas of the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hansa
from hansa.adversary.alie import largest_shift
from hansa.adversary.bit_flip import flipped
from hansa.core.plain_data import from_config, to_config
from hansa.core.registry import registered

ATTACKS = sorted(registered("adversary"))
ON_UPDATES = [name for name in ATTACKS if name != "label-flip"]
SIZES = st.tuples(st.integers(2, 9), st.integers(1, 30), st.integers(0, 10**6))


def draws(k: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stream() -> np.random.Generator:
    return np.random.default_rng(0)


def image(n: int, *shape: int) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


# --- what all of them promise ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ON_UPDATES)
def test_an_attack_gives_new_updates_of_the_same_type_and_leaves_what_it_was_given(
    name: str, dtype: torch.dtype
) -> None:
    updates = draws(7, 40, dtype=dtype)
    before = updates.clone()
    after = hansa.build("adversary", name)(updates, [1, 4], seed=3)
    assert torch.equal(updates, before)
    assert (after.dtype, after.shape) == (dtype, updates.shape)
    assert after.data_ptr() != updates.data_ptr()


@pytest.mark.parametrize("name", ON_UPDATES)
def test_an_attack_is_a_function_of_its_seed_and_round(name: str) -> None:
    attack, updates = hansa.build("adversary", name), draws(7, 40)
    torch.testing.assert_close(attack(updates, [1, 4], seed=3), attack(updates, [1, 4], seed=3), rtol=0, atol=0)
    if name in ("gaussian",):
        assert not torch.equal(attack(updates, [1], seed=3), attack(updates, [1], seed=4))
        assert not torch.equal(attack(updates, [1], seed=3), attack(updates, [1], seed=3, round=1))


@pytest.mark.parametrize("name", [name for name in ON_UPDATES if name != "gambler"])
def test_without_attackers_nothing_changes_and_with_some_only_their_rows_do(name: str) -> None:
    attack, updates = hansa.build("adversary", name), draws(7, 40)
    assert torch.equal(attack(updates, []), updates)
    after = attack(updates, [1, 4])
    honest = [0, 2, 3, 5, 6]
    assert torch.equal(after[honest], updates[honest])
    assert not torch.equal(after[1], updates[1]) and not torch.equal(after[4], updates[4])


@pytest.mark.parametrize("name", ATTACKS)
def test_an_adversary_survives_as_plain_data(name: str) -> None:
    attack = hansa.build("adversary", name)
    assert from_config("adversary", to_config(attack), "here") == attack
    if name != "gambler":
        named = hansa.build("adversary", name, parties=["berlin", 3])
        assert from_config("adversary", to_config(named), "here") == named
        assert named.fraction is None


def test_what_attackers_send_as_noise_does_not_depend_on_who_attacks_beside_them() -> None:
    updates = draws(6, 9)
    alone, together = (hansa.GaussianAttack()(updates, rows, seed=1) for rows in ([4], [1, 4]))
    assert torch.equal(alone[4], together[4])
    assert not torch.equal(together[1], together[4])


# --- formulas ---


@pytest.mark.slow
@given(SIZES, st.floats(0.01, 20.0))
@settings(max_examples=30, deadline=None)
def test_a_flipped_sign_is_a_negative_multiple_of_ones_own_update(size: tuple[int, int, int], scale: float) -> None:
    updates = draws(*size)
    torch.testing.assert_close(hansa.SignFlip(scale=scale)(updates, [0])[0], -scale * updates[0])


def test_the_omniscient_send_the_negative_sum_of_the_honest() -> None:
    updates = draws(5, 8)
    after = hansa.Omniscient(scale=1e20)(updates, [0, 3])
    wanted = -1e20 * (updates[1] + updates[2] + updates[4])
    torch.testing.assert_close(after[0], wanted)
    assert torch.equal(after[0], after[3])


def test_an_omniscient_update_may_overflow_its_type() -> None:
    assert bool(torch.isinf(hansa.Omniscient(scale=1e20)(torch.full((2, 3), 1e20), [0])[0]).all())


@given(SIZES, st.floats(0.0, 3.0))
@settings(max_examples=40, deadline=None)
def test_alie_stays_at_the_lower_edge_of_mean_and_z_deviations(size: tuple[int, int, int], z: float) -> None:
    updates = draws(*size)
    after = hansa.ALIE(z=z)(updates, [0])[0].numpy()
    honest = updates[1:].numpy()
    mean, std = honest.mean(0), honest.std(0)  # numpy's default divides by n
    np.testing.assert_allclose(after, mean - z * std, rtol=1e-9, atol=1e-12)
    assert (np.abs(after - mean) <= z * std + 1e-9).all()


def test_alie_may_go_by_its_members_own_updates_and_all_send_the_same() -> None:
    updates = draws(6, 4)
    after = hansa.ALIE(z=1.5, knows="own")(updates, [0, 2, 5])
    own = updates[[0, 2, 5]].numpy()
    np.testing.assert_allclose(after[2].numpy(), own.mean(0) - 1.5 * own.std(0))
    assert torch.equal(after[0], after[2]) and torch.equal(after[2], after[5])


def test_the_largest_shift_of_alie_is_the_papers() -> None:
    assert largest_shift(50, 24) == pytest.approx(1.426, abs=5e-4)  # s = 2; Baruch et al. 2019
    assert largest_shift(51, 12) == pytest.approx(0.3612, abs=5e-4)  # s = 14: Phi^-1(25 / 39)
    assert largest_shift(10, 6) == 1.5  # a majority
    assert largest_shift(4, 4) == 1.5
    assert largest_shift(2, 1) == 0.0
    updates = draws(50, 3)
    after = hansa.ALIE()(updates, range(24))[0].numpy()
    honest = updates[24:].numpy()
    np.testing.assert_allclose((honest.mean(0) - after) / honest.std(0), 1.426, atol=5e-4)


@given(st.integers(2, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_under_ipm_the_mean_points_uphill_only_beyond_honest_over_attackers(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, n - 1))
    epsilon = data.draw(st.floats(0.01, 20.0).filter(lambda e: abs(e - (n - m) / m) > 1e-6))
    updates = draws(n, 5, seed=n)
    after = hansa.IPM(epsilon=epsilon)(updates, range(m))
    inner = float(after.mean(0) @ updates[m:].mean(0))
    assert (inner < 0) == (epsilon > (n - m) / m)


def test_gaussian_noise_has_its_deviation_and_replaces_or_adds() -> None:
    updates = draws(3, 20_000) + 5
    replaced, added = (hansa.GaussianAttack(sigma=200, replace=replace)(updates, [1]) for replace in (True, False))
    assert float(replaced[1].std()) == pytest.approx(200, rel=0.03)
    assert abs(float(replaced[1].mean())) < 6
    torch.testing.assert_close(added[1], updates[1] + replaced[1])


def test_a_free_rider_sends_nothing_or_noise() -> None:
    updates = draws(3, 20_000)
    assert not hansa.FreeRider()(updates, [1])[1].any()
    assert float(hansa.FreeRider(noise=0.1)(updates, [1])[1].std()) == pytest.approx(0.1, rel=0.03)


# --- bits ---


@given(st.sets(st.integers(1, 32)), st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bits_flipped_twice_are_the_original_ones(bits: set[int], values: list[float]) -> None:
    before = torch.tensor(values, dtype=torch.float32)
    once = flipped(before, tuple(bits))
    twice = flipped(once, tuple(bits))
    assert torch.equal(twice.view(torch.int32), before.view(torch.int32))
    assert torch.equal(once.view(torch.int32), before.view(torch.int32)) == (not bits)


def test_the_32nd_bit_is_the_sign_and_the_24th_the_lowest_of_the_exponent() -> None:
    assert flipped(torch.tensor([1.5]), (32,)).tolist() == [-1.5]
    assert flipped(torch.tensor([1.5]), (24,)).tolist() == [0.75]  # the exponent 127 is odd
    assert flipped(torch.tensor([1.5], dtype=torch.float64), (23,)).tolist() == [1.0]


def test_bits_are_flipped_in_the_first_coordinates_only() -> None:
    updates = draws(4, 12, dtype=torch.float32)
    after = hansa.BitFlip(dims=5)(updates, [2])
    assert torch.equal(after[:, 5:], updates[:, 5:])
    assert bool((after[2, :5] != updates[2, :5]).all())


def test_dimensional_flips_hit_a_share_of_the_parties_in_each_coordinate_and_spare_no_party() -> None:
    updates = draws(10, 400, dtype=torch.float32)
    after = hansa.BitFlip(fraction=0.25, dims=300, mode="dimensional")(updates)
    hit = after.view(torch.int32) != updates.view(torch.int32)
    assert hit[:, :300].sum(0).tolist() == [2] * 300
    assert not hit[:, 300:].any()
    assert int(hit.any(1).sum()) == 10
    assert abs(int(hit[0].sum()) - 60) < 35  # drawn evenly


def test_dimensional_flips_of_named_parties_are_theirs_alone() -> None:
    updates = draws(4, 12, dtype=torch.float32)
    named, classic = (hansa.BitFlip(parties=(1,), mode=mode)(updates, [1]) for mode in ("dimensional", "classic"))
    assert torch.equal(named.view(torch.int32), classic.view(torch.int32))


# --- the gambler ---


def test_a_gambler_multiplies_values_of_any_party_in_the_hostile_shards() -> None:
    updates = draws(6, 100)
    after = hansa.Gambler(fraction=0.1, shards=20, probability=1.0)(updates, seed=5)
    hit = (after != updates).all(0)
    shards = hit.view(20, 5)
    assert torch.equal(shards.all(1), shards.any(1))
    assert int(shards.all(1).sum()) == 2
    assert torch.equal(after[:, hit], updates[:, hit] * -1e20)
    assert torch.equal(after[:, ~hit], updates[:, ~hit])
    later = hansa.Gambler(fraction=0.1, shards=20, probability=1.0)(updates, seed=5, round=9)
    assert torch.equal(later, after)  # the shards are drawn once


def test_a_gambler_hits_with_its_probability_and_needs_at_least_one_shard() -> None:
    updates = torch.ones(100, 1000, dtype=torch.float64)
    share = float((hansa.Gambler(shards=1, fraction=0.01, probability=0.05)(updates) != 1).double().mean())
    assert share == pytest.approx(0.05, rel=0.1)
    assert torch.equal(hansa.Gambler(fraction=0.0, probability=1.0)(updates), updates)


@pytest.mark.parametrize("d", [1, 19, 103])
def test_the_shards_of_a_gambler_hold_every_coordinate_once(d: int) -> None:
    after = hansa.Gambler(fraction=1.0, factor=2.0, probability=1.0)(torch.ones(2, d))
    assert after.tolist() == [[2.0] * d] * 2
    shares = [int((hansa.Gambler(probability=1.0)(torch.ones(1, d), seed=seed) != 1).sum()) for seed in range(9)]
    assert all(d // 20 <= share <= d // 20 + 1 for share in shares)


def test_what_a_gambler_hits_of_a_party_does_not_depend_on_who_else_is_there() -> None:
    updates, attack = draws(6, 100), hansa.Gambler(fraction=0.5, probability=0.3)
    few, all_of_them = attack(updates[:2], seed=5), attack(updates, seed=5)
    assert torch.equal(few, all_of_them[:2])
    assert not torch.equal(few[0] != updates[0], few[1] != updates[1])


def test_draws_differ_from_piece_to_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.adversary.gambler.NUMBERS", 64)
    monkeypatch.setattr("hansa.adversary.bit_flip.NUMBERS", 64 * 8)
    updates = torch.ones(8, 256)
    for attack in (hansa.Gambler(fraction=1.0, probability=0.5), hansa.BitFlip(fraction=0.25, mode="dimensional")):
        hit = attack(updates) != updates
        assert len({hit[:, at : at + 64].numpy().tobytes() for at in range(0, 256, 64)}) == 4
    assert hit.sum(0).tolist() == [2] * 256  # as many per coordinate as without blocks


# --- poisoned data ---


@given(st.integers(2, 6), st.integers(0, 40), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_flipping_labels_keeps_the_samples_and_their_number(classes: int, n: int, share: float) -> None:
    x, y = draws(n, 3), torch.from_numpy(np.random.default_rng(n).integers(0, classes, n))
    x_after, flips = hansa.LabelFlip(share=share).poison(x, y, classes, stream())
    assert torch.equal(x_after, x) and flips.shape == y.shape
    middle = int((y == classes - 1 - y).sum())
    changed = int((flips != y).sum())
    count = math.floor(share * n + 1e-9)
    assert count - middle <= changed <= count
    assert bool(((flips == y) | (flips == classes - 1 - y)).all())
    whole = hansa.LabelFlip().poison(x, y, classes, stream())[1]
    counts = torch.bincount(y, minlength=classes)
    assert torch.equal(torch.bincount(whole, minlength=classes), counts.flip(0))


def test_a_share_of_zero_changes_no_label_and_no_image() -> None:
    x, y = image(20, 1, 8, 8), torch.arange(20) % 10
    for attack in (hansa.LabelFlip(share=0.0), hansa.LabelFlip(source=1, target=2, share=0.0),
                   hansa.Backdoor(share=0.0, value=1.0)):  # fmt: skip
        after = attack.poison(x, y, 10, stream())
        assert torch.equal(after[0], x) and torch.equal(after[1], y)


def test_a_source_class_becomes_the_target_and_no_other_does() -> None:
    x, y = draws(40, 2), torch.arange(40) % 4
    flips = hansa.LabelFlip(source=3, target=1, share=0.5).poison(x, y, 4, stream())[1]
    assert int((flips == 3).sum()) == 5 and int((flips == 1).sum()) == 15
    assert torch.equal(flips[y != 3], y[y != 3])


@pytest.mark.parametrize("shape", [(3, 8, 9), (8, 9), (64,)])
def test_a_backdoor_lights_the_top_left_corner_and_says_the_target(shape: tuple[int, ...]) -> None:
    x, y = image(10, *shape), torch.arange(10) % 5
    attack = hansa.Backdoor(size=2, target=4, share=0.5).learn([x[:5], x[5:]])
    assert attack.value == float(x.max())
    images, labels = attack.poison(x, y, 5, stream())
    side = (8, 8) if len(shape) == 1 else shape[-2:]
    before, after = (v.reshape(10, -1, *side) for v in (x, images))
    lit = (after[:, :, :2, :2] == attack.value).flatten(1).all(1)
    assert int(lit.sum()) == 5
    assert bool((labels[lit] == 4).all()) and torch.equal(labels[~lit], y[~lit])
    rest = torch.ones(side, dtype=torch.bool)
    rest[:2, :2] = False
    assert torch.equal(after[..., rest], before[..., rest])
    assert torch.equal(after[~lit], before[~lit])


@given(st.integers(2, 8), st.floats(0.1, 2.0), st.data())
@settings(max_examples=40, deadline=None)
def test_a_replaced_model_is_the_members_where_all_others_stay(n: int, rate: float, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, n))
    weights = data.draw(st.lists(st.integers(1, 50), min_size=n, max_size=n))
    updates = draws(n, 6, seed=n)
    updates[m:] = 0
    after = hansa.Backdoor()(updates, range(m), weights=weights, rate=rate)
    share = torch.tensor(weights, dtype=torch.float64)
    mean = (share[:, None] * after).sum(0) / share.sum()
    members = (share[:m, None] * updates[:m]).sum(0) / share[:m].sum()
    torch.testing.assert_close(rate * mean, members)


def test_a_given_scale_goes_before_the_exact_one_and_no_replacement_leaves_the_update() -> None:
    updates = draws(4, 3)
    torch.testing.assert_close(hansa.Backdoor(scale=7.0)(updates, [1])[1], 7 * updates[1])
    assert torch.equal(hansa.Backdoor(replace=False)(updates, [1]), updates)


# --- refusals ---


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("alie", {"fraction": 1.5}, "fraction must be at least 0 and at most 1, got 1.5"),
        ("alie", {"fraction": 0.5, "parties": [1]}, "not both"),
        ("alie", {"knows": "all"}, "one of 'honest', 'own'"),
        ("ipm", {"epsilon": -1.0}, "epsilon must be above 0"),
        ("sign-flip", {"scale": 0.0}, "scale must be above 0"),
        ("omniscient", {"scale": -1.0}, "scale must be above 0"),
        ("gaussian", {"sigma": -1.0}, "sigma must be at least 0"),
        ("free-rider", {"noise": -1.0}, "noise must be at least 0"),
        ("bit-flip", {"bits": [33]}, "bits.0. must be at least 1 and at most 32, got 33"),
        ("bit-flip", {"bits": [3, 3]}, "distinct"),
        ("bit-flip", {"dims": -1}, "dims must be at least 0"),
        ("gambler", {"parties": [1]}, "give fraction instead of parties"),
        ("gambler", {"shards": 0}, "shards must be at least 1"),
        ("gambler", {"probability": 2.0}, "probability must be at least 0 and at most 1"),
        ("label-flip", {"source": 1}, "source and target go together"),
        ("label-flip", {"source": 1, "target": 1}, "give two classes"),
        ("label-flip", {"share": 2.0}, "share must be at least 0 and at most 1"),
        ("backdoor", {"size": 0}, "size must be at least 1"),
        ("backdoor", {"replace": False, "scale": 2.0}, "scale = 2.0 has no effect while replace is false"),
        ("backdor", {}, "backdoor"),
    ],
)
def test_a_field_that_cannot_be_right_is_refused_with_the_reason(name: str, fields: dict, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.build("adversary", name, **fields)


def test_rows_that_are_not_there_cannot_attack() -> None:
    with pytest.raises(hansa.ConfigError, match=r"rows 0\.\.2"):
        hansa.SignFlip()(draws(3, 2), [3])
