"""Replies of parties are checked before they are fused, for every verb and every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.core.wrapper import Wrapper
from hansa.fusion import WeightedMean
from hansa.local import SGD, LocalSolver
from hansa.plumbing.errors import PartyError
from hansa.server import ServerOptimizer

HOSTILE = 1
NAMES = ["anna", "boris", "clara", "dora"]


@dataclass(frozen=True)
class Bad(Wrapper):
    """Honest at every party except one, which sends something else."""

    trick: str = "nan"
    inner: LocalSolver = SGD(lr=0.5)
    name: ClassVar[str] = "bad"
    kind: ClassVar[str] = "local"

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        if party.id != HOSTILE:
            return reply, memory
        w = reply.tensors["w"]
        if self.trick == "decline":
            raise PartyError("it has other plans")
        tricks: dict[str, Reply] = {
            "nan": Reply({"w": w * math.nan}, reply.weight),
            "inf": Reply({"w": w + math.inf}, reply.weight),
            "shape": Reply({"w": w[:-1]}, reply.weight),
            "broadcast": Reply({"w": w[:1]}, reply.weight),
            "dtype": Reply({"w": w.float()}, reply.weight),
            "name": Reply({"v": w}, reply.weight),
            "extra": Reply({"w": w, "v": w}, reply.weight),
            "zero": Reply({"w": w}, 0),
            "negative": Reply({"w": w}, -5),
            "huge": Reply({"w": w + 1e6}, reply.weight),
            "heavy": Reply({"w": w}, 10**9),
            "metrics": Reply({"w": w}, reply.weight, metrics={"train_loss": math.nan}),
        }
        return tricks[self.trick], {**memory, "kept": torch.ones(1)}


REASONS = {
    "nan": "not finite",
    "inf": "not finite",
    "shape": "has the shape",
    "broadcast": "has the shape",
    "dtype": "expected torch.float64",
    "name": "has the tensors",
    "extra": "has the tensors",
    "zero": "weight is 0",
    "negative": "weight is -5",
    "huge": "over the limit of 100",
    "heavy": "over the limit of 1000",
    "metrics": "metrics are not finite",
}


def task() -> hansa.Task:
    make = torch.Generator().manual_seed(0)
    parties = [
        (torch.randn(n, 3, generator=make, dtype=torch.float64), torch.randint(2, (n,), generator=make))
        for n in (4, 6, 3, 9)
    ]
    return hansa.Task(lambda: nn.Linear(3, 2).double(), "cross_entropy", parties, names=NAMES)


def run(local: LocalSolver | Bad, algorithm: str = "fedavg", **settings: Any) -> hansa.Result:
    fields: dict[str, Any] = {"local": local}
    if algorithm == "fedbuff":
        fields |= {"buffer": 3, "refill": "flush"}
    made = {"fedavg": hansa.FedAvg, "fedbuff": hansa.FedBuff}[algorithm](**fields)
    return hansa.simulate(made, task(), **{"rounds": 1, "max_norm": 100.0, "max_weight": 1000, **settings})


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("trick", REASONS)
def test_a_bad_reply_is_left_out_counted_and_reported_with_its_party(trick: str, engine: str) -> None:
    found = run(Bad(trick), engine=engine)
    without = run(SGD(lr=0.5), engine=engine, absent=lambda party, round: party == HOSTILE)
    assert torch.equal(found.state.params.w, without.state.params.w)
    (line,) = found.history
    assert list(line["rejected"]) == ["boris"]
    assert REASONS[trick] in line["rejected"]["boris"]
    assert (line["asked"], line["replies"]) == (4, 3)
    assert line["train_loss"] == without.history[0]["train_loss"]
    assert HOSTILE not in found.memories


@pytest.mark.parametrize("trick", ["nan", "shape", "zero"])
def test_a_bad_reply_does_not_enter_the_buffer_of_an_asynchronous_run(trick: str) -> None:
    found = run(Bad(trick), "fedbuff")
    without = run(SGD(lr=0.5), "fedbuff", absent=lambda party, round: party == HOSTILE)
    assert torch.equal(found.state.params.w, without.state.params.w)
    assert REASONS[trick] in found.history[0]["rejected"]["boris"]
    assert found.history[0]["replies"] == 3


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_party_that_declines_is_missing_with_its_reason(engine: str) -> None:
    found = run(Bad("decline"), engine=engine)
    without = run(SGD(lr=0.5), engine=engine, absent=lambda party, round: party == HOSTILE)
    assert torch.equal(found.state.params.w, without.state.params.w)
    assert found.history[0]["missing"] == {"boris": "it has other plans"}


def test_a_party_without_samples_declines() -> None:
    given = task()
    given.parties[2] = (torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))  # type: ignore[index]
    for engine in ("reference", "stacked"):
        done = hansa.simulate(hansa.FedAvg(), given, rounds=1, engine=engine)
        assert done.history[0]["missing"] == {"clara": "it has no samples"}
        assert done.history[0]["replies"] == 3


@pytest.mark.parametrize("counts", [torch.tensor([1, 2, 3]), torch.tensor([1.5])])
def test_a_bad_counter_is_rejected_like_any_other_tensor(counts: Tensor) -> None:
    @dataclass(frozen=True)
    class Miscounted(Wrapper):
        inner: LocalSolver = SGD(lr=0.5)
        name: ClassVar[str] = "miscounted"
        kind: ClassVar[str] = "local"

        def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
            if party.id == HOSTILE:
                reply.maxima = {"counts": counts}
            return reply, memory

    given = task()
    given.model = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    done = hansa.simulate(hansa.FedAvg(local=Miscounted()), given, rounds=1, engine="reference")
    assert list(done.history[0]["rejected"]) == ["boris"]
    assert done.params["1.num_batches_tracked"] == 1


# --- empty rounds ---


@dataclass(frozen=True)
class Counting(ServerOptimizer):
    """Descent that counts its steps in the server's state."""

    name: ClassVar[str] = "counting"

    def move(self, state: hansa.State, delta: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return delta, {"steps": state.slots.get("steps", torch.zeros(())) + 1}


def test_an_empty_round_keeps_the_model_and_the_optimisers_state_and_is_recorded() -> None:
    gone = {1, 2}
    algorithm = hansa.FedAvg(local=SGD(lr=0.5), server=Counting())
    seen: list[dict[str, Any]] = []
    done = hansa.simulate(algorithm, task(), rounds=4, absent=lambda party, round: round in gone, on_round=seen.append)
    assert [line["round"] for line in seen] == [1, 2, 3, 4]
    assert ["empty" in line for line in seen] == [False, True, True, False]
    assert seen[1]["replies"] == 0
    assert set(seen[1]["missing"]) == set(NAMES)
    assert "0 usable replies of 4 parties asked, quorum 1" in seen[1]["empty"]
    assert done.state.slots["steps"] == 2
    one = hansa.simulate(algorithm, task(), rounds=1)
    stuck = hansa.simulate(algorithm, task(), rounds=3, absent=lambda party, round: round in gone)
    assert torch.equal(one.state.params.w, stuck.state.params.w)
    assert stuck.state.slots["steps"] == 1
    assert not torch.equal(done.state.params.w, stuck.state.params.w)


@pytest.mark.parametrize("quorum", [3, 0.75])
def test_a_round_below_the_quorum_is_empty(quorum: float) -> None:
    def two_gone(party: int, round: int) -> bool:
        return party in (0, 1) and round == 0

    done = hansa.simulate(hansa.FedAvg(), task(), rounds=2, quorum=quorum, absent=two_gone)
    assert "2 usable replies of 4 parties asked, quorum 3" in done.history[0]["empty"]
    assert done.history[0]["replies"] == 2
    assert "empty" not in done.history[1]


@dataclass(frozen=True)
class Diary(Wrapper):
    """Trains, and remembers how often."""

    inner: LocalSolver = SGD(lr=0.5)
    name: ClassVar[str] = "diary"
    kind: ClassVar[str] = "local"

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        return reply, {**memory, "times": memory.get("times", torch.zeros(())) + 1}


@dataclass(frozen=True)
class TwoAsks(hansa.Algorithm):
    """Has all parties train, then asks one of them again."""

    name: ClassVar[str] = "two-asks"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    async def round(self, fed: hansa.Federation, state: hansa.State) -> hansa.State:
        update = await WeightedMean().collect(fed, Diary(), state.params)
        await fed.reduce(SGD(), {"model": state.params._asdict()}, parties=[1])
        return hansa.Descent().step(state, update)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_what_a_party_remembers_counts_only_rounds_that_were_completed(engine: str) -> None:
    def absent(party: int, round: int) -> bool:
        return round == 1 and party == 1

    done = hansa.simulate(TwoAsks(), task(), rounds=3, absent=absent, engine=engine)
    # In round 1 three parties answer the first ask and stage what they remember; the second ask aborts the round.
    assert ["empty" in line for line in done.history] == [False, True, False]
    assert done.history[1]["replies"] == 3
    assert {party: int(memory["times"]) for party, memory in done.memories.items()} == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_second_ask_of_a_round_sees_what_the_first_one_staged() -> None:
    @dataclass(frozen=True)
    class Twice(TwoAsks):
        async def round(self, fed: hansa.Federation, state: hansa.State) -> hansa.State:
            for _ in range(2):
                await WeightedMean().collect(fed, Diary(), state.params)
            return state

    done = hansa.simulate(Twice(), task(), rounds=2)
    assert {party: int(memory["times"]) for party, memory in done.memories.items()} == {0: 4, 1: 4, 2: 4, 3: 4}


def test_nested_wrappers_see_the_payload_they_were_given_in_either_engine() -> None:
    seen: dict[str, list[Any]] = {}

    @dataclass(frozen=True)
    class Marks(Wrapper):
        inner: Any = SGD(lr=0.5)
        mark: str = "outer"
        name: ClassVar[str] = "marks"
        kind: ClassVar[str] = "local"

        def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
            return {**payload, "from": self.mark}

        def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
            seen.setdefault(engine, []).append((self.mark, party.id, payload.get("from")))
            return reply, memory

    for engine in ("reference", "stacked"):
        algorithm = hansa.FedAvg(local=Marks(inner=Marks(mark="inner")))
        hansa.simulate(algorithm, task(), rounds=1, engine=engine)
    reference, stacked = (sorted(marks, key=lambda mark: mark[1]) for marks in seen.values())  # whoever trains first
    assert reference == stacked
    assert seen["reference"][:2] == [("inner", 0, "outer"), ("outer", 0, None)]


def test_uniform_fusion_ignores_how_many_samples_a_party_has() -> None:
    weighted = run(SGD(lr=0.5))
    uniform = hansa.simulate(hansa.FedAvg(local=SGD(lr=0.5), fusion=WeightedMean(uniform=True)), task(), rounds=1)
    assert not torch.allclose(weighted.state.params.w, uniform.state.params.w)
