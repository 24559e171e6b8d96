"""Work settings for single parties and for all: they reach the parties through every verb.

The loss |w x - y| with an unreachable y has the gradient -x for every w: a party with the samples e_i moves coordinate
i by its rate times its number of steps.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import hansa
from hansa.core.algorithm import Algorithm, Parts, State
from hansa.core.ask import Ask, Reduced
from hansa.core.federation import Federation
from hansa.experiment.config import parse_set, read
from hansa.fusion import WeightedMean
from hansa.local import SGD, LocalSolver
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError
from hansa.schedule import AdaComm, Fixed, Random
from hansa.testing import PartyPool, experiment_for, run_on, same_bits
from quadratics import zeros

NAMES = ["aa", "bb", "cc"]
LOCAL = SGD(lr=1.0, batch=None)


def task(names: list[str] | None = NAMES, samples: int = 4) -> hansa.Task:
    """Three parties with four samples e_i each."""
    rows = [row.expand(samples, 3) for row in torch.eye(3, dtype=torch.float64)]
    return hansa.Task(lambda: zeros(3), "mae", [(x, x.new_full((samples, 1), 1e9)) for x in rows], names=names)


@dataclass(frozen=True)
class Gathering(Algorithm):
    """The mean of updates that are gathered one by one; `each` adds a value per party."""

    name: ClassVar[str] = "gathering"
    local: LocalSolver = LOCAL
    each: bool = False

    def parts(self) -> Parts:
        return Parts(local=self.local)

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    async def round(self, fed: Federation, state: State) -> State:
        each: dict[int, Any] = {p: {"age": p, "work": {"lr": 10.0}} for p in fed.cohort} if self.each else {}
        answer = await fed.gather(self.local, {"model": state.params._asdict()}, each=each)
        return state.replace(state.params._replace(w=state.params.w + answer.rows("w").mean(0)))


ALGORITHMS = [
    hansa.FedAvg(local=LOCAL, fusion=WeightedMean(uniform=True)),
    hansa.FedBuff(local=LOCAL, buffer=3, refill="flush"),
    hansa.DecentralizedSGD(local=LOCAL, topology="complete"),
    Gathering(),
]


def moved(algorithm: Algorithm = ALGORITHMS[0], *, names: list[str] | None = NAMES, engine: str = "reference",
          **settings: Any) -> list[float]:  # fmt: skip
    """The distance that each party moved its own coordinate in one round."""
    done = hansa.simulate(algorithm, task(names), rounds=1, engine=engine, **settings)
    moves: Tensor = done.state.params.w * 3
    return [round(value, 9) for value in moves.tolist()]


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_what_is_said_of_one_party_reaches_that_party_alone(algorithm: Algorithm, engine: str) -> None:
    assert moved(algorithm, engine=engine) == [1, 1, 1]
    assert moved(algorithm, engine=engine, own={"bb": {"lr": 0.25}}) == [1, 0.25, 1]
    assert moved(algorithm, engine=engine, own={"bb": {"epochs": 3}, "cc": {"steps": 5}}) == [1, 3, 5]
    assert moved(algorithm, engine=engine, own={"aa": {"batch": 1}}) == [4, 1, 1]
    assert moved(algorithm, engine=engine, own={"aa": {"batch": 2, "epochs": 3, "lr": 0.5}}) == [3, 1, 1]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_a_pace_reaches_the_parties_through_every_verb(algorithm: Algorithm) -> None:
    assert moved(algorithm, pace=AdaComm(4)) == [4, 4, 4]
    assert moved(algorithm, pace=Random(3, 3)) == [3, 3, 3]
    drawn = moved(algorithm, pace=Random(1, 50))
    assert len(set(drawn)) == 3
    assert drawn == moved(pace=Random(1, 50))  # the same under every algorithm


def test_what_is_said_of_one_party_goes_before_the_pace() -> None:
    pace = AdaComm(4)
    assert moved(pace=pace, own={"aa": {"steps": 2}}) == [2, 4, 4]
    assert moved(pace=pace, own={"aa": {"epochs": 3}}) == [3, 4, 4]
    assert moved(pace=pace, own={"aa": {"lr": 0.5}}) == [2, 4, 4]
    drawn = moved(pace=Random(10, 50))
    assert moved(pace=Random(10, 50), own={"aa": {"steps": 2}, "bb": {"epochs": 3}}) == [2, 3, drawn[2]]
    assert moved(pace=Random(10, 50), own={"aa": {"lr": 2.0}}) == [2 * drawn[0], *drawn[1:]]


def test_what_the_run_says_is_laid_over_what_the_algorithm_says() -> None:
    algorithm = Gathering(each=True)
    assert moved(algorithm) == [10, 10, 10]
    assert moved(algorithm, own={"bb": {"lr": 2.0}}, pace=AdaComm(3)) == [30, 6, 30]


def test_parties_go_by_name_or_by_number() -> None:
    assert moved(own={"1": {"lr": 0.5}}) == moved(own={1: {"lr": 0.5}}) == [1, 0.5, 1]
    assert moved(names=None, own={"2": {"lr": 0.5}}) == [1, 1, 0.5]
    assert moved(names=["2", "0", "1"], own={"2": {"lr": 0.5}}) == [0.5, 1, 1]  # a name takes precedence over a number


class Spy:
    """A sum protocol that only observes."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
        self.asks.append(ask)
        answer: Reduced = await ask
        return answer


