"""A run's key covers the whole experiment: if any field changes, the key changes, or LEFT_OUT has the reason."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from hansa.adversary import Adversary
from hansa.core.algorithm import Algorithm
from hansa.core.plain_data import field_default, field_types, fill, to_config
from hansa.core.registry import KINDS, Part, registered
from hansa.data.partition import Partition
from hansa.drift import Drift
from hansa.experiment.audit import AuditTable
from hansa.experiment.config import Experiment, TaskTable, parse
from hansa.experiment.settings import Run
from hansa.plumbing.errors import ConfigError
from hansa.privacy import Privacy, privacy
from hansa.study import cell as cells
from hansa.study.cell import LEFT_OUT, Cell, key_of
from hansa.study.inputs import modules_of
from hansa.study.pool import CellRun, copy_finished
from hansa.study.runner import run_study
from hansa.study.spec import parse_study

TREE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": "2nn", "prepare": "standardise"},
    "partition": {"name": "dirichlet", "parties": 4},
    "algorithm": {"name": "fedavg"},
    "adversary": [{"name": "sign-flip", "fraction": 0.25}],
}
PRIVACY = {"secure": "masking", "dp": {"name": "central", "sigma": 1.0}}  # which no rule would allow beside the rest
# Other values for fields that do not accept every value.
OTHERS: dict[str, Any] = {
    "task": TaskTable(dataset="digits"), "partition": None, "algorithm": registered("algorithm")["scaffold"](),
    "run": Run(rounds=99), "tree": {}, "folder": "elsewhere", "adversary": (), "track": ("tracker",),
    "privacy": Privacy(), "audit": AuditTable(keep_replies=True), "name": "other",
    "task.dataset": "mnist", "task.model": "logistic",
    "task.dataset.drop": ("column",),
}  # fmt: skip
OUTSIDE = {"tracker", "op", "predictor", "transform", "attestation"}  # kinds that no field of an experiment names
Rebuild = Callable[[Any], Experiment]  # the experiment with another value at one place


def with_field(owner: Any, name: str, value: Any) -> Any:
    """The settings with one field changed, unchecked: the key must see values that checks refuse today, too."""
    changed = copy.copy(owner)
    object.__setattr__(changed, name, value)
    return changed


def options(hint: Any) -> list[Any]:
    """A field's types, one by one."""
    if get_origin(hint) in (Union, types.UnionType):
        return [inner for option in get_args(hint) for inner in options(option)]
    if get_origin(hint) is tuple:
        return [inner for option in get_args(hint) if option is not ... for inner in options(option)]
    return [hint]


def part_kinds(hint: Any) -> set[str]:
    """The kinds of parts that a field accepts."""
    return {option.kind for option in options(hint) if isinstance(option, type) and issubclass(option, Part)}


def sample(cls: type[Any]) -> Any:
    """A part with its defaults, and an arbitrary value for each field without a default."""
    needed = {name: hint for name, hint in field_types(cls).items() if field_default(cls, name) is dataclasses.MISSING}
    try:
        return fill(cls, {name: another(None, hint) for name, hint in needed.items()}, where="sample")
    except Exception:  # the fields that have defaults must fit one another: take them as they are
        blank = object.__new__(cls)
        for name, hint in field_types(cls).items():
            value = another(None, hint) if name in needed else field_default(cls, name)
            object.__setattr__(blank, name, value)
        return blank


