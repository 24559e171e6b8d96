"""The check of an order before it becomes a job."""

from __future__ import annotations

import dataclasses

from hansa.core.algorithm import Algorithm, Problem
from hansa.core.task import Known
from hansa.data.column_transformer import ColumnTransformer
from hansa.experiment.checks import check_relays, check_settings
from hansa.experiment.config import Experiment, parse
from hansa.experiment.local_work import LocalWork
from hansa.metrics.function import functions as metric_functions
from hansa.net.transport.wire import Order
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError
from hansa.plumbing.functions import only, reference_of

NOT_LISTED = "is not among serve.functions of federation.toml"


def check_relayed(experiment: Experiment) -> None:
    """Raise a ConfigError for an experiment that cannot run with parties behind relays."""
    check_relays(experiment.algorithm, experiment.privacy.secure, "[relays] of federation.toml")
    if experiment.audit.keep_replies:
        raise ConfigError(
            "audit.keep_replies: relays pass on sums, so the aggregator does not have the reply of each party; leave "
            "it out, or use a federation without [relays]"
        )


def check_order(order: Order, functions: tuple[str, ...], parties: list[str], relays: bool = False) -> Experiment:
    """Check an order as far as possible before the parties have described their data; returns its experiment.

    `relays` says that some parties are behind relays.
    A ConfigError says why the experiment cannot run across a network.
    """
    with only(functions, NOT_LISTED):
        experiment = parse({name: table for name, table in order.experiment.items() if name != "track"})
    experiment.check_networked()
    if relays:
        check_relayed(experiment)
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
    LocalWork(run, experiment.algorithm, Known(count, parties, (), None))
    trusted = 0 if experiment.task.trusted is None else 1
    several = dict.fromkeys(experiment.task.models or (), ParamSpec((), (), ()))  # as far as is known so far
    public = 0 if experiment.task.public is None else 1
    problem = Problem(ParamSpec((), (), ()), Params.none(), count, (), None, run.size(count), True, trusted, run.seed,
                      several, public, public_targets=True, names=parties)  # fmt: skip
    Algorithm.check(experiment.algorithm, problem)  # not the algorithm's own check, which needs the data
    own = dataclasses.replace(problem, party_tests=experiment.task.party_test > 0)  # as far as is known so far
    sums = experiment.task.prepare is not None and not isinstance(experiment.task.prepare, ColumnTransformer)
    experiment.privacy.check(experiment.algorithm, run, own, sums)  # which sums a table needs is known later
    check_settings(experiment.algorithm, run, problem, experiment.privacy.secure)
    guard = experiment.privacy.guard(experiment.algorithm, run, problem)
    if guard is not None:
        guard.begin()
    measured = run.target is not None or run.patience is not None or run.keep == "best"
    if measured and not run.eval_parties and order.central is None:
        raise ConfigError("target, patience and keep need a test set: give the task one, or let the parties evaluate")
    return experiment
