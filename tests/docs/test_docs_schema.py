"""The JSON schema of experiment files accepts what Hansa accepts, and flags names and types that Hansa refuses."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import fastjsonschema
import pytest
from docs_pages import ROOT, blocks
from typer.testing import CliRunner

from hansa.cli.app import app
from hansa.core.plain_data import field_types, to_config
from hansa.core.registry import Part, registered
from hansa.experiment.config import parse
from hansa.plumbing.errors import ConfigError
from hansa.study import parse_study
from hansa.study.schema import file_schema

COPY = ROOT / "docs" / "experiment.schema.json"
SCHEMA = json.loads(COPY.read_text())
EXAMPLES = {path.name: tomllib.loads(path.read_text()) for path in sorted((ROOT / "examples").glob("*.toml"))}
OWN_PARTS = ROOT / "docs/howto/own-parts.md"  # its experiment names parts that Hansa does not have
BASE = {"task": {"dataset": "digits", "model": "2nn"}}
Check = Callable[[Any], Any]


@pytest.fixture(scope="module")
def check() -> Check:
    return fastjsonschema.compile(SCHEMA)  # type: ignore[no-any-return]


def flagged(check: Check, tree: Any) -> str | None:
    """What the schema says against a file; None if nothing."""
    try:
        check(copy.deepcopy(tree))  # it fills in defaults
    except fastjsonschema.JsonSchemaException as error:
        return str(error)
    return None


def refused(tree: Any) -> str | None:
    """What Hansa says against a file; None if nothing."""
    try:
        if "study" in tree:
            parse_study(tree, "page").cells()
        else:
            parse(tree)
    except ConfigError as error:
        return str(error)
    return None


def test_the_copy_in_the_documentation_is_current() -> None:
    assert file_schema(own=True) == SCHEMA, "run: make surface"


def test_the_command_prints_the_schema_with_all_parts_that_are_installed() -> None:
    printed = json.loads(CliRunner().invoke(app, ["schema"]).stdout)
    assert printed == json.loads(json.dumps(file_schema()))
    assert printed["definitions"].keys() >= SCHEMA["definitions"].keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid(check: Check, name: str) -> None:
    assert refused(EXAMPLES[name]) is None
    assert flagged(check, EXAMPLES[name]) is None


@pytest.mark.parametrize("name", [name for name in EXAMPLES])
def test_an_example_names_the_schema_for_editors(name: str) -> None:
    first = (ROOT / "examples" / name).read_text().splitlines()[0]
    assert first == "#:schema ../docs/experiment.schema.json" and COPY.is_file()


def test_an_experiment_on_a_page_is_valid(check: Check) -> None:
    trees = [(page, block.line, tomllib.loads(block.text)) for page in sorted((ROOT / "docs").rglob("*.md"))
             for block in blocks(page) if block.language == "toml" and page != OWN_PARTS]  # fmt: skip
    experiments = [entry for entry in trees if {"task", "study"} & set(entry[2])]
    assert len(experiments) >= 10
    assert [(str(page), line, said) for page, line, tree in experiments if (said := flagged(check, tree))] == []


def own(kind: str) -> dict[str, type[Part]]:
    return {name: cls for name, cls in registered(kind).items() if cls.__module__.startswith("hansa.")}


def filled(part: Part) -> Any:
    """A part as a table of a file, with all fields that have a value."""

    def without_none(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: without_none(value) for key, value in tree.items() if value is not None}
        return [without_none(entry) for entry in tree] if isinstance(tree, (list, tuple)) else tree

    return without_none(to_config(part))


NEEDED: dict[str, dict[str, Any]] = {
    "cosine": {"rounds": 5}, "exponential": {"decay": 0.9}, "step": {"at": [3]}, "adacomm": {"tau0": 4},
    "random": {"least": 1, "most": 3}, "constant": {"value": 1.0}, "trace": {"file": "times.csv"},
    "central": {"sigma": 1.0}, "dp-sgd": {"sigma": 1.0}, "csv-file": {"file": "a.csv", "target": "y"},
    "new-classes": {"start": 2, "classes": [8, 9]},
    **{name: {"start": 2} for name in ("label-shift", "rotation", "noise", "join", "leave", "day-night")},
}  # fmt: skip
PLACES: dict[str, Callable[[Any], Any]] = {
    "algorithm": lambda table: BASE | {"algorithm": table},
    "partition": lambda table: BASE | {"partition": table},
    "adversary": lambda table: BASE | {"adversary": [table]},
    "drift": lambda table: BASE | {"drift": [table]},
    "detector": lambda table: BASE | {"run": {"detect": table}},
    "local": lambda table: BASE | {"algorithm": {"name": "fedavg", "local": table}},
    "server": lambda table: BASE | {"algorithm": {"name": "fedavg", "server": table}},
    "fusion": lambda table: BASE | {"algorithm": {"name": "fedavg", "fusion": table}},
    "schedule": lambda table: BASE | {"algorithm": {"name": "fedavg", "local": {"schedule": table}}},
    "select": lambda table: BASE | {"run": {"select": table}},
    "pace": lambda table: BASE | {"run": {"pace": table}},
    "distribution": lambda table: BASE | {"run": {"devices": {"compute": table}}},
    "availability": lambda table: BASE | {"run": {"devices": {"availability": table}}},
    "dataset": lambda table: {"task": {"dataset": table, "model": "2nn"}},
    "model": lambda table: {"task": {"dataset": "digits", "model": table}},
    "prepare": lambda table: {"task": {"dataset": "digits", "model": "2nn", "prepare": table}},
    "secure": lambda table: BASE | {"privacy": {"secure": table}},
    "dp": lambda table: BASE | {"privacy": {"dp": table}},
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_part_of_the_users_own_is_valid_by_the_name_of_its_module(check: Check, kind: str) -> None:
    for table in ("mine:MyPart", {"name": "my_folder.mine:MyPart"}):
        assert flagged(check, PLACES[kind](table)) is None
    if kind not in ("dp", "secure"):  # their tables list all fields
        assert flagged(check, PLACES[kind]({"name": "mine:MyPart", "my_field": 3})) is None
    for wrong in ("mine:", ":MyPart", "mine:3", "a:b:c"):
        assert flagged(check, PLACES[kind](wrong))


def test_a_loss_and_the_algorithms_of_a_study_may_be_the_users_own(check: Check) -> None:
    assert flagged(check, {"task": {"dataset": "digits", "model": "2nn", "loss": "mine:focal"}}) is None
    entries = ["fedavg", "mine:MyAlg", {"name": "mine:MyAlg", "my_field": 3, "label": "mine"}]
    assert flagged(check, {**BASE, "study": {"algorithms": entries, "partitions": ["mine:Divide"]}}) is None
    assert flagged(check, {**BASE, "study": {"algorithms": [{"name": "fedavg", "my_field": 3}]}})


@pytest.mark.parametrize("kind", PLACES)
def test_a_part_is_valid_by_name_and_with_all_of_its_fields_and_no_others(check: Check, kind: str) -> None:
    place = PLACES[kind]
    for name, cls in own(kind).items():
        needed = {key: value for key, value in NEEDED.get(name, {}).items() if key in field_types(cls)}
        table = filled(cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in needed.items()}))
        assert flagged(check, place(table)) is None, name
        assert flagged(check, place({"name": name, **needed})) is None, name
        assert needed or flagged(check, place(name)) is None, name
        assert flagged(check, place({**table, "no_such_field": 1})), name
        assert flagged(check, place({**table, "name": "no-such-name"})), name
    assert flagged(check, place("no-such-name"))


@pytest.mark.parametrize(("tree", "right"), [
    ({"run": {"rounds": 0}}, {"run": {"rounds": 1}}),
    ({"run": {"cohort": 1.5}}, {"run": {"cohort": 0.5}}),
    ({"run": {"quorum": -1}}, {"run": {"quorum": 0.5}}),
    ({"run": {"deadline": 0}}, {"run": {"deadline": "none"}}),
    ({"audit": {"keep_replies": True, "keep_bytes": 0}}, {"audit": {"keep_replies": True, "keep_bytes": 1}}),
    ({"privacy": {"secure": {"name": "paillier", "key_bits": 1025}}},
     {"privacy": {"secure": {"name": "paillier", "key_bits": 1024}}}),
    ({"algorithm": {"name": "boosting", "leaves": 1, "growth": "leaves"}},
     {"algorithm": {"name": "boosting", "leaves": 2, "growth": "leaves"}}),
    ({"algorithm": {"name": "boosting", "categorical": [-1]}}, {"algorithm": {"name": "boosting", "categorical": [1]}}),
])  # fmt: skip
def test_a_number_outside_its_limits_is_flagged(check: Check, tree: Any, right: Any) -> None:
    assert flagged(check, BASE | tree) is not None and refused(BASE | tree) is not None
    assert flagged(check, BASE | right) is None and refused(BASE | right) is None


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every table, list and value of a file."""
    yield path
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from places(value, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a file with another value at a path."""
    made = copy.deepcopy(tree)
    at(made, path[:-1])[path[-1]] = value
    return made


FREE = {"tune", "grid", "own"}  # tables whose keys are names of fields or parties


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_unknown_keys_wrong_types_and_wrong_names_in_an_example_are_flagged(check: Check, name: str) -> None:
    tree, tried = EXAMPLES[name], 0
    for path in places(tree):
        value = at(tree, path)
        if FREE & set(path) or path == ("study", "name"):
            continue
        if isinstance(value, dict):
            wrong = [changed(tree, (*path, "no_such_key"), 1)]
        elif isinstance(value, str):
            labelled = path[-1] == "label"
            wrong = [changed(tree, path, 7), *([] if labelled else [changed(tree, path, "no-such-name")])]
        elif isinstance(value, list):
            wrong = [changed(tree, path, 7)]
        else:
            # A number, or the name of a file, a function or a party.
            may_be_text = path == ("task", "public") or (path[0] == "drift" and "parties" in path)
            wrong = [changed(tree, path, {"a": 1}), *([] if may_be_text else [changed(tree, path, "text")])]
        for other in wrong:
            assert flagged(check, other), path
            assert refused(other), path
            tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("more", "valid"),
    [
        ({"algorithm": {"name": "fedprox", "mu": 0.1}}, True),  # a field of its local solver
        ({"algorithm": {"name": "fedavg", "local": "proximal", "mu": 0.1}}, True),
        ({"algorithm": {"name": "fedavg", "local": {"mu": 0.1}}}, False),  # not a field of the default solver
        ({"algorithm": {"local": {"lr": 0.1}}}, False),
        ({"algorithm": "fedavg", "partition": "iid"}, True),
        ({"partition": {"parties": 10}}, False),
        ({"privacy": {"secure": "masking", "threshold": 0.7}}, True),
        ({"privacy": {"threshold": 0.7}}, False),  # a field of a secure sum that is not named
        ({"privacy": {"secure": "masking", "key_bits": 2048}}, False),  # a field of another secure sum
        ({"privacy": {"dp": {"kind": "central", "sigma": 1}}}, True),
        ({"privacy": {"dp": {"sigma": 1}}}, False),
        ({"adversary": {"kind": "alie"}}, True),
        ({"adversary": [{"kind": "alie", "fraction": 0.1}, {"name": "ipm", "fraction": 0.1}]}, True),
        ({"adversary": {"fraction": 0.1}}, False),
        ({"drift": {"name": "leave", "start": 3, "parties": ["ada", 2]}}, True),
        ({"drift": [{"name": "rotation", "start": 3}, {"name": "join", "start": 2}]}, True),
        ({"drift": {"name": "rotation"}}, False),
        ({"track": ["jsonl:lines.jsonl", "console"]}, True),
        ({"track": {"jsonl": {}}}, True),
        ({"track": ["jsonll"]}, False),
        ({"run": {"own": {"3": {"lr": 0.1, "batch": 4}}}}, True),
        ({"run": {"own": {"3": 1}}}, False),
        ({"run": {"quorum": 0.5}}, True),
        ({"run": {"rounds": 2.5}}, False),
        ({"run": {"rounds": True}}, False),
        ({"run": {"metric": "acuracy"}}, False),
        ({"run": {"engine": "gpu"}}, False),
        ({"runs": {}}, False),
    ],
)
def test_the_schema_and_hansa_agree(check: Check, more: dict[str, Any], valid: bool) -> None:
    tree = {**BASE, **more}
    assert (refused(tree) is None) is valid, refused(tree)
    assert (flagged(check, tree) is None) is valid, flagged(check, tree)


def test_a_file_without_a_task_is_flagged_unless_it_is_a_study(check: Check) -> None:
    assert flagged(check, {"run": {"rounds": 3}})
    assert flagged(check, {"study": {"algorithms": ["fedavg"]}, "algorithm": {"local": {"lr": 0.1}}}) is None


def test_fields_are_described_by_the_docstrings_and_the_defaults() -> None:
    run = SCHEMA["properties"]["run"]["properties"]
    assert "max(floor(C * K), 1)" in run["cohort"]["description"] and run["cohort"]["default"] == 1.0
    lr = SCHEMA["definitions"]["local.fields"]["properties"]["mu"]["allOf"][0]["description"]
    assert "Default: 0.1." in lr
    names = SCHEMA["definitions"]["algorithm"]["allOf"][0]["properties"]["name"]["anyOf"][0]
    told = dict(zip(names["enum"], names["x-taplo"]["docs"]["enumValues"], strict=True))
    assert told["fedavg"] == (own("algorithm")["fedavg"].__doc__ or "").splitlines()[0]
    for name, definition in SCHEMA["definitions"].items():
        if name.endswith(".fields"):
            assert all(field["allOf"][0]["description"] for field in definition["properties"].values()), name
