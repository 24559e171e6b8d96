"""Card 2.2 and FedNova's random epochs, in whole runs.

The loss |w x - y| with an unreachable y has the gradient -x for every w: a party that takes k steps at rate lr moves by
k * lr * x. So the model shows how many steps were taken, and the losses on the way are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import hansa
from hansa.core.ask import Ask, Reduced
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply
from hansa.core.wrapper import Wrapper
from hansa.fusion import WeightedMean
from hansa.local import SGD
from hansa.plumbing.errors import ConfigError
from hansa.schedule import AdaComm, ConstantRate, Cosine, ExponentialDecay, Pace, Random, RateSchedule
from quadratics import ENGINES, zeros


def line_task(y: float = 100.0, loss: str = "mae", parties: int = 2) -> hansa.Task:
    """Parties with the one sample (1, y): the loss at w is |w - y|."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return hansa.Task(lambda: zeros(1), loss, [(one, one * y)] * parties)


def own_task(parties: int) -> hansa.Task:
    """Party i moves coordinate i and no other."""
    rows = torch.eye(parties, dtype=torch.float64)
    return hansa.Task(lambda: zeros(parties), "mae", [(row[None], row.new_full((1, 1), 1e9)) for row in rows])


def adapted(pace: Pace, rounds: int, lr: float = 1.0, schedule: RateSchedule | None = None, engine: str = "reference",
            given: hansa.Task | None = None, **more: Any) -> hansa.Result:  # fmt: skip
    local = SGD(lr=lr, batch=None, schedule=schedule or ConstantRate())
    return hansa.simulate(
        hansa.FedAvg(local=local), given or line_task(), rounds=rounds, pace=pace, engine=engine, **more
    )


def steps(result: hansa.Result) -> list[int]:
    return [line["local_steps"] for line in result.history]


def expected(pace: AdaComm, rounds: int, lr: float, schedule: RateSchedule, y: float = 100.0) -> list[int]:
    """AdaComm on the line, implemented again; a round takes one second."""
    tau, w, taus, first, boundary = pace.tau0, 0.0, [], None, pace.interval
    for round in range(rounds):
        rate = lr * schedule.factor(round)
        losses = [y - (w + k * rate) for k in range(tau)]
        assert losses[-1] > 0
        w, loss = w + tau * rate, sum(losses) / tau
        taus.append(tau)
        if round + 1 >= boundary:
            boundary += pace.interval
            if first is not None:
                fall = 1 / schedule.factor(round + 1)
                new = math.ceil(math.sqrt(fall * loss / first) * pace.tau0 - 1e-9)
                tau = max(1, new if new < tau else math.ceil(pace.gamma * tau))
        first = first or loss
    return taus


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", [ConstantRate(), ExponentialDecay(0.95)])
@pytest.mark.parametrize("pace", [AdaComm(12, interval=2.0), AdaComm(12, interval=3.0, gamma=0.9)])
def test_local_steps_follow_the_root_of_the_loss(pace: AdaComm, schedule: RateSchedule, engine: str) -> None:
    lr, rounds = 1.2, 8
    found = adapted(pace, rounds, lr, schedule, engine)
    taus = expected(pace, rounds, lr, schedule)
    assert steps(found) == taus
    assert len(set(taus)) >= 3
    travelled = sum(tau * lr * schedule.factor(round) for round, tau in enumerate(taus))
    assert math.isclose(float(found.state.params.w), travelled, rel_tol=1e-12)


def test_the_rates_fall_keeps_the_steps_up() -> None:
    plain, faded = (
        expected(AdaComm(12, interval=3.0, gamma=0.9), 8, 1.2, s) for s in (ConstantRate(), ExponentialDecay(0.95))
    )
    assert plain != faded  # or the test above could not tell


def test_an_unchanged_loss_leaves_the_steps_as_they_are_where_saturation_is_ruled_out() -> None:
    assert steps(adapted(AdaComm(7, interval=1.0, gamma=1.0), 5, lr=1e-12)) == [7] * 5


def test_a_quarter_of_the_loss_halves_the_steps() -> None:
    lr = 0.75 * 100.0 / 9.125  # the mean loss is y - 1.5 lr in the first round, y - 9.5 lr in the third
    found = adapted(AdaComm(4, interval=3.0, gamma=1.0), 4, lr)
    losses = [line["train_loss"] for line in found.history]
    assert math.isclose(losses[2], losses[0] / 4)
    assert steps(found) == [4, 4, 4, 2]
    assert AdaComm(5).period(5, 0.25, 1.0) == 3  # rounded up
    assert AdaComm(4).period(4, 0.25 * (1 + 1e-12), 1.0) == 2  # but not for a rounding error


def test_a_loss_near_zero_leaves_one_step() -> None:
    found = adapted(AdaComm(10, interval=1.0, gamma=1.0), 4, lr=0.4, given=line_task(loss="mse"))
    assert steps(found) == [10, 10, 1, 1]


def test_steps_that_would_not_fall_are_cut_by_gamma_and_never_below_one() -> None:
    assert steps(adapted(AdaComm(10, interval=1.0), 7, lr=1e-12)) == [10, 10, 5, 3, 2, 1, 1]


def test_a_rising_loss_never_raises_the_steps() -> None:
    found = steps(adapted(AdaComm(8, interval=1.0), 6, lr=1.5, given=line_task(loss="mse")))
    assert found == sorted(found, reverse=True)
    assert found[-1] == 1


def test_a_rate_of_zero_counts_as_saturation() -> None:
    assert steps(adapted(AdaComm(8, interval=1.0), 5, schedule=Cosine(rounds=2)))[-2:] == [2, 1]


def test_the_steps_change_only_when_the_interval_of_simulated_time_is_over() -> None:
    assert steps(adapted(AdaComm(8, interval=2.5), 7, lr=1e-12)) == [8, 8, 8, 4, 4, 2, 2]


