"""Parties in separate processes: the contract that a network runtime fulfils."""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hansa
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.round_record import Record
from hansa.core.runtime import Commit, Open, complete_async
from hansa.experiment.config import Experiment, parse
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import AlgorithmError, ReplayError, RoundAborted
from hansa.replies.journal import Journal
from hansa.run.loop import Training
from hansa.secure import Masking
from hansa.testing import PARTIES, TREE, PartyPool, experiment_for, history_on, run_on, same_bits
from in_loop import in_loop


def cnn_tree(model: Any) -> dict[str, Any]:
    return {
        "task": {"dataset": "digits", "model": model},
        "partition": {"name": "dirichlet", "parties": PARTIES, "alpha": 0.5, "min_size": 10},
        "algorithm": {"name": "fedavg", "local": {"name": "sgd", "batch": 16}},
        "run": {"rounds": 2, "seed": 5, "engine": "reference", "cohort": 0.5},
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", ["2nn", "cnn", "resnet-gn"])
def test_processes_and_the_reference_engine_give_the_same_float32_bits(pool: PartyPool, model: str) -> None:
    experiment = parse(cnn_tree(model))
    reference = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    state = pool.call(run_on(experiment, pool.runtime))
    assert same_bits(reference.state.tree(), state.tree())


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        hansa.FedAvg(local=hansa.SGD(epochs=4)),
        hansa.DecentralizedSGD(),
        hansa.FedBuff(local=hansa.SGD(epochs=4), buffer=2),
    ],
    ids=lambda a: a.name,
)
def test_simulated_devices_do_to_processes_what_they_do_to_a_simulation(
    pool: PartyPool, algorithm: hansa.Algorithm
) -> None:
    devices = {
        "compute": "exponential", "speed": "lognormal", "bandwidth": {"name": "exponential", "mean": 1000.0},
        "availability": {"name": "bernoulli", "p": 0.8}, "dropout": 0.4, "stragglers": 0.5,
    }  # fmt: skip
    deadline = None if algorithm.participation == "own" else 12.0
    experiment = experiment_for(algorithm, devices=devices, deadline=deadline, rounds=8, engine="reference")
    simulated = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    state, history = pool.call(history_on(experiment, pool.runtime))
    assert same_bits(simulated.state.tree(), state.tree())
    told = ("simulated_seconds", "replies", "missing", "bytes_up", "bytes_down", "empty")
    for one, other in zip(simulated.history, history, strict=True):
        assert {name: one.get(name) for name in told} == {name: other.get(name) for name in told}
    assert any("missing" in line for line in history)


@pytest.mark.slow
def test_killed_parties_are_missing_and_the_others_go_on_between_the_exchanges_of_a_masked_sum_too() -> None:
    own = PartyPool()
    try:
        experiment = experiment_for(hansa.FedAvg())
        own.call(own.runtime.begin(experiment.tree))
        rounds = itertools.count()

        async def counted(protocol: Masking | None = None, parties: Sequence[int] = range(PARTIES),
                          doomed: tuple[str, int] | None = None) -> tuple[Any, Record]:  # fmt: skip
            """The parties' moments; one party is killed when an exchange begins."""
            record, round = Record(), next(rounds)
            await own.runtime.answer(Open(round, record))
            fed = Federation(range(PARTIES), round, 0, len(parties), protocol=protocol)
            payload = {"centre": torch.zeros(30, dtype=torch.float64)}
            op = hansa.build("op", "column-moments")

            async def answer(ask: Any) -> Any:
                if doomed is not None and ask.op.name == doomed[0]:
                    own.runtime.parties[doomed[1]].kill()
                return await own.runtime.answer(ask)

            found = await complete_async(drive(fed.reduce(op, payload, parties=parties), "test"), answer)
            await own.runtime.answer(Commit(round))
            return found, record

        masking = Masking(threshold=0.51, active=False)
        without, record = own.call(counted(masking, doomed=("secure-masked", 2)))
        plain, missing = own.call(counted())
        assert plain.count == PARTIES - 1
        assert missing.missing == record.missing == {2: "its process has ended"}
        with_it, _ = own.call(counted(masking, (0, 1, 3), doomed=("secure-unmask", 1)))
        for answer in (without, with_it):
            assert answer.count == 3
            assert torch.equal(answer.sums["count"], plain.sums["count"])
            assert torch.allclose(answer.sums["sum"], plain.sums["sum"], atol=1e-4)
        with pytest.raises(RoundAborted, match="1 parties shared their secrets, and the secure sum needs 2"):
            own.call(counted(masking, (0, 3), doomed=("secure-shares", 3)))
    finally:
        own.close()


@pytest.mark.slow
def test_a_replay_under_another_configuration_fails_loudly(pool: PartyPool) -> None:
    journal = Journal()
    pool.call(run_on(experiment_for(hansa.FedAvg()), pool.runtime, journal))
    with pytest.raises(ReplayError):
        pool.call(run_on(experiment_for(hansa.FedAvg(local=hansa.SGD(lr=0.2))), pool.runtime, journal))


async def trained(experiment: Experiment, pool: PartyPool) -> Training:
    """A whole run over the pool's processes; tickets arrive in the order of completion."""
    await pool.runtime.begin(experiment.tree)
    task = experiment.build_task()
    objective = Objective(task.model, task.loss, experiment.run.seed)
    training = Training(experiment.algorithm, task, experiment.run, objective, task.holdings(objective))
    await complete_async(training.steps(), pool.runtime.answer)
    return training


@pytest.mark.slow
def test_bytes_are_counted_as_in_simulation(pool: PartyPool) -> None:
    experiment = experiment_for(hansa.DecentralizedSGD())
    simulated = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    progress = pool.call(trained(experiment, pool)).progress
    assert (progress.bytes_up, progress.bytes_down) == (simulated.summary["bytes_up"], simulated.summary["bytes_down"])


def test_asynchronous_tickets_arrive_without_a_simulated_clock(pool: PartyPool) -> None:
    experiment = experiment_for(hansa.FedBuff(buffer=3), cohort=0.5)

    training = pool.call(trained(experiment, pool))
    assert [line["replies"] for line in training.history] == [3, 3, 3]
    assert training.history[-1]["loss"] < 0.69


@in_loop
async def test_a_cancellation_that_the_algorithm_swallows_is_noticed() -> None:
    async def stubborn(fed: Federation) -> None:
        with contextlib.suppress(BaseException):
            await fed.gather(hansa.build("op", "sample-count"))
        await fed.gather(hansa.build("op", "sample-count"))

    async def never(_: Any) -> Any:
        await asyncio.sleep(60)

    fed = Federation(range(2), 0, 0, 2)
    task = asyncio.create_task(complete_async(drive(stubborn(fed), "stubborn"), never))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(AlgorithmError, match="stubborn swallowed the end of its round"):
        await task


def test_the_task_tree_of_the_suite_is_a_valid_experiment() -> None:
    assert parse({**TREE, "algorithm": "fedavg"}).run.rounds == 3