def asked(algorithm: Algorithm = ALGORITHMS[0], **settings: Any) -> Ask:
    spy = Spy()
    hansa.simulate(algorithm, task(), rounds=1, protocol=spy, **settings)
    return spy.asks[0]


def test_a_run_with_nothing_to_say_asks_as_if_there_were_no_such_thing() -> None:
    plain = asked()
    assert set(plain.payload) == {"model"} and plain.each == {}
    model = hansa.simulate(ALGORITHMS[0], task(), rounds=1).state.params._asdict()
    start = {name: value * 0 for name, value in model.items()}
    bare = Ask("reduce", 0, "round", 0, LOCAL, {"model": start}, (0, 1, 2), uniform=True)
    assert plain.digest() == bare.digest() == asked(pace=Fixed(), own={}).digest()


def test_what_all_are_told_travels_once_and_what_one_is_told_to_it_alone() -> None:
    paced = asked(pace=AdaComm(4))
    assert paced.payload["work"] == {"steps": 4} and paced.each == {}
    own = asked(own={"bb": {"lr": 0.5}})
    assert "work" not in own.payload and own.each == {1: {"work": {"lr": 0.5}}}
    both = asked(pace=AdaComm(4), own={"bb": {"epochs": 2}})
    assert both.payload["work"] == {"steps": 4} and both.each == {1: {"work": {"steps": None, "epochs": 2}}}


def test_ops_that_do_not_train_are_told_nothing() -> None:
    fed = Federation(range(3), 0, 0, 3)
    fed.tell({"steps": 4}, lambda party: {"lr": 1.0})
    model: dict[str, Any] = {"model": Params.none()._asdict()}
    ask = fed.reduce(hansa.Gradient(), model).send(None)
    assert ask.payload == model and ask.each == {}


def test_parties_told_the_same_are_sent_one_payload() -> None:
    """A checkpoint keeps one model for all tickets that share a payload."""
    fed = Federation(range(4), 0, 0, 4)
    fed.tell({"steps": 4}, lambda party: {"lr": 1.0} if party == 3 else {})
    model: dict[str, Any] = {"model": Params.none()._asdict()}
    sent = [fed.submit(LOCAL, model, party).send(None).payload for party in range(4)]
    assert sent[0] is sent[1] is sent[2]
    assert sent[3] == {**model, "work": {"steps": 4, "lr": 1.0}}


@pytest.mark.thin(0)
@pytest.mark.parametrize(
    "run",
    [
        {"pace": {"name": "adacomm", "tau0": 6, "interval": 1e-9}},
        {"pace": {"name": "random", "least": 1, "most": 4}, "own": {"2": {"lr": 0.02, "batch": 9}}},
    ],
    ids=["adacomm", "random and own"],
)
@pytest.mark.parametrize("algorithm", [hansa.FedAvg(), hansa.FedBuff(buffer=2), hansa.DecentralizedSGD(local=SGD())])
def test_parties_in_processes_of_their_own_are_told_the_same(
    algorithm: Algorithm, run: dict[str, Any], pool: PartyPool
) -> None:
    experiment = experiment_for(algorithm, **run)
    simulated = {
        engine: hansa.simulate(
            experiment.algorithm, experiment.build_task(), **{**experiment.settings(), "engine": engine}
        )
        for engine in ("reference", "stacked")
    }
    apart = pool.call(asyncio.wait_for(run_on(experiment, pool.runtime), 600))
    assert same_bits(simulated["reference"].state.tree(), apart.tree())
    close = torch.allclose(simulated["stacked"].state.params.w, apart.params.w, rtol=0, atol=1e-9)
    assert close