def another(value: Any, hint: Any, step: float = 1) -> Any:
    """Another value for a field; a number grows by the step."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + step if value + step != value else 2 * value
    if isinstance(value, str) and get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != value)
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple) and "relu" in value:  # the layers of a chain
        return value[:-2]
    if isinstance(value, (list, tuple)):
        return (*value[:-1], another(value[-1] if value else None, options(hint)[0], step))
    if isinstance(value, dict):
        return {**value, "party": {"lr": 2.0}}
    kinds = sorted(part_kinds(hint))
    if kinds:
        classes = [known for kind in kinds for known in registered(kind).values() if known is not type(value)]
        return sample(classes[0]) if classes else None
    chosen = next(option for option in options(hint) if option is not type(None))
    if get_origin(chosen) is Literal:
        return next(choice for choice in get_args(chosen) if choice != value)
    return {int: 3, float: 0.5, str: "text", bool: True, Any: 3, dict: {"party": {"lr": 2.0}}}[chosen]


def places() -> Iterator[tuple[str, Any, Rebuild]]:
    """Every settings class, once: its dotted path, an instance, and a function that replaces it."""
    base = dataclasses.replace(parse(TREE), privacy=privacy(PRIVACY))
    seen: set[type[Any]] = set()
    waiting: list[tuple[str, Any, Rebuild]] = [("", base, lambda value: value)]
    while waiting:
        at, owner, rebuild = waiting.pop(0)
        if type(owner) in seen:
            continue
        seen.add(type(owner))
        yield at, owner, rebuild
        hints = typed(type(owner))
        for field in dataclasses.fields(owner):
            name, hint = field.name, hints[field.name]
            value = getattr(owner, name)
            several = get_origin(hint) is tuple

            def lay(
                inner: Any, owner: Any = owner, name: str = name, several: bool = several, rebuild: Rebuild = rebuild
            ) -> Experiment:
                return rebuild(with_field(owner, name, (inner,) if several else inner))

            dotted = f"{at}.{name}".removeprefix(".")
            if dotted in LEFT_OUT:
                continue
            if dataclasses.is_dataclass(value) and not isinstance(value, Part):
                waiting.append((dotted, value, lay))
            for kind in sorted(part_kinds(hint)):
                waiting += [(dotted, sample(known), lay) for known in registered(kind).values()]
    for kind in ("dataset", "model"):  # which stand in [task] as plain data
        for known in registered(kind).values():

            def named(part: Any, kind: str = kind) -> Experiment:
                return dataclasses.replace(base, task=with_field(base.task, kind, to_config(part)))

            yield f"task.{kind}", sample(known), named


def typed(cls: type[Any]) -> dict[str, Any]:
    """The types of a settings class's fields; Experiment's trackers are named for type checkers only."""
    if cls is not Experiment:
        return field_types(cls)
    hints: dict[str, Any] = {field.name: Any for field in dataclasses.fields(cls)}
    return hints | {"partition": Partition, "algorithm": Algorithm, "adversary": tuple[Adversary, ...],
                    "drift": tuple[Drift, ...]}  # fmt: skip


def changed_key(dotted: str, owner: Any, rebuild: Rebuild, name: str, hint: Any) -> str:
    """The key with another value in one field; for data sets and models, which are checked, an allowed value."""
    value = getattr(owner, name)
    for step in (1, 6, 0.25):
        with contextlib.suppress(ConfigError):
            other = OTHERS[dotted] if dotted in OTHERS else another(value, hint, step)
            return key_of(rebuild(with_field(owner, name, other)))
    raise AssertionError(f"found no other value for {dotted} = {value!r}")


def test_every_field_of_every_settings_class_is_in_the_key_or_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cells, "inputs", lambda experiment: {})  # digests of code and files have tests of their own
    walked, classes, wrong = set(), set(), []
    for at, owner, rebuild in places():
        classes.add(type(owner).__name__)
        before = key_of(rebuild(owner))
        for name, hint in typed(type(owner)).items():
            dotted = f"{at}.{name}".removeprefix(".")
            walked.add(dotted)
            if (changed_key(dotted, owner, rebuild, name, hint) == before) != (dotted in LEFT_OUT):
                wrong.append(f"{type(owner).__name__}.{name} at {dotted}")
    assert wrong == []
    assert set(LEFT_OUT) <= walked and all(LEFT_OUT.values())
    assert {"Experiment", "TaskTable", "Run", "Privacy"} <= classes
    for kind in sorted(set(KINDS) - OUTSIDE):
        missing = {part.__name__ for part in registered(kind).values() if dataclasses.fields(part)} - classes
        assert not missing, f"no {kind} of these was looked at: {missing}"


def test_cells_that_differ_in_privacy_only_have_different_keys() -> None:
    tree = {
        "task": {"dataset": "digits", "model": "logistic"}, "privacy": {"secure": "masking"},
        "study": {"grid": {"privacy.bits": [8, 32]}},
    }  # fmt: skip
    private = [cell.key for cell in parse_study(tree, "bits").cells()]
    plain = [cell.key for cell in parse_study({"task": tree["task"]}, "plain").cells()]
    assert len({*private, *plain}) == 3


def test_a_private_study_does_not_take_the_runs_of_an_unprotected_one_beside_it(tmp_path: Path) -> None:
    tree = {
        "task": {"dataset": "digits", "model": "logistic"}, "partition": {"name": "iid", "parties": 3},
        "run": {"rounds": 2}, "study": {"jobs": 1},
    }  # fmt: skip

    def results(name: str, **tables: Any) -> Any:
        study = dataclasses.replace(parse_study({**tree, **tables}, name), folder=tmp_path / name)
        return run_study(study).outcomes[0]

    plain, private = results("plain"), results("private", privacy={"bound": 0.01})
    assert private.history != plain.history
    assert json.loads((private.run_dir / "experiment.json").read_text())["privacy"] == {"bound": 0.01}


def test_runs_under_keys_of_an_older_form_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("fedavg", "as given", "", "", 0, {"task": {"dataset": "digits", "model": "logistic"}})
    now = cell.key
    monkeypatch.setattr(cells, "KEY_VERSION", cells.KEY_VERSION - 1)
    old = dataclasses.replace(cell).key
    assert old != now
    finished = tmp_path / "old" / "cells" / old
    finished.mkdir(parents=True)
    (finished / "summary.json").write_text("{}")
    mine = CellRun("fedavg", "fedavg", cell.experiment, tmp_path / "new" / "cells" / now)
    copy_finished(mine)
    assert not mine.run_dir.exists()


def test_the_module_of_a_secure_sum_of_the_users_own_is_known_to_workers() -> None:
    masking = registered("secure")["masking"]
    base = dataclasses.replace(parse(TREE), privacy=privacy(PRIVACY))
    own = type("Own", (masking,), {"__module__": "my_sums"})
    part = copy.copy(base.privacy.secure)
    object.__setattr__(part, "__class__", own)
    assert modules_of(dataclasses.replace(base, privacy=with_field(base.privacy, "secure", part))) == {"my_sums"}
