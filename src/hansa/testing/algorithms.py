"""The conformance suite that every registered algorithm passes.

It runs an algorithm on a small task and checks what every algorithm promises: the engines agree; parties in separate
processes, which have neither the server object nor the algorithm's state, give the bits of the reference engine; a
second run and a resumed run give the same bits; a missing party gives a defined result or a named error; messages
survive the codec; the state survives a round trip through its tree; where an op leaves sizes open, a party that sends
empty tensors or too large ones does not stop the run.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator
from typing import Any

import torch

from hansa.core.algorithm import Algorithm, State
from hansa.core.ask import Ask, op_config, op_of
from hansa.core.plain_data import from_config, to_config
from hansa.core.runtime import Request
from hansa.experiment.config import Experiment
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.plumbing.forking import fork_obstacle
from hansa.replies.journal import Journal
from hansa.run.loop import Training
from hansa.run.result import Result
from hansa.run.simulate import simulate
from hansa.sim.workers import usable
from hansa.testing.arrivals import RecordedArrivals, simulated_again
from hansa.testing.experiments import close, experiment_for, finite, measured, published, same_bits, simulated
from hansa.testing.open_sizes import check_open_sizes
from hansa.testing.pools import NetworkPool, PartyPool, history_on, run_on
from hansa.testing.processes import ProcessRuntime


def check_algorithm(algorithm: Algorithm, pool: PartyPool | None = None, network: NetworkPool | None = None) -> None:
    """Raise AssertionError with the promise that an algorithm breaks.

    `pool` has party processes to use again. `network` is a federation on which the algorithm is checked too.
    """
    reference = check_engines(algorithm)
    check_replay(algorithm, reference)
    check_missing_party(algorithm)
    check_codec(algorithm)
    check_open_sizes(algorithm)
    check_processes(algorithm, reference, pool)
    if network is not None:
        check_network(algorithm, network)


def check_engines(algorithm: Algorithm, **run: Any) -> Result:
    """Check that the engines agree; return the result of the reference engine.

    In float64 the stacked engine agrees to 1e-9 in state, metrics and bytes; worker processes agree bit for bit. Over
    columns there is the reference engine alone, and the others are refused. `run` replaces fields of the `[run]` table,
    here and in the other checks.
    """
    experiment = experiment_for(algorithm, **run)
    reference = simulated(experiment, engine="reference")
    if algorithm.data == "columns":
        _check_complete(algorithm, reference)
        return reference
    stacked = simulated(experiment, engine="stacked")
    name = algorithm.name
    assert close(published(reference), published(stacked), 1e-9), f"{name}: the engines disagree by more than 1e-9"
    if usable(torch.device("cpu")) and fork_obstacle() is None:
        workers = simulated(experiment, engine="workers")
        assert same_bits(published(reference), published(workers)), f"{name}: worker processes and the reference differ"
    for a, b in zip(reference.history, stacked.history, strict=True):
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"]), (
            f"{name}: engines count different bytes"
        )
    _check_complete(algorithm, reference)
    return reference


def _check_complete(algorithm: Algorithm, result: Result) -> None:
    name = algorithm.name
    for line in result.history:
        assert "empty" not in line, f"{name}: round {line['round']} was empty: {line['empty']}"
    assert finite(published(result)), f"{name}: the final state is not finite"


def check_replay(algorithm: Algorithm, reference: Result, **run: Any) -> None:
    """Check that a plan gives the same bits twice, and when it is resumed after any round."""
    experiment = experiment_for(algorithm, **run)
    again = simulated(experiment, engine="reference")
    assert same_bits(published(reference), published(again)), f"{algorithm.name}: two runs of one plan differ"

    class Stop(BaseException):
        pass

    rounds = len(reference.history)
    for stop_after in range(1, rounds):
        with tempfile.TemporaryDirectory() as folder:

            def stop(line: dict[str, Any], at: int = stop_after) -> None:
                if line["round"] == at:
                    raise Stop

            task = experiment.build_task()
            settings = {**experiment.settings(), "engine": "reference", "checkpoint_seconds": 0.0}
            path = f"{folder}/run"
            with contextlib.suppress(Stop):
                simulate(algorithm, task, run_dir=path, on_round=stop, **settings)
            resumed = simulate(algorithm, experiment.build_task(), run_dir=path, resume=True, **settings)
        name = algorithm.name
        assert same_bits(published(reference), published(resumed)), f"{name}: resumed after {stop_after}, bits differ"
        memories = [{str(p): m for p, m in sorted(r.memories.items())} for r in (reference, resumed)]
        assert same_bits(*memories), f"{name}: party memories differ after a resume"


def check_missing_party(algorithm: Algorithm) -> None:
    """Check that a party that never replies leads to a result or a named error."""
    try:
        result = simulated(experiment_for(algorithm), absent=lambda party, round: party == 1, engine="reference")
    except (ConfigError, PartyError):
        return
    names = [set(line.get("missing", {})) for line in result.history]
    assert any(names), f"{algorithm.name}: a missing party was not reported"
    assert finite(published(result))


def check_codec(algorithm: Algorithm) -> None:
    """Check that configuration, state, asks and payloads survive encoding."""
    name = algorithm.name
    assert from_config("algorithm", to_config(algorithm), "check") == algorithm, f"{name}: configuration changes"
    experiment = experiment_for(algorithm)
    task = experiment.build_task()
    objective = Objective(task.model, task.loss, experiment.run.seed, bf16=experiment.run.precision == "bf16")
    training = Training(algorithm, task, experiment.run, objective, task.holdings(objective))
    state = training.state.tree()
    assert same_bits(State.of_tree(codec.decode(codec.encode(state))).tree(), state), (
        f"{name}: state does not round-trip"
    )

    def watch(run: Generator[Request, Any, Any]) -> Generator[Request, Any, Any]:
        answer: Any = None
        try:
            request = next(run)
            while True:
                if isinstance(request, Ask) and request.op is not None:
                    party = request.parties[0]
                    message = request.message(party)
                    back = codec.decode(codec.encode(message))
                    assert same_bits(message, back), f"{name}: the payload of {request.verb} changes on the wire"
                    assert codec.size(message) == len(codec.encode(message)), f"{name}: bytes are miscounted"
                    op = op_of(back["op"], "check")
                    assert op_config(op) == op_config(request.op), (
                        f"{name}: the op {request.op.name} changes on the wire"
                    )
                answer = yield request
                request = run.send(answer)
        except StopIteration as done:
            return done.value

    original = Training.steps
    try:
        Training.steps = lambda self: watch(original(self))  # type: ignore[method-assign]
        simulated(experiment, engine="reference")
    finally:
        Training.steps = original  # type: ignore[method-assign]


def check_processes(algorithm: Algorithm, reference: Result, pool: PartyPool | None = None, **run: Any) -> None:
    """Check that parties in separate processes give the reference's bits, and so does a replay of their replies."""
    own = pool or PartyPool()
    try:
        own.call(_check_processes(experiment_for(algorithm, **run), reference, own.runtime))
    finally:
        if pool is None:
            own.close()


