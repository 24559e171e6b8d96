from __future__ import annotations

import dataclasses
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hansa
from hansa.core import registry
from hansa.core.plain_data import build, from_config, nest, to_config
from hansa.core.registry import KINDS, Part, lookup, register, registered, summary
from hansa.fusion import WeightedMean
from hansa.local import SGD, SVRG, Gradient
from hansa.plumbing.errors import ConfigError
from hansa.schedule import ExponentialDecay

PARTS = [
    (kind, name) for kind in KINDS for name, part in registered(kind).items() if part.__module__.startswith("hansa.")
]  # not of tests
GIVEN: dict[tuple[str, str], dict[str, Any]] = {("dp", "central"): {"sigma": 1.0},  # one of several must be given
                                                ("metric", "function"): {"function": "my_module:cost"},
                                                ("topology", "edges"): {"edges": ["a -- b"]},
                                                ("relays", "relays"): {"counts": [2, 3], "latency": [0.5]},
                                                ("attestation", "sev-snp"): {"measurements": ["ab" * 48], "roots": "a"},
                                                ("attestation", "tdx"): {"measurements": ["ab" * 48], "roots": "a"},
                                                }  # fmt: skip


def needs_fields(cls: type[Part]) -> bool:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return any(f.default is missing and f.default_factory is missing for f in fields)


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_part_survives_its_configuration_as_json(kind: str, name: str) -> None:
    cls = registered(kind)[name]
    if needs_fields(cls):
        with pytest.raises(ConfigError, match="is required"):
            build(kind, name)
        return
    part = build(kind, name, **GIVEN.get((kind, name), {}))
    assert (part.kind, part.name) == (kind, name)
    assert from_config(kind, json.loads(json.dumps(to_config(part))), where=kind) == part


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_part_says_what_it_is_and_cannot_be_changed(kind: str, name: str) -> None:
    cls = registered(kind)[name]
    assert summary(cls)[0].endswith((".", "?")), "the first line, which `hansa parts` shows, is a sentence"
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_values_that_differ_from_the_defaults_survive_too() -> None:
    part = hansa.FedAvg(local=SGD(lr=0.5, steps=3, batch=7, drop_last=True), fusion=WeightedMean(uniform=True))
    assert from_config("algorithm", json.loads(json.dumps(to_config(part))), where="algorithm") == part
    tree = hansa.ID3(max_depth=7)
    assert from_config("algorithm", to_config(tree), where="algorithm") == tree


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm 'fedavgg'; did you mean 'fedavg'\?"):
        build("algorithm", "fedavgg")
    with pytest.raises(ConfigError, match=r"unknown kind of part 'algoritm'; did you mean 'algorithm'\?"):
        registered("algoritm")


def test_an_unknown_field_suggests_the_nearest_and_says_where() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm \(fedavg\)\.local \(sgd\): unknown field 'epoch'; did you mean 'epochs'"
    ):
        build("algorithm", "fedavg", **{"local.epoch": 3})
    with pytest.raises(ConfigError, match="unknown field 'zzz'; known: fusion, local, server"):
        build("algorithm", "fedavg", zzz=1)


