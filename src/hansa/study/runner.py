"""Runs a study: tunes, runs every cell, collects the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hansa.core.plain_data import field_default, field_types, nest, to_config
from hansa.core.registry import Part
from hansa.core.task import Task
from hansa.experiment.sources import MAIN
from hansa.plumbing.errors import ConfigError
from hansa.report.progress import in_notebook
from hansa.study.cell import Cell
from hansa.study.inputs import modules_of
from hansa.study.notebook import NotebookBoard
from hansa.study.pool import LOG, CellRun, InProcessRunner, Pool, PoolWatcher, SilentWatcher, copy_finished, locked
from hansa.study.ray_pool import RayPool
from hansa.study.results import Results, Trial, outcome_of
from hansa.study.spec import Study, cores, lay, parse_study
from hansa.study.tracking import track_study
from hansa.study.tune import tune
from hansa.study.worker import Loader
from hansa.track import trackers


def run_study(study: Study, watch: PoolWatcher | None = None) -> Results:
    """Do the runs of a study that its folder does not hold yet; return the results of all.

    A failed run is in the results with the reason. An invalid cell or missing data is an error before any run."""
    watch = watch or SilentWatcher()
    if study.folder is None:
        raise ConfigError("a study needs a folder for its runs")
    folder = study.folder
    cells = study.cells()
    check_data(cells)
    modules = sorted({module for cell in cells for module in modules_of(cell.experiment)})
    jobs = study.jobs or (1 if any(cell.experiment.run.device != "cpu" for cell in cells) else cores())
    check_cluster(study, cells, modules)
    with locked(folder) as lock:
        for name in ("cells", "trials"):
            (folder / name).mkdir(exist_ok=True)
        pool: InProcessRunner | Pool | RayPool
        if study.ray is not None:
            pool = RayPool(study.ray, study.jobs, modules)
        else:
            pool = InProcessRunner() if jobs == 1 or MAIN in modules else Pool(jobs, folder / LOG, lock, modules)
        try:
            trials: list[Trial] = []
            if len(study.candidates(study.algorithms[0].label)) > 1 or study.tune:
                tuned, trials = tune(study, folder, lambda title, runs: pool.run(title, runs, watch))
                cells = study.cells(tuned)
            unique = {cell.key: cell_run(cell, folder) for cell in cells}
            for job in unique.values():
                copy_finished(job)
            failed = pool.run("runs", list(unique.values()), watch)
        finally:
            pool.close()
        outcomes = []
        for cell in cells:
            job = unique[cell.key]
            outcomes.append(outcome_of(cell, job.run_dir, failed.get(job.run_dir)))
        results = Results(study, outcomes, trials)
        results = replace(results, study=replace(study, metric=results.metric))
        results.save()
    return results


def check_cluster(study: Study, cells: Sequence[Cell], modules: Sequence[str]) -> None:
    """Refuse what a study does not do on a cluster."""
    if any(cell.experiment.run.engine.name == "ray" for cell in cells):
        raise ConfigError(
            "run.engine: each run of a study uses one process, and the engine 'ray' several; leave it out, and do the "
            "runs on a cluster with study.ray (--ray)"
        )
    if study.ray is not None and MAIN in modules:
        raise ConfigError("study.ray: other machines cannot import functions of __main__; put them into a module")
    if study.ray is not None and any(cell.experiment.run.device != "cpu" for cell in cells):
        raise ConfigError("study.ray: its runs use CPUs; leave run.device out, or leave study.ray out")


def cell_run(cell: Cell, folder: Path) -> CellRun:
    return CellRun(cell.label, cell.algorithm, cell.experiment, folder / "cells" / cell.key)


def check_data(cells: Sequence[Cell]) -> None:
    """Check before any run that all data can be loaded and divided."""
    load, seen = Loader(), set()
    for cell in cells:
        experiment = cell.experiment
        about = json.dumps([experiment.tree.get("task"), experiment.tree.get("partition")], sort_keys=True)
        if about not in seen:
            seen.add(about)
            experiment.build_task(load(experiment))


def compare(
    algorithms: Sequence[Any] | None = None,
    *,
    dataset: Any = None,
    model: Any = None,
    baselines: Sequence[str] | None = None,
    partitions: Sequence[Any] | None = None,
    parties: int | None = None,
    adversaries: Sequence[Any] | None = None,
    seeds: int | Sequence[int] = 3,
    rounds: int | None = None,
    cohort: float | None = None,
    target: float | None = None,
    metric: str | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    folder: str | Path | None = None,
    data_dir: str | None = None,
    task: Any = None,
    track: Any = None,
    watch: PoolWatcher | None = None,
    **more: Any,
) -> Results:
    """Compare algorithms, each given by name, as a table or as a part, on a data set divided in one or more ways.

    This is the same study as with `hansa compare`. `baselines` are "local-only" and "centralised". Runs are stored in
    `folder` (by default runs/NAME, with the name of the study), so a second call with more algorithms or seeds does
    only the new runs. With `ray`, the address of a Ray cluster, runs are done there. `more` are dotted fields for all
    runs, as `--set` takes them: `**{"algorithm.local.lr": 0.1, "run.eval_every": 5}`. Pass your own data as
    `dataset="my_module:function"`; a Task made of arrays has no configuration that could identify its runs.
    `track` names trackers, as for `simulate`; they receive the study and its report at the end. In a notebook, a line
    below the cell shows the progress.
    """
    if isinstance(task, Task) or isinstance(dataset, Task):
        raise ConfigError(
            "compare identifies runs by their configuration, and a Task made in Python has none; put a function that "
            'returns a hansa.data.Data into a module and pass dataset="my_module:function"'
        )
    if isinstance(algorithms, (str, Part)):
        algorithms = [algorithms]
    fields = {"algorithms": algorithms, "baselines": baselines, "partitions": partitions, "adversaries": adversaries,
              "grid": grid, "tune": tune, "target": target, "metric": metric, "jobs": jobs, "ray": ray,
              "seeds": seeds if isinstance(seeds, int) else list(seeds)}  # fmt: skip
    settings = {"task.dataset": dataset, "task.model": model, "task.data_dir": data_dir, "partition.parties": parties,
                "run.rounds": rounds, "run.cohort": cohort}  # fmt: skip
    tree = lay({} if task is None else {"task": plain(task)}, tree_of(plain(settings), plain(fields)))
    tree = lay(tree, nest(plain(more)))
    _check_plain(tree, "")
    study = parse_study(tree, "")
    study = named(study, None if folder is None else Path(folder))
    study = replace(study, track=(*study.track, *trackers(track)))
    if watch is None and in_notebook():
        watch = NotebookBoard()
    results = run_study(study, watch)
    if study.track:
        results.report()
        track_study(results, study.track)
    return results


def tree_of(settings: Mapping[str, Any], study: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tree of a study from dotted fields and the keys of [study]; values of None are left out.

    Without a partition, a data set uses its natural partition, or else an even one. A number of parties without a
    partition means IID."""
    fields = {name: value for name, value in settings.items() if value is not None}
    keys = {name: value for name, value in study.items() if value is not None}
    return {**nest(fields), "study": keys}


