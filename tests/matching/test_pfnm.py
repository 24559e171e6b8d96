"""PFNM: permuted copies, class weights, unequal widths, rounds, liars, and what it cannot match."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.matching.beta_bernoulli import Process
from hansa.matching.matched import output_shares
from hansa.matching.pfnm import TrainNetwork, assemble
from hansa.matching.units import Network, Units, permuted
from hansa.models import CharLstm, Cnn, LayerChain, TwoNN
from hansa.plumbing.errors import ConfigError

SOLVER = hansa.SGD(lr=0.3, epochs=20, batch=16)


def mlp(inputs: int, widths: tuple[int, ...], outputs: int) -> LayerChain:
    sizes, layers = [inputs, *widths, outputs], ["flatten"]
    for a, b in itertools.pairwise(sizes):
        layers += [f"linear {a} {b}", "relu"]
    return LayerChain((inputs,), outputs, tuple(layers[:-1]))


def ring(parties: int = 4, n: int = 80) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Two classes that no line divides: inside and outside a ring."""
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(n * parties + 300, 2, generator=draws, dtype=torch.float64)
    y = (x.square().sum(1) > 1.4).long()
    return [(x[n * k : n * (k + 1)], y[n * k : n * (k + 1)]) for k in range(parties)], (x[-300:], y[-300:])


def task(parties: int = 4, widths: tuple[int, ...] = (12,), **fields: Any) -> hansa.Task:
    pairs, test = ring(parties)
    return hansa.Task(lambda: mlp(2, widths, 2)().double(), "cross_entropy", pairs, test=test, **fields)


def copies(widths: tuple[int, ...], parties: int) -> tuple[Network, nn.Module, list[list[Units]]]:
    module = mlp(5, widths, 3)().double()
    network = Network.of(module)
    units = network.read({name: value.detach() for name, value in module.named_parameters()})
    orders = [
        [torch.from_numpy(np.random.default_rng(7 * k + n).permutation(n)) for n in widths] for k in range(parties)
    ]
    return network, module, [permuted(units, own) for own in orders]


@pytest.mark.parametrize("widths", [(9,), (9, 7), (6, 8, 5)])
@pytest.mark.parametrize("parties", [2, 3])
def test_permuted_copies_restore_the_function_at_a_large_prior_variance(widths: tuple[int, ...], parties: int) -> None:
    network, module, models = copies(widths, parties)
    shares = [torch.full((3,), 1 / parties, dtype=torch.float64)] * parties
    merged, places = assemble(models, shares, Process(sigma=0.01, sigma0=1e8), [10 * w for w in widths],
                              np.random.default_rng(0))  # fmt: skip
    assert [len(layer.bias) for layer in merged[:-1]] == list(widths)
    found = network.resized(widths)
    chain = found.chain((5,))().double()
    chain.load_state_dict(found.write(merged))
    x = torch.randn(20, 5, dtype=torch.float64)
    assert torch.allclose(chain(x), module(x), atol=1e-7)
    assert all(sorted(place.tolist()) == list(range(w)) for own in places for place, w in zip(own, widths, strict=True))


def test_outputs_of_a_class_count_by_the_share_of_the_class() -> None:
    _, _, models = copies((4,), 2)
    other = [models[0][0], models[0][1]._replace(incoming=models[0][1].incoming * 3, bias=models[0][1].bias * 3)]
    shares = [torch.tensor([1.0, 0.25, 0.0]).double(), torch.tensor([0.0, 0.75, 0.0]).double()]
    merged, (first, _) = assemble([models[0], other], shares, Process(sigma=0.5, sigma0=2.0, gamma=1e-9), [40],
                                  np.random.default_rng(0))  # fmt: skip
    ours, found = models[0][1].incoming[:, :, 0], merged[1].incoming[:, first[0], 0]
    assert torch.allclose(found[0], ours[0] * 2 / (0.5 + 2))  # class 0: the first party alone
    assert torch.allclose(found[1], ours[1] * (0.25 + 3 * 0.75) * 2 / (0.5 + 2))
    assert torch.equal(found[2], torch.zeros(4).double())  # nobody has the class: the prior
    assert float(merged[1].bias[1, 0]) == pytest.approx(float(models[0][1].bias[1, 0]) * 2.5 * 2 / 2.5)
    assert torch.allclose(merged[0].incoming[first[0]], models[0][0].incoming * 4 / (0.5 + 4))