def test_a_first_loss_of_zero_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"adacomm needs a positive loss in the first round to compare with, got 0\.0"
    ):
        adapted(AdaComm(4), 2, given=line_task(y=0.0))


def test_an_empty_round_is_no_loss_to_go_by() -> None:
    nobody = adapted(AdaComm(8, interval=1.0), 5, lr=1e-12, absent=lambda party, round: round == 0)
    assert steps(nobody) == [8, 8, 8, 4, 2]


@dataclass(frozen=True)
class Quiet(Wrapper):
    """The inner op's reply without its metrics."""

    inner: Op
    name: ClassVar[str] = "quiet"

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        return Reply(reply.tensors, reply.weight), memory


class Hiding:
    """A sum without the training loss."""

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
        assert ask.op is not None
        answer = await fed.gather(Quiet(ask.op), ask.payload, parties=ask.parties, each=ask.each)
        return Reduced({"w": answer.rows("w").sum(0)}, len(answer.parties), len(answer.parties))


def test_a_pace_that_goes_by_a_hidden_loss_is_refused_and_others_are_not() -> None:
    with pytest.raises(ConfigError, match=r"'adacomm' needs the parties' training loss, which is hidden here"):
        adapted(AdaComm(3), 2, protocol=Hiding())
    plain, hidden = (adapted(Random(1, 9), 3, protocol=protocol).state.params.w for protocol in (None, Hiding()))
    assert torch.allclose(plain, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_each_party_draws_its_epochs_anew_in_each_round(engine: str) -> None:
    parties, rounds = 30, 10
    before, drawn = torch.zeros(parties, dtype=torch.float64), []
    algorithm = hansa.FedAvg(local=SGD(lr=1.0, batch=None), fusion=WeightedMean(uniform=True))
    for round in range(rounds):
        done = hansa.simulate(algorithm, own_task(parties), rounds=round + 1, pace=Random(2, 5), engine=engine)
        drawn.append((done.state.params.w - before) * parties)
        before = done.state.params.w
    epochs = torch.stack(drawn).round()
    assert torch.allclose(torch.stack(drawn), epochs, atol=1e-9)
    counts = torch.tensor([int((epochs == e).sum()) for e in range(2, 6)])
    n = parties * rounds
    assert int(counts.sum()) == n  # 2..5, both ends included
    deviation = math.sqrt(n * 0.25 * 0.75)
    assert bool(((counts - n / 4).abs() < 4 * deviation).all())
    assert len({tuple(row.tolist()) for row in epochs}) == rounds
    assert len({tuple(column.tolist()) for column in epochs.T}) == parties


@pytest.mark.slow
def test_what_a_party_draws_depends_on_nobody_else() -> None:
    pace = Random(1, 1000)
    algorithm = hansa.FedAvg(local=SGD(lr=1.0, batch=None), fusion=WeightedMean(uniform=True))

    def moved(seed: int = 0, **more: Any) -> torch.Tensor:
        return hansa.simulate(algorithm, own_task(5), rounds=1, pace=pace, seed=seed, **more).state.params.w

    whole, alone = moved() * 5, moved(absent=lambda party, round: party != 3)
    assert torch.allclose(whole[3], alone[3])
    assert not torch.allclose(moved(seed=1) * 5, whole)


def one_step_more(algorithm: hansa.Algorithm, folder: Path, stop: int, **settings: Any) -> hansa.Result:
    """A run that is stopped at the end of a round and resumed."""

    class Stop(BaseException):
        pass

    def watch(line: dict[str, Any]) -> None:
        if line["round"] == stop:
            raise Stop

    whole = {**settings, "run_dir": folder, "checkpoint_seconds": 0.0}
    with pytest.raises(Stop):
        hansa.simulate(algorithm, line_task(parties=4), on_round=watch, **whole)
    return hansa.simulate(algorithm, line_task(parties=4), resume=True, **whole)


LOCAL = SGD(lr=0.3, batch=None)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("algorithm", "pace"),
    [
        (hansa.FedAvg(local=LOCAL), AdaComm(9, interval=2.0)),
        (hansa.FedAvg(local=LOCAL), Random(1, 6)),
        (hansa.FedBuff(local=LOCAL, buffer=2), AdaComm(9, interval=2.0)),
        (hansa.FedBuff(local=LOCAL, buffer=2), Random(1, 6)),
        (hansa.DecentralizedSGD(local=LOCAL), AdaComm(9, interval=2.0)),
    ],
    ids=lambda part: part.name,
)
def test_a_resumed_run_keeps_its_pace_to_the_bit(algorithm: hansa.Algorithm, pace: Pace, tmp_path: Path) -> None:
    settings = {"rounds": 7, "pace": pace, "engine": "reference"}
    straight = hansa.simulate(algorithm, line_task(parties=4), **settings)
    for stop in (1, 3, 4):
        resumed = one_step_more(algorithm, tmp_path / str(stop), stop, **settings)
        for a, b in zip(straight.history, resumed.history, strict=True):
            assert {**a, "seconds": 0} == {**b, "seconds": 0}
        assert torch.equal(straight.state.params.w, resumed.state.params.w)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Random(0, 3), "least must be at least 1, got 0"),
        (lambda: Random(4, 3), "expected least <= most, got least = 4"),
        (lambda: AdaComm(0), "tau0 must be at least 1"),
        (lambda: AdaComm(3, interval=0.0), "interval must be above 0"),
        (lambda: AdaComm(3, gamma=0.0), "gamma must be above 0 and at most 1"),
        (lambda: AdaComm(3, gamma=1.5), "gamma must be above 0 and at most 1"),
    ],
)
def test_impossible_paces_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()
