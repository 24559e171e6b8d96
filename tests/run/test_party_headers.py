"""Files of several parties: columns are matched by name, labels and types are compared before the first round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hansa
from hansa.experiment.config import parse
from hansa.experiment.deployed import own_samples
from hansa.net.party.samples import preparer, read_samples
from hansa.plumbing.errors import ConfigError, DataError, NotAdmitted

COLUMNS = ["age", "chol", "pulse", "sick"]
RNG = np.random.default_rng(1)
ROWS = {name: RNG.normal(size=(30, 3)) for name in "abct"}


def write(folder: Path, name: str, columns: list[str], label: Any = lambda y: int(y)) -> None:
    lines = [",".join(columns)]
    for row in ROWS[name]:
        cells = {"age": row[0], "chol": row[1], "pulse": row[2], "sick": label(row[0] > row[1])}
        lines.append(",".join(str(cells.get(column, 0.5)) for column in columns))
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def run(folder: Path, **task: Any) -> Any:
    tree = {
        "task": {"parties": ["a.csv", "b.csv", "c.csv"], "test": "t.csv", "model": "logistic", **task},
        "run": {"rounds": 2, "engine": "reference"},
    }
    experiment = parse(tree, str(folder))
    return hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ROWS:
        write(tmp_path, name, COLUMNS)
    return tmp_path


def test_columns_in_another_order_are_matched_by_name(folder: Path) -> None:
    plain = run(folder, target="sick").saved_model()["params"]
    for name in "bt":
        write(folder, name, ["sick", "pulse", "age", "chol"])
    other = run(folder, target="sick")
    assert all(plain[name].equal(value) for name, value in other.saved_model()["params"].items())
    assert other.summary["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("b", ["age", "chol", "heart", "sick"], r"b\.csv: its columns lack 'pulse' and have besides 'heart'"),
        ("b", ["age", "chol", "sick"], r"b\.csv: its columns lack 'pulse'"),
        ("t", ["Age", "chol", "pulse", "sick"], r"t\.csv: its columns lack 'age' and have besides 'Age'"),
        ("b", ["sick", "age", "chol", "pulse"], r"b\.csv: its target is the column 'pulse', not 'sick'"),
        ("b", ["age", "age", "pulse", "sick"], r"b\.csv, line 1: two columns are called 'age'"),
    ],
)
def test_files_with_other_columns_are_refused_with_the_names(
    folder: Path, name: str, columns: list[str], message: str
) -> None:
    write(folder, name, columns)
    with pytest.raises(DataError, match=message):
        run(folder)


def yes(y: Any) -> str:
    return "yes" if y else "no"


@pytest.mark.parametrize(
    ("names", "label", "message"),
    [
        ("abct", lambda y: int(y) + 1, "class numbers go from 1 to 2, and none is 0"),
        ("abct", lambda y: 100 * int(y), "class numbers reach 100"),
        ("b", lambda y: int(y) + 1, "at 'b' class numbers go from 1 to 2, those of other parties from 0 to 1"),
        ("b", yes, r"b\.csv, line 2: the target 'sick' is '(yes|no)'; give numbers, or class numbers from 0"),
        ("b", lambda y: int(y) + 0.5, r"the targets of a\.csv are whole numbers and those of b\.csv are not"),
        ("t", lambda y: int(y) + 1, r"test: targets must lie in 0\.\.1, got 1\.\.2; number the classes from 0"),
    ],
)
def test_other_labels_are_refused_before_the_first_round(folder: Path, names: str, label: Any, message: str) -> None:
    for name in names:
        write(folder, name, COLUMNS, label)
    with pytest.raises(DataError, match=message):
        run(folder)


def test_a_stated_number_of_classes_allows_labels_that_look_odd(folder: Path) -> None:
    for name in "abct":
        write(folder, name, COLUMNS, lambda y: int(y) + 1)
    assert run(folder, classes=3).training.holdings.classes == 3
    with pytest.raises(ConfigError, match="classes needs the loss 'cross_entropy'"):
        run(folder, classes=3, loss="mse")
    with pytest.raises(ConfigError, match="classes apply to parties as files"):
        parse({"task": {"dataset": "digits", "model": "logistic", "classes": 10}})


def test_a_number_too_large_for_float32_is_refused(folder: Path) -> None:
    text = (folder / "b.csv").read_text().replace("\n", "\n1e39,0,0,1\n", 1)
    (folder / "b.csv").write_text(text)
    with pytest.raises(DataError, match=r"b\.csv, line 2: 'age' is infinite or too large for float32"):
        run(folder)


def test_a_deployed_party_reads_its_header_and_follows_the_jobs(folder: Path) -> None:
    write(folder, "b", ["pulse", "age", "chol", "sick"])
    write(folder, "t", ["chol", "age", "pulse", "sick"])
    given = read_samples(str(folder / "b.csv"), None, str(folder / "t.csv"))
    assert given.header == ("sick", "pulse", "age", "chol")
    task = {"party_test": 0.0, "shape": [3], "model": "logistic", "dtype": "float64", "outputs": 2, "seed": 0,
            "loss": "cross_entropy", "bf16": False, "prepared": False, "classes": 2,
            "header": ["sick", "age", "chol", "pulse"]}  # fmt: skip
    party = preparer(given)(0, task, "cpu")
    np.testing.assert_allclose(party.data.train("train")[0].numpy(), ROWS["b"], atol=1e-6)
    np.testing.assert_allclose(party.data.test("evaluate")[0].numpy(), ROWS["t"], atol=1e-6)
    with pytest.raises(NotAdmitted, match="its columns lack 'weight'"):
        preparer(given)(0, {**task, "header": ["sick", "age", "chol", "weight"]}, "cpu")
    tree, _ = own_samples(parse({"task": {"parties": ["a.csv"], "test": "t.csv", "model": "logistic"}}, str(folder)))
    assert tree["header"] == ["sick", "chol", "age", "pulse"]