def test_shares_of_classes_are_those_of_the_samples() -> None:
    replies = [hansa.core.op.Reply({"shares": torch.tensor([0.5, 0.5, 0.0]).double()}, weight=10),
               hansa.core.op.Reply({"shares": torch.tensor([0.0, 1.0, 0.0]).double()}, weight=30)]  # fmt: skip
    first, second = output_shares(replies, 4)
    assert first.tolist() == [1.0, 5 / 35, 0.0, 0.0] and second.tolist() == [0.0, 30 / 35, 0.0, 0.0]
    plain = output_shares([hansa.core.op.Reply({}, weight=1), hansa.core.op.Reply({}, weight=3)], 1)
    assert [float(own[0]) for own in plain] == [0.25, 0.75]


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_one_shot_matching_beats_the_mean_of_independent_networks(engine: str) -> None:
    algorithm = hansa.PFNM(local=SOLVER, sigma=0.3, sigma0=10.0)
    result = hansa.simulate(algorithm, task(), rounds=1, engine=engine)
    module = result.model()
    width = module[1].out_features
    assert 12 <= width < 48 and result.history[0]["units"] == width
    x, y = ring()[1]
    assert torch.equal(module(x).detach(), result.predict(x))
    assert result.history[0]["accuracy"] == pytest.approx(float((module(x).argmax(1) == y).double().mean()))
    assert result.history[0]["accuracy"] > 0.85


@pytest.mark.slow
def test_further_rounds_start_from_each_partys_own_part() -> None:
    algorithm = hansa.PFNM(local=hansa.Proximal(lr=0.3, epochs=10, batch=16, mu=0.01), sigma=0.3, sigma0=10.0)
    result = hansa.simulate(algorithm, task(widths=(12, 8)), rounds=4)
    lines = result.history
    assert lines[-1]["train_loss"] < lines[0]["train_loss"] and lines[-1]["accuracy"] > 0.85
    assert lines[1]["bytes_down"] > 4 * 8 * (12 * 2 + 12 * 8)  # each party is sent its part


def test_parties_of_different_widths_are_matched() -> None:
    pairs, test = ring()
    models = {"narrow": lambda: mlp(2, (6,), 2)().double(), "wide": lambda: mlp(2, (15,), 2)().double()}
    result = hansa.simulate(hansa.PFNM(local=SOLVER, sigma=0.3, sigma0=10.0),
                            hansa.Task(None, "cross_entropy", pairs, test=test, models=models), rounds=2)  # fmt: skip
    places = result.state.slots["places"]
    assert [len(places[str(party)][0]) for party in range(4)] == [6, 15, 6, 15]
    assert result.model()[1].out_features >= 15 and result.history[-1]["accuracy"] > 0.85


def test_the_marginal_form_matches_a_hidden_layer_too() -> None:
    result = hansa.simulate(hansa.PFNM(local=SOLVER, marginal=True), task(), rounds=1)
    assert 12 <= result.history[0]["units"] <= 48
    with pytest.raises(ConfigError, match="learns the variances of one hidden layer, and the model has 2"):
        hansa.simulate(hansa.PFNM(marginal=True), task(widths=(4, 4)), rounds=1)


def test_one_party_alone_and_a_regression() -> None:
    alone = hansa.simulate(hansa.PFNM(local=SOLVER, sigma0=1e9), task(1), rounds=1)
    assert alone.model()[1].out_features == 12 and alone.history[0]["accuracy"] > 0.8
    pairs, test = ring()
    data = [(x, x[:, 0].abs()) for x, _ in pairs]
    number = hansa.Task(lambda: mlp(2, (8,), 1)().double(), "mse", data, test=(test[0], test[0][:, 0].abs()))
    algorithm = hansa.PFNM(local=hansa.SGD(lr=0.05, epochs=20), sigma=0.3, sigma0=10.0)
    result = hansa.simulate(algorithm, number, rounds=3)
    assert result.history[-1]["loss"] < 0.3


def test_growth_limits_the_width() -> None:
    result = hansa.simulate(hansa.PFNM(local=SOLVER, gamma=1e300, growth=1.5), task(), rounds=1)
    assert result.model()[1].out_features == 18


def test_a_saved_model_is_built_again_by_plain_pytorch(tmp_path: Path) -> None:
    result = hansa.simulate(hansa.PFNM(local=SOLVER), task(), rounds=1, run_dir=tmp_path / "run")
    x = ring()[1][0]
    loaded = hansa.load(tmp_path / "run")
    assert torch.equal(loaded.predict(x), result.predict(x))
    params = loaded.params
    width = params["1.weight"].shape[0]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)).double()
    plain.load_state_dict(params)
    assert torch.equal(plain(x).detach(), result.predict(x))


