"""A field that the other fields leave without effect is refused when it is set, in Python, in files and by `--set`."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from hansa.algorithms import FedAvg
from hansa.core.applies import If, Unless, conditions
from hansa.core.plain_data import build, field_default, field_types, from_config, nest
from hansa.core.registry import KINDS, registered
from hansa.experiment.audit import AuditTable
from hansa.experiment.config import parse, parse_set, read
from hansa.experiment.settings import Run
from hansa.local.sgd import SGD
from hansa.matching.pfnm import PFNM
from hansa.plumbing.errors import ConfigError
from hansa.study.spec import read_study

CLASSES: list[type[Any]] = [Run, AuditTable]
CLASSES += [cls for kind in KINDS for cls in registered(kind).values() if any(conditions(cls))]
STATED = [(cls, field, condition) for cls in CLASSES for field, condition in conditions(cls)]


def candidates(hint: Any, default: Any) -> list[Any]:
    """Values of a field's type other than its default."""
    if get_origin(hint) in (Union, types.UnionType):
        return [value for option in get_args(hint) for value in candidates(option, default)]
    if get_origin(hint) is Literal:
        values = list(get_args(hint))
    elif get_origin(hint) is tuple:
        values = [tuple(candidates(get_args(hint)[0], None)[:2])]
    else:
        number = default if isinstance(default, (int, float)) else 1
        values = {bool: [False, True], int: [number + 1, number + 2], float: [number * 0.75, 0.5],
                  str: ["leaves", "sketch"], type(None): [None]}[hint]  # fmt: skip
    return [value for value in values if value != default]


def switched(cls: type[Any], condition: If, on: bool) -> list[Any]:
    """Values of a condition's switch with which it holds, or does not hold."""
    default = field_default(cls, condition.switch)
    values = [default, *condition.values, *candidates(field_types(cls)[condition.switch], default)]
    return [value for value in values if condition.holds(value, default) is on]


def others_of(cls: type[Any], field: str, condition: If) -> dict[str, Any]:
    """Values of the other switches of a field, and of its switch, with which both apply."""
    related = [other for name, other in conditions(cls) if name in (field, condition.switch) and other is not condition]
    return {other.switch: switched(cls, other, on=True)[0] for other in related}


@pytest.mark.parametrize(("cls", "field", "condition"), STATED,
                         ids=[f"{cls.__name__}-{field}-{on.switch}" for cls, field, on in STATED])  # fmt: skip
def test_every_stated_field_is_refused_without_effect_and_allowed_with_it(cls: Any, field: str, condition: If) -> None:
    value = candidates(field_types(cls)[field], field_default(cls, field))[0]
    for off in switched(cls, condition, on=False)[:2]:
        with pytest.raises(ConfigError, match=f"^{field} = .* has no effect while") as refusal:
            cls(**{**others_of(cls, field, condition), field: value, condition.switch: off})
        assert f"leave {field} out" in str(refusal.value)
    allowed = switched(cls, condition, on=True)
    assert allowed, "no value of the switch makes the field apply"
    for other in allowed[:2]:
        try:
            cls(**{field: value, condition.switch: other})
        except ConfigError as error:
            assert f"has no effect while {condition.switch} " not in str(error)


