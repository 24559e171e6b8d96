"""Check that an algorithm and the settings of a run fit together, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hansa.core.algorithm import Algorithm, Problem
from hansa.core.federation import SumProtocol
from hansa.core.wrapper import unwrap
from hansa.data.column_transformer import ColumnTransformer
from hansa.drift import DataDrift, Drift
from hansa.experiment.settings import Run
from hansa.fusion import Fusion
from hansa.local.finetune import FineTuning
from hansa.metrics.metric import Metric
from hansa.metrics.names import FORGETTING, MEMBERSHIP
from hansa.numerics.params import ParamSpec
from hansa.numerics.weights import BALANCED, class_weights
from hansa.plumbing.errors import AlgorithmError, ConfigError, UnsuitedError
from hansa.privacy import Privacy
from hansa.transforms import ByLayer, Packed, Transform

APART = "parties behind different relays have certificates of different authorities, and cannot check each other's"
NO_ATTACKS = "attacks are simulated on parties with the same columns, and these hold different ones; leave them out"


def check_data(algorithm: Algorithm, columns: bool) -> None:
    """Raise a ConfigError if an algorithm does not fit what the parties hold: rows, or columns of the same people."""
    if columns and algorithm.data == "rows":
        raise ConfigError(
            f"{algorithm.name} trains on parties with the same columns, and these parties hold different columns of "
            "the same people (partition 'columns', or ids); use an algorithm over columns, or another partition"
        )
    if not columns and algorithm.data == "columns":
        raise ConfigError(
            f"{algorithm.name} trains on parties with different columns of the same people, and these parties hold "
            "different rows with the same columns; use the partition 'columns', or give ids (task.ids, Task(ids=...))"
        )
    if columns and algorithm.trains:
        raise AlgorithmError(
            f"{algorithm.name} is an algorithm over columns, where parties have no common model to train; set "
            "trains = False in its class"
        )


def check_finetuning(algorithm: Algorithm, settings: FineTuning) -> None:
    """Raise a ConfigError for an algorithm whose parties have no network that they could fine-tune alone."""
    if not settings.epochs:
        return
    if algorithm.data == "columns":
        raise UnsuitedError(
            f"run.finetune: the parties of {algorithm.name} hold different columns, so none of them has a whole model "
            "that it could train alone; leave run.finetune out"
        )
    if not algorithm.trains and algorithm.models != "several":
        raise UnsuitedError(
            f"run.finetune: {algorithm.name} trains no network that a party could train further; leave run.finetune out"
        )


def check_groups(prepare: Any, metrics: Sequence[Metric]) -> None:
    """Raise a ConfigError for metrics by a column that the preparation of a table makes unrecognisable."""
    if isinstance(prepare, ColumnTransformer):
        for metric in metrics:
            if metric.by is not None:
                prepare.check_group(metric.by)


def check_pooled(algorithm: Algorithm, columns: bool, protected: bool) -> None:
    """Raise a ConfigError for samples in one place (`task.pooled`) where a run would not be centralised training.

    `protected` says whether the run has attackers or privacy.
    """
    if algorithm.name != "fedavg" or columns or protected:
        raise ConfigError(
            "task.pooled puts all training samples in one place, where there is nothing to federate, to attack or to "
            "protect; use it with fedavg, without [adversary], [privacy] and columns"
        )


def check_drift(drifts: Sequence[Drift], run: Run, columns: bool, pooled: bool, prepare: Any) -> None:
    """Raise a ConfigError for drifts that the run cannot have."""
    if run.metric == FORGETTING and not any(isinstance(drift, DataDrift) for drift in drifts):
        raise ConfigError(
            f"run.metric: {FORGETTING!r} is measured where samples drift; add a [drift] table such as 'rotation', or "
            "choose another metric"
        )
    if not drifts:
        return
    if columns:
        raise ConfigError(
            "drift: the parties hold different columns of the same people, and drifts change rows of single parties; "
            "leave it out"
        )
    if pooled:
        raise ConfigError("drift: with task.pooled all samples are in one place, and no party drifts; leave it out")
    if run.baselines:
        raise ConfigError(
            "run.baselines train on data that do not change, so a comparison with a run that has drift would mislead; "
            "leave one of them out"
        )
    for drift in drifts:
        if drift.name == "join" and isinstance(prepare, ColumnTransformer):
            raise ConfigError(
                "drift (join): all parties learn prepare = 'table' together before the first round, and a party that "
                "joins later cannot; leave one of them out"
            )
        if isinstance(drift, DataDrift) and run.metric == MEMBERSHIP:
            raise ConfigError(
                f"run.metric: {MEMBERSHIP!r} compares training samples with test samples, and [drift] replaces both "
                "from round to round; choose another metric"
            )


def check_weights(algorithm: Algorithm, task: Any, privacy: Privacy, classes: int | None) -> None:
    """Raise a ConfigError for weights of samples or classes that the algorithm or the privacy settings cannot have."""
    given = [name for name in ("weights", "sample_weight", "class_weight") if getattr(task, name, None) is not None]
    if not given:
        return
    if not algorithm.weighs:
        raise UnsuitedError(
            f"{given[0]}: {algorithm.name} does not use weights of samples; leave {' and '.join(given)} out, or use an "
            "algorithm that trains a model, or a linear model such as 'logistic-regression'"
        )
    if task.class_weight is None:
        return
    if classes is None:
        raise ConfigError("class_weight: the targets are numbers, not classes; give weights of samples instead")
    balanced = class_weights(task.class_weight, classes or None) == BALANCED
    local = algorithm.parts().local
    if balanced and (privacy.dp is not None or (local is not None and local.budget is not None)):
        raise ConfigError(
            'class_weight = "balanced" counts the classes of all parties, and differential privacy does not cover the '
            "counts; give the weights as a table, from what is known publicly, or leave one of them out"
        )


def check_augmented(algorithm: Algorithm, augment: Any) -> None:
    """Raise a ConfigError for an augmentation of samples that no step of the algorithm would use."""
    if augment is not None and not algorithm.trains and algorithm.models == "one":
        raise UnsuitedError(
            f"task.augment: {algorithm.name} trains no network by batches, which an augmentation could change; leave "
            "task.augment out"
        )


def check_relays(algorithm: Algorithm, protocol: SumProtocol | None, where: str) -> None:
    """Raise a ConfigError for a run that cannot have parties behind relays; `where` names the setting with them."""
    if "route" in algorithm.verbs or algorithm.data == "columns":
        raise ConfigError(
            f"{algorithm.name}: its parties send each other sealed messages, and {APART}; leave {where} out, or use "
            "another algorithm"
        )
    if getattr(protocol, "active", False):
        raise ConfigError(
            f"privacy.secure.active: the parties sign their keys of a secure sum, and {APART}; set active = false, or "
            f"leave {where} out"
        )


def check_settings(algorithm: Algorithm, run: Run, problem: Problem, protocol: SumProtocol | None = None) -> None:
    """Raise a ConfigError for an algorithm and settings of a run that cannot work together."""
    run.select.check(algorithm, problem)
    if run.devices.relays is not None:
        check_relays(algorithm, protocol, "run.devices.relays")
    if run.select.watches and protocol is not None:
        raise ConfigError(
            f"run.select: the selector {run.select.name!r} needs the loss of each party that trained, which a secure "
            "sum hides; choose another selector"
        )
    if run.select.sees and (protocol is not None or run.sums == "exact"):
        hides = "a secure sum hides" if protocol is not None else "exact sums never look at"
        raise ConfigError(
            f"run.select: the selector {run.select.name!r} needs the update of each party, which {hides}; choose "
            "another selector"
        )
    if protocol is not None and "route" in algorithm.verbs:
        raise ConfigError(
            f"{algorithm.name}: its parties send messages to each other, and their losses and numbers of samples to "
            "the aggregator, which a secure sum or a bound on updates does not cover; leave privacy.secure and "
            "privacy.bound out, or use another algorithm"
        )
    if algorithm.alone is not None:
        _check_alone(algorithm.name, algorithm.alone, run, protocol is not None)
    if algorithm.clustered and run.min_cohort > 1:
        raise ConfigError(
            f"run.min_cohort: a cluster of {algorithm.name} may have fewer than {run.min_cohort} parties, and its "
            "model would show their updates; leave it out, or use another algorithm"
        )
    if protocol is not None and algorithm.sums_alone is not None:
        raise ConfigError(
            f"{algorithm.name}: it looks at the reply of each party, which a secure sum hides; set "
            f"{algorithm.sums_alone}, or leave the secure sum out"
        )
    if protocol is not None and algorithm.verbs - {"reduce"}:
        seen = algorithm.parts().fusion or algorithm
        instead = (
            "use an algorithm that needs their sums alone, such as fedavg"
            if seen is algorithm
            else "use the fusion 'mean' and have each party bound the norm of its own update (privacy.bound)"
        )
        raise ConfigError(
            f"{algorithm.name}: {seen.name} looks at the update of each party, which a secure sum hides; {instead}, or "
            "no secure sum"
        )
    fusion = algorithm.parts().fusion
    if not algorithm.aligned or (fusion is not None and fusion.permutes):
        _check_other_parameters(algorithm.name, run)
    if run.sums == "exact":
        _check_exact_sums(algorithm, protocol)
    needed = run.rules().needed(problem.cohort_size)
    if needed > problem.cohort_size:
        raise ConfigError(
            f"run.quorum: the quorum of {needed} can never be met: a round asks {problem.cohort_size} parties"
        )
    rule = algorithm.parts().fusion
    used = rule.used(problem.cohort_size) if isinstance(rule, Fusion) else problem.cohort_size
    if isinstance(rule, Fusion) and run.min_cohort > 1 and used < run.min_cohort:
        raise ConfigError(
            f"run.min_cohort is {run.min_cohort}, but {rule.name} makes the new model of the updates of {used} of "
            f"{problem.cohort_size} parties; use another fusion"
        )
    if run.over_select and algorithm.participation != "cohort":
        raise ConfigError(f"run.over_select: {algorithm.name} has no cohort to enlarge; leave it out")
    if run.over_select and run.select.independent:
        raise ConfigError(
            f"run.over_select: {run.select.name} draws each party by itself, so the cohort has no fixed size; leave it "
            "out"
        )
    if algorithm.participation == "own":
        if run.min_cohort > 1:
            raise ConfigError(
                f"run.min_cohort: {algorithm.name} applies updates one by one as they arrive, so no cohort hides a "
                "single one; leave it out, or use another algorithm"
            )
        if run.deadline is not None:
            raise ConfigError(f"run.deadline: {algorithm.name} is asynchronous and has no deadlines; leave it out")


def _check_exact_sums(algorithm: Algorithm, protocol: SumProtocol | None) -> None:
    if protocol is not None:
        raise ConfigError(
            "run.sums: 'exact' applies to plain sums, and a secure sum or protocol= takes over every sum (secure sums "
            "add whole numbers anyway); leave one of them out"
        )
    if "reduce" not in algorithm.verbs:
        seen = algorithm.parts().fusion or algorithm
        raise ConfigError(
            f"run.sums: {seen.name} does not sum the replies of a round, so 'exact' would have no effect; leave it out"
        )


def _check_alone(name: str, otherwise: str, run: Run, hides: bool) -> None:
    """Refuse settings with which a round that asks a single party is impossible; `otherwise` says what to set."""
    if hides:
        raise ConfigError(
            f"{name}: some of its rounds ask a single party, and a secure sum of one update hides nothing; set "
            f"{otherwise}"
        )
    if run.rules().needed(1) > 1:
        setting = "min_cohort" if run.min_cohort > 1 else "quorum"
        raise ConfigError(
            f"run.{setting}: {name} has rounds that ask a single party, and this setting requires "
            f"{run.rules().needed(1)} replies; set {otherwise}"
        )


def _check_other_parameters(name: str, run: Run) -> None:
    """Refuse transforms that cannot work where a number of a vector is about other parameters from round to round."""
    for setting in ("compress", "compress_down"):
        transform: Transform | None = getattr(run, setting)
        if transform is not None and (transform.remembers or transform.layered):
            needs = "needs the layers of a vector" if transform.layered else "remembers numbers of a vector"
            raise ConfigError(
                f"run.{setting}: {transform.name} {needs}, and those of {name} are about other parameters from round "
                "to round; use one transform without memory, such as 'int8'"
            )


def transforms(algorithm: Algorithm, run: Run) -> list[tuple[str, Transform]]:
    """The transforms of a run's updates, each with the setting that names it."""
    local = algorithm.parts().local
    layers = unwrap(local)[0] if local is not None else []
    inner = [("local", layer.transform) for layer in layers if isinstance(layer, Packed)]
    return inner + ([] if run.compress is None else [("run.compress", run.compress)])


