"""Every party its own aggregator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gossip import models, net, task
from torch import Tensor, nn

import hansa
from hansa.algorithms.self_aggregation import FuseNeighbours
from hansa.local import SGD
from hansa.topology import EdgeList

LOCAL = SGD(lr=0.2, epochs=2, batch=2)


def run(rounds: int = 3, parties: int = 6, model: Any = net, **fields: Any) -> hansa.Result:
    algorithm = hansa.SelfAggregation(**{"local": LOCAL, **fields})
    return hansa.simulate(algorithm, task(parties, model, 1 / 3), rounds=rounds, engine="reference")


@pytest.mark.thin(2)
@pytest.mark.parametrize("rule", ["mean", "median", {"name": "krum", "f": 1}, "trimmed-mean", "geometric-median"])
def test_on_the_complete_graph_every_party_has_the_model_of_a_central_aggregator(rule: Any) -> None:
    done = run(topology="complete", fusions=[rule])
    fusion = hansa.WeightedMean(uniform=True) if rule == "mean" else rule
    central = hansa.simulate(hansa.FedAvg(local=LOCAL, fusion=fusion), task(step=1 / 3), rounds=3, engine="reference")
    assert torch.allclose(models(done), central.state.params.w.expand(6, -1), atol=1e-12)
    assert torch.allclose(done.state.params.w, central.state.params.w, atol=1e-12)


def test_parties_take_the_rules_in_turn() -> None:
    done = run(1, topology="complete", fusions=["mean", "median"])
    mean, median = run(1, topology="complete"), run(1, topology="complete", fusions=["median"])
    for party in range(6):
        assert torch.equal(models(done)[party], models(mean if party % 2 == 0 else median)[party])
    assert not torch.allclose(models(mean), models(median))


def test_a_party_fuses_the_models_of_those_that_send_to_it() -> None:
    topology = EdgeList(edges=("0 -> 1", "1 -> 2", "2 -> 0"))
    done, alone = run(1, parties=3, topology=topology), run(1, parties=1)
    trained = torch.stack([
        hansa.simulate(hansa.FedAvg(local=LOCAL), task(3, step=1 / 3), rounds=1, engine="reference",
                       absent=lambda party, round, k=k: party != k).state.params.w
        for k in range(3)
    ])  # fmt: skip
    assert torch.allclose(models(alone)[0], trained[0], atol=1e-14)
    for party in range(3):
        assert torch.allclose(models(done)[party], (trained[party] + trained[party - 1]) / 2, atol=1e-12)


def test_a_robust_rule_bounds_a_hostile_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    after = FuseNeighbours.after

    def hostile(self: Any, party: Any, *rest: Any) -> Any:
        reply, memory = after(self, party, *rest)
        if party.id == 3:
            reply.tensors["x"] = torch.full_like(reply.tensors["x"], 1e12)
        return reply, memory

    monkeypatch.setattr(FuseNeighbours, "after", hostile)
    small = {"name": "small-world", "degree": 4}
    honest = [k for k in range(6) if k != 3]
    assert float(models(run(topology=small, fusions=["median"]))[honest].abs().max()) < 10
    assert float(models(run(topology=small))[honest].abs().max()) > 1e10


def test_each_party_stops_by_its_own_rule_and_the_run_ends_with_the_last_one() -> None:
    done = run(8, topology="ring", tolerances=[10.0, 0.0], patience=2, local=SGD(lr=0.1, steps=1, batch=None))
    stopped = [line["stopped_parties"] for line in done.history]
    assert stopped[:3] == [0.0, 3.0, 3.0]
    assert max(stopped) == 3.0  # the others change a little in every round
    early = run(2, topology="ring", tolerances=[10.0, 0.0], patience=2, local=SGD(lr=0.1, steps=1, batch=None))
    assert torch.equal(models(done)[::2], models(early)[::2])  # who has stopped keeps its model
    assert not torch.equal(models(done)[1::2], models(early)[1::2])
    all_stop = run(50, tolerances=[10.0], patience=3)
    assert len(all_stop.history) == 3


def test_a_change_above_the_tolerance_starts_the_count_again() -> None:
    op, memory = FuseNeighbours(tolerances=(0.1,), patience=2), dict[str, Tensor]()
    from hansa.core.op import Party
    from hansa.holdings.gateway import SampleGateway
    from hansa.numerics.objective import Objective

    party = Party(0, Objective(net, "cross_entropy", 0), SampleGateway(task(step=1 / 3).parties[0]), 0)
    stops = []
    for factor in (1.01, 2.0, 1.01, 1.01):
        own = memory.get("gossip/w", party.objective.initial.w)
        reply, memory = op.receive(party, {}, {}, {**memory, "gossip/trained/x": own * factor})
        stops.append(bool(reply.tensors["stopped"]))
    assert stops == [False, False, False, True]


def test_a_party_whose_neighbours_have_left_trains_alone() -> None:
    krum = {"name": "krum", "f": 0}
    done = run(6, topology="ring", fusions=[krum], tolerances=[10.0, 0.0], patience=1)
    assert [line["stopped_parties"] for line in done.history] == [3.0] * 6
    assert all("empty" not in line and "missing" not in line for line in done.history)
    before = run(5, topology="ring", fusions=[krum], tolerances=[10.0, 0.0], patience=1)
    assert not torch.equal(models(done)[1], models(before)[1])


def test_the_buffers_of_a_model_are_fused_by_the_same_kind_of_rule() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()

    fields = {"topology": "complete", "model": normed, "local": SGD(lr=1e-9, steps=1, batch=None)}
    mean, median = run(1, **fields), run(1, fusions=["median"], **fields)
    alone = torch.stack([0.1 * x.mean(0) for x, _ in task(step=1 / 3).parties])  # BatchNorm's momentum is 0.1
    assert torch.allclose(mean.memories[0]["gossip/stats"][:3], alone.mean(0), atol=1e-12)
    assert torch.allclose(median.memories[0]["gossip/stats"][:3], alone.quantile(0.5, dim=0), atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"fusions": [{"name": "krum", "f": 1}]},
      r"party 0 has 2 neighbours, and its own model counts too: krum: f = 1 needs .* got 3; use a topology with more"),
     ({"fusions": []}, "fusions and tolerances need at least one entry each"),
     ({"fusions": ["fltrust"]}, "fltrust needs trusted samples of an aggregator, which a party does not have"),
     ({"fusions": ["legato"]}, "legato needs a memory of earlier rounds"),
     ({"patience": 0}, "patience must be at least 1"), ({"tolerances": [-1.0]}, "tolerances.0. must be at least 0")],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hansa.ConfigError, match=sentence):
        run(1, **fields)