def test_stated_fields_exist_and_have_defaults() -> None:
    for cls, field, condition in STATED:
        for name in (field, condition.switch):
            assert field_default(cls, name) is not dataclasses.MISSING, (cls, name)


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("local", "sgd", {"epochs": 5, "steps": 3}, "epochs = 5 has no effect while steps is 3"),
    ("local", "elastic", {"epochs": 5, "steps": 3}, "epochs = 5 has no effect while steps is 3"),
    ("local", "overlap", {"epochs": 5, "steps": 3}, "epochs = 5 has no effect while steps is 3"),
    ("local", "adam", {"drop_last": True, "batch": None}, "drop_last = true has no effect while batch is not set"),
    ("transform", "top-k", {"share": 0.5, "k": 3}, "share = 0.5 has no effect while k is 3"),
    ("transform", "rand-k", {"share": 0.5, "k": 3}, "share = 0.5 has no effect while k is 3"),
    ("transform", "accumulated-top-k", {"share": 0.5, "k": 3}, "share = 0.5 has no effect while k is 3"),
    ("select", "power-of-choice", {"batch": 5}, "batch = 5 has no effect while variant is 'pow-d'; leave batch out, or "
     "set variant to 'cpow-d'"),
    ("select", "power-of-choice", {"batch": 5, "variant": "rpow-d"}, "while variant is 'rpow-d'"),
    ("select", "tiers", {"interval": 3}, "interval = 3 has no effect while policy is 'uniform'"),
    ("select", "tiers", {"credits": 3, "policy": "vanilla"}, "credits = 3 has no effect while policy is 'vanilla'"),
    ("select", "merit", {"samples": 7}, "samples = 7 has no effect while measure is 'agreement'"),
    ("algorithm", "ifca", {"trial": 7}, "trial = 7 has no effect while restarts is 1; leave trial out"),
    ("algorithm", "fedper", {"layers": 2, "head": ("out",)}, "layers = 2 has no effect while head is ['out']"),
    ("algorithm", "lg-fedavg", {"layers": 2, "representation": ("out",)}, "layers = 2 has no effect while"),
    ("algorithm", "boosting", {"leaves": 7}, "leaves = 7 has no effect while growth is 'levels'"),
    ("algorithm", "boosting", {"error": 0.01}, "error = 0.01 has no effect while cuts is 'quantiles'"),
    ("algorithm", "prunefl", {"interval": 0, "half_life": 5.0}, "half_life = 5.0 has no effect while interval is 0"),
    ("dataset", "synthetic", {"iid": True, "alpha": 2.0}, "alpha = 2.0 has no effect while iid is true"),
    ("finetune", "finetune", {"lr": 0.5}, "lr = 0.5 has no effect while epochs is 0"),
    ("metric", "f1", {"average": "macro", "positive": 0}, "positive = 0 has no effect while average is 'macro'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "fields", "reason"), REFUSED, ids=[f"{r[1]}-{r[3][:9]}" for r in REFUSED])
def test_python_and_tables_refuse_the_same_fields_with_the_same_sentence(
    kind: str, name: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as in_python:
        registered(kind)[name](**fields)
    with pytest.raises(ConfigError) as in_table:
        from_config(kind, {"name": name, **fields}, where="here")
    assert reason in str(in_python.value)
    assert str(in_table.value) == f"here ({name}): {in_python.value}"


def test_run_refuses_fields_without_effect() -> None:
    with pytest.raises(ConfigError, match="late = 'drop' has no effect without parties that are late"):
        Run(late="drop")
    with pytest.raises(ConfigError, match=r"cohort = 0\.5 has no effect while cohort_size is 3"):
        Run(cohort=0.5, cohort_size=3)


def test_a_cohort_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="cohort must be above 0 and at most 1, got 0"):
        Run(cohort=0)


def test_a_default_of_an_algorithm_gives_way_to_a_field_that_is_set() -> None:
    assert PFNM().local.epochs == 10
    assert build("algorithm", "pfnm", **{"local.steps": 3}).local == SGD(steps=3)
    assert SGD(epochs=5).at({"steps": 3}) == SGD(steps=3)


def test_the_word_none_unsets_a_field_of_an_algorithms_default() -> None:
    with pytest.raises(ConfigError, match=r"epochs = 5 has no effect while steps is 1; .* set steps to 'none'"):
        build("algorithm", "zeno++", **{"local.epochs": 5})
    changed = build("algorithm", "zeno++", **{"local.epochs": 5, "local.steps": "none"})
    assert changed.local == SGD(lr=0.1, batch=128, epochs=5)


def test_an_experiment_says_where_the_field_is() -> None:
    tree = {"task": {"dataset": "digits", "model": "logistic"},
            "algorithm": {"name": "fedavg", "local": {"steps": 3, "epochs": 5}}}  # fmt: skip
    with pytest.raises(ConfigError, match=r"algorithm \(fedavg\).local \(sgd\): epochs = 5 has no effect"):
        parse(tree)
    assert parse({**tree, "algorithm": {"name": "fedavg", "local": {"steps": 3}}}).algorithm == FedAvg(SGD(steps=3))


def test_conditions_say_when_they_hold() -> None:
    assert If("a", 1, 2).holds(2, None) and not If("a", 1).holds(2, None)
    assert Unless("a", 1).holds(2, None) and not Unless("a", 1).holds(1, None)
    assert If("a").holds(3, 1) and not If("a").holds(1, 1)
    assert Unless("a").holds(1, 1) and not Unless("a").holds(3, 1)


def test_set_without_a_value_takes_a_field_out_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text('[task]\ndataset = "digits"\nmodel = "logistic"\n[algorithm]\nname = "fedavg"\nlocal.epochs = 5\n')
    with pytest.raises(ConfigError, match="epochs = 5 has no effect while steps is 3"):
        read(file, parse_set(["algorithm.local.steps=3"]))
    changed = read(file, parse_set(["algorithm.local.steps=3", "algorithm.local.epochs="]))
    assert changed.algorithm == FedAvg(SGD(steps=3)) and "epochs" not in changed.tree["algorithm"]["local"]
    with pytest.raises(ConfigError, match="the file does not set it; did you mean 'epochs'"):
        read(file, parse_set(["algorithm.local.epoch="]))
    assert read(file, parse_set(["run.patience=none", "task.model='2nn'"])).run.patience is None


def test_set_without_a_value_takes_a_field_out_of_a_study(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[study]\nalgorithms = ["fedavg"]\n[algorithm]\nlocal.epochs = 5\n')
    study = read_study(file, nest(parse_set(["algorithm.local.steps=3", "algorithm.local.epochs="])))
    assert {cell.experiment.algorithm for cell in study.cells()} == {FedAvg(SGD(steps=3))}
    with pytest.raises(ConfigError, match="takes a field out of the file, and the file does not set it"):
        read_study(file, nest(parse_set(["task.labels="])))
