"""DP-SGD at the party: the requirements of the card of Abadi et al. 2016."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.kernel.grid import Grid
from hansa.local import DPSGD, SGD, Personal
from hansa.local.dp_sgd import SIGMAS
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import ParamSpec
from hansa.plumbing.errors import ConfigError

SIZES = (3, 11, 7, 16, 1)


def test_the_ends_of_the_range_of_noise_are_within_it() -> None:
    assert DPSGD(sigma=SIGMAS[0]).sigma < DPSGD(sigma=SIGMAS[1]).sigma
    for sigma in (SIGMAS[0] / 2, SIGMAS[1] * 2):
        with pytest.raises(ConfigError, match="sigma must lie in 1e-06 to 1e\\+06"):
            DPSGD(sigma=sigma)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def linear() -> nn.Module:
    return nn.Linear(8, 3).double()


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(45, 3)
    ).double()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=make).double(), torch.randint(0, 3, (n,), generator=make)


def task(model: Any = dense) -> hansa.Task:
    return hansa.Task(model, "cross_entropy", [samples(n, n) for n in SIZES], test=samples(20), classes=3)


def party(n: int = 10, secret: bytes = b"", round: int = 0, model: Any = dense) -> Party:
    return Party(2, Objective(model, "cross_entropy", 0), SampleGateway(samples(n)), seed=0, round=round, secret=secret)


def update(solver: Any, at: Party) -> Tensor:
    reply, _ = solver.run(at, {"model": at.objective.initial._asdict()}, {})
    w: Tensor = reply.tensors["w"]
    return w


def trained(local: Any, engine: str = "reference", model: Any = dense, rounds: int = 2) -> Tensor:
    w: Tensor = hansa.simulate(hansa.FedAvg(local=local), task(model), rounds=rounds, engine=engine).state.params.w
    return w


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_without_noise_bound_or_sampling_it_is_gradient_descent(engine: str, momentum: float) -> None:
    given = {"lr": 0.3, "batch": None, "epochs": 3, "momentum": momentum}
    private = trained(DPSGD(**given, clip=1e6, sigma=0.0), engine)
    torch.testing.assert_close(private, trained(SGD(**given)), rtol=0, atol=1e-12)


def test_without_noise_and_bound_it_is_sgd_on_the_drawn_batches_divided_by_the_expected_size() -> None:
    at, solver = party(), DPSGD(lr=0.3, batch=4, epochs=2, clip=1e6, sigma=0.0)
    batches = solver.batches(10, 0, 0, 2)
    assert len(batches) == 6
    assert {len(rows) for rows in batches} != {4}
    module = at.objective.spec.load(dense(), at.objective.initial)
    x, y = at.samples("train")
    for rows in batches:
        loss = nn.functional.cross_entropy(module(x[rows]), y[rows], reduction="sum") / 4
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.data -= 0.3 * gradient
    wanted = at.objective.spec.flatten(module).w - at.objective.initial.w
    torch.testing.assert_close(update(solver, at), wanted, rtol=0, atol=1e-12)


@pytest.mark.thin(3)
@pytest.mark.parametrize("model", [dense, linear, images, dropping], ids=lambda m: m.__name__)
@pytest.mark.parametrize("more", [{}, {"per_layer": True, "microbatch": 2, "momentum": 0.5}], ids=["flat", "layers"])
def test_every_engine_gives_what_a_deployed_party_would(model: Any, more: dict[str, Any]) -> None:
    solver = DPSGD(lr=0.3, batch=2, epochs=2, clip=0.5, sigma=0.6, **more)
    assert any(len(rows) == 0 for k, n in enumerate(SIZES) for rows in solver.batches(n, 0, 0, k))
    reference = trained(solver, "reference", model)
    torch.testing.assert_close(trained(solver, "stacked", model), reference, rtol=0, atol=1e-9)


def test_one_sample_cannot_spoil_the_update() -> None:
    solver, updates = DPSGD(lr=0.3, batch=None, clip=0.5, sigma=0.6, epochs=2), []
    for value in (math.inf, -math.inf, math.nan):
        at = party()
        at.samples("train")[0][5] = value
        updates.append(update(solver, at))
    assert updates[0].isfinite().all()
    assert torch.equal(updates[0], updates[1]) and torch.equal(updates[0], updates[2])  # it adds nothing


def test_parties_that_are_told_batch_sizes_of_their_own_divide_by_them() -> None:
    def own(engine: str) -> Tensor:
        local = DPSGD(lr=0.3, batch=2, clip=0.5, sigma=0.6)
        parties = {"1": {"batch": 5}, "3": {"batch": 3}}
        done = hansa.simulate(hansa.FedAvg(local=local), task(), rounds=1, engine=engine, own=parties)
        w: Tensor = done.state.params.w
        return w

    torch.testing.assert_close(own("stacked"), own("reference"), rtol=0, atol=1e-9)
    assert not torch.equal(own("reference"), trained(DPSGD(lr=0.3, batch=2, clip=0.5, sigma=0.6), rounds=1))


@pytest.mark.parametrize("secret", [b"", b"what only the party knows"])
def test_the_noise_has_the_standard_deviation_that_was_promised(secret: bytes) -> None:
    at = party(12, secret, model=lambda: nn.Linear(8, 500).double())
    given: dict[str, Any] = {"lr": 1.0, "batch": 5, "steps": 1, "clip": 0.7}
    noise = update(DPSGD(**given, sigma=1.5), at) - update(DPSGD(**given, sigma=0.0), at)
    d = len(noise)
    assert d == 4500
    scaled = (noise / (1.5 * 0.7 / 5)).square().sum()
    assert abs(scaled - d) < 4 * math.sqrt(2 * d)  # chi-square with d degrees of freedom
    assert abs(noise.sum() / (1.5 * 0.7 / 5)) < 4 * math.sqrt(d)
    halves = noise[: d // 2], noise[d // 2 :]
    assert abs(torch.corrcoef(torch.stack(halves))[0, 1]) < 4 / math.sqrt(d // 2)


@pytest.mark.parametrize("secret", [b"", b"s"])
def test_an_empty_batch_still_adds_noise_and_steps(secret: bytes) -> None:
    solver = DPSGD(lr=1.0, batch=1, steps=1, sigma=0.8, clip=2.0)
    empty = next(at for at in (party(2, secret, round) for round in range(50)) if not len(solver.drawn(at)[0]))
    moved = update(solver, empty)
    assert moved.abs().min() > 0
    assert 0.7 < float(moved.std()) / (0.8 * 2.0) < 1.3
    assert not update(DPSGD(lr=1.0, batch=1, steps=1, sigma=0.0), empty).any()


def test_each_sample_joins_each_step_by_a_draw_of_its_own() -> None:
    solver = DPSGD(batch=30, steps=400)
    joins = np.zeros((400, 100))
    for step, rows in enumerate(solver.batches(100, 0, 0, 0)):
        joins[step, rows] = 1
    q = solver.rate_of(100)
    assert q == 0.3
    spread = math.sqrt(q * (1 - q))
    assert abs(joins.mean() - q) < 4 * spread / math.sqrt(joins.size)
    assert abs(joins.mean(0) - q).max() < 5 * spread / math.sqrt(400)
    lengths = joins.sum(1)
    assert 0.8 < lengths.var() / (100 * q * (1 - q)) < 1.2  # binomial: batches of one size would have none
    assert abs(np.corrcoef(joins[:-1].ravel(), joins[1:].ravel())[0, 1]) < 4 / math.sqrt(joins.size)


def test_a_round_has_as_many_steps_as_batches_of_the_expected_size_make_epochs() -> None:
    assert [DPSGD(batch=4, epochs=3).count(n) for n in (1, 4, 9)] == [3, 3, 9]
    assert DPSGD(batch=4, steps=5).count(9) == 5
    assert [DPSGD(batch=4).rate_of(n) for n in (2, 4, 16)] == [1.0, 1.0, 0.25]
    assert len(DPSGD(batch=4, epochs=3).batches(9, 0, 0, 0)) == 9
    assert DPSGD(batch=None).rate_of(7) == 1.0


def test_draws_differ_between_rounds_parties_steps_and_seeds_and_repeat_otherwise() -> None:
    solver = DPSGD(batch=8, steps=2)

    def drawn(seed: int = 0, round: int = 0, party: int = 0, step: int = 0) -> tuple[int, ...]:
        return tuple(solver.batches(40, seed, round, party)[step])

    others = [drawn(), drawn(seed=1), drawn(round=1), drawn(party=1), drawn(step=1)]
    assert len(set(others)) == 5
    assert drawn() == others[0]


def test_a_deployed_partys_samples_and_noise_come_from_its_secret_alone() -> None:
    solver = DPSGD(batch=4, steps=2, sigma=1.0)
    updates = [update(solver, party(10, secret)) for secret in (b"", b"one", b"two", b"one")]
    assert torch.equal(updates[1], updates[3])  # the same message, answered again
    assert not torch.equal(updates[0], updates[1])
    assert not torch.equal(updates[1], updates[2])
    draws = [[tuple(rows) for rows in solver.drawn(party(40, secret))] for secret in (b"", b"one", b"two")]
    assert draws[0] != draws[1] != draws[2]
    pure = DPSGD(batch=None, steps=2, sigma=1e6)  # all but noise is drowned: the seed must not tell it
    near = [update(pure, party(10, secret)) for secret in (b"", b"one")]
    assert abs(torch.corrcoef(torch.stack(near))[0, 1]) < 0.5


def test_a_deployed_party_releases_integers_of_a_grid_unless_the_job_asks_for_floats() -> None:
    given: dict[str, Any] = {"lr": 1.0, "batch": None, "steps": 1, "clip": 0.7, "sigma": 1.3}

    def steps(solver: DPSGD, secret: bytes) -> Tensor:
        at = party(8, secret, model=lambda: nn.Linear(8, 3, bias=False).double())
        zeros = at.objective.initial._replace(w=torch.zeros(24, dtype=torch.float64))
        w: Tensor = solver.run(at, {"model": zeros._asdict()}, {})[0].tensors["w"]
        return w * 8 / Grid(0.7, 1.3, 24, 8).step  # eight samples: the division by eight is exact

    whole = steps(DPSGD(**given), b"s")
    assert torch.equal(whole, whole.round())
    assert torch.equal(whole, steps(DPSGD(**given, mechanism="discrete"), b"s"))
    for floats in (steps(DPSGD(**given, mechanism="float"), b"s"), steps(DPSGD(**given), b"")):
        assert not torch.equal(floats, floats.round())
    simulated = steps(DPSGD(**given, mechanism="discrete"), b"")
    assert torch.equal(simulated, simulated.round()) and not torch.equal(simulated, whole)


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_discrete_noise_gives_the_same_bits_in_every_engine(engine: str) -> None:
    local = DPSGD(lr=0.3, batch=4, clip=0.5, sigma=0.6, mechanism="discrete")
    assert torch.equal(trained(local, engine), trained(local))
    assert not torch.equal(trained(local), trained(replace(local, mechanism="float")))


@pytest.mark.parametrize("model", [dense, lambda: nn.Sequential(nn.Linear(8, 3), nn.LayerNorm(3)).double()])
@pytest.mark.parametrize("per_layer", [False, True])
def test_discrete_noise_covers_the_clipped_sum_of_the_samples(model: Any, per_layer: bool) -> None:
    given: dict[str, Any] = {"lr": 1.0, "batch": None, "steps": 1, "clip": 0.2, "per_layer": per_layer}
    exact = update(DPSGD(**given, sigma=0.0), party(10, b"s", model=model))
    near = [update(DPSGD(**given, sigma=1e-6, mechanism=kind), party(10, b"s", model=model))
            for kind in ("float", "discrete")]  # fmt: skip
    for kind in near:
        assert float((kind - exact).abs().max()) < 1e-5
        assert not torch.equal(kind, exact)


def test_microbatches_change_no_number_of_the_discrete_mechanism() -> None:
    updates = [update(DPSGD(batch=7, steps=2, microbatch=size, sigma=0.5), party(10, b"s")) for size in (None, 2)]
    torch.testing.assert_close(*updates, rtol=0, atol=1e-9)


def test_the_noise_of_two_steps_is_not_the_same() -> None:
    one, two = (update(DPSGD(lr=1.0, batch=None, steps=k, sigma=1e6), party(3, b"s")) for k in (1, 2))
    assert abs(torch.corrcoef(torch.stack([one, two - one]))[0, 1]) < 0.5


def test_only_the_update_leaves_the_party() -> None:
    at = party()
    reply, memory = DPSGD().run(at, {"model": at.objective.initial._asdict()}, {})
    assert list(reply.tensors) == ["w"]
    assert (reply.metrics, reply.maxima, memory) == ({}, {}, {})
    for engine in ("reference", "stacked"):
        done = hansa.simulate(hansa.FedAvg(local=DPSGD(batch=4)), task(), rounds=1, engine=engine)
        assert "train_loss" not in done.history[0]


def test_frozen_parameters_are_not_sent() -> None:
    def half() -> nn.Module:
        module = dense()
        for parameter in module[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        return module

    at = party(model=half)
    reply, _ = DPSGD().run(at, {"model": at.objective.initial._asdict()}, {})
    assert list(reply.tensors) == ["w"] and reply.tensors["w"].numel() == at.objective.spec.dim


@pytest.mark.parametrize("local", [DPSGD(), Personal(inner=DPSGD())], ids=lambda s: s.name)
def test_batch_norm_is_refused_before_anything_runs(local: Any) -> None:
    with pytest.raises(ConfigError, match=r"layer '1' normalises by statistics of the whole batch.*GroupNorm"):
        local.check(ParamSpec.of(normed()))
    with pytest.raises(ConfigError, match="BatchNorm"):
        hansa.simulate(hansa.FedAvg(local=DPSGD()), task(normed), rounds=1)


def test_a_personal_head_does_not_change_how_samples_are_drawn() -> None:
    inner = DPSGD(batch=3, epochs=2)
    ours, theirs = (solver.batches(12, 0, 1, 4) for solver in (inner, Personal(inner=inner)))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    runs = [hansa.simulate(hansa.FedPer(local=inner), task(), rounds=2, engine=engine).state.params.w
            for engine in ("reference", "stacked")]  # fmt: skip
    torch.testing.assert_close(*runs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("algorithm", ["fedadam", "fedavgm"])
def test_it_composes_with_servers_of_other_kinds(algorithm: str) -> None:
    made: Any = hansa.build("algorithm", algorithm, local={"name": "dp-sgd", "batch": 4, "sigma": 0.5})
    runs = [hansa.simulate(made, task(), rounds=2, engine=engine).state.params.w for engine in ("reference", "stacked")]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"clip": 0.0}, "clip must be at least 1e-06 and at most 1000000, got 0; it is the longest"),
        ({"clip": -1.0}, "clip must be at least 1e-06"),
        ({"clip": 1e-30}, "clip must be at least 1e-06 and at most"),
        ({"clip": 1e7}, "at most 1000000, got 10000000; it is the longest"),
        ({"clip": math.nan}, "clip: expected a number"),
        ({"clip": math.inf}, "clip: expected a number"),
        ({"sigma": -0.1}, "sigma must be at least 0"),
        ({"sigma": 1e-300}, "sigma must lie"),
        ({"sigma": math.inf}, "sigma: expected a number"),
        ({"sigma": math.nan}, "sigma: expected a number"),
        ({"delta": 0.0}, "delta must be above 0 and below 1"),
        ({"delta": 1.0}, "delta must be above 0 and below 1"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"microbatch": 0}, "microbatch must be at least 1"),
        ({"mechanism": "discrete", "sigma": 0.0}, "mechanism = 'discrete' is a kind of noise, and sigma is 0"),
        ({"mechanism": "real"}, "mechanism"),
    ],
)
def test_impossible_privacy_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DPSGD(**fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_normal_to_its_tails_and_the_same_however_it_is_made(dtype: torch.dtype) -> None:
    keys = torch.tensor([3, -4])
    drawn = torch.stack([rng.noise(key, 200_001, dtype) for key in keys])
    assert torch.equal(torch.func.vmap(lambda key: rng.noise(key, 200_001, dtype))(keys), drawn)
    values, _ = drawn.double().flatten().sort()
    place = (torch.arange(len(values)).double() + 0.5) / len(values)
    assert (torch.special.ndtr(values) - place).abs().max() < 1.95 / math.sqrt(len(values))  # Kolmogorov and Smirnov
    assert abs(torch.corrcoef(drawn)[0, 1]) < 4 / math.sqrt(200_001)
    share = (values.abs() > 3).double().mean()
    assert 0.9 < share / (2 * (1 - torch.special.ndtr(torch.tensor(3.0)))) < 1.1
