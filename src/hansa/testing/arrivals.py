"""Simulate a job again with the arrivals that its aggregator recorded."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

from hansa.core.ask import Ask
from hansa.core.runtime import Plan, complete
from hansa.experiment.config import Experiment
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import deterministic, threads
from hansa.run.loop import Training
from hansa.run.result import Result
from hansa.sim.engine import ReferenceEngine
from hansa.sim.runtime import Simulation


class RecordedArrivals:
    """A simulated clock that repeats a deployed job.

    Tickets complete in the order in which the job's did, and the parties that were available in a round are available.
    """

    def __init__(self, database: Path, job: str) -> None:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
            asks = db.execute("SELECT round, number, parties, closed FROM asks WHERE job = ? AND phase = 'round' "
                              "ORDER BY round, number", (job,)).fetchall()  # fmt: skip
            present = db.execute(
                "SELECT round, closed FROM asks WHERE job = ? AND phase = 'present'", (job,)
            ).fetchall()
        submitted = [(round, number) for round, number, parties, _ in asks if parties != "[]"]
        tickets = [json.loads(closed)["ticket"] for _, _, parties, closed in asks if parties == "[]"]
        self._when = {submitted[ticket]: place + 1.0 for place, ticket in enumerate(tickets)}
        self._present: dict[int, list[int]] = {round: json.loads(parties) for round, parties in present}
        self.now = 0.0

    def available(self, round: int) -> list[int]:
        """The parties that were available in a round."""
        return self._present[round]

    def wait(self) -> None:
        """Never needed: at least one party was available in every round."""
        raise AssertionError("the record has no round without an available party")

    def plan(self, ask: Ask) -> Plan:
        """When the reply to an ask arrives."""
        when = self._when.get((ask.round, ask.index), math.inf) if ask.verb == "submit" else self.now
        return Plan(when - self.now)


def simulated_again(experiment: Experiment, clock: RecordedArrivals) -> dict[str, Any]:
    """The saved model of an experiment that the reference engine simulates with recorded arrivals."""
    with deterministic("cpu"), threads(1):
        task, run = experiment.build_task(), experiment.run
        objective = Objective(task.model, task.loss, run.seed)
        holdings = task.holdings(objective)
        runtime = Simulation(ReferenceEngine(objective, holdings, run.seed), run.rules(objective.spec), clock)
        training = Training(experiment.algorithm, task, run, objective, holdings, clock=clock)
        state = complete(training.steps(), runtime.answer)
    return Result(training, state, {}, None).saved_model()