def test_a_file_and_the_command_line_say_the_same_as_python(tmp_path: Path) -> None:
    for name, unit in (("cleveland", "1,0"), ("budapest", "0,1")):
        (tmp_path / f"{name}.csv").write_text("p,q,y\n" + f"{unit},1e9\n" * 4)
    (tmp_path / "e.toml").write_text(
        '[task]\nparties = ["cleveland.csv", "budapest.csv"]\ntarget = "y"\nloss = "mae"\nmodel = "logistic"\n'
        'dtype = "float64"\n[algorithm]\nname = "fedavg"\nlocal = { name = "sgd", lr = 1.0, steps = 2 }\n'
        "[run]\nrounds = 1\n[run.own.cleveland]\nlr = 0.25\n"
    )

    def changed(*sets: str) -> list[float]:
        experiment = read(tmp_path / "e.toml", parse_set(list(sets)))
        given, settings = experiment.build_task(), experiment.settings()
        done = hansa.simulate(experiment.algorithm, given, **settings).state.params.w
        start = hansa.simulate(experiment.algorithm, given, **{**settings, "absent": lambda p, r: True}).state.params.w
        return [round(v, 6) for v in ((done - start)[:2] * 2).tolist()]

    assert changed() == [0.5, 2.0]
    assert changed("run.own.cleveland.lr=0.5", "run.own.budapest.steps=7") == [1.0, 7.0]
    assert changed("run.pace=adacomm", "run.pace.tau0=5") == [1.25, 5.0]


@pytest.mark.parametrize(
    ("algorithm", "settings", "reason"),
    [
        (hansa.FedAvg(), {"own": {"dd": {"lr": 1.0}}}, r"run\.own\.dd: there is no party 'dd'"),
        (hansa.FedAvg(), {"own": {3: {"lr": 1.0}}}, r"run\.own\.3: there is no party '3'"),
        (hansa.FedAvg(), {"own": {"aa": {"lr": 1.0}, 0: {"lr": 2.0}}}, "the party is listed twice"),
        (hansa.FedAvg(), {"own": {"aa": {"lr": 0.0}}}, r"run\.own\.aa.lr must be above 0"),
        (hansa.FedAvg(), {"own": {"aa": {"lr": "fast"}}}, r"run\.own\.aa\.lr: expected a number, got 'fast'"),
        (hansa.FedAvg(), {"own": {"aa": {"steps": 0}}}, "steps must be at least 1"),
        (hansa.FedAvg(), {"own": {"aa": {"drop_last": True}}}, "'drop_last' cannot be set for one party"),
        (hansa.FedAvg(), {"own": {"aa": 0.5}}, "own.aa: expected a table"),
        (hansa.FedAvg(local=SGD(steps=3)), {"own": {"aa": {"epochs": 2}}}, "steps take precedence over epochs"),
        (hansa.FSVRG(), {"own": {"aa": {"lr": 0.5}}}, "'lr' cannot be set .* 'svrg' allows: batch"),
        (hansa.FedSGD(), {"own": {"aa": {"lr": 0.5}}}, "fedsgd has no local steps"),
        (hansa.GaussianNB(), {"own": {"aa": {"lr": 0.5}}}, "naive-bayes has no local steps"),
        (hansa.GaussianNB(), {"pace": Random(1, 2)}, "naive-bayes has no local steps, so 'random' has no effect"),
        (hansa.FedSGD(), {"pace": AdaComm(2)}, "fedsgd has no local steps, so 'adacomm' has no effect"),
        (hansa.FSVRG(), {"pace": Random(1, 2)}, "'random' sets epochs, which the local solver 'svrg' does not have"),
    ],
)  # fmt: skip
def test_what_the_local_solver_cannot_do_is_refused_before_anything_runs(
    algorithm: Algorithm, settings: dict[str, Any], reason: str
) -> None:
    lines: list[Any] = []
    with pytest.raises(ConfigError, match=reason):
        hansa.simulate(algorithm, task(), rounds=1, on_round=lines.append, **settings)
    assert lines == []
