"""Fusions of updates that stay on a Ray cluster, divided by columns, have the bits of one machine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import hansa
from hansa.cluster.columns import BlockCall, ColumnHolder
from hansa.cluster.matrix import ClusterRows, ColumnStore, divided, limits_of
from hansa.cluster.trees import packed
from hansa.core.registry import registered
from hansa.fusion.moreau import centre
from hansa.fusion.ordered import NotFinite
from hansa.numerics.rows import Rows, segments

FUSIONS = {name: part for name, part in registered("fusion").items()
           if part.__module__.startswith("hansa.fusion") and "gather" in part.verbs and not part.trusts}  # type: ignore[attr-defined]  # fmt: skip


class HereStore(ColumnStore):
    """Columns with holders in this process: references are their results."""

    def __init__(self, updates: Tensor, actors: int) -> None:
        self.ray, self.key = self, "key"
        self.actors = [ColumnHolder() for _ in range(actors)]
        self.cuts = {"w": limits_of(updates.shape[1], actors)}
        for holder, span in zip(self.actors, itertools.pairwise(self.cuts["w"]), strict=False):
            holder.open_columns("key", "w", len(updates), span, updates.dtype, 0)  # in files
            holder.put_columns("key", "w", list(range(len(updates))), packed(updates[:, slice(*span)]))

    def get(self, result: Any) -> Any:
        return result

    def surely(self, action: Any) -> Any:
        return action()

    def call(self, actor: int, method: str, *arguments: Any, returns: int = 1) -> Any:
        return getattr(self.actors[actor], method)(*arguments)


def on_actors(updates: Tensor, actors: int) -> ClusterRows:
    return ClusterRows(HereStore(updates, actors), "w", *updates.shape, updates.dtype)


def some_updates(parties: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draws = torch.Generator().manual_seed(parties)
    updates = torch.randn(parties, dim, generator=draws, dtype=torch.float64) + torch.linspace(-1, 1, dim)
    updates[1] *= 30  # an update that robust fusions notice
    return updates.to(dtype)


@pytest.mark.thin(9)
@pytest.mark.parametrize("name", FUSIONS)
@pytest.mark.parametrize(("parties", "dim", "actors"), [(9, 9000, 2), (23, 71_003, 5), (300, 1111, 3)])
def test_every_fusion_has_the_bits_of_one_matrix(name: str, parties: int, dim: int, actors: int) -> None:
    rule: Any = FUSIONS[name]()
    for dtype in (torch.float32, torch.float64):
        updates = some_updates(parties, dim, dtype)
        known = {"layers": [("a", dim // 3), ("b", dim - dim // 3)]} if rule.remembers else {}
        here, there = rule.examine(Rows(updates), **known), rule.examine(on_actors(updates, actors), **known)
        assert torch.equal(here.w, there.w)
        assert here.shares == there.shares and here.scores == there.scores


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_centres_of_fed_plus_have_the_bits_of_one_matrix(norm: Any) -> None:
    updates = some_updates(9, 20_000)
    here, there = (centre(norm, rows, 0.5, 1e-6, 20).w for rows in (Rows(updates), on_actors(updates, 3)))
    assert torch.equal(here, there)


def test_rows_columns_and_samples_are_those_of_the_matrix() -> None:
    updates = some_updates(7, 10_000)
    here, there = Rows(updates), on_actors(updates, 4)
    for one, other in ((here, there), (here.take([5, 0, 3]), there.take([5, 0, 3]))):
        assert torch.equal(one.row(2), other.row(2))
        assert torch.equal(one.block(2400, 7700), other.block(2400, 7700))
        assert torch.equal(one.sample(256), other.sample(256))
        assert torch.equal(torch.cat(list(one.map(lambda at, end, block: block.sum(0)))),
                           torch.cat(list(other.map(lambda at, end, block: block.sum(0)))))  # fmt: skip


class RestoredStore(HereStore):
    """Before each action, the columns are lost and divided again, over another number of actors."""

    def __init__(self, updates: Tensor, actors: int) -> None:
        super().__init__(updates, actors)
        self.updates = updates

    def surely(self, action: Any) -> Any:
        HereStore.__init__(self, self.updates, len(self.actors) % 4 + 1)
        return action()


def test_rows_are_the_same_if_columns_are_restored_on_other_actors() -> None:
    updates = some_updates(7, 10_000)
    here = Rows(updates)
    there = ClusterRows(RestoredStore(updates, 1), "w", *updates.shape, updates.dtype)
    for _ in range(4):
        assert torch.equal(here.sample(300), there.sample(300))
        assert torch.equal(here.block(2400, 7700), there.block(2400, 7700))
        assert torch.equal(here.total(lambda at, end, block: block.sum(1)),
                           there.total(lambda at, end, block: block.sum(1)))  # fmt: skip


def test_values_that_are_not_finite_are_noticed() -> None:
    updates = some_updates(7, 10_000)
    updates[3, 9_999] = torch.nan
    for rule in (hansa.build("fusion", "median"), hansa.build("fusion", "krum", f=1)):
        with pytest.raises(NotFinite):
            rule.fuse(on_actors(updates, 3), None)
        assert torch.equal(rule(on_actors(updates, 3)), rule(updates))


@pytest.mark.parametrize("actors", [1, 2, 7, 64, 200])
def test_every_block_is_at_one_actor_and_groups_go_on_in_order(actors: int) -> None:
    groups = segments(Rows(torch.empty(50, 20_000)).spans(2**16))
    cuts = limits_of(20_000, actors)
    parts, ends = divided(groups, cuts)
    assert sorted(span for part in parts for group in part.groups for span in group) == [s for g in groups for s in g]
    seen: list[Any] = []
    for part in parts:
        assert part.follows is None or part.follows in seen  # what it needs was sent before
        assert all(cuts[part.actor] <= at < cuts[part.actor + 1] for group in part.groups for at, _ in group)
        seen.append(part)
    assert len(ends) == len(groups)


def test_a_call_can_be_sent_to_another_process(short_folder: Any) -> None:  # of Ray, which is imported
    import pickle

    cloudpickle = pytest.importorskip("ray", reason="Ray is not installed (make extras)").cloudpickle
    calls: list[Any] = []

    class Sending(HereStore):
        def call(self, actor: int, method: str, *arguments: Any, returns: int = 1) -> Any:
            arguments = pickle.loads(cloudpickle.dumps(arguments))
            calls.extend(argument for argument in arguments if isinstance(argument, BlockCall))
            return super().call(actor, method, *arguments, returns=returns)

    updates = some_updates(9, 5000)
    rows = ClusterRows(Sending(updates, 2), "w", *updates.shape, updates.dtype)
    for name in FUSIONS:
        assert torch.equal(FUSIONS[name]()(rows), FUSIONS[name]()(updates))  # type: ignore[operator]
    numbers = [len(cloudpickle.dumps(call.work)) for call in calls]
    assert max(numbers) < 5000 * 4  # no function brings a vector of its own


@pytest.mark.slow
@pytest.mark.parametrize("actors", [3, 70])
def test_a_group_of_blocks_at_several_actors_has_the_sum_of_one_matrix(actors: int) -> None:
    updates = some_updates(300, 60_003)
    here, there = Rows(updates), on_actors(updates, actors)
    parts, _ = divided(segments(here.spans(2**17)), limits_of(60_003, actors))
    assert any(part.follows is not None for part in parts)

    def work(at: int, end: int, block: Tensor, point: Tensor) -> Tensor:
        return (block - point).square_().sum(1)

    point = updates.double().mean(0)
    sums = [rows.total(work, point, numbers=2**17, dtype=torch.float64) for rows in (here, there)]
    assert torch.equal(*sums)
