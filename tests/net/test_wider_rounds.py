"""Contracts of an algorithm in a deployed job: its own evaluation, gathering all, what was sent, what the model is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from league import PARTIES, League, logistic_task, samples

import hansa
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.other_model import OtherModel
from hansa.core.plain_data import build
from hansa.core.registry import register
from hansa.local import SGD
from hansa.net.party.samples import PartySamples
from hansa.numerics.params import Params
from hansa.plumbing import codec

pytestmark = pytest.mark.usefixtures("quick")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}


def tree(algorithm: Any, **run: Any) -> dict[str, Any]:
    return {"task": TASK, "algorithm": algorithm, "run": {"rounds": 2, **run}}


@register("test-net-mean")
@dataclass(frozen=True)
class Mean(Op):
    """The sum of the party's features, and a draw of its own."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, _ = party.samples("statistics")
        draw = torch.tensor(party.rng("draw").random(), dtype=torch.float64)
        return Reply({"sum": x.double().sum(), "draw": draw}, weight=party.n), {"test/evaluated": torch.ones(1)}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((), torch.float64), "draw": ((), torch.float64)}


@register("test-net-evaluated")
@dataclass(frozen=True)
class Evaluated(hansa.FedAvg):
    """FedAvg that also reports the mean feature over all parties, and the sum of their draws."""

    need: Literal["all", "some"] = "some"

    async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
        if self.need == "all":
            await fed.gather(Mean(), need="all")
        return await super().round(fed, state)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce", "gather"})

    async def evaluate(self, fed: Federation, state: hansa.State) -> dict[str, float]:
        answer = await fed.gather(Mean())
        count = sum(reply.weight for reply in answer.replies)
        total = sum(float(reply.tensors["sum"]) for reply in answer.replies)
        return {"mean_feature": total / count, "draws": sum(float(reply.tensors["draw"]) for reply in answer.replies)}


def simulated(algorithm: hansa.Algorithm) -> hansa.Result:
    return hansa.simulate(algorithm, logistic_task(), rounds=2, engine="reference")


def test_a_deployed_job_has_the_algorithm_s_own_metrics(league: League) -> None:
    league.join_all()
    ended = league.ended(league.submit(tree("test-net-evaluated")))
    assert ended["status"] == "finished", ended["reason"]
    expected = simulated(Evaluated())
    assert not any(expected.memories.get(party) for party in range(3))  # parties keep nothing of an evaluation
    for line, other in zip(ended["rounds"], expected.history, strict=True):
        assert line["mean_feature"] == other["mean_feature"]
        assert line["draws"] == other["draws"]  # the same streams as in a simulation
        assert (line["asked"], line["bytes_up"]) == (3, other["bytes_up"])  # not counted with the round


@pytest.mark.slow
def test_a_deployed_round_that_needs_all_is_empty_without_one_of_them(league: League, silent: set[int]) -> None:
    for number, name in enumerate(PARTIES[:2]):
        league.join(name, samples(number))
    league.enrolled("cid")  # it is there, and says nothing
    silent.add(2)
    ended = league.ended(league.submit(tree({"name": "test-net-evaluated", "need": "all"}, deadline=0.5)))
    assert ended["status"] == "failed"
    for line in ended["rounds"]:
        assert line["empty"].startswith("2 usable replies of 3 parties asked, and all are needed")


@register("test-net-versions")
@dataclass(frozen=True)
class Versions(hansa.Algorithm):
    """Asynchronous; checks that an arrival has what its party was sent."""

    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"submit", "next"})

    async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
        for party in fed.available:
            if party not in fed.busy:
                await fed.submit(SGD(), {"model": state.params._asdict(), "version": fed.round}, party)
        arrival = await fed.next()
        assert arrival.payload["version"] == arrival.ticket.round
        assert arrival.reply is not None
        w = arrival.payload["model"]["w"] + arrival.reply.tensors["w"]
        seen = [*state.slots.get("seen", []), arrival.payload["version"]]
        return state.replace(state.params._replace(w=(state.params.w + w) / 2), seen=seen)


def test_an_arrival_of_a_deployed_job_says_what_its_party_was_sent(league: League) -> None:
    league.join_all()
    ended = league.ended(league.submit(tree("test-net-versions", rounds=5)))
    assert ended["status"] == "finished", ended["reason"]


# What the model is


@register("test-net-halved")
@dataclass(frozen=True)
class Halved(hansa.FedAvg):
    """FedAvg whose model is half of its parameters."""

    def model(self, state: hansa.State) -> Params:
        return state.params._replace(w=state.params.w / 2)


@register("test-net-widened")
@dataclass(frozen=True)
class Widened(hansa.FedAvg):
    """FedAvg on a linear model, published as a network with hidden layers that computes the same."""

    def model(self, state: hansa.State) -> OtherModel:
        weight, bias = state.params.w[:6].view(2, 3), state.params.w[6:]
        eye, zero = torch.eye(3, dtype=weight.dtype), torch.zeros(6, dtype=weight.dtype)
        tensors = {
            "1.weight": torch.cat([eye, -eye]), "1.bias": zero, "3.weight": torch.eye(6, dtype=weight.dtype),
            "3.bias": zero, "5.weight": torch.cat([weight, -weight], 1), "5.bias": bias,
        }  # fmt: skip
        return OtherModel.of(build("model", "2nn", inputs=(3,), outputs=2, hidden=6), tensors)


def joined(league: League, policy: str = "") -> None:
    for number, name in enumerate(PARTIES):
        pair, _ = samples(number)
        league.join(name, PartySamples(pair, (pair[0][:6], pair[1][:6])), policy if name == "bob" else "")


@pytest.mark.slow
def test_the_log_hashes_the_algorithm_s_model(league: League, tmp_path: Path) -> None:
    joined(league)
    for algorithm in (Halved(), Widened()):
        ended = league.ended(league.submit(tree(algorithm.name), algorithm.name))
        assert ended["status"] == "finished", ended["reason"]
        state = simulated(algorithm).state
        model = algorithm.model(state)
        expected = codec.digest(model.payload() if isinstance(model, OtherModel) else model)
        assert ended["rounds"][-1]["model"] == expected
        pulled = league.operator.pull(ended["id"], tmp_path / f"{algorithm.name}.safetensors")
        x = samples(0)[0][0]
        assert torch.equal(hansa.load(pulled).predict(x), simulated(algorithm).predict(x))
        module = hansa.load(pulled).model()
        assert len([1 for layer in module.modules() if isinstance(layer, torch.nn.Linear)]) == (
            3 if isinstance(model, OtherModel) else 1
        )


def test_a_party_s_policy_covers_the_model_that_a_payload_describes(league: League) -> None:
    joined(league, policy='models = ["logistic"]')
    ended = league.ended(league.submit(tree("test-net-widened")))
    assert ended["status"] == "finished", ended["reason"]
    for line in ended["rounds"]:
        assert line["replies"] == 3  # it trains the task's model
        assert sorted(line["parties"]) == ["ann", "cid"]  # and does not evaluate the other one
