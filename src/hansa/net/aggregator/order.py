"""The check of an order before it becomes a job."""

from __future__ import annotations

from hansa.core.task import Known
from hansa.experiment.config import Experiment, parse
from hansa.experiment.local_work import LocalWork
from hansa.metrics.function import functions as metric_functions
from hansa.net.transport.wire import Order
from hansa.plumbing.errors import ConfigError
from hansa.plumbing.functions import only, reference_of

NOT_LISTED = "is not among serve.functions of federation.toml"


def check_order(order: Order, functions: tuple[str, ...], parties: list[str], relays: bool = False) -> Experiment:
    """Check an order as far as possible before the parties have described their data; returns its experiment.

    `relays` says that some parties are behind relays.
    A ConfigError says why the experiment cannot run across a network.
    """
    with only(functions, NOT_LISTED):
        experiment = parse({name: table for name, table in order.experiment.items() if name != "track"})
    if "track" in order.experiment:
        raise ConfigError(
            "[track]: the aggregator's own configuration decides how its jobs are tracked; remove the table"
        )
    task, metrics = experiment.task, metric_functions(experiment.run.metrics)
    named = [*task.named_models.items(), ("task.loss", task.loss), *(("run.metrics", name) for name in metrics)]
    for where, setting in named:
        reference = reference_of(setting)
        if reference is not None and reference not in functions:
            raise ConfigError(f"{where}: {reference!r} {NOT_LISTED}")
    run, count = experiment.run, len(parties)
    experiment.check(deployed=True, networked=True, relays=relays, parties=count, names=parties,
                     cohort_size=run.size(count), seed=run.seed, central=order.central is not None)  # fmt: skip
    LocalWork(run, experiment.algorithm, Known(count, parties, (), None))
    guard = experiment.privacy.guard(experiment.algorithm, run, count, run.size(count))
    if guard is not None:
        guard.begin()
    return experiment
