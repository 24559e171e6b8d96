"""A deployed experiment: the samples that the aggregator keeps, and the settings that do not apply."""

from __future__ import annotations

from typing import Any

from hansa.core.errors import DataError, HansaError
from hansa.experiment.config import Experiment
from hansa.experiment.settings import Run
from hansa.experiment.tasks import keep_trusted, load_data, read_files

SIMULATED = ("engine", "device", "compile", "devices", "late", "checkpoint_seconds")


def own_samples(experiment: Experiment) -> tuple[dict[str, Any], list[str]]:
    """The samples that are the aggregator's own, for its test and for rules that need some, and what is to be said."""
    table = experiment.task
    if table.parties:
        files = {kind: str(name) for kind, name in (("test", table.test), ("trusted", table.trusted)) if name}
        pairs, header = read_files(experiment.folder, tuple(files.values()), table.target)
        own = {**dict(zip(files, pairs, strict=True)), "header": list(header)}
        return own, ["task.parties: each party brings its own data instead"]
    try:
        data = load_data(experiment)
    except HansaError as error:
        if isinstance(table.trusted, int):
            raise DataError(f"task.trusted: samples are to be kept at the aggregator, but: {error}") from None
        return {}, [f"task.dataset: parties bring their own data; no central test set, for {error}"]
    kept = None
    if isinstance(table.trusted, int):
        data, kept = keep_trusted(data, table.trusted, experiment.run.seed)
    what = ", ".join(name for name, given in (("test set", data.test), ("trusted samples", kept)) if given is not None)
    keeps = f"; the aggregator keeps its {what}" if what else ""
    tree = {"test": data.test, "trusted": kept, "classes": data.classes, "loss": table.loss or data.loss}
    return tree, [f"task.dataset: each party brings its own data instead{keeps}"]


def replaced(experiment: Experiment) -> list[str]:
    """What of an experiment the parties' own data and machines take the place of, a sentence each."""
    notes = []
    if experiment.partition is not None:
        notes.append("partition: the parties' data are divided as they are")
    if experiment.track:
        notes.append(
            "track: left out; who runs the aggregator decides what tracks its jobs ([track] in federation.toml)"
        )
    plain = Run()
    given = [name for name in SIMULATED if getattr(experiment.run, name) != getattr(plain, name)]
    if given:
        notes.append(f"run.{', run.'.join(given)}: of a simulation; parties work on their own machines, in real time")
    if experiment.run.deadline is not None:
        notes.append(f"run.deadline: {experiment.run.deadline:g} real seconds for each exchange with the parties")
    notes.append(
        "a party's own policy (party.toml) may refuse the job, and set its learning rate, batch size and device"
    )
    return notes
