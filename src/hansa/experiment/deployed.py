"""Deployed experiments: the aggregator's own samples, and the settings that do not apply."""

from __future__ import annotations

from typing import Any

from hansa.data.column_transformer import ColumnTransformer
from hansa.experiment.config import Experiment
from hansa.experiment.settings import Run
from hansa.experiment.tasks import code_files, load_data, public_samples, read_files, read_tables, set_aside
from hansa.holdings.stored_rows import whole
from hansa.plumbing.errors import DataError, HansaError

# Settings of a run that apply to simulations only.
SIMULATED = ("engine", "device", "compile", "devices", "late", "checkpoint_seconds", "baselines")


def own_samples(experiment: Experiment) -> tuple[dict[str, Any], list[str]]:
    """The samples that come with an order (test set, trusted and public samples), and notes for the operator."""
    table = experiment.task
    if experiment.algorithm.data == "columns":
        return _over_columns(experiment)
    if table.parties and isinstance(table.prepare, ColumnTransformer):
        return _tables(experiment, table.prepare), ["task.parties: each party brings its own data instead"]
    if table.parties:
        files = {kind: str(name) for kind, name in (("test", table.test), ("trusted", table.trusted)) if name}
        pairs, header = read_files(experiment.folder, tuple(files.values()), table.target, (), table.sample_weight)
        own = {kind: (whole(x), y) for kind, (x, y) in zip(files, pairs, strict=True)} | {"header": list(header)}
        own |= {} if table.public is None else {"public": public_samples(experiment, header)}
        return own, ["task.parties: each party brings its own data instead"]
    try:
        data = load_data(experiment)
    except HansaError as error:
        for setting in ("trusted", "public"):
            if isinstance(getattr(table, setting), int):
                raise DataError(f"task.{setting}: its samples cannot be loaded: {error}") from None
        own = {} if table.public is None else {"public": public_samples(experiment)}
        return own, [f"task.dataset: each party brings its own data instead; there is no central test set: {error}"]
    trusted, public = None, public_samples(experiment)
    if isinstance(table.trusted, int):
        data, trusted = set_aside(data, table.trusted, experiment.run.seed, "trusted")
    if isinstance(table.public, int):
        data, public = set_aside(data, table.public, experiment.run.seed, "public")
    kinds = [name for name, pair in (("test set", data.test), ("trusted samples", trusted), ("public samples", public))
             if pair is not None]  # fmt: skip
    keeps = f"; the aggregator keeps its {', '.join(kinds)}" if kinds else ""
    tree = {
        "test": data.test,
        "trusted": trusted,
        "public": public,
        "classes": data.classes,
        "loss": table.loss or data.loss,
        **({} if data.table is None else {"table": data.table.tree()}),
    }
    return tree, [f"task.dataset: each party brings its own data instead{keeps}"]


def _tables(experiment: Experiment, prepare: ColumnTransformer) -> dict[str, Any]:
    """The aggregator's own samples as coded rows of a table, with its columns."""
    table = experiment.task
    kinds = {"test": table.test, "trusted": table.trusted, "public": table.public}
    files = {kind: str(name) for kind, name in kinds.items() if name is not None}
    known = {"classes": len(table.labels)} if table.labels else {}
    if not files:
        return known
    own = read_tables(experiment, list(files.values()))
    pairs, layout = code_files(own, prepare)
    return {**known, **dict(zip(files, pairs, strict=True)), "table": layout.tree()}


def _over_columns(experiment: Experiment) -> tuple[dict[str, Any], list[str]]:
    """The aggregator has no samples of its own over columns, but it knows the loss and the classes of a data set."""
    table = experiment.task
    if table.parties:
        return {}, ["task.parties: each party brings its own data instead"]
    try:
        data = load_data(experiment)
    except HansaError as error:
        return {}, [f"task.dataset: each party brings its own data instead: {error}"]
    return {"classes": data.classes, "loss": table.loss or data.loss}, [
        "task.dataset: each party brings its own data and its own test samples instead"
    ]


def replaced(experiment: Experiment) -> list[str]:
    """One sentence for each setting that the parties' own data and machines replace."""
    notes = []
    if experiment.partition is not None:
        notes.append("partition: does not apply; each party has its own data")
    if experiment.track:
        notes.append("track: does not apply; [track] in federation.toml says what tracks the aggregator's jobs")
    if experiment.task.sample_weight is not None:
        notes.append("task.sample_weight: does not apply; each party names its own (hansa join --weights)")
    default = Run()
    ignored = [name for name in SIMULATED if getattr(experiment.run, name) != getattr(default, name)]
    if ignored:
        notes.append(f"run.{', run.'.join(ignored)}: simulation only; parties work on their own machines, in real time")
    if experiment.run.deadline is not None:
        notes.append(f"run.deadline: {experiment.run.deadline:g} real seconds for each exchange with the parties")
    notes.append(
        "a party's own policy (party.toml) may refuse the job, and set its learning rate, batch size and device"
    )
    return notes