async def _check_processes(experiment: Experiment, reference: Result, runtime: ProcessRuntime) -> None:
    journal, name = Journal(), experiment.algorithm.name
    first, history = await history_on(experiment, runtime, journal)
    assert same_bits(published(reference), first.tree()), f"{name}: separate processes and the reference differ"
    if experiment.algorithm.data == "columns":
        assert measured(reference.history) == measured(history), f"{name}: separate processes have other metrics"
    total = len(journal)
    for count in (total, total // 2):
        again = await run_on(experiment, runtime, journal.head(count))
        assert same_bits(published(reference), again.tree()), f"{name}: a replay of {count} of {total} answers differs"


def check_network(algorithm: Algorithm, pool: NetworkPool, **run: Any) -> None:
    """Check that a deployed job saves the reference's model, to the last bit.

    Over columns the parts of a model stay at the parties, so the metrics of all rounds are compared too.
    An asynchronous method is compared with a reference whose tickets complete in the order recorded by the aggregator.
    """
    assert algorithm.data == pool.data, f"{algorithm.name}: give it a NetworkPool(folder, data={algorithm.data!r})"
    experiment = experiment_for(algorithm, **run)
    job, model = pool.run(experiment)
    if "submit" not in algorithm.verbs:
        result = simulated(experiment, engine="reference")
        reference = result.saved_model()
        if algorithm.data == "columns":
            assert measured(result.history) == measured(pool.history), f"{algorithm.name}: the network's metrics differ"
    else:
        arrivals = RecordedArrivals(pool.federation.folder / "state" / "hansa.db", job)
        reference = simulated_again(experiment, arrivals)
    assert same_bits(reference, model), f"{algorithm.name}: the network and the reference differ"
