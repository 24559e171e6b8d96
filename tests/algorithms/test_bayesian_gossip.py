"""Bayesian gossip: card 11.4 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.algorithms import curvature
from hansa.algorithms.bayesian_gossip import ExchangeBeliefs
from hansa.algorithms.curvature import Likelihood
from hansa.core.mixing import Mixing, MixingRows
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.numerics.objective import Objective

SIGMA = 0.5
PRIOR = 2.0


def linear() -> nn.Module:
    return nn.Linear(3, 1, bias=False).double()


def samples(parties: int = 4, coordinates: bool = False) -> list[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(1)
    out = []
    for k in range(parties):
        x = torch.randn(5, 3, generator=make).double()
        x = x * torch.eye(3).double()[k % 3] if coordinates else x
        noise = SIGMA * torch.randn(5, 1, generator=make).double()
        out.append((x, x @ torch.tensor([[2.0], [-1.0], [0.5]]).double() + noise))
    return out


def gossip(data: list[tuple[Tensor, Tensor]], rounds: int, model: Any = linear, **fields: Any) -> hansa.Result:
    settings = {"belief": "full", "prior": PRIOR, "scale": 1 / (2 * SIGMA**2), "repeats": 1, **fields}
    algorithm = hansa.BayesianGossip(**settings)
    return hansa.simulate(
        algorithm, hansa.Task(model, "mse", data), rounds=rounds, engine="reference", eval_every=rounds
    )


def pooled(data: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The precision and the mean of the posterior of all samples: Bayesian linear regression."""
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    first = Objective(linear, "mse", 0).initial.w
    precision = PRIOR * torch.eye(3).double() + x.T @ x / SIGMA**2
    return precision, torch.linalg.solve(precision, PRIOR * first + (x.T @ y / SIGMA**2).flatten())


@pytest.mark.thin(2)
@pytest.mark.parametrize(("topology", "rounds"), [("complete", 1), ("ring", 40), ("star", 110)])
def test_beliefs_converge_to_the_pooled_posterior_with_its_precision_over_n(topology: Any, rounds: int) -> None:
    data = samples()
    done = gossip(data, rounds, topology=topology)
    precision, mean = pooled(data)
    for party in range(4):
        assert torch.allclose(done.memories[party]["belief/mean"], mean, atol=1e-9)
        assert torch.allclose(done.memories[party]["belief/precision"], precision / 4, atol=1e-7)


@pytest.mark.parametrize("belief", ["full", "diagonal"])
def test_parties_that_observe_one_coordinate_each_identify_all(belief: Any) -> None:
    data = samples(3, coordinates=True)
    done = gossip(data, 30, belief=belief)
    precision, mean = pooled(data)
    assert torch.equal(precision, torch.diag(precision.diagonal()))
    for party in range(3):
        memory = done.memories[party]
        assert torch.allclose(memory["belief/mean"], mean, atol=1e-9)
        held = memory["belief/precision"]
        assert torch.allclose(held if belief == "full" else torch.diag(held), precision / 3, atol=1e-7)


def test_the_published_model_is_the_pooled_posterior_mean_before_the_parties_agree() -> None:
    data = samples()
    done = gossip(data, 1, topology="ring")
    assert torch.allclose(done.state.params.w, pooled(data)[1], atol=1e-12)
    assert not torch.allclose(done.memories[0]["belief/mean"], pooled(data)[1], atol=1e-3)


@pytest.mark.slow
def test_a_likelihood_that_is_spread_over_rounds_counts_once() -> None:
    data = samples()
    done = gossip(data, 12, topology="complete", repeats=10)
    precision, mean = pooled(data)
    assert torch.allclose(done.memories[0]["belief/precision"], precision / 4, atol=1e-9)
    assert torch.allclose(done.memories[0]["belief/mean"], mean, atol=1e-9)
    assert int(done.memories[0]["belief/counted"]) == 10


@pytest.mark.slow
def test_a_party_that_misses_a_round_adds_its_likelihood_later() -> None:
    data = samples()
    algorithm = hansa.BayesianGossip(topology="complete", belief="full", prior=PRIOR, scale=2.0, repeats=1)
    done = hansa.simulate(
        algorithm, hansa.Task(linear, "mse", data), rounds=30, absent=lambda party, round: (party, round) == (2, 0)
    )
    assert torch.allclose(done.memories[1]["belief/mean"], pooled(data)[1], atol=1e-9)


@pytest.mark.slow
def test_several_newton_steps_of_a_logistic_model_find_the_most_probable_one() -> None:
    make = torch.Generator().manual_seed(5)
    data = [(torch.randn(30, 2, generator=make).double(), torch.randint(2, (30,), generator=make)) for _ in range(3)]
    task = hansa.Task(lambda: nn.Linear(2, 2).double(), "cross_entropy", data, classes=2)
    algorithm = hansa.BayesianGossip(topology="complete", belief="full", repeats=1, steps=12)
    done = hansa.simulate(algorithm, task, rounds=1)
    first = Objective(task.model, "cross_entropy", 0).initial.w  # type: ignore[arg-type]
    for party in range(3):  # each party's own optimum before mixing: gradient of loss and prior together is 0
        x, y = data[party]
        belief = ExchangeBeliefs(repeats=1, steps=12).updated(
            Party(party, Objective(task.model, "cross_entropy", 0), SampleGateway((x, y)), 0),  # type: ignore[arg-type]
            {"precision": torch.eye(6).double() / 3, "mean": first},
        )
        w = belief["mean"].requires_grad_()
        loss = nn.functional.cross_entropy(x @ w[:4].view(2, 2).T + w[4:], y, reduction="sum")
        slope = torch.autograd.grad(loss + ((w - first) ** 2).sum() / 6, w)[0]
        assert float(slope.abs().max()) < 1e-9
    assert "empty" not in done.history[0]


