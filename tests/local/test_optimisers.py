"""SGD with momentum, weight decay and Nesterov, and Adam: equal to PyTorch's own, in the same order of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory, Party, Payload
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD, Adam, Carry, Context, LocalSolver
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params, ParamSpec
from small_tasks import net, samples

CASES: list[tuple[LocalSolver, Callable[[Any], torch.optim.Optimizer]]] = [
    (SGD(lr=0.2, batch=4, epochs=2, momentum=0.9), lambda p: torch.optim.SGD(p, 0.2, momentum=0.9)),
    (SGD(lr=0.2, batch=4, epochs=2, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.2, weight_decay=0.1)),
    (
        SGD(lr=0.2, batch=4, epochs=2, momentum=0.8, nesterov=True, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.2, momentum=0.8, nesterov=True, weight_decay=0.05),
    ),
    (Adam(lr=0.02, batch=4, epochs=2), lambda p: torch.optim.Adam(p, 0.02)),
    (
        Adam(lr=0.02, batch=4, steps=5, beta1=0.5, beta2=0.9, eps=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.02, betas=(0.5, 0.9), eps=1e-4, weight_decay=0.1),
    ),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize(("local", "make"), CASES, ids=["momentum", "decay", "nesterov", "adam", "adam-fields"])
def test_a_party_trains_as_pytorchs_optimiser_does(local: LocalSolver, make: Any, engine: str) -> None:
    parties = samples([11, 3, 8])
    done = hansa.simulate(hansa.FedAvg(local=local), hansa.Task(net, "cross_entropy", parties, classes=3), rounds=2,
                          engine=engine)  # fmt: skip
    objective = Objective(net, "cross_entropy", 0)
    w = objective.initial
    for round in range(2):
        ends = []
        for k, (x, y) in enumerate(parties):
            module = objective.spec.load(net(), w)
            plain = make(list(module.parameters()))  # made anew: moments start at zero in each round
            for rows in local.batches(len(x), 0, round, k):
                plain.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                plain.step()
            ends.append(len(x) * objective.spec.flatten(module).w)
        w = w._replace(w=torch.stack(ends).sum(0) / 22)
    torch.testing.assert_close(done.state.params.w, w.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SGD(momentum=1.0), "momentum must be at least 0 and below 1"),
        (lambda: SGD(nesterov=True), "nesterov = true has no effect while momentum is 0.0"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay must be at least 0"),
        (lambda: Adam(beta1=1.0), "beta1 must be at least 0 and below 1"),
        (lambda: Adam(beta2=-0.1), "beta2 must be at least 0 and below 1"),
        (lambda: Adam(eps=0.0), "eps must be above 0"),
        (lambda: Adam(lr=0.0), "lr must be above 0"),
        (lambda: Adam(weight_decay=-1.0), "weight_decay must be at least 0"),
    ],
)
def test_fields_outside_their_range_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        make()


ALL = [local for local, _ in CASES] + [SGD(lr=0.2)]


def walk(local: LocalSolver, in_place: bool, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Four steps along random directions, the last three by `step_in_place` if wanted."""
    draws = torch.Generator().manual_seed(3)
    w, *directions = torch.randn(5, 101, generator=draws, dtype=dtype)
    directions[1][:50] = 0.0
    nothing: Any = None
    ctx = Context(nothing, 1, 4, 0, local.rate(0), nothing, (w, w))
    w, carry = local.start(ctx, w, {}, {})
    for number, direction in enumerate(directions):
        before = direction.clone()
        w, carry = (local.step_in_place if in_place and number else local.step)(ctx, w, direction, carry)
        assert torch.equal(direction, before)
    return w, carry


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("local", ALL, ids=lambda local: local.name)
def test_steps_in_place_have_the_bits_of_steps(local: LocalSolver, dtype: torch.dtype) -> None:
    (apart, carry), (in_place, other) = walk(local, False, dtype), walk(local, True, dtype)
    assert torch.equal(apart, in_place)
    assert carry.keys() == other.keys()
    assert all(torch.equal(carry[name], other[name]) for name in carry)


@pytest.mark.parametrize("local", ALL, ids=lambda local: local.name)
def test_a_step_overwrites_nothing(local: LocalSolver) -> None:
    nothing: Any = None
    w, direction = torch.randn(2, 101, generator=torch.Generator().manual_seed(4))
    ctx = Context(nothing, 1, 4, 0, local.rate(0), nothing, (w, w))
    _, carry = local.start(ctx, w, {}, {})
    inputs = {"w": w, "direction": direction, **carry}
    before = {name: value.clone() for name, value in inputs.items()}
    local.step(ctx, w, direction, carry)
    assert all(torch.equal(value, before[name]) for name, value in inputs.items())


def test_a_subclass_with_its_own_step_does_not_inherit_the_step_in_place() -> None:
    class Halved(Adam):
        def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
            return super().step(ctx, w, direction / 2, carry)

    class Renamed(Adam):
        pass

    assert Halved.step_in_place is LocalSolver.step_in_place
    assert Renamed.step_in_place is Adam.step_in_place


def test_training_does_not_overwrite_a_velocity_that_the_party_remembers() -> None:
    class Lasting(SGD):
        """Momentum that goes on in the next round."""

        def remember(self, spec: ParamSpec, initial: Params) -> Memory:
            return {"velocity": torch.zeros_like(initial.w)}

        def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
            return w, {"velocity": memory["velocity"]}

        def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
                   memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
            return {"w": w - start}, {"velocity": carry["velocity"]}

    objective = Objective(net, "cross_entropy", 0)
    at = Party(0, objective, SampleGateway(samples([11])[0]), 0)
    payload, remembered = {"model": objective.initial._asdict()}, torch.ones_like(objective.initial.w)
    first = objective.initial.w.clone()
    reply, after = Lasting(lr=0.2, batch=4, momentum=0.9).run(at, payload, {"velocity": remembered})
    assert torch.equal(remembered, torch.ones_like(remembered))
    assert torch.equal(objective.initial.w, first)
    assert not torch.equal(after["velocity"], remembered)
    assert reply.tensors["w"].abs().min() > 0
