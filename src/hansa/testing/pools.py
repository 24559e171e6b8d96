"""Parties that stay for several checks: processes on pipes, and a federation on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hansa.core.algorithm import State
from hansa.core.plain_data import from_config
from hansa.core.runtime import complete_async
from hansa.experiment.config import Experiment, parse
from hansa.experiment.tasks import divide, load_data, set_aside
from hansa.net.aggregator.federation import init
from hansa.net.local import all_run, free_port, processes
from hansa.net.operator import Operator
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.determinism import deterministic
from hansa.replies.journal import Journal
from hansa.run.loop import Training
from hansa.testing.experiments import COLUMN_TREE, PARTIES, TREE
from hansa.testing.processes import ProcessRuntime

PARTY_COMMAND = [sys.executable, "-m", "hansa.testing.party_process"]


class PartyPool:
    """Party processes that stay for several checks, driven by an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.runtime = ProcessRuntime(PARTIES, PARTY_COMMAND)
        self.call(self.runtime.__aenter__())

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the pool's event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the processes."""
        self.call(self.runtime.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def run_on(experiment: Experiment, runtime: ProcessRuntime, journal: Journal | None = None) -> State:
    """Run an experiment's algorithm with parties in other processes, in simulated time; return the final state."""
    return (await history_on(experiment, runtime, journal))[0]


async def history_on(experiment: Experiment, runtime: ProcessRuntime,
                     journal: Journal | None = None) -> tuple[State, list[dict[str, Any]]]:  # fmt: skip
    """As `run_on`; return the final state and the metrics line of each round."""
    experiment.check(deployed=True)
    with deterministic("cpu"):
        task = experiment.build_task()
        objective = Objective(task.model, task.loss, experiment.run.seed, bf16=experiment.run.precision == "bf16")
        holdings = task.holdings(objective)
        clock = experiment.run.clock(holdings)
        runtime.rules = experiment.run.rules(objective.spec)
        await runtime.begin(experiment.tree, experiment.folder, journal, clock)
        training = Training(experiment.algorithm, task, experiment.run, objective, holdings, clock=clock)
        return await complete_async(training.steps(), runtime.answer), training.history


def party_samples() -> tuple[Tensor, Tensor]:
    """The samples of one party of a `NetworkPool`; the environment has the party's number."""
    experiment = parse(TREE)
    data, _ = set_aside(load_data(experiment), TREE["task"]["trusted"], TREE["run"]["seed"], "trusted")
    pair: tuple[Tensor, Tensor] = divide(data, experiment)[0][int(os.environ["HANSA_TESTING_PARTY"])]
    return pair


def party_columns() -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """The training and test rows of one party of a `NetworkPool` over columns, with their ids."""
    dataset: Any = from_config("dataset", COLUMN_TREE["task"]["dataset"], where="dataset")
    partition: Any = from_config("partition", COLUMN_TREE["partition"], where="partition")
    parts, party = partition.divide(dataset.load(), COLUMN_TREE["run"]["seed"]), int(os.environ["HANSA_TESTING_PARTY"])
    return (*parts.parties[party], parts.ids[party]), (*parts.tests[party], parts.test_ids[party])


class NetworkPool:
    """A federation on loopback that stays for several checks.

    The aggregator and each party are processes of their own, connected over mutual TLS. `data` says whether they hold
    rows, or columns of the same people.
    """

    def __init__(self, folder: Path, data: Literal["rows", "columns"] = "rows") -> None:
        self.data, self.history = data, list[dict[str, Any]]()
        names = [f"p{number}" for number in range(PARTIES)]
        self.federation = init(folder / "federation", "conformance", names, ["localhost"], free_port())
        commands: list[tuple[str, list[str], dict[str, str]]] = [
            ("aggregator", ["serve", str(folder / "federation")], {})
        ]
        for number, name in enumerate(names):
            token = folder / "federation" / "tokens" / f"{name}.token"
            source = "hansa.testing:party_columns" if data == "columns" else "hansa.testing:party_samples"
            if data == "columns":
                (folder / name).mkdir()
                (folder / name / "party.toml").write_text("matches = 1000\nfuzzy = true\n")
            words = ["join", self.federation.url, "--token-file", str(token), "--data", source,
                     "--state", str(folder / name)]  # fmt: skip
            commands.append((name, words, {"HANSA_TESTING_PARTY": str(number)}))
        self._running = contextlib.ExitStack()
        self._processes = self._running.enter_context(processes(commands, folder))
        self.operator = Operator(self.federation)
        self.operator.wait_until_served(check=lambda: all_run(self._processes, folder))
        self.folder = folder

    def run(self, experiment: Experiment) -> tuple[str, dict[str, Any]]:
        """Run an experiment as a job to its end; return the job's name and its saved model.

        `history` has the metrics lines of its rounds.
        """
        self.history.clear()
        job, _ = self.operator.submit(experiment, experiment.algorithm.name)
        ended = self.operator.wait(job, self.history.append, check=lambda: all_run(self._processes, self.folder))
        assert ended["status"] == "finished", f"{experiment.algorithm.name}: {ended['reason']}"
        return job, codec.decode(self.operator.pull(job, self.folder / "model").read_bytes())

    def close(self) -> None:
        """End the aggregator and the parties."""
        self._running.close()
