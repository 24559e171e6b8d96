"""What parties hold, and what may be done with their samples."""

from __future__ import annotations

from typing import Any

from hansa.core.columns import REFUSED
from hansa.core.registry import registered
from hansa.drift import DataDrift
from hansa.experiment.rules.rule import Facts, Rule
from hansa.metrics.names import FORGETTING, MEMBERSHIP
from hansa.numerics.weights import BALANCED, class_weights
from hansa.plumbing.errors import AlgorithmError, UnsuitedError


def _check_classes(f: Facts) -> None:
    class_weights(f.task.class_weight, f.classes)


def _models(f: Facts) -> Any:
    """How to name a model, where the file names none."""
    several = ", or task.models" if f.algorithm.models != "one" else ""
    return not f.table.named_models and f"{several}, one of {', '.join(registered('model'))}"


def _refused(f: Facts) -> Any:
    """A field of the task that parties with different columns cannot have, and why."""
    return next((field for field in REFUSED.items() if getattr(f.table, field[0]) is not None), None)


def _check_columns(f: Facts) -> None:
    f.as_table.for_columns()


def _check_groups(f: Facts) -> None:
    for metric in f.run.metrics:
        if metric.by is not None:
            f.as_table.check_group(metric.by)


DATA = [
    Rule("An algorithm over rows has parties with rows", "by_columns", lambda f: f.algorithm.data == "rows",
         "{algorithm.name} trains on parties with the same columns, and these parties hold different columns of the "
         "same people (partition 'columns', or ids)", "use an algorithm over columns, or another partition"),
    Rule("An algorithm over columns has parties with different columns", lambda f: f.algorithm.data == "columns",
         lambda f: not f.by_columns,
         "{algorithm.name} trains on parties with different columns of the same people, and these parties hold "
         "different rows with the same columns", "use the partition 'columns', or give ids (task.ids, Task(ids=...))"),
    Rule("An algorithm over columns trains no common model", lambda f: f.algorithm.data == "columns",
         lambda f: f.algorithm.trains,
         "{algorithm.name} is an algorithm over columns, where parties have no common model to train",
         "set trains = False in its class", AlgorithmError),
    Rule("Samples have no weights over columns", "by_columns", lambda f: f.table.sample_weight is not None,
         "task.sample_weight: weights are for parties with the same columns", "leave it out"),
    Rule("Kept replies can be read: no secure sum", "audit.keep_replies", lambda f: f.privacy.secure,
         "audit.keep_replies: the secure sum {found.name!r} hides every single reply, so nothing readable would be "
         "stored", "leave out one of them"),
    Rule("Kept replies can be read: no sealed messages", "audit.keep_replies",
         lambda f: "route" in f.algorithm.verbs or f.algorithm.data == "columns",
         "audit.keep_replies: parties of {algorithm.name} seal their messages for each other, so nothing readable "
         "would be stored", "leave it out"),
    Rule("Weights need an algorithm that uses them", "weighted",
         lambda f: not f.algorithm.weighs and (f.weighted[0], " and ".join(f.weighted)),
         "{found[0]}: {algorithm.name} does not use weights of samples",
         "leave {found[1]} out, or use an algorithm that trains a model, or a linear model such as "
         "'logistic-regression'", UnsuitedError),
    Rule("Weights of classes need classes", lambda f: f.task.class_weight is not None, lambda f: f.classes is None,
         "class_weight: the targets are numbers, not classes", "give weights of samples instead"),
    Rule("Weights of classes fit the classes", lambda f: f.task.class_weight is not None, _check_classes,
         "a weight belongs to a class of the task"),
    Rule("Balanced classes are not private", lambda f: f.task.class_weight == BALANCED,
         lambda f: f.privacy.dp is not None or (f.local is not None and f.local.budget is not None),
         'class_weight = "balanced" counts the classes of all parties, and differential privacy does not cover the '
         'counts', "give the weights as a table, from what is known publicly, or leave one of them out"),
    Rule("Fine-tuning needs a whole model", "run.finetune.epochs", lambda f: f.algorithm.data == "columns",
         "run.finetune: the parties of {algorithm.name} hold different columns, so none of them has a whole model that "
         "it could train alone", "leave run.finetune out", UnsuitedError),
    Rule("Fine-tuning needs a network", "run.finetune.epochs",
         lambda f: not f.algorithm.trains and f.algorithm.models != "several",
         "run.finetune: {algorithm.name} trains no network that a party could train further", "leave run.finetune out",
         UnsuitedError),
    Rule("A prepared table keeps the columns that metrics are grouped by",
         lambda f: f.as_table and any(metric.by is not None for metric in f.run.metrics), _check_groups,
         "the preparation of a table changes the values of some columns"),
    Rule("An augmentation needs training by batches", lambda f: f.task.augment is not None,
         lambda f: not f.algorithm.trains and f.algorithm.models == "one",
         "task.augment: {algorithm.name} trains no network by batches, which an augmentation could change",
         "leave task.augment out", UnsuitedError),
    Rule("Some preparations of a table need the same columns", lambda f: f.as_table and f.by_columns, _check_columns,
         "the parties would have to know each other's columns"),
    Rule("Different columns leave no place for one model and its samples", "by_columns", _refused,
         "task.{found[0]}: {found[1]}"),
    Rule("Attacks need the same columns", "adversary", lambda f: f.by_columns,
         "adversary: attacks are simulated on parties with the same columns, and these hold different ones",
         "leave them out"),
    Rule("An algorithm that trains a model is given one", lambda f: f.algorithm.trains or f.algorithm.models != "one",
         _models, "{algorithm.name} trains a model: set task.model{found}"),
    Rule("Samples in one place have nothing to federate, to attack or to protect", "task.pooled",
         lambda f: f.algorithm.name != "fedavg" or f.by_columns or f.adversary or f.protected,
         "task.pooled puts all training samples in one place, where there is nothing to federate, to attack or to "
         "protect", "use it with fedavg, without [adversary], [privacy] and columns"),
    Rule("Forgetting needs samples that drift", lambda f: f.run.metric == FORGETTING,
         lambda f: not any(isinstance(drift, DataDrift) for drift in f.drift),
         f"run.metric: {FORGETTING!r} is measured where samples drift",
         "add a [drift] table such as 'rotation', or choose another metric"),
    Rule("Drifts need the same columns", "drift", lambda f: f.by_columns,
         "drift: the parties hold different columns of the same people, and drifts change rows of single parties",
         "leave it out"),
    Rule("Drifts need parties with samples of their own", "drift", lambda f: f.task.pooled,
         "drift: with task.pooled all samples are in one place, and no party drifts", "leave it out"),
    Rule("Baselines need data that do not change", "drift", lambda f: f.run.baselines,
         "run.baselines train on data that do not change, so a comparison with a run that has drift would mislead",
         "leave one of them out"),
    Rule("A party that joins later cannot take part in the preparation of a table",
         lambda f: any(drift.name == "join" for drift in f.drift), lambda f: f.as_table,
         "drift (join): all parties learn prepare = 'table' together before the first round, and a party that joins "
         "later cannot", "leave one of them out"),
    Rule("Membership needs samples that stay", lambda f: f.run.metric == MEMBERSHIP,
         lambda f: any(isinstance(drift, DataDrift) for drift in f.drift),
         f"run.metric: {MEMBERSHIP!r} compares training samples with test samples, and [drift] replaces both from "
         "round to round", "choose another metric"),
    Rule("A data set is divided, files are not", lambda f: f.table.parties, lambda f: f.partition is not None,
         "[partition] divides a data set, and task.parties has one file per party", "leave one of them out"),
]  # fmt: skip
