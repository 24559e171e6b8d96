"""Each drift by itself: identities, marginals, nested steps, and who is there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hansa
from hansa.core.task import Holdings
from hansa.drift import Course
from hansa.drift.course import concept_of
from hansa.drift.features import rotated
from hansa.drift.labels import rounded
from hansa.numerics.objective import Objective


def course(holdings: Holdings, *drifts: hansa.Drift, seed: int = 3) -> Course:
    made = Course(drifts, holdings, seed)
    made.begin(holdings.test, None)
    return made


def labels(holdings: Holdings, party: int) -> list[int]:
    return [int(label) for label in holdings.train.of(party)[1]]


def samples(holdings: Holdings) -> list[torch.Tensor]:
    tests = holdings.tests
    assert tests is not None
    return [holdings.train.x.clone(), holdings.train.y.clone(), tests.x.clone(), tests.y.clone()]  # type: ignore[union-attr]


# --- rotation and noise ---


def test_a_rotation_by_quarters_moves_pixels_as_rot90_does() -> None:
    x = torch.randn(3, 2, 5, 5)
    for quarters in range(-3, 5):
        assert torch.equal(rotated(x, 90.0 * quarters), torch.rot90(x, quarters, (-2, -1)))


@given(st.integers(2, 7), st.integers(2, 7))
def test_interpolation_at_half_a_turn_is_the_reversed_picture(height: int, width: int) -> None:
    x = torch.randn(2, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(height))
    assert torch.allclose(rotated(x, 180.0), x.flip(-1, -2), atol=1e-12)


def test_interpolation_tends_to_the_quarter_turn_of_rot90() -> None:
    x = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotated(x, 90.0 + 1e-7), torch.rot90(x, 1, (-2, -1)), atol=1e-6)


@pytest.mark.parametrize(
    "drift",
    [hansa.Rotation(start=1, degrees=0), hansa.Rotation(start=1, degrees=720), hansa.FeatureNoise(start=1, std=0),
     hansa.NewClasses(start=1, classes=(2,)), hansa.LabelShift(start=9)],
)  # fmt: skip
def test_a_drift_of_nothing_leaves_every_sample_where_it_is(drift: hansa.Drift, holdings: Holdings) -> None:
    before, x = samples(holdings), holdings.train.x
    made = course(holdings, drift)
    made.enter(1)
    assert all(map(torch.equal, samples(holdings), before))
    assert holdings.train.x is x
    assert made.test(1)[0] is holdings.test[0]  # type: ignore[index]


def test_noise_has_the_stated_deviation_and_grows_in_equal_steps(holdings: Holdings) -> None:
    before = samples(holdings)[0]
    made = course(holdings, hansa.FeatureNoise(start=2, over=4, std=0.8))
    added = []
    for round in (1, 2, 3, 5, 9):
        made.enter(round)
        added.append(holdings.train.x - before)
    assert not added[0].any()
    assert torch.allclose(2 * added[1], added[2], atol=1e-5)
    assert torch.equal(added[3], added[4])
    assert abs(float(added[3].std()) - 0.8) < 0.05
    assert abs(float(added[3].mean())) < 0.05


def test_a_drift_of_some_parties_changes_no_sample_of_the_others(holdings: Holdings) -> None:
    before = samples(holdings)
    course(holdings, hansa.Rotation(start=1, parties=("ben", 3))).enter(1)
    for party in range(4):
        rows = holdings.train.span(party)
        turned = torch.rot90(before[0][rows], 1, (-2, -1))
        assert torch.equal(holdings.train.x[rows], turned if party in (1, 3) else before[0][rows])


def test_the_tasks_own_tensors_are_never_changed(task: hansa.Task, holdings: Holdings) -> None:
    own = [x.clone() for x, _ in task.parties]
    course(holdings, hansa.Rotation(start=1), hansa.LabelShift(start=1, to=(1, 0, 0))).enter(1)
    assert all(torch.equal(x, kept) for (x, _), kept in zip(task.parties, own, strict=True))


# --- labels ---


@given(st.integers(0, 200), st.lists(st.floats(0, 10), min_size=1, max_size=8).filter(lambda s: sum(s) > 1e-3))
def test_rounded_shares_add_up_and_are_off_by_less_than_one(count: int, shares: list[float]) -> None:
    parts = rounded(count, tuple(shares))
    assert sum(parts) == count
    assert all(abs(part - count * share / sum(shares)) < 1 + 1e-6 for part, share in zip(parts, shares, strict=True))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.floats(0, 5), min_size=4, max_size=4).filter(
       lambda s: sum(s) > 1e-3), st.integers(0, 1000))  # fmt: skip
def test_a_complete_label_shift_has_the_stated_marginals(own: list[int], to: list[float], key: int) -> None:
    y = torch.tensor([*own, 0, 1, 2, 3])  # another party has a sample of each class
    drift, concept = hansa.LabelShift(start=1, to=tuple(to)), concept_of(y, 4)
    rows = drift.rows(np.arange(len(own)), concept, 1.0, key)
    assert rows is not None and len(rows) == len(own)
    counts = Counter(y[rows].tolist())
    assert [counts[label] for label in range(4)] == rounded(len(own), tuple(to))
    held = {label: np.flatnonzero(np.array(own) == label) for label in set(own)}
    for label, mine in held.items():  # its own samples serve first, and are repeated evenly
        used = Counter(rows[y[rows].numpy() == label].tolist())
        assert set(used) <= set(mine.tolist())
        if counts[label] >= len(mine):
            assert set(used) == set(mine.tolist())
            assert max(used.values()) - min(used.values()) <= 1
        else:
            assert max(used.values(), default=1) == 1


def test_a_label_shift_to_the_present_shares_moves_nothing(holdings: Holdings) -> None:
    counts = Counter(labels(holdings, 1))
    to = tuple(float(counts[label]) for label in range(3))
    before = samples(holdings)[0]
    course(holdings, hansa.LabelShift(start=1, to=to, parties=(1,))).enter(1)
    rows = holdings.train.span(1)
    assert torch.equal(holdings.train.x[rows], before[rows])


def test_a_gradual_label_shift_moves_more_samples_every_round_and_keeps_those_moved(holdings: Holdings) -> None:
    made, before = course(holdings, hansa.LabelShift(start=2, over=5, to=(0, 0, 1))), samples(holdings)
    moved = set[int]()
    for round in range(1, 8):
        made.enter(round)
        now = set((holdings.train.x != before[0]).flatten(1).any(1).nonzero().flatten().tolist())
        assert moved <= now
        assert (round == 1) == (not now)
        moved = now
        for party in range(4):
            assert len(labels(holdings, party)) == holdings.train.size(party)
    assert all(set(labels(holdings, party)) == {2} for party in range(4))


def test_a_label_shift_that_is_half_complete_has_half_of_every_new_class() -> None:
    y = torch.tensor([0] * 200 + [1, 2])
    rows = hansa.LabelShift(start=1, to=(0, 1, 1)).rows(np.arange(200), concept_of(y, 3), 0.5, 11)
    assert rows is not None
    counts = Counter(y[rows].tolist())
    assert counts[0] == 100 and 30 <= counts[1] <= 70


def test_samples_weights_and_labels_move_together() -> None:
    x = torch.arange(12.0).reshape(12, 1, 1, 1).expand(12, 1, 4, 4).clone()
    y = torch.arange(12) % 3
    weights = [x[:6, 0, 0, 0] + 1, x[6:, 0, 0, 0] + 1]
    task = hansa.Task(model=None, parties=[(x[:6], y[:6]), (x[6:], y[6:])], weights=weights, classes=3)
    holdings = task.holdings(Objective(None, "cross_entropy", 0))
    made = course(holdings, hansa.LabelShift(start=1, to=(1, 0, 0)))
    targets = holdings.train.targets
    made.enter(1)
    rows = holdings.train.x[:, 0, 0, 0]  # type: ignore[index]
    assert torch.equal(holdings.train.y, rows.long() % 3)
    assert torch.equal(holdings.train.weights, (rows + 1).to(holdings.train.weights.dtype))  # type: ignore[union-attr, arg-type]
    assert not torch.equal(holdings.train.targets, targets)


def test_new_classes_are_unseen_before_they_begin_and_as_they_were_after(holdings: Holdings) -> None:
    before = samples(holdings)
    made = course(holdings, hansa.NewClasses(start=4, classes=(0, 2)))
    for round in (1, 3):
        made.enter(round)
        assert set(holdings.train.y.tolist()) == {1}
        assert set(holdings.tests.y.tolist()) == {1}  # type: ignore[union-attr]
        assert set(made.test(round)[1].tolist()) == {1}  # type: ignore[index]
    made.enter(4)
    assert all(map(torch.equal, samples(holdings), before))


def test_new_classes_that_come_gradually_come_in_equal_steps(holdings: Holdings) -> None:
    made, before = course(holdings, hansa.NewClasses(start=2, over=4, classes=(2,))), samples(holdings)
    owned = [labels(holdings, party).count(2) for party in range(4)]
    for round in range(1, 6):
        made.enter(round)
        shown = {tuple(x.flatten().tolist()) for x, y in zip(*holdings.train.of(3), strict=True) if y == 2}
        assert len(shown) == owned[3] * (round - 1) // 4  # the others are hidden behind samples that are shown
    assert all(map(torch.equal, samples(holdings), before))


def test_a_party_with_new_classes_alone_comes_with_them() -> None:
    x = torch.randn(8, 1, 2, 2)
    task = hansa.Task(model=None, parties=[(x[:4], torch.tensor([0, 1, 0, 1])), (x[4:], torch.tensor([1, 1, 1, 1]))])
    made = course(task.holdings(Objective(None, "cross_entropy", 0)), hansa.NewClasses(start=3, classes=(1,)))
    made.enter(2)
    assert made.present([0, 1]) == (0,)
    assert made.away(1) == "it has no samples yet: all of them are of classes that appear later"
    made.enter(3)
    assert made.present([0, 1]) == [0, 1]


# --- the aggregator's test set, and replay ---


def test_the_test_set_drifts_by_the_members_share_of_the_training_samples(holdings: Holdings) -> None:
    made = course(holdings, hansa.Rotation(start=1, degrees=180.0, parties=("dan",)))
    x, y, _ = made.test(1)  # type: ignore[misc]
    before = holdings.test[0]  # type: ignore[index]
    turned = (x != before).flatten(1).any(1)
    assert int(turned.sum()) == round(60 * 40 / 126)
    assert torch.equal(x[turned], before[turned].flip(-1, -2))
    assert torch.equal(y, holdings.test[1])  # type: ignore[index]


@pytest.mark.parametrize("order", [(1, 2, 4, 6), (6, 4, 2, 1), (4, 1, 6, 2)])
def test_the_samples_of_a_round_are_the_same_in_any_order(order: tuple[int, ...], holdings: Holdings) -> None:
    drifts = (hansa.LabelShift(start=2, over=3, to=(2, 1, 0)), hansa.Rotation(start=3, over=3, fraction=0.5),
              hansa.FeatureNoise(start=5, std=0.1, parties=(0,)))  # fmt: skip
    made = course(holdings, *drifts)
    seen = {}
    for round in order:
        made.enter(round)
        seen[round] = samples(holdings)
    for round in sorted(order):
        made.enter(round)
        assert all(map(torch.equal, samples(holdings), seen[round]))


def test_the_engine_learns_which_parties_have_other_samples(holdings: Holdings) -> None:
    made, told = course(holdings, hansa.Rotation(start=2, parties=(1, 3), over=2)), list[Any]()
    made.changed = told.append
    for round in (1, 2, 3, 4, 5, 1):
        made.enter(round)
    assert told == [[1, 3], [1, 3], [1, 3]]


# --- presence ---


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_presence_follows_the_schedule(round: int, start: int, day: int, night: int) -> None:
    assert (hansa.Joining(start=start).away(round) is None) == (round >= start)
    assert (hansa.Leaving(start=start).away(round) is None) == (round < start)
    first = hansa.DayAndNight(start=start, day=day, night=night)
    there = [first.away(r) is None for r in range(start, start + 2 * (day + night))]
    assert there == ([True] * day + [False] * night) * 2
    late = hansa.DayAndNight(start=start, day=night, night=day, first="night")
    if round >= start:
        assert (first.away(round) is None) != (late.away(round) is None)
    else:
        assert first.away(round) is late.away(round) is None


def test_members_are_drawn_by_the_seed() -> None:
    task = hansa.Task(model=None, parties=(torch.randn(40, 2), torch.zeros(40, dtype=torch.int64), np.arange(41)))
    held = task.holdings(Objective(None, "cross_entropy", 0))
    drawn = {seed: Course((hansa.Leaving(start=1, fraction=0.25),), held, seed).absent for seed in range(3)}
    assert all(len(absent) == 10 for absent in drawn.values())
    assert len(set(drawn.values())) == 3
    assert Course((hansa.Leaving(start=1, fraction=0.25),), held, 0).absent == drawn[0]
