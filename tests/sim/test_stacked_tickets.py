"""Tickets under way are trained in stacks, and nothing but the time of the computation changes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.ask import Ticket
from hansa.core.op import Memory, Op, Party, Payload, Reply
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.local import DPSGD, SGD, Adam, Proximal
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params, ParamSpec
from hansa.run.result import Result
from hansa.schedule import ExponentialDecay
from hansa.sim import stacked
from hansa.sim.engine import PartyWork, ReferenceEngine
from hansa.sim.stack import Stack
from hansa.sim.stacked import StackedEngine
from hansa.sim.tickets import TimedFlight, Trained, outcome_of
from hansa.sim.workers import WorkersEngine, usable
from hansa.testing.experiments import same_bits
from small_tasks import chain, halves

DEVICES = {"latency": "exponential", "compute": {"name": "exponential", "mean": 0.1}, "speed": "lognormal"}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2)).double()


@register("late-drift")
@dataclass(frozen=True)
class LateDrift(SGD):
    """A solver that reads the round and remembers how far its party moved."""

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        return {"drift": torch.zeros(spec.dim, dtype=spec.dtype)}

    def start(self, ctx: Any, w: Tensor, payload: Payload, memory: Memory) -> Any:
        return w - 0.1 * memory["drift"] + 0.01 * ctx.round, {}

    def finish(self, ctx: Any, start: Tensor, w: Tensor, carry: Any, memory: Memory) -> Any:
        return {"w": w - start}, {"drift": memory["drift"] + (w - start)}


METHODS = {
    "fedasync": hansa.FedAsync(local=Proximal(lr=0.3, batch=2, mu=0.2, schedule=ExponentialDecay(0.9))),
    "fedbuff": hansa.FedBuff(local=SGD(lr=0.3, batch=2, epochs=2, momentum=0.5), buffer=3),
    "co-op": hansa.CoOp(local=SGD(lr=0.3, batch=2), b_l=2, b_u=5),
    "memory": hansa.FedAsync(local=LateDrift(lr=0.3, batch=2)),
    "adam": hansa.FedAsync(local=Adam(lr=0.05, batch=2)),
    "poisson": hansa.FedBuff(local=DPSGD(lr=0.3, batch=2, sigma=1.0, schedule=ExponentialDecay(0.9)), buffer=2),
}


def run(method: Any, engine: str = "reference", model: Any = chain, rounds: int = 12, **more: Any) -> Result:
    settings = {"cohort_size": 6, "devices": DEVICES, "seed": 3, **more}
    return hansa.simulate(method, halves(10, model), rounds=rounds, engine=engine, **settings)


def lines(result: Result) -> list[dict[str, Any]]:
    told = ("replies", "missing", "simulated_seconds", "bytes_up", "bytes_down", "staleness", "accepted", "epsilons")
    return [{name: line.get(name) for name in told} for line in result.history]


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The (party, round) pairs of every stack that is trained."""
    seen: list[list[tuple[int, int]]] = []
    before = Stack.__post_init__

    def noted(self: Stack) -> None:
        before(self)
        seen.append([(member.party, member.in_round(self.round)) for member in self.members])

    monkeypatch.setattr(Stack, "__post_init__", noted)
    monkeypatch.setattr(stacked, "cores", lambda: 2)  # the number of tickets of a stack depends on it
    return seen


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [chain, net], ids=["chain", "dropout"])
@pytest.mark.parametrize("name", METHODS)
def test_stacked_tickets_of_different_rounds_agree_with_the_reference(
    name: str, model: Any, stacks: list[list[tuple[int, int]]]
) -> None:
    one, other = run(METHODS[name], model=model), run(METHODS[name], "stacked", model)
    assert torch.allclose(one.state.params.w, other.state.params.w, rtol=0, atol=1e-9)
    assert lines(one) == lines(other)
    mixed = [stack for stack in stacks if len({round for _, round in stack}) > 1]
    assert mixed, "no stack had tickets of different rounds"
    trained = [pair for stack in stacks for pair in stack]
    if name != "fedbuff":  # which may ask a party twice in one round
        assert len(set(trained)) == len(trained), "a ticket was trained twice"


@pytest.mark.thin(1)
@pytest.mark.skipif(not usable(torch.device("cpu")), reason="needs two cores and fork")
@pytest.mark.parametrize("name", ["fedasync", "memory"])
def test_worker_processes_give_the_bits_of_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    before = WorkersEngine._train

    def noted(self: WorkersEngine, op: Op, members: list[PartyWork], round: int) -> Iterator[Any]:
        sizes.append(len(members))
        return before(self, op, members, round)

    monkeypatch.setattr(WorkersEngine, "_train", noted)
    one, other = run(METHODS[name], model=net), run(METHODS[name], "workers", net)
    assert same_bits(one.state.tree(), other.state.tree())
    assert max(sizes) > 1, "no two tickets were trained at once"


@pytest.mark.thin(1)
@pytest.mark.parametrize("name", ["fedasync", "co-op", "memory"])
def test_a_resumed_run_in_stacks_has_the_same_bits(
    name: str, tmp_path: Path, stacks: list[list[tuple[int, int]]]
) -> None:
    whole = run(METHODS[name], "stacked")
    count = len(stacks)
    stacks.clear()

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 4:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "checkpoint_seconds": 0.0}
    with contextlib.suppress(KeyboardInterrupt):
        run(METHODS[name], "stacked", on_round=stop, **settings)
    resumed = run(METHODS[name], "stacked", resume=True, **settings)
    assert same_bits(whole.state.tree(), resumed.state.tree())
    assert len(stacks) == count  # the outcomes of the checkpoint were not trained again