def party(model: Any, loss: str, x: Tensor, y: Tensor) -> Party:
    return Party(0, Objective(model, loss, 0), SampleGateway((x, y)), 0)


def test_the_curvature_is_the_hessian_of_a_linear_model_and_its_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=make).double(), torch.randint(3, (30,), generator=make)
    here = party(lambda: nn.Linear(4, 3).double(), "cross_entropy", x, y)
    likelihood, w = Likelihood(here, 0.5), here.objective.initial.w

    def loss(w: Tensor) -> Tensor:
        return 0.5 * nn.functional.cross_entropy(x @ w[:12].view(3, 4).T + w[12:], y, reduction="sum")

    matrix = likelihood.matrix(w)
    assert torch.allclose(matrix, torch.autograd.functional.hessian(loss, w), atol=1e-12)  # type: ignore[no-untyped-call]
    assert torch.allclose(likelihood.gradient(w), torch.autograd.functional.jacobian(loss, w), atol=1e-12)  # type: ignore[no-untyped-call]
    assert torch.allclose(likelihood.diagonal(w), matrix.diagonal(), atol=1e-13)
    vector, damping = torch.randn(15, generator=make).double(), torch.full((15,), 0.1).double()
    assert torch.allclose(likelihood.product(w, vector), matrix @ vector, atol=1e-12)
    direct = likelihood.solved(w, damping, vector)
    monkeypatch.setattr(curvature, "WHOLE", 0)
    assert torch.allclose(likelihood.solved(w, damping, vector), direct, atol=1e-8)
    monkeypatch.setattr(curvature, "NUMBERS", 1)  # one sample at a time
    assert torch.allclose(likelihood.matrix(w), matrix, atol=1e-12)


@pytest.mark.parametrize("form", ["diagonal", "full"])
@pytest.mark.parametrize("scale", [1e6, 1e200])
def test_an_update_that_is_too_sharp_or_not_finite_keeps_the_belief(form: str, scale: float) -> None:
    """A refusal would depend on the samples, and the aggregator chooses `sharpest`."""
    x, y = samples()[0]
    payload = {"dim": 3, "form": form, "prior": 0.5}
    sent, memory = ExchangeBeliefs(repeats=1).send(party(linear, "mse", scale * x, y), payload, (1,), {})
    prior = torch.full((3,), 0.5).double()
    assert torch.equal(sent[1]["precision"], prior if form == "diagonal" else torch.diag(prior))
    assert torch.equal(memory["belief/mean"], sent[1]["mean"]) and int(memory["belief/counted"]) == 1


@pytest.mark.parametrize(
    "precision",
    [-torch.ones(3), torch.tensor([1.0, 0.0, 1.0]), torch.full((3,), 2e9), -torch.eye(3), torch.full((3, 3), 1.0),
     torch.eye(3) * 2e9, torch.eye(3) + torch.tensor([[0.0, 0.1, 0], [0, 0, 0], [0, 0, 0]])],
)  # fmt: skip
def test_a_belief_that_is_none_or_too_certain_is_left_out(precision: Tensor) -> None:
    form = "diagonal" if precision.dim() == 1 else "full"
    x, y = samples()[0]
    here, op = party(linear, "mse", x, y), ExchangeBeliefs(repeats=1)
    payload = {"dim": 3, "form": form, "prior": 0.5, **MixingRows(Mixing.of(torch.full((2, 2), 0.5).double()))[0]}
    _, memory = op.send(here, payload, (1,), {})
    lie = {"precision": precision.double(), "mean": torch.full((3,), 1e6).double()}
    _, after = op.receive(here, payload, {1: lie}, memory)
    assert torch.allclose(after["belief/mean"], memory["belief/mean"], atol=1e-12)
    assert torch.allclose(after["belief/precision"], memory["belief/precision"], atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "model", "sentence"),
    [({"prior": 0.0}, linear, "prior must be above 0"),
     ({"repeats": 0}, linear, "repeats must be at least 1"),
     ({"sharpest": 1.0}, linear, r"sharpest is 1\.0, below the precision of the prior"),
     ({"belief": "full"}, lambda: nn.Sequential(nn.Linear(3, 300), nn.Linear(300, 1)).double(),
      "belief = 'full' is for at most 1024 parameters, and the model has 1501; set belief = 'diagonal'"),
     ({}, lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), "the model has buffers")],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_one_sentence(fields: dict[str, Any], model: Any, sentence: str) -> None:
    with pytest.raises(hansa.ConfigError, match=sentence):
        gossip(samples(), 1, model, **fields)


def test_two_runs_of_one_plan_have_the_same_bits() -> None:
    one, two = (gossip(samples(), 3, repeats=2) for _ in range(2))
    for k in range(4):
        assert torch.equal(one.memories[k]["belief/precision"], two.memories[k]["belief/precision"])
    assert torch.equal(one.state.params.w, two.state.params.w)
