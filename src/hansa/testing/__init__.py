"""The conformance suite that every registered algorithm must pass.

    from hansa.testing import check_algorithm
    check_algorithm(MyAlgorithm())

It runs the algorithm on a small embedded task and checks what every algorithm promises: the engines agree, separate
processes that have neither the server object nor the algorithm's state give the reference's bits, a second run and
a resumed one give the same bits, a missing party gives a defined result or a named error, what travels survives the
codec, and the state round-trips.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.algorithm import Algorithm, State
from hansa.core.determinism import deterministic, threads
from hansa.core.errors import ConfigError, PartyError
from hansa.core.federation import Ask, op_config, op_of
from hansa.core.journal import Journal
from hansa.core.objective import Objective
from hansa.core.registry import from_config, to_config
from hansa.core.runtime import Plan, Request, complete, complete_async
from hansa.experiment.config import Experiment, parse
from hansa.experiment.tasks import divide, keep_trusted, load_data
from hansa.net.aggregator.federation import init
from hansa.net.local import all_run, free_port, processes
from hansa.net.operator import Operator
from hansa.run.loop import Training
from hansa.run.result import Result
from hansa.run.simulate import simulate
from hansa.sim.engine import ReferenceEngine
from hansa.sim.runtime import Simulation
from hansa.sim.workers import usable
from hansa.testing.processes import ProcessRuntime

PARTIES = 4
TREE: dict[str, Any] = {
    "task": {"dataset": "breast-cancer", "model": "logistic", "prepare": "standardise", "party_test": 0.2,
             "dtype": "float64", "trusted": 40},
    "partition": {"name": "quantity", "parties": PARTIES, "alpha": 1.0, "min_size": 20},
    "run": {"rounds": 3, "seed": 3,
            "devices": {"compute": {"name": "exponential", "mean": 0.1}, "latency": "exponential"}},
}  # fmt: skip
PARTY_COMMAND = [sys.executable, "-m", "hansa.testing.party_process"]


def experiment_for(algorithm: Algorithm, **run: Any) -> Experiment:
    """The suite's task under an algorithm."""
    return parse({**TREE, "algorithm": to_config(algorithm), "run": {**TREE["run"], **run}})


def _simulate(experiment: Experiment, **more: Any) -> Result:
    return simulate(experiment.algorithm, experiment.build_task(), **{**experiment.settings(), **more})


