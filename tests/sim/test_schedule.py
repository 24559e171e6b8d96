"""The batches of many parties, computed at once, equal those of each party alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa.local import SGD, SVRG, Gradient, LocalSolver
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.sim.schedule import schedule


def sgd(batch: int | None, epochs: int, steps: int | None, drop_last: bool) -> SGD:
    """A solver without fields that others leave without effect."""
    return SGD(batch=batch, epochs=1 if steps else epochs, steps=steps, drop_last=drop_last and batch is not None)


SOLVERS = st.one_of(
    st.builds(
        sgd,
        batch=st.one_of(st.none(), st.integers(1, 9)),
        epochs=st.integers(1, 3),
        steps=st.one_of(st.none(), st.integers(1, 8)),
        drop_last=st.booleans(),
    ),
    st.builds(SVRG, batch=st.one_of(st.none(), st.integers(1, 5))),
    st.just(Gradient()),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(SOLVERS, st.lists(st.integers(1, 23), min_size=1, max_size=6), st.integers(0, 3))
def test_a_schedule_holds_the_batches_of_each_party(solver: LocalSolver, sizes: list[int], round: int) -> None:
    x = torch.zeros(sum(sizes), 2)
    task = hansa.Task(lambda: torch.nn.Linear(2, 1), "mse", (x, torch.zeros(len(x), 1), np.cumsum([0, *sizes])))
    objective = Objective(task.model, task.loss, 0)
    shards = task.holdings(objective).train
    parties = sorted(range(len(sizes)), key=lambda k: -solver.count(sizes[k]))
    plan = schedule([solver], shards, parties, 7, [round], torch.device("cpu"))
    for k, party in enumerate(parties):
        batches = solver.batches(sizes[party], 7, round, party)
        assert plan.steps[k] == len(batches) == solver.count(sizes[party])
        for s, rows in enumerate(batches):
            length = int(plan.lengths[k, s])
            assert plan.rows[k, s, :length].tolist() == (rows + int(shards.offsets[party])).tolist()
        assert not plan.lengths[k, len(batches) :].any()
        own = plan.rows[k]
        assert int(own.min()) >= int(shards.offsets[party]) and int(own.max()) < int(shards.offsets[party + 1])
    assert plan.widths == plan.lengths.max(0).values.tolist()
    assert plan.active == (plan.lengths > 0).sum(0).tolist()


@pytest.mark.parametrize("n", [1, 2, 7, 600])
def test_a_shuffle_is_an_order_and_differs_from_key_to_key(n: int) -> None:
    orders = [rng.shuffled(rng.key(1, "shuffle", k), n) for k in range(4)]
    assert all(sorted(order.tolist()) == list(range(n)) for order in orders)
    assert n < 7 or len({tuple(order.tolist()) for order in orders}) == 4


def test_every_order_of_three_is_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for k in range(6000):
        order = tuple(rng.shuffled(rng.key(0, "likely", k), 3).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    chi = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi < 20.5  # the 0.1% point of chi-squared with five degrees of freedom