def test_an_outcome_survives_its_tree() -> None:
    reply = Reply({"w": torch.tensor([1.0, 2.0])}, 3, {"counts": torch.tensor([4])}, {"train_loss": 0.25})
    for trained in (Trained((reply, {"drift": torch.tensor([5.0])}), {}), Trained("it has no samples", {})):
        back = Trained.of_tree(trained.tree())
        assert same_bits(back.tree(), trained.tree())
        assert type(back.outcome) is type(trained.outcome)


@dataclass(frozen=True)
class Breaks(SGD):
    """A solver that fails at one party."""

    who: AnyCount = -1

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if party.id == self.who:
            raise ValueError("broken")
        return super().run(party, payload, memory)


def test_a_party_that_fails_is_named_when_its_ticket_arrives_and_not_before() -> None:
    arrived = [int(line["party"]) for line in watched().history]
    last = arrived[-1]
    calm = arrived.index(last)  # rounds before its first ticket arrives
    broken = hansa.FedAsync(local=Breaks(lr=0.3, batch=2, who=last))
    assert calm > 1
    assert len(run(broken, "stacked", rounds=calm).history) == calm
    with pytest.raises(hansa.HansaError, match=f"party {last} failed at .* in round"):
        run(broken, "stacked", rounds=calm + 1)


def watched() -> Result:
    """A run of FedAsync whose metrics lines name the party of each arrival."""

    @dataclass(frozen=True)
    class Watched(hansa.FedAsync):
        async def round(self, fed: hansa.Federation, state: hansa.State) -> hansa.State:
            arrive = fed.next

            async def noted() -> Any:
                arrival = await arrive()
                fed.metrics["party"] = float(arrival.ticket.party)
                return arrival

            fed.next = noted  # type: ignore[method-assign]
            return await super().round(fed, state)

    return run(Watched(local=SGD(lr=0.3, batch=2)), "stacked")


def test_a_ticket_whose_party_has_another_memory_by_now_is_trained_again() -> None:
    given = halves(10)
    objective = Objective(given.model, given.loss, 3)
    engine = StackedEngine(objective, given.holdings(objective), 3)
    payload = {"model": objective.initial._asdict()}
    solver = LateDrift(lr=0.3, batch=2)
    memories: dict[int, Memory] = {0: {}, 1: {}}
    first, second = (TimedFlight(Ticket(k, k, k), solver, payload, arrives=float(k)) for k in (0, 1))

    def task_of(flight: TimedFlight) -> tuple[Op, PartyWork]:
        return solver, PartyWork(flight.ticket.party, payload, memories[flight.ticket.party], flight.ticket.round)

    outcome_of(engine, first, task_of, [second])
    assert second.trained is not None
    ahead = second.trained.outcome
    assert outcome_of(engine, second, task_of, []) is ahead
    memories[1] = {"drift": torch.ones(objective.spec.dim, dtype=torch.float64)}
    again = outcome_of(engine, second, task_of, [])
    alone = ReferenceEngine(objective, given.holdings(objective), 3).one(*task_of(second), 99)
    assert not isinstance(ahead, str) and not isinstance(again, str) and not isinstance(alone, str)
    assert not torch.allclose(ahead[0].tensors["w"], again[0].tensors["w"])
    assert torch.allclose(alone[0].tensors["w"], again[0].tensors["w"], rtol=0, atol=1e-12)


def test_budgets_are_charged_when_tickets_arrive() -> None:
    local = DPSGD(lr=0.3, batch=2, sigma=2.0, epsilon=3.0)
    one, other = (run(hansa.FedBuff(local=local, buffer=1), engine, rounds=16) for engine in ("reference", "stacked"))
    assert lines(one) == lines(other)
    assert any("budget is spent" in why for line in one.history for why in line.get("missing", {}).values())


def test_hostile_parties_train_in_stacks_too() -> None:
    adversary = {"name": "sign-flip", "fraction": 0.3}
    one, other = (run(METHODS["fedasync"], engine, adversary=adversary) for engine in ("reference", "stacked"))
    assert torch.allclose(one.state.params.w, other.state.params.w, rtol=0, atol=1e-9)
    assert lines(one) == lines(other)
    assert not torch.allclose(one.state.params.w, run(METHODS["fedasync"]).state.params.w)


def test_absent_and_lost_parties_are_not_trained(stacks: list[list[tuple[int, int]]]) -> None:
    gone = {"absent": lambda party, round: party in (1, 4), "devices": {**DEVICES, "dropout": 0.3}}
    one, other = (run(METHODS["fedasync"], engine, **gone) for engine in ("reference", "stacked"))
    assert lines(one) == lines(other)
    assert not {1, 4} & {party for stack in stacks for party, _ in stack}


def test_an_engine_that_trains_one_party_at_a_time_trains_no_ticket_before_it_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    before = ReferenceEngine.one

    @functools.wraps(before)
    def one(self: ReferenceEngine, op: Op, member: PartyWork, round: int) -> Any:
        counted.append(member.party)
        return before(self, op, member, round)

    monkeypatch.setattr(ReferenceEngine, "one", one)
    run(METHODS["fedasync"])
    assert len(counted) == 12