def leaves(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [leaf for value in values for leaf in leaves(value)]


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the last bit."""
    return codec.encode(a) == codec.encode(b)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=0, atol=tolerance) for x, y in pairs)


def published(result: Result) -> dict[str, Any]:
    return result.state.tree()


class PartyPool:
    """Party processes that stay for several checks, on an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.runtime = ProcessRuntime(PARTIES, PARTY_COMMAND)
        self.call(self.runtime.__aenter__())

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the pool's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.call(self.runtime.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def party_samples() -> tuple[Tensor, Tensor]:
    """The share of the suite's samples that the party named in the environment brings to a network."""
    experiment = parse(TREE)
    data, _ = keep_trusted(load_data(experiment), TREE["task"]["trusted"], TREE["run"]["seed"])
    pair: tuple[Tensor, Tensor] = divide(data, experiment)[0][int(os.environ["HANSA_TESTING_PARTY"])]
    return pair


class NetworkPool:
    """A federation on loopback that stays for several checks: an aggregator and parties, each a process of its own,
    over mutual TLS."""

    def __init__(self, folder: Path) -> None:
        names = [f"p{number}" for number in range(PARTIES)]
        self.federation = init(folder / "federation", "conformance", names, ["localhost"], free_port())
        commands: list[tuple[str, list[str], dict[str, str]]] = [
            ("aggregator", ["serve", str(folder / "federation")], {})
        ]
        for number, name in enumerate(names):
            token = folder / "federation" / "tokens" / f"{name}.token"
            words = ["join", self.federation.url, "--token-file", str(token), "--data", "hansa.testing:party_samples",
                     "--state", str(folder / name)]  # fmt: skip
            commands.append((name, words, {"HANSA_TESTING_PARTY": str(number)}))
        self._running = contextlib.ExitStack()
        self._processes = self._running.enter_context(processes(commands, folder))
        self.operator = Operator(self.federation)
        self.operator.wait_until_served()
        self.folder = folder

    def run(self, experiment: Experiment) -> tuple[str, dict[str, Any]]:
        """Run an experiment to its end: what its job is called, and the model that it saved."""
        job, _ = self.operator.submit(experiment, experiment.algorithm.name.replace("+", "-plus"))
        ended = self.operator.wait(job, check=lambda: all_run(self._processes, self.folder))
        assert ended["status"] == "finished", f"{experiment.algorithm.name}: {ended['reason']}"
        return job, codec.decode(self.operator.pull(job, self.folder / "model").read_bytes())

    def close(self) -> None:
        self._running.close()


class RecordedArrivals:
    """Simulated time in which tickets come back in the order in which a deployed job's did, and those parties are
    available in a round that were."""

    def __init__(self, database: Path, job: str) -> None:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
            asks = db.execute("SELECT round, number, parties, closed FROM asks WHERE job = ? AND phase = 'round' "
                              "ORDER BY round, number", (job,)).fetchall()  # fmt: skip
            here = db.execute("SELECT round, closed FROM asks WHERE job = ? AND phase = 'present'", (job,)).fetchall()
        submitted = [(round, number) for round, number, parties, _ in asks if parties != "[]"]
        came = [json.loads(closed)["ticket"] for _, _, parties, closed in asks if parties == "[]"]
        self._when = {submitted[ticket]: place + 1.0 for place, ticket in enumerate(came)}
        self._here = {round: json.loads(found) for round, found in here}
        self.now = 0.0

    def available(self, round: int) -> list[int]:
        found: list[int] = self._here[round]
        return found

    def wait(self) -> None:
        raise AssertionError("somebody was there in every round")

    def plan(self, ask: Ask) -> Plan:
        when = self._when.get((ask.round, ask.index), math.inf) if ask.verb == "submit" else self.now
        return Plan(when - self.now)


def check_network(algorithm: Algorithm, pool: NetworkPool) -> None:
    """Parties across a network give the reference's bits: to the model file, which is compared as a whole. An
    asynchronous method is compared with the reference in which tickets come back in the order in which they did."""
    experiment = experiment_for(algorithm)
    job, model = pool.run(experiment)
    if "submit" not in algorithm.verbs:
        reference = _simulate(experiment, engine="reference").saved_model()
    else:
        reference = _in_recorded_order(experiment, RecordedArrivals(pool.federation.folder / "state" / "hansa.db", job))
    assert same_bits(reference, model), f"{algorithm.name}: the network and the reference differ"


def _in_recorded_order(experiment: Experiment, clock: RecordedArrivals) -> dict[str, Any]:
    with deterministic("cpu"), threads(1):
        task, run = experiment.build_task(), experiment.run
        objective = Objective(task.model, task.loss, run.seed)
        holdings = task.holdings(objective)
        runtime = Simulation(ReferenceEngine(objective, holdings, run.seed), run.rules(objective.spec), clock)
        training = Training(experiment.algorithm, task, run, objective, holdings, clock=clock)
        state = complete(training.steps(), runtime.answer)
    return Result(training, state, {}, None).saved_model()


def check_algorithm(algorithm: Algorithm, pool: PartyPool | None = None, network: NetworkPool | None = None) -> None:
    """Raise AssertionError with the promise that is broken. `pool` reuses party processes that already run; `network`
    is a federation over which the algorithm is checked too, unless it cannot run over one."""
    reference = check_engines(algorithm)
    check_replay(algorithm, reference)
    check_missing_party(algorithm)
    check_codec(algorithm)
    check_processes(algorithm, reference, pool)
    if network is not None and "exchange" not in algorithm.verbs:
        check_network(algorithm, network)


def check_engines(algorithm: Algorithm) -> Result:
    """The stacked engine agrees with the reference to 1e-9 in float64, metrics and bytes too; workers bit for bit."""
    experiment = experiment_for(algorithm)
    reference = _simulate(experiment, engine="reference")
    stacked = _simulate(experiment, engine="stacked")
    name = algorithm.name
    assert _close(published(reference), published(stacked), 1e-9), f"{name}: the engines disagree by more than 1e-9"
    if usable(torch.device("cpu")):
        workers = _simulate(experiment, engine="workers")
        assert same_bits(published(reference), published(workers)), f"{name}: worker processes and the reference differ"
    for a, b in zip(reference.history, stacked.history, strict=True):
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"]), (
            f"{name}: engines count other bytes"
        )
        assert "empty" not in a, f"{name}: round {a['round']} was empty: {a['empty']}"
    assert all(bool(torch.isfinite(t).all()) for t in leaves(published(reference)) if t.is_floating_point()), (
        f"{name}: the final state is not finite"
    )
    return reference