def fitted(algorithm: Algorithm, run: Run, spec: ParamSpec) -> Run:
    """The run with transforms for the layers of its model; a ConfigError if they do not fit the model."""
    layers = algorithm.sent_layers(spec)
    changed: dict[str, Transform] = {}
    for setting in ("compress", "compress_down"):
        transform = getattr(run, setting)
        if transform is not None and algorithm.trains:
            try:
                changed[setting] = transform.of_model(layers)
            except ConfigError as error:
                raise ConfigError(f"run.{setting}: {error}") from None
    return dataclasses.replace(run, **changed) if changed else run  # type: ignore[arg-type]


def check_transforms(algorithm: Algorithm, run: Run, privacy: Privacy, protocol: bool) -> None:
    """Raise a ConfigError for a transform of updates that the run cannot use; `protocol` replaces sums of a run."""
    _check_downlink(algorithm, run.compress_down)
    used = transforms(algorithm, run)
    if run.compress is not None and not algorithm.trains:
        raise ConfigError(f"run.compress: the parties of {algorithm.name} send no updates of a model; leave it out")
    if run.compress is not None and algorithm.packs:
        raise ConfigError(f"run.compress: {algorithm.name} packs updates in its own way; leave it out")
    if run.compress is not None and "route" in algorithm.verbs:
        raise ConfigError(
            f"run.compress: the parties of {algorithm.name} send whole models to each other, and a transform is made "
            "for updates, which become small; leave it out"
        )
    for where, transform in used:
        if algorithm.whole_updates and _leaves_out(transform):
            raise ConfigError(
                f"{where}: {algorithm.name} adds up the changes of what each party keeps, so what {transform.name!r} "
                "cuts off would be missing from its sum for good; leave it out, or use 'error-feedback' or 'int8'"
            )
    local = algorithm.parts().local
    if run.compress is not None and len(used) > 1:
        raise ConfigError("run.compress: the algorithm's local solver packs its updates already; leave one of them out")
    if run.compress is not None and local is not None:
        try:
            run.compress.around(local)
        except ConfigError as error:
            raise ConfigError(f"run.compress: {error}") from None
    for where, transform in used:
        if algorithm.clustered and transform.remembers:
            raise ConfigError(
                f"{where}: {transform.name!r} remembers numbers of an update for the next round, in which a party of "
                f"{algorithm.name} may train another model; use a transform without memory, such as 'int8'"
            )
    hidden = "a secure sum" if privacy.secure is not None else "protocol=" if protocol else None
    for where, transform in used:
        if hidden is not None and not transform.adds:
            raise ConfigError(
                f"{where}: {transform.name!r} sends numbers that cannot be added before they are opened, and "
                f"{hidden} adds them; use a transform that commutes with sums, such as 'clip', or leave one of them out"
            )
        if privacy.dp is None and privacy.bound is None:
            continue
        setting, length = ("dp", "dp.clip") if privacy.dp is not None else ("bound", "bound")
        if transform.lengthens:
            raise ConfigError(
                f"{where}: {transform.name!r} can make an update longer than privacy.{length}, so privacy.{setting} "
                "would not hold; use a transform that commutes with sums, such as 'clip', or leave one of them out"
            )
        if privacy.dp is not None and not transform.adds:
            raise ConfigError(
                f"{where}: {transform.name!r} sends numbers that cannot be added before they are opened, and "
                "privacy.dp clips and adds what is sent; use a transform that commutes with sums, such as 'clip', or "
                "leave one of them out"
            )
    if privacy.secure is not None or protocol or not any(transform.packs for _, transform in used):
        return
    where, transform = next((where, transform) for where, transform in used if transform.packs)
    if privacy.bound is not None:
        raise ConfigError(
            f"privacy.bound: the aggregator checks the length of each update, which {where} = {transform.name!r} may "
            "change; use run.max_norm instead"
        )
    if privacy.dp is not None and run.max_norm is not None:
        raise ConfigError(
            f"run.max_norm: with privacy.dp and {where} = {transform.name!r} the aggregator adds packed updates and "
            "does not see the norm of an update; leave run.max_norm out (privacy.dp.clip bounds each update)"
        )


def _leaves_out(transform: Transform) -> bool:
    """Whether a large part of an update is neither sent nor kept for the next round."""
    if isinstance(transform, ByLayer):
        return any(_leaves_out(each) for each in transform.transforms)
    return (transform.sparse or transform.name in ("clip", "sign")) and not transform.remembers


def _check_downlink(algorithm: Algorithm, transform: Transform | None) -> None:
    """Raise a ConfigError for a transform of models that cannot work."""
    if transform is None:
        return
    if not algorithm.trains or "route" in algorithm.verbs:
        raise ConfigError(f"run.compress_down: {algorithm.name} sends no model to the parties; leave it out")
    if transform.sparse:
        raise ConfigError(
            f"run.compress_down: {transform.name!r} leaves most numbers out, and the parties get whole models, not "
            "updates; use a quantiser: int8, qsgd or stochastic-rounding"
        )
    if algorithm.clustered:
        raise ConfigError(
            f"run.compress_down: {algorithm.name} sends several models in one message, and a party opens one; leave it "
            "out"
        )
    if not transform.packs:
        raise ConfigError(f"run.compress_down: {transform.name!r} keeps the form of an update; leave it out")
