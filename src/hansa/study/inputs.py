"""Digests of the user's own code and data files, which are inputs of a run besides its configuration.

The digests are part of the run's key, so that a run is repeated after a change to them."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import CodeType
from typing import Any

from hansa.core.plain_data import from_config
from hansa.core.registry import Part
from hansa.experiment import sources
from hansa.experiment.config import Experiment
from hansa.experiment.sources import MAIN, digest, module_digests
from hansa.metrics.function import functions
from hansa.plumbing.errors import HansaError
from hansa.plumbing.functions import is_function, load_function, reference_of

SIMPLE = (bool, int, float, complex, str, bytes, tuple, type(None))


def inputs(experiment: Experiment) -> dict[str, dict[str, str | None]]:
    """Digests, by name, of the user's modules that an experiment uses and of the files that it reads."""
    return {"code": code_of(experiment), "files": files_of(experiment)}


def parts_of(value: Any) -> Iterator[Part]:
    """All parts of an experiment."""
    if isinstance(value, Experiment):
        models = [("model", where, model) for where, model in value.task.named_models.items()]
        for kind, where, reference in (("dataset", "task.dataset", value.task.dataset), *models):
            if reference is not None and reference_of(reference) is None:
                yield from parts_of(from_config(kind, reference, where=where))
        yield from parts_of([getattr(value, field.name) for field in fields(value) if field.name != "track"])
    else:
        yield from sources.parts_of(value)


def functions_of(experiment: Experiment) -> list[str]:
    """The functions that an experiment names, as "module:function"."""
    task = experiment.task
    settings = (task.dataset, *task.named_models.values(), task.public, task.loss, task.augment,
                *functions(experiment.run.metrics))  # fmt: skip
    return [reference for setting in settings if (reference := reference_of(setting)) is not None]


def modules_of(experiment: Experiment) -> set[str]:
    """Modules outside Hansa that define parts of an experiment; a worker must import them.

    Contains `__main__` if the experiment names a function of it; no worker can import `__main__`."""
    modules = {type(part).__module__ for part in parts_of(experiment)}
    modules |= {MAIN} & {reference.partition(":")[0] for reference in functions_of(experiment)}
    return {name for name in modules if not name.startswith("hansa.")}


def code_of(experiment: Experiment) -> dict[str, str | None]:
    """Digests of the user's modules. A script or notebook counts only by the code that the experiment uses."""
    named = modules_of(experiment) - {MAIN}
    mine: list[Any] = [type(part) for part in parts_of(experiment) if type(part).__module__ == MAIN]
    for reference in functions_of(experiment):
        module = reference.partition(":")[0]
        try:
            function = load_function(reference, "task", experiment.folder)
        except HansaError:  # the run itself reports the error
            continue
        if module == MAIN:
            mine.append(function)
        else:
            named.add(module)
    digests = module_digests(named)
    if mine:
        seen: set[int] = set()
        digests[MAIN] = _digest(repr([_doing(thing, seen) for thing in mine]).encode())
    return digests


def _doing(thing: Any, seen: set[int]) -> Any:
    """The code of a class or function of a script or notebook, and of everything there that it uses, as plain data.

    Other text of the script or notebook may change."""
    if isinstance(thing, SIMPLE):
        return repr(thing)
    if id(thing) in seen:
        return None
    seen.add(id(thing))
    if isinstance(thing, type):
        members = {name: inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
                   for name, value in sorted(vars(thing).items())}  # fmt: skip
        members_code = {name: _doing(value, seen) for name, value in members.items()
                if hasattr(value, "__code__") or (isinstance(value, SIMPLE) and not name.startswith("__"))}  # fmt: skip
        return [members_code, [_doing(base, seen) for base in thing.__bases__ if base.__module__ == MAIN]]
    code = getattr(thing, "__code__", None)
    return None if code is None else [_plain(code, thing.__globals__, seen), repr(thing.__defaults__)]


def _plain(code: CodeType, space: Mapping[str, Any], seen: set[int]) -> Any:
    globals_code = {name: _doing(space[name], seen) for name in code.co_names
            if name in space and getattr(space[name], "__module__", MAIN) == MAIN}  # fmt: skip
    values = [_plain(value, space, seen) if isinstance(value, CodeType) else
              sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
              for value in code.co_consts]  # fmt: skip
    return [code.co_code.hex(), code.co_names, values, globals_code]


def files_of(experiment: Experiment) -> dict[str, str | None]:
    """Digests of the files that an experiment names, and of the files in its data set's folder."""
    task, place = experiment.task, Path(experiment.folder)
    files = [task.test, task.trusted, None if is_function(task.public) else task.public]
    beside = [*task.parties, *(name for name in files if isinstance(name, str))]
    digests = {name: digest(place / name) for name in beside if not (place / name).is_dir()}
    for name in beside:  # of a folder, those of its files
        digests |= {f"{name}/{path.relative_to(place / name).as_posix()}": digest(path)
                    for path in sorted((place / name).rglob("*")) if path.is_file()}  # fmt: skip
    named = {part.file for part in parts_of(experiment) if isinstance(getattr(part, "file", None), str)}  # type: ignore[attr-defined]
    digests |= {name: digest(place / name) or digest(name) for name in named}
    root = task.data_dir or os.environ.get("HANSA_DATA")
    if root and task.dataset is not None and reference_of(task.dataset) is None:
        name = task.dataset if isinstance(task.dataset, str) else str(task.dataset.get("name"))
        folder = Path(root).expanduser() / name
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digests[f"{name}/{path.relative_to(folder).as_posix()}"] = digest(path)
    return digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]