def named(study: Study, folder: Path | None, under: str = "runs") -> Study:
    """The study with a folder and a name.

    The default name consists of the data set and a hash of the study, so that the same study finds its runs again and
    a different study gets a different folder."""
    if not study.name:
        text = json.dumps(
            {**study.tree, "study": {k: v for k, v in study.tree["study"].items() if k not in ("jobs", "ray")}},
            sort_keys=True,
        )
        dataset = study.tree["task"].get("dataset", "files")
        dataset = dataset.get("name", "data") if isinstance(dataset, Mapping) else str(dataset).replace(":", "-")
        name = (
            folder.name if folder is not None else f"compare-{dataset}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
        )
        study = replace(study, name=name)
    return replace(study, folder=folder or Path(under) / study.name)


def plain(value: Any) -> Any:
    """Replace parts at any depth by plain data."""
    if isinstance(value, Part):
        return brief(value)
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def _check_plain(value: Any, where: str) -> None:
    """Refuse values without a textual form: the configuration, as text, identifies a run."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_plain(inner, f"{where}.{name}" if where else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_plain(inner, where)
    elif value is not None and not isinstance(value, (str, bool, int, float)):
        hint = "a name, a table, a part" if where in ("task.dataset", "task.model") else "a plain value or a part"
        raise ConfigError(
            f"{where}: compare identifies runs by their configuration, so it takes {hint} or a function of a module "
            f'as "my_module:function", got a {type(value).__name__}'
        )


def brief(part: Part) -> dict[str, Any]:
    """A part as plain data: its name, and the fields that differ from their defaults."""
    whole = to_config(part)
    out: dict[str, Any] = {"name": part.name}
    for name in field_types(type(part)):
        value, default = getattr(part, name), field_default(type(part), name)
        if isinstance(value, Part) and type(value) is type(default):
            inner = brief(value)
            out |= {name: {key: each for key, each in inner.items() if key != "name"}} if value != default else {}
        elif value != default:
            out[name] = {**brief(value), **_kind(whole[name])} if isinstance(value, Part) else whole[name]
    return out


def _kind(config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of a part, if it differs from the declared kind."""
    return {"kind": config["kind"]} if "kind" in config else {}
