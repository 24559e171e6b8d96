"""FedMA: copies restored through the stages, frozen layers, cycles, unequal widths, liars on both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_pfnm import ring
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.holdings.gateway import SampleGateway
from hansa.matching import Process, match
from hansa.matching.fedma import TrainAbove, class_mean, owners_mean
from hansa.matching.matched import sliced
from hansa.matching.units import Network, Units, permuted
from hansa.models import CharLstm, Cnn, LayerChain, Logistic, TwoNN
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, PartyError

LOCAL = hansa.SGD(lr=0.3, epochs=10, batch=16)
NETS: dict[str, tuple[Any, Tensor]] = {
    "dense": (TwoNN((9,), 3, hidden=8), torch.randn(6, 9).double()),
    "conv": (LayerChain((1, 8, 8), 3, ("conv 1 5 kernel=3 padding=1", "relu", "max-pool kernel=2", "conv 5 6 kernel=3",
                                  "relu", "flatten", "linear 24 7", "relu", "linear 7 3")),
             torch.randn(6, 1, 8, 8).double()),
    "lstm": (CharLstm((5,), 7, embed=4, hidden=8, layers=2), torch.randint(7, (6, 5))),
}  # fmt: skip


def read(module: nn.Module) -> tuple[Network, list[Units]]:
    network = Network.of(module)
    return network, network.read({name: value.detach() for name, value in module.named_parameters()})


def staged(network: Network, models: list[list[Units]], process: Process) -> list[Units]:
    """The stages of FedMA without any training."""
    merged: list[Units] = []
    models = [list(model) for model in models]
    for stage in range(len(network.widths)):
        groups = [model[stage] for model in models]
        found = match([units.atoms for units in groups], process)
        merged.append(owners_mean(groups, found.places, len(found.atoms)))
        for model, place in zip(models, found.places, strict=True):
            model[stage + 1] = model[stage + 1].above(place, len(found.atoms))
    shares = [torch.full((network.outputs,), 1 / len(models), dtype=torch.float64)] * len(models)
    return [*merged, class_mean([model[-1] for model in models], shares)]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("parties", [1, 2, 5])
def test_permuted_copies_restore_the_function(name: str, parties: int) -> None:
    model, x = NETS[name]
    module = model().double()
    network, units = read(module)
    orders = [[torch.from_numpy(np.random.default_rng(9 * k + w).permutation(w)) for w in network.widths]
              for k in range(parties)]  # fmt: skip
    merged = staged(network, [permuted(units, own) for own in orders], Process(sigma=1e-3, sigma0=1e6))
    assert [len(layer.bias) for layer in merged[:-1]] == list(network.widths)
    found = network.resized(network.widths)
    chain = found.chain(model.inputs)().double()
    chain.load_state_dict(found.write(merged))
    assert torch.allclose(chain(x), module(x), atol=1e-12)
    assert not torch.allclose(chain(x), chain(x) * 0, atol=1e-3)


def test_a_unit_is_the_mean_over_the_parties_that_have_it() -> None:
    network, units = read(LayerChain((2,), 2, ("embedding 5 3", "lstm 3 4", "linear 4 2"))().double())
    lstm = units[1]
    both = owners_mean([lstm, lstm.taken(torch.tensor([2, 0]))], [torch.arange(4), torch.tensor([2, 4])], 5)
    assert torch.allclose(both.incoming[2], lstm.incoming[2]) and torch.equal(both.incoming[1], lstm.incoming[1])
    assert torch.equal(both.recurrent[4, 4], lstm.recurrent[0, 0])  # the second party alone
    assert torch.allclose(both.recurrent[2, 2], lstm.recurrent[2, 2])  # both parties
    assert torch.equal(both.recurrent[1, 4], torch.zeros(4).double())  # no party has both units
    assert len(network.layers) == 3


def test_an_output_is_the_mean_by_class_or_even_where_nobody_has_the_class() -> None:
    _, units = read(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).double())
    groups = [Units(*(factor * t for t in units[-1])) for factor in (1.0, 3.0)]
    shares = [torch.tensor([0.75, 0.0]).double(), torch.tensor([0.25, 0.0]).double()]
    found = class_mean(groups, shares)
    assert torch.allclose(found.incoming[0], 1.5 * units[-1].incoming[0])
    assert torch.allclose(found.incoming[1], 2.0 * units[-1].incoming[1])
    assert torch.allclose(found.bias[:, 0], units[-1].bias[:, 0] * torch.tensor([1.5, 2.0]).double())


def task(parties: int = 4, **fields: Any) -> hansa.Task:
    pairs, test = ring(parties)
    make = lambda: TwoNN((2,), 2, hidden=10)().double()  # noqa: E731
    return hansa.Task(fields.pop("model", make), "cross_entropy", pairs, test=test, **fields)


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_three_stages_give_a_network_of_its_own_widths(engine: str) -> None:
    result = hansa.simulate(hansa.FedMA(local=LOCAL, sigma=0.1), task(), rounds=9, engine=engine)
    assert [line["layer"] for line in result.history] == [1, 2, 3]  # then nothing is left to match
    widths = [int(line["units"]) for line in result.history[:2]]
    module = result.model()
    assert [layer.out_features for layer in module if isinstance(layer, nn.Linear)] == [*widths, 2]
    assert all(10 <= width <= 40 for width in widths)
    x, _ = ring()[1]
    assert torch.equal(module(x).detach(), result.predict(x)) and result.history[-1]["accuracy"] > 0.85


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_are_matched_on_a_gpu_as_on_a_cpu() -> None:
    cpu, gpu = (hansa.simulate(hansa.FedMA(local=LOCAL, sigma=0.1), task(), rounds=3, device=device).history[-1]
                for device in ("cpu", "cuda"))  # fmt: skip
    assert gpu["accuracy"] == pytest.approx(cpu["accuracy"], abs=0.02)


def test_until_the_last_stage_the_outputs_are_zero() -> None:
    result = hansa.simulate(hansa.FedMA(local=LOCAL), task(), rounds=2)
    assert not result.predict(ring()[1][0]).any()
    assert hansa.FedMA().finished(result.state) is False


@pytest.mark.slow
def test_cycles_start_from_each_partys_part_of_the_matched_network() -> None:
    result = hansa.simulate(hansa.FedMA(local=LOCAL, sigma=0.1, cycles=2), task(), rounds=20)
    lines = result.history
    assert [line["layer"] for line in lines] == [1, 2, 3, 1, 2, 3]
    assert lines[3]["train_loss"] < 0.7 * lines[0]["train_loss"]  # it does not begin anew
    assert lines[3]["accuracy"] == lines[2]["accuracy"]  # the last complete network, until the next is complete
    assert lines[5]["accuracy"] > 0.85


def test_parties_of_different_widths_and_float32() -> None:
    pairs, test = ring()
    data = [(x.float(), y) for x, y in pairs]
    models = {"narrow": TwoNN((2,), 2, hidden=6), "wide": TwoNN((2,), 2, hidden=12)}
    result = hansa.simulate(hansa.FedMA(local=LOCAL, sigma=0.1),
                            hansa.Task(None, "cross_entropy", data, test=(test[0].float(), test[1]), models=models),
                            rounds=3)  # fmt: skip
    assert [len(place) for place in result.state.slots["places"]["0"]] == [6, 6]
    assert [len(place) for place in result.state.slots["places"]["1"]] == [12, 12]
    assert result.history[-1]["accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "lstm"])
def test_convolutions_and_sequences_learn(name: str, tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    if name == "conv":
        x = torch.randn(240, 1, 6, 6, generator=draws)
        y = (x[:, 0, :3].mean((1, 2)) > x[:, 0, 3:].mean((1, 2))).long()
        model: Any = LayerChain((1, 6, 6), 2, ("conv 1 4 kernel=3 padding=1", "relu", "avg-pool kernel=3", "flatten",
                                          "linear 16 6", "relu", "linear 6 2"))  # fmt: skip
        rounds, floor = 3, 0.8
    else:
        x = torch.randint(5, (240, 6), generator=draws)
        y = x.roll(1, 1)  # the code before
        y[:, 0] = 0
        model, rounds, floor = CharLstm((6,), 5, embed=4, hidden=10, layers=1), 3, 0.6
    pairs = [(x[k::3], y[k::3]) for k in range(3)]
    local = hansa.Adam(lr=0.02, epochs=15, batch=16)
    setting = hansa.Task(model, "cross_entropy", pairs, test=(x, y), classes=2 if name == "conv" else 5)
    result = hansa.simulate(hansa.FedMA(local=local, sigma=0.1), setting, rounds=rounds, run_dir=tmp_path / "run")
    assert result.history[-1]["accuracy"] > floor
    loaded = hansa.load(tmp_path / "run")
    assert torch.equal(loaded.predict(x), result.predict(x))
    if name == "lstm":  # plain PyTorch loads it
        params = loaded.params
        width, units = params["0.weight"].shape[1], params["1.weight_hh_l0"].shape[1]
        embedding, lstm, out = nn.Embedding(5, width), nn.LSTM(width, units, batch_first=True), nn.Linear(units, 5)
        for at, layer in enumerate((embedding, lstm, out)):
            layer.load_state_dict({key[2:]: value for key, value in params.items() if key.startswith(f"{at}.")})
        assert torch.allclose(out(lstm(embedding(x))[0]), result.predict(x), atol=1e-5)


def party(hidden: int = 5) -> Party:
    x, y = ring()[1]
    return Party(0, Objective(TwoNN((2,), 2, hidden=hidden), "cross_entropy", 0), SampleGateway((x.float(), y)), 0)


OP = TrainAbove(hansa.SGD(lr=0.1, steps=2), tuple(Network.of(TwoNN((2,), 2, hidden=5)()).chain((2,)).layers), 2)


def test_matched_layers_are_frozen_and_layers_above_are_kept_at_the_party() -> None:
    reply, memory = OP.run(party(), {"layers": []}, {"other": torch.ones(1)})
    assert set(memory) == {"other", "fedma/1/incoming", "fedma/1/bias", "fedma/2/incoming", "fedma/2/bias"}
    wide = {name: torch.cat([value, value]) for name, value in reply.tensors.items()}
    place = torch.tensor([7, 0, 3, 9, 4])
    second, later = replace(OP, stage=1).run(party(), {"layers": [wide], "place": place}, memory)
    assert second.tensors["incoming"].shape == (5, 10, 1) and "fedma/1/bias" not in later
    own = second.tensors["incoming"][:, place]
    assert torch.allclose(own, memory["fedma/1/incoming"], atol=0.2)  # two steps away
    last, _ = replace(OP, stage=2).run(party(), {"layers": [wide, second.tensors], "place": torch.arange(5)}, later)
    assert set(last.tensors) == {"incoming", "bias", "shares"}
    assert float(last.tensors["shares"].sum()) == pytest.approx(1.0)


def test_only_the_layers_above_the_matched_ones_are_trained() -> None:
    reply, _ = OP.run(party(), {"layers": []}, {})
    op, network = replace(OP, stage=1), OP.network
    objective = op.objective(party(), network, [Units.of_tree(reply.tensors)])
    first, *above = network.layers
    assert {entry.name for entry in objective.spec.frozen} == set(first.names)
    assert [entry.name for entry in objective.spec.weights] == [name for layer in above for name in layer.names]
    assert torch.equal(objective.frozen[first.names[0]], reply.tensors["incoming"][:, :, 0])


def pretrained() -> nn.Module:
    """A model whose initial values do not depend on the seed."""
    module = TwoNN((2,), 2, hidden=5)()
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)))
    return module


@pytest.mark.parametrize("algorithm", [hansa.PFNM, hansa.FedMA])
def test_parties_begin_with_the_models_own_initial_values_and_copies_keep_its_widths(algorithm: Any) -> None:
    still = hansa.SGD(lr=1e-9, steps=1)
    pairs = [(x.float(), y) for x, y in ring()[0]]
    found = hansa.simulate(algorithm(local=still), hansa.Task(pretrained, "cross_entropy", pairs), rounds=3).model()
    widths = [layer.out_features for layer in found if isinstance(layer, nn.Linear)]
    assert widths == [5, 5, 2]
    if algorithm is hansa.FedMA:  # PFNM's estimate is shrunk towards 0
        x = torch.randn(9, 2)
        torch.testing.assert_close(found(x), pretrained()(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", [hansa.PFNM, hansa.FedMA])
@pytest.mark.parametrize("parties", [2, 3, 4, 8, 20])
def test_copies_of_any_length_make_no_new_unit_by_default(algorithm: Any, parties: int) -> None:
    units = torch.randn(5, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for length in (1e-3, 0.1, 1.0, 10.0):
        assert len(match([length * units] * parties, algorithm().process()).atoms) == 5


def test_without_a_valid_place_the_party_begins_the_layer_anew() -> None:
    reply, memory = OP.run(party(), {"layers": []}, {})
    fresh, _ = replace(OP, stage=1).run(party(), {"layers": [reply.tensors]}, {})
    for place in (
        None,
        torch.zeros(5, dtype=torch.int64),
        torch.arange(4),
        torch.arange(5) + 1,
        torch.arange(5.0),
        "x",
    ):
        payload = {"layers": [reply.tensors], "place": place}
        found, _ = replace(OP, stage=1).run(party(), payload, memory)
        assert torch.equal(found.tensors["incoming"], fresh.tensors["incoming"])


def test_a_party_refuses_layers_that_do_not_fit() -> None:
    reply, _ = OP.run(party(), {"layers": []}, {})
    layer, op = reply.tensors, replace(OP, stage=1)
    bad: list[Any] = [[], [layer, layer], "x", [{}], [{**layer, "bias": layer["bias"][:-1]}],
                      [{**layer, "bias": layer["bias"] * torch.nan}], [{n: v.double() for n, v in layer.items()}],
                      [{name: value[:0] for name, value in layer.items()}]]  # fmt: skip
    for layers in bad:
        with pytest.raises(PartyError, match="matched layers"):
            op.run(party(), {"layers": layers}, {})
    with pytest.raises(PartyError, match="not the chain of layers"):
        OP.run(party(hidden=6), {"layers": []}, {})  # wider than the ask expects


def test_a_grown_network_counts_toward_a_partys_limit_of_parameters() -> None:
    from hansa.net.party.workload import Workload

    layer = {"incoming": torch.zeros(1000, 2, 1), "bias": torch.zeros(1000, 1)}
    payload = {"layers": [layer]}
    assert replace(OP, stage=1).demands(10, payload)["parameters"] == 3000 + 5 * 1001 + 2 * 6
    reason = Workload(parameters=5000).refuses(replace(OP, stage=1), 10, payload)
    assert reason is not None and "at most 5000 parameters" in reason
    assert Workload(parameters=9000).refuses(replace(OP, stage=1), 10, payload) is None


@pytest.mark.slow
def test_a_missing_party_comes_back_in_the_next_stage() -> None:
    result = hansa.simulate(hansa.FedMA(local=LOCAL, sigma=0.1, cycles=2), task(), rounds=9,
                            absent=lambda party, round: party == 2 and round == 1)  # fmt: skip
    assert result.history[-1]["accuracy"] > 0.8
    assert len(result.state.slots["places"]["2"]) == 2


def test_a_party_with_units_of_another_shape_is_rejected_by_name() -> None:
    honest = TrainAbove.run

    def lie(self: Any, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply, memory = honest(self, party, payload, memory)
        if party.id == 1 and self.stage == 0:
            reply.tensors["bias"] = reply.tensors["bias"][:-1]
        if party.id == 3 and self.stage == 2:
            reply.tensors["shares"] = -reply.tensors["shares"]
        if party.id == 2 and self.stage == 1:
            reply.tensors["bias"] = reply.tensors["bias"] + 1e9
        return reply, memory

    TrainAbove.run = lie  # type: ignore[method-assign]
    try:
        lines = hansa.simulate(hansa.FedMA(local=LOCAL), task(), rounds=3, engine="reference").history
    finally:
        TrainAbove.run = honest  # type: ignore[method-assign]
    assert [list(line.get("rejected", {})) for line in lines] == [["1"], ["2"], ["3"]]


@pytest.mark.parametrize(("algorithm", "model", "reason"), [
    ({"cycles": 0}, None, "cycles must be at least 1, got 0"),
    ({"growth": 0.9}, None, "growth must be at least 1, got 0.9"),
    ({}, lambda: Logistic((2,), 2)().double(), "no hidden layer to match"),
    ({}, lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double(), "LayerNorm"),
    ({"local": "dp-sgd"}, None, "'dp-sgd' does not cover"),
])  # fmt: skip
def test_what_it_cannot_do_is_one_sentence_before_training(algorithm: Any, model: Any, reason: str) -> None:
    fields = {} if model is None else {"model": model}
    with pytest.raises(ConfigError, match=reason):
        hansa.simulate(hansa.FedMA(**algorithm), task(**fields), rounds=1)


def test_a_slice_of_the_matched_network_is_the_partys_own_network() -> None:
    network, units = read(Cnn((1, 4, 4), 3)())
    orders = [torch.randperm(w, generator=torch.Generator().manual_seed(w)) for w in network.widths]
    found = sliced(permuted(units, orders), [torch.argsort(order) for order in orders])
    assert all(torch.equal(a, b) for x, y in zip(found, units, strict=True) for a, b in zip(x, y, strict=True))
