"""A party as a process of its own: `python -m hansa.testing.party`, driven by `hansa.testing.processes`."""

from __future__ import annotations

from typing import Any

from hansa.core.objective import Objective
from hansa.core.op import Party
from hansa.experiment.config import parse
from hansa.privacy import spent
from hansa.testing.agent import Agent, serve


def load(message: dict[str, Any]) -> Party:
    """The party that an experiment's message names, with its own share of the data and nothing else."""
    experiment = parse(message["experiment"], message["folder"])
    experiment.check_deployed()
    task = experiment.build_task()
    objective = Objective(task.model, task.loss, experiment.run.seed, bf16=experiment.run.precision == "bf16")
    holdings, id = task.holdings(objective), int(message["party"])
    x, y = holdings.train.of(id)
    test = None
    if holdings.tests is not None:
        test_x, test_y = holdings.tests.of(id)
        test = (test_x.clone(), test_y.clone())
    return Party(id, objective, (x.clone(), y.clone()), test, experiment.run.seed)


if __name__ == "__main__":
    serve(Agent(load, spent))