@pytest.mark.parametrize(("algorithm", "fields", "reason"), [
    ({}, {"model": lambda: nn.Linear(2, 2).double()}, "no hidden layer to match"),
    ({}, {"model": lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()}, "BatchNorm1d"),
    ({"sigma": 0.0}, {}, "sigma must be above 0, got 0"),
    ({"sigma0": -1.0}, {}, "sigma0 must be above 0, got -1"),
    ({"growth": 0.5}, {}, "growth must be at least 1, got 0.5; the units of the widest party"),
    ({"local": "dp-sgd"}, {}, "which the noise of 'dp-sgd' does not cover"),
    ({"local": "controlled"}, {}, "scaffold"),
])  # fmt: skip
def test_what_cannot_be_matched_is_refused_before_training(algorithm: Any, fields: Any, reason: str) -> None:
    setting = task()
    for name, value in fields.items():
        setattr(setting, name, value)
    with pytest.raises(ConfigError, match=reason):
        hansa.simulate(hansa.PFNM(**algorithm), setting, rounds=1)


def test_models_that_differ_in_more_than_widths_are_refused() -> None:
    pairs, test = ring()
    models = {"one": lambda: mlp(2, (6,), 2)().double(), "two": lambda: mlp(2, (6, 6), 2)().double()}
    with pytest.raises(ConfigError, match="'one' and 'two' differ in more than the widths"):
        hansa.simulate(hansa.PFNM(), hansa.Task(None, "cross_entropy", pairs, test=test, models=models), rounds=1)


@pytest.mark.parametrize("model", [Cnn((1, 4, 4), 2), CharLstm((5,), 7, hidden=4)])
def test_other_layers_are_left_to_fedma(model: Any) -> None:
    x = torch.zeros(6, *model.inputs).to(torch.int64 if isinstance(model, CharLstm) else torch.float32)
    y = torch.zeros(6, *(model.inputs if isinstance(model, CharLstm) else ()), dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"pfnm matches linear layers, and the model has .*use fedma"):
        hansa.simulate(hansa.PFNM(), hansa.Task(model, "cross_entropy", [(x, y)], classes=2), rounds=1)


@pytest.mark.parametrize(("privacy", "reason"), [
    ({"secure": "masking"}, "which a secure sum hides"),
    ({"dp": {"kind": "central", "sigma": 1.0, "delta": 1e-5}}, "pfnm"),
])  # fmt: skip
def test_secure_sums_and_central_privacy_are_refused(privacy: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        hansa.simulate(hansa.PFNM(), task(), rounds=1, privacy=privacy)


def test_a_party_checks_what_it_is_sent() -> None:
    from hansa.core.op import Party
    from hansa.holdings.gateway import SampleGateway
    from hansa.numerics.objective import Objective
    from hansa.plumbing.errors import PartyError

    objective = Objective(lambda: mlp(2, (5,), 2)(), "cross_entropy", 0)
    x, y = ring()[1]
    party = Party(0, objective, SampleGateway((x.float(), y)), 0)
    texts = mlp(2, (5,), 2).layers
    op = TrainNetwork(hansa.SGD(steps=1), texts, 2)
    reply, _ = op.run(party, {}, {})
    start = [{"incoming": reply.tensors[f"{k}.incoming"], "bias": reply.tensors[f"{k}.bias"]} for k in (0, 1)]
    again, _ = op.run(party, {"start": start}, {})
    assert torch.allclose(again.tensors["0.incoming"], reply.tensors["0.incoming"], atol=0.5)
    wide = {name: torch.cat([value, value]) for name, value in start[0].items()}
    bad = [{**start[0], "bias": start[0]["bias"] * torch.nan}, start[1]]
    for wrong in ([wide, start[1]], start[:1], bad, "x", [start[0], {}]):
        with pytest.raises(PartyError, match="network of the party's own widths"):
            op.run(party, {"start": wrong}, {})
    with pytest.raises(PartyError, match="not the chain of layers"):
        TrainNetwork(hansa.SGD(steps=1), mlp(2, (4,), 2).layers, 2).run(party, {}, {})
    with pytest.raises(PartyError, match="about 1 classes"):
        TrainNetwork(hansa.SGD(steps=1), texts, 1).run(party, {}, {})


def test_a_party_whose_layers_or_shares_do_not_fit_is_rejected_by_name() -> None:
    from hansa.core.op import Memory, Party, Payload, Reply

    honest = TrainNetwork.run

    def lie(self: Any, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply, memory = honest(self, party, payload, memory)
        if party.id == 1:
            reply.tensors["0.bias"] = reply.tensors["0.bias"][:-1]
        if party.id == 2:
            reply.tensors["shares"] = reply.tensors["shares"] * 9
        return reply, memory

    TrainNetwork.run = lie  # type: ignore[method-assign]
    try:
        line = hansa.simulate(hansa.PFNM(local=SOLVER), task(), rounds=1, engine="reference").history[0]
    finally:
        TrainNetwork.run = honest  # type: ignore[method-assign]
    assert "do not fit together" in line["rejected"]["1"] and "add up to 1" in line["rejected"]["2"]


def test_two_hidden_layers_of_the_registered_model_run() -> None:
    assert Network.of(TwoNN((4,), 2, hidden=3)()).widths == (3, 3)