def check_replay(algorithm: Algorithm, reference: Result) -> None:
    """The same plan gives the same bits twice, and after a stop at any round's end."""
    experiment = experiment_for(algorithm)
    again = _simulate(experiment, engine="reference")
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
        kept = [{str(p): m for p, m in sorted(r.memories.items())} for r in (reference, resumed)]
        assert same_bits(*kept), f"{name}: party memories differ after a resume"


def check_missing_party(algorithm: Algorithm) -> None:
    """One party that never answers: a result, or a named error."""
    try:
        result = _simulate(experiment_for(algorithm), absent=lambda party, round: party == 1, engine="reference")
    except (ConfigError, PartyError):
        return
    names = [set(line.get("missing", {})) for line in result.history]
    assert any(names), f"{algorithm.name}: a missing party was not reported"
    assert all(bool(torch.isfinite(t).all()) for t in leaves(published(result)) if t.is_floating_point())


def check_codec(algorithm: Algorithm) -> None:
    """Configuration, state, asks and payloads survive encoding."""
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
        _simulate(experiment, engine="reference")
    finally:
        Training.steps = original  # type: ignore[method-assign]


def check_processes(algorithm: Algorithm, reference: Result, pool: PartyPool | None = None) -> None:
    """Parties in processes of their own, which have no server object, give the reference's bits; so does a replay."""
    own = pool or PartyPool()
    try:
        own.call(_check_processes(algorithm, reference, own.runtime))
    finally:
        if pool is None:
            own.close()


async def _check_processes(algorithm: Algorithm, reference: Result, runtime: ProcessRuntime) -> None:
    experiment, journal, name = experiment_for(algorithm), Journal(), algorithm.name
    first = await run_on(experiment, runtime, journal)
    assert same_bits(published(reference), first.tree()), f"{name}: separate processes and the reference differ"
    whole = len(journal)
    for kept in (whole, whole // 2):
        again = await run_on(experiment, runtime, journal.head(kept))
        assert same_bits(published(reference), again.tree()), f"{name}: a replay of {kept} of {whole} answers differs"


async def run_on(experiment: Experiment, runtime: ProcessRuntime, journal: Journal | None = None) -> State:
    """Run an experiment's algorithm over parties in other processes, in simulated time."""
    return (await history_on(experiment, runtime, journal))[0]


async def history_on(experiment: Experiment, runtime: ProcessRuntime,
                     journal: Journal | None = None) -> tuple[State, list[dict[str, Any]]]:  # fmt: skip
    """As `run_on`, with an entry a round beside the state."""
    experiment.check_deployed()
    with deterministic("cpu"):
        task = experiment.build_task()
        objective = Objective(task.model, task.loss, experiment.run.seed, bf16=experiment.run.precision == "bf16")
        holdings = task.holdings(objective)
        clock = experiment.run.clock(holdings)
        await runtime.begin(experiment.tree, experiment.folder, journal, clock)
        training = Training(experiment.algorithm, task, experiment.run, objective, holdings, clock=clock)
        return await complete_async(training.steps(), runtime.answer), training.history
