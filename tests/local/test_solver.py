from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD, SVRG, Gradient
from hansa.local.context import masked_mean
from hansa.local.svrg import present
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, PartyError


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12), st.booleans(), st.integers(0, 5))
def test_an_epoch_takes_every_sample_once_unless_a_short_batch_is_dropped(
    n: int, epochs: int, batch: int, drop_last: bool, round: int
) -> None:
    rows = SGD(epochs=epochs, batch=batch, drop_last=drop_last).batches(n, 0, round, 3)
    size = min(batch, n)
    dropped = n % size if drop_last else 0
    an_epoch = n // size if drop_last else -(-n // size)
    assert len(rows) == epochs * an_epoch
    for epoch in range(epochs):
        taken = np.concatenate(rows[epoch * an_epoch : (epoch + 1) * an_epoch])
        assert len(taken) == len(set(taken.tolist())) == n - dropped
        assert set(taken.tolist()) <= set(range(n))
    assert all(len(r) == size for r in rows) or not drop_last


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 30))
def test_steps_are_as_many_as_asked_for(n: int, batch: int, steps: int) -> None:
    rows = SGD(steps=steps, batch=batch).batches(n, 0, 0, 0)
    assert len(rows) == steps
    whole = SGD(epochs=40, batch=batch).batches(n, 0, 0, 0)
    assert all(np.array_equal(a, b) for a, b in zip(rows, whole, strict=False))


def test_the_order_changes_with_seed_round_party_and_epoch_and_with_nothing_else() -> None:
    def order(seed: int = 0, round: int = 0, party: int = 0, epoch: int = 0) -> tuple[int, ...]:
        rows = SGD(epochs=2, batch=5).batches(20, seed, round, party)
        return tuple(np.concatenate(rows[epoch * 4 : epoch * 4 + 4]).tolist())

    orders = [order(), order(seed=1), order(round=1), order(party=1), order(epoch=1)]
    assert len(set(orders)) == 5
    assert order() == orders[0]


def test_a_masked_mean_is_the_mean_of_what_counts() -> None:
    values = torch.tensor([1.0, 100.0, 3.0, 100.0])
    assert masked_mean(values, torch.tensor([1.0, 0.0, 1.0, 0.0])) == 2.0
    assert masked_mean(values, None) == values.mean()


def test_features_are_counted_where_they_are_not_zero_and_not_in_padding() -> None:
    from hansa.local import Batch

    x = torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0]])
    assert present(Batch(x, x, None)).tolist() == [2, 3]
    assert present(Batch(x, x, torch.tensor([1.0, 1.0, 0.0]))).tolist() == [1, 2]


def party(n: int = 6) -> Party:
    make = torch.Generator().manual_seed(0)
    objective = Objective(lambda: nn.Linear(3, 1).double(), "mse", 0)
    data = (torch.randn(n, 3, generator=make).double(), torch.randn(n, 1, generator=make).double())
    return Party(2, objective, SampleGateway(data), seed=0)


def payload(at: Party) -> dict[str, Any]:
    return {"model": at.objective.initial._asdict()}


def test_a_gradient_points_downhill_and_is_that_of_autograd() -> None:
    at = party()
    reply, _ = Gradient().run(at, payload(at), {})
    module = at.objective.spec.load(nn.Linear(3, 1).double(), at.objective.initial)
    loss = ((module(at.samples("train")[0]) - at.samples("train")[1]) ** 2).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    assert torch.allclose(reply.tensors["w"], -expected, atol=1e-14)
    assert reply.weight == 6
    assert reply.metrics["train_loss"] == pytest.approx(loss.item())


@pytest.mark.parametrize("solver", [SGD(batch=2), Gradient(), SVRG()], ids=lambda s: s.name)
def test_a_solver_changes_neither_the_payload_nor_the_partys_data(solver: Any) -> None:
    at = party()
    sent = {**payload(at), "gradient": torch.ones(4, dtype=torch.float64)}
    inputs = [at.objective.initial.w, *at.samples("train"), sent["gradient"]]
    before = [value.clone() for value in inputs]
    first, memory = solver.run(at, sent, {"other": torch.ones(1)})
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert torch.equal(solver.run(at, sent, {})[0].tensors["w"], first.tensors["w"])
    assert list(memory) == ["other"]  # what is another's stays
    assert {name: (tuple(t.shape), t.dtype) for name, t in first.tensors.items()} == solver.expects(sent)


def test_the_training_loss_is_the_mean_over_the_steps_before_each_step() -> None:
    at = party()
    reply, _ = SGD(lr=0.1, batch=None, epochs=2).run(at, payload(at), {})
    module = at.objective.spec.load(nn.Linear(3, 1).double(), at.objective.initial)
    losses = []
    for _ in range(2):
        loss = ((module(at.samples("train")[0]) - at.samples("train")[1]) ** 2).mean()
        losses.append(loss.item())
        for parameter, gradient in zip(
            module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            parameter.data -= 0.1 * gradient
    assert reply.metrics["train_loss"] == pytest.approx(sum(losses) / 2, rel=1e-12)


def test_a_party_without_samples_declines() -> None:
    at = party(0)
    with pytest.raises(PartyError, match="it has no samples"):
        SGD().run(at, payload(at), {})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SGD(lr=0.0), "lr must be above 0"),
        (lambda: SGD(epochs=0), "epochs must be at least 1"),
        (lambda: SGD(steps=0), "steps must be at least 1"),
        (lambda: SGD(batch=0), "batch must be at least 1"),
        (lambda: SVRG(h=0.0), "h must be above 0"),
        (lambda: SVRG(batch=0), "batch must be at least 1"),
    ],
)
def test_impossible_hyper_parameters_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def test_a_solver_sees_loss_and_gradient_on_all_of_its_partys_data() -> None:
    from hansa.local import Batch, Context
    from hansa.numerics.objective import Objective

    objective = Objective(lambda: torch.nn.Linear(3, 2).double(), "cross_entropy", 0)
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 3, generator=draws, dtype=torch.float64), torch.randint(0, 2, (7,), generator=draws)
    key = torch.zeros((), dtype=torch.int64)
    w = objective.initial.w
    buffers = (objective.initial.stats, objective.initial.counts)
    ctx = Context(objective, 7, 1, 0, 0.1, lambda: Batch(x, y, None), buffers, key)
    at = w.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ at[:6].view(2, 3).T + at[6:], y)
    loss.backward()
    assert at.grad is not None
    torch.testing.assert_close(ctx.full_gradient(w), at.grad, rtol=0, atol=1e-14)
    torch.testing.assert_close(ctx.full_loss(w), loss.detach(), rtol=0, atol=1e-14)
    padded = Batch(torch.cat([x, x[:2]]), torch.cat([y, y[:2]]), torch.tensor([1.0] * 7 + [0.0] * 2).double())
    masked = Context(objective, 7, 1, 0, 0.1, lambda: padded, ctx.buffers, key)
    torch.testing.assert_close(masked.full_gradient(w), at.grad, rtol=0, atol=1e-14)