@pytest.mark.parametrize("local", [5, True, [1], {"name": 5}, {"name": [1]}, {"name": {"a": 1}}])
@pytest.mark.parametrize("beside", [{}, {"lr": 0.1}, {"mom": 1}])
def test_a_name_that_is_no_text_is_refused_whatever_stands_beside_it(local: Any, beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs a name|by name or as a table|unknown field"):
        build("algorithm", "fedavg", local=local, **beside)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("local.lr", "fast", "expected a number, got 'fast'"),
        ("local.lr", True, "expected a number, got True"),
        ("local.epochs", 1.5, "expected a whole number, got 1.5"),
        ("local.epochs", True, "expected a whole number, got True"),
        ("local.drop_last", 1, "expected true or false, got 1"),
        ("local.batch", "all", "expected a whole number or nothing, got 'all'"),
        ("local", 3, "expected a local solver by name or as a table, got 3"),
        ("local", WeightedMean(), "expected a local solver, got the fusion 'mean'"),
        ("local.epochs", 0, "epochs must be at least 1, got 0"),
        ("local.lr", -1.0, "lr must be above 0, got -1"),
        ("local.lr", float("nan"), "expected a number, got nan"),
        pytest.param(
            "local.lr", 10**400, "lr: the whole number is too large; at most 1.79769e+308 is allowed", id="large"
        ),
        pytest.param("local.batch", -(10**400), "batch: the whole number is too large", id="small"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("algorithm", "fedavg", **{field: value})
    assert expected in str(caught.value)
    assert str(caught.value).startswith("algorithm (fedavg).local")


def test_a_choice_that_does_not_exist_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'metropoli' is not one of .*; did you mean 'metropolis'\?"):
        build("algorithm", "d-psgd", weights="metropoli")


def test_dotted_names_reach_nested_fields() -> None:
    made = build("algorithm", "fedavg", **{"local.lr": 0.5, "local.epochs": 2, "server.lr": 2})
    assert made == hansa.FedAvg(local=SGD(lr=0.5, epochs=2), server=hansa.Descent(lr=2.0))
    assert isinstance(made.server.lr, float)


def test_a_field_set_by_a_dotted_name_leaves_the_others_at_the_owners_default() -> None:
    assert build("algorithm", "d-psgd", **{"local.lr": 0.5}).local == SGD(lr=0.5, steps=1)  # SGD's own is steps=None
    faded = build("algorithm", "fedsgd", **{"server.schedule": "exponential", "server.schedule.decay": 0.9})
    assert faded.server == hansa.Descent(lr=0.1, schedule=ExponentialDecay(0.9))


def test_another_part_starts_from_its_own_defaults() -> None:
    assert build("algorithm", "d-psgd", **{"local": "gradient"}).local == Gradient()
    assert build("algorithm", "fedavg", **{"local": "svrg", "local.h": 2}).local == SVRG(h=2.0)
    assert build("algorithm", "fedavg", **{"local.h": 2, "local": "svrg"}).local == SVRG(h=2.0)  # in any order
    assert build("algorithm", "fedavg", local={"name": "svrg", "h": 2}).local == SVRG(h=2.0)
    assert build("algorithm", "fedavg", **{"local": SGD(lr=3.0), "local.epochs": 2}).local == SGD(lr=3.0, epochs=2)


def test_a_name_that_reaches_into_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="reaches into 'lr', which is already set to 1"):
        nest({"lr": 1, "lr.x": 2})


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two fusions are called 'mean'"):

        @register("mean")
        @dataclass(frozen=True)
        class Other(WeightedMean):
            pass

    assert registered("fusion")["mean"] is WeightedMean


@pytest.mark.parametrize(("kind", "where"), [("algorithm", "algorithm"), ("local", "algorithm.local")])
def test_dpsgd_is_refused_with_both_names_that_may_be_meant(kind: str, where: str) -> None:
    with pytest.raises(ConfigError, match=r"'dpsgd' is ambiguous: 'd-psgd' is .*, 'dp-sgd' is .*"):
        from_config(kind, {"name": "dpsgd"}, where)
    with pytest.raises(AttributeError, match=r"hansa\.DecentralizedSGD is .*, hansa\.local\.DPSGD is .*"):
        hansa.DPSGD  # noqa: B018


def test_what_the_package_exports_can_be_had() -> None:
    for name in hansa.__all__:
        assert getattr(hansa, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'FedAvgg'"):
        hansa.FedAvgg  # noqa: B018


@pytest.mark.parametrize(
    ("name", "fields", "part", "field", "value"),
    [
        ("fedprox", {"mu": 1.0}, "local", "mu", 1.0),
        ("scaffold", {"option": "I", "local.lr": 0.3}, "local", "option", "I"),
        ("fedadam", {"tau": 0.1, "server.lr": 0.3}, "server", "tau", 0.1),
        ("qfedavg", {"q": 5}, "local", "q", 5.0),
        ("fedavg", {"local": "adam", "beta1": 0.5}, "local", "beta1", 0.5),
        ("fedavg", {"local": hansa.SGD(lr=3.0), "batch": 7}, "local", "batch", 7),
        ("fedavg", {"uniform": True}, "fusion", "uniform", True),
    ],
)
def test_a_field_that_only_one_part_of_an_algorithm_has_needs_no_part(
    name: str, fields: dict[str, Any], part: str, field: str, value: Any
) -> None:
    assert getattr(getattr(build("algorithm", name, **fields), part), field) == value


def test_a_field_of_two_parts_must_say_which() -> None:
    with pytest.raises(ConfigError, match=r"local and server have a field 'lr'; say which, as in local\.lr"):
        build("algorithm", "fedadam", lr=1.0)
    assert build("algorithm", "fedavg", local=hansa.SGD(lr=3.0), batch=7).local.lr == 3.0


SLOW = """
import threading
from dataclasses import dataclass
import hansa.core.registry as registry

registry.begun.set()  # the test's own: the import has begun, and goes on once another thread has asked
registry.go_on.wait(600)

@registry.register("slow-tracker")
@dataclass(frozen=True)
class SlowTracker(registry.Part):
    '''A part whose module takes its time.'''
    kind = "tracker"

assert registry.lookup("tracker", "slow-tracker") is SlowTracker  # a module may ask for its own kind
"""


def test_a_part_whose_module_another_thread_is_importing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_tracker_module.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_parts", {**registry._parts, "tracker": {}})
    monkeypatch.setattr(registry, "_providers", {**registry._providers, "tracker": ["slow_tracker_module"]})
    monkeypatch.setattr(registry, "_loaded", registry._loaded - {"tracker"})
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(registry, "begun", begun, raising=False)
    monkeypatch.setattr(registry, "go_on", go_on, raising=False)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(lookup, "tracker", "slow-tracker")
            assert begun.wait(600)
            second = pool.submit(lookup, "tracker", "slow-tracker")
            with pytest.raises(TimeoutError):  # it waits for the import instead of saying that there is no such part
                second.result(0.3)
            go_on.set()
            assert first.result(600) is second.result(600)
    finally:
        sys.modules.pop("slow_tracker_module", None)


def test_a_module_that_cannot_be_imported_is_said_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_providers", {**registry._providers, "tracker": ["no_such_module_of_parts"]})
    monkeypatch.setattr(registry, "_loaded", registry._loaded - {"tracker"})
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_of_parts"):
            registered("tracker")
