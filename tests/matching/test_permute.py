"""Weight matching before a fusion: permuted copies agree, and units in place are not touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from test_matched_layers import read as units
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.core.wrapper import Wrapper
from hansa.local import SGD, LocalSolver
from hansa.matching.permute import _overlaps, fit, fit_pair
from hansa.matching.units import Network, Units, permuted
from hansa.models import CharLstm, Cnn, LayerChain, TwoNN
from hansa.plumbing.errors import ConfigError
from hansa.testing import check_engines

with torch.random.fork_rng():  # the same weights, whatever was drawn before
    torch.manual_seed(0)
    NETS: dict[str, nn.Module] = {
        "dense": TwoNN((9,), 3, hidden=8)(),
        "conv": Cnn((1, 4, 4), 3)(),
        "lstm": CharLstm((5,), 7, embed=4, hidden=8, layers=2)(),
    }


def drawn_orders(network: Network, seed: int) -> list[Tensor]:
    return [torch.randperm(n, generator=torch.Generator().manual_seed(seed + n)) for n in network.widths]


@pytest.mark.parametrize("name", NETS)
def test_permuted_copies_come_back_to_one_network(name: str) -> None:
    network, model = units(NETS[name])
    models = [permuted(model, drawn_orders(network, seed)) for seed in range(3)]
    orders = fit(models, model, sweeps=3)
    for copy, own in zip(models, orders, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(network.write(permuted(copy, own)).values(),
                                                     network.write(model).values(), strict=True))  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_a_fit_never_lowers_the_product_and_leaves_an_equal_network_alone(name: str) -> None:
    network, model = units(NETS[name])
    identity = [torch.arange(width) for width in network.widths]
    assert all(torch.equal(a, b) for a, b in zip(fit_pair(model, model, identity), identity, strict=True))
    _, other = units(type(NETS[name])(*NETS[name]) if isinstance(NETS[name], nn.Sequential) else NETS[name])
    noisy = [Units(*(t + 0.1 * torch.randn_like(t) for t in layer)) for layer in other]

    def product(orders: list[Tensor]) -> float:
        pairs = zip(permuted(noisy, orders), model, strict=True)
        return float(sum((x * y).sum() for a, b in pairs for x, y in zip(a, b, strict=True)))

    start = drawn_orders(network, 3)
    assert product(fit_pair(noisy, model, start)) >= product(start)


@pytest.mark.parametrize("name", NETS)
def test_overlaps_are_inner_products_of_all_weights_of_a_unit(name: str) -> None:
    network, model = units(NETS[name])
    draws = torch.Generator().manual_seed(5)
    target = [Units(*(t.double() for t in layer)) for layer in model]
    model = [Units(*(torch.randn(t.shape, generator=draws, dtype=t.dtype) for t in layer)) for layer in target]
    orders = drawn_orders(network, 1)
    for layer, order in enumerate(orders):
        other = torch.randperm(len(order), generator=draws)
        overlap = _overlaps(model, target, orders, layer)
        own = permuted(model, [*orders[:layer], other, *orders[layer + 1 :]])
        mine, theirs = model[layer].recurrent, target[layer].recurrent
        expected = sum(
            float((a * b).sum())
            for a, b in ((own[layer].incoming, target[layer].incoming), (own[layer].bias, target[layer].bias),
                         (own[layer + 1].incoming, target[layer + 1].incoming),
                         (mine[other][:, order], theirs), (mine[order][:, other], theirs))
        )  # fmt: skip
        assert float(overlap[torch.arange(len(order)), other].sum()) == pytest.approx(expected, rel=1e-9)


@dataclass(frozen=True)
class Shuffle(Wrapper):
    """Send the update to a copy of the trained model with its units in another order."""

    inner: LocalSolver = SGD(lr=0.1)
    name: ClassVar[str] = "test-shuffle-units"
    kind: ClassVar[str] = "local"

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        objective, w = party.objective, payload["model"]["w"]
        network = Network.of(objective.network())
        trained = network.read(objective.spec.split(w + reply.tensors["w"]))
        named = network.write(permuted(trained, drawn_orders(network, party.id)))
        reply.tensors["w"] = torch.cat([named[entry.name].reshape(-1) for entry in objective.spec.weights]) - w
        return reply, memory


def task(model: Any = None, parties: int = 3) -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(30 * parties, 6, generator=draws, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    pairs = [(x[30 * k : 30 * k + 30], y[30 * k : 30 * k + 30]) for k in range(parties)]
    make = model or (lambda: TwoNN((6,), 2, hidden=10)().double())
    return hansa.Task(make, "cross_entropy", pairs, test=(x, y))


@pytest.mark.parametrize("fusion", ["mean", "median", "krum"])
def test_shuffled_units_change_nothing_in_a_run(fusion: str) -> None:
    plain = hansa.simulate(hansa.FedAvg(SGD(lr=0.1), fusion=fusion), task(), rounds=3)  # type: ignore[arg-type]
    rule = hansa.MatchPermute(inner=fusion)  # type: ignore[arg-type]
    found = hansa.simulate(hansa.FedAvg(Shuffle(), fusion=rule), task(), rounds=3)  # type: ignore[arg-type]
    assert torch.allclose(found.state.params.w, plain.state.params.w, atol=1e-12)
    wrong = hansa.simulate(hansa.FedAvg(Shuffle(), fusion=fusion), task(), rounds=3)  # type: ignore[arg-type]
    assert not torch.allclose(wrong.state.params.w, plain.state.params.w, atol=1e-3)


def test_units_in_place_give_the_bits_of_the_inner_fusion() -> None:
    plain = hansa.simulate(hansa.FedAvg(SGD(lr=0.1)), task(), rounds=2)
    found = hansa.simulate(hansa.FedAvg(SGD(lr=0.1), fusion=hansa.MatchPermute()), task(), rounds=2)
    assert torch.equal(found.state.params.w, plain.state.params.w)


def test_engines_agree_on_permuted_updates() -> None:
    check_engines(hansa.FedAvgM(local=SGD(lr=0.5, epochs=3), fusion=hansa.MatchPermute()))


AVERAGING = [name for name, part in registered("algorithm").items()
             if part.__module__.startswith("hansa.") and part().parts().fusion is not None]  # type: ignore[attr-defined]  # fmt: skip
RUNS = {"fedavg", "fedsgd", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedprox", "fednova", "qfedavg", "qfedsgd"}


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", AVERAGING)
def test_it_is_the_fusion_of_an_averaging_algorithm_or_refused(name: str) -> None:
    try:
        algorithm = build("algorithm", name, fusion="match-permute")
        setting = task()
        setting.public = setting.test[0] if algorithm.uses_public else None  # type: ignore[index,attr-defined]
        done = hansa.simulate(algorithm, setting, rounds=2)  # type: ignore[arg-type]
    except ConfigError as refusal:
        assert name not in RUNS, refusal
        assert "fusion" in str(refusal) or "match-permute" in str(refusal), refusal
    else:
        assert bool(torch.isfinite(done.state.params.w).all())


@pytest.mark.parametrize(("settings", "reason"), [
    ({"model": lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()}, "BatchNorm1d"),
    ({"compress": "error-feedback"}, "remembers numbers of a vector"),
    ({"privacy": {"secure": "masking"}}, "looks at the update of each party, which a secure sum hides"),
    ({"privacy": {"dp": {"kind": "central", "sigma": 1.0, "delta": 1e-5}}}, "needs more than their sum"),
    ({"inner": "zeno"}, "compares updates by samples of the server"),
    ({"inner": "legato"}, "compares updates by the places of units"),
    ({"inner": "match-permute"}, "compares updates by the places of units"),
    ({"sweeps": -1}, "sweeps must be at least 0, got -1"),
])  # fmt: skip
def test_what_it_cannot_work_with_is_refused_in_one_sentence(settings: dict[str, Any], reason: str) -> None:
    rule = {name: settings.pop(name) for name in ("inner", "sweeps") if name in settings}
    model = settings.pop("model", None)
    with pytest.raises(ConfigError, match=reason):
        hansa.simulate(hansa.FedAvg(fusion=hansa.MatchPermute(**rule)), task(model), rounds=1, **settings)


def test_a_chain_of_layers_is_a_model_of_an_experiment() -> None:
    layers = ("flatten", "linear 6 5", "tanh", "linear 5 2")
    done = hansa.simulate(hansa.FedAvg(), task(lambda: LayerChain((6,), 2, layers)().double()), rounds=1)
    assert "accuracy" in done.history[0]
