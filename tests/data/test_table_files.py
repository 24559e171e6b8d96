"""Tables from files and frames, and the tasks of experiments with them."""

from __future__ import annotations

import builtins
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from hansa.data.table import Table, guess
from hansa.data.table_files import read_table, read_table_samples
from hansa.experiment.config import parse
from hansa.experiment.deployed import own_samples
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import ConfigError, DataError

CSV = "age,city,seen,y\n31,Riga,2020-01-05,0\nNA,?,N/A,1\n44.5,Visby,2021-06-30T12:00,0\n-,null,,1\n"


def test_a_csv_file_has_numbers_texts_dates_and_missing_values(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    table, y, name = read_table_samples(path)
    assert name == "y" and y.tolist() == [0, 1, 0, 1]
    assert table.guesses() == {"age": "number", "city": "text", "seen": "date"}
    x, texts = table.coded(TableLayout((("seen", "date"), ("age", "number"), ("city", "text"))))
    days = (datetime.date(2020, 1, 5) - datetime.date(1970, 1, 1)).days
    assert x[0, 0] == days and x[2, 0] % 1 == 0.5 and x[2, 1] == 44.5
    assert torch.isnan(x[[1, 3]]).all()
    assert [texts[int(code)] for code in x[[0, 2], 2]] == ["Riga", "Visby"]


@pytest.mark.parametrize(("text", "message"), [
    ("a,a,y\n1,2,0\n", "two columns are called 'a'"),
    ("a,y\n1,no\n", "line 2, column 'y': expected a number, got 'no'; targets are numbers"),
    ("a,y\n1,\n", "line 2: the target 'y' is missing"),
    ("a,y\n1,0,3\n", "line 2: 3 values where the header names 2 columns"),
    ("a,y\n", "has no rows"),
])  # fmt: skip
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_table_samples(path)


def test_a_parquet_file_is_the_table_of_its_csv_file(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({
        "age": [31, None, 44.5], "count": pd.array([1, None, 3], dtype="Int64"), "city": ["Riga", None, "Visby"],
        "kind": pd.Categorical(["x", "y", "x"]), "seen": pd.to_datetime(["2020-01-05 06:00", None, "2021-06-30 12:00"]),
        "on": [True, False, True],
    })  # fmt: skip
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    layout = TableLayout((("age", "number"), ("count", "number"), ("city", "text"), ("kind", "text"), ("seen", "date")))
    coded = [read_table(tmp_path / name).coded(layout)[0] for name in ("a.parquet", "a.csv")]
    assert torch.equal(coded[0].nan_to_num(-1), coded[1].nan_to_num(-1))
    of_frame, _ = Table.of(frame).coded(layout)
    assert torch.equal(of_frame.nan_to_num(-1), coded[0].nan_to_num(-1))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="is not a Parquet file"):
        read_table(tmp_path / "b.parquet")


def test_without_pyarrow_a_parquet_file_is_refused_with_the_extra(tmp_path: Path, monkeypatch: Any) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **more)

    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'hansa\[parquet\]'"):
        read_table(tmp_path / "a.parquet")


def test_columns_of_mixed_types_are_texts_and_numbers_read_alike() -> None:
    assert guess(Table.of({"a": [1, "x", 2.0]}).columns["a"]) == "text"
    assert guess(Table.of({"a": [1, "2", None, float("nan")]}).columns["a"]) == "number"
    layout = TableLayout((("a", "text"),))
    as_numbers, texts = Table.of({"a": np.array([1.0, 2.5])}).coded(layout)
    as_texts, _ = Table.of({"a": ["1", "2.5"]}).coded(layout)
    assert torch.equal(as_numbers, as_texts) and set(texts.values()) == {"1", "2.5"}


def tree(**task: Any) -> dict[str, Any]:
    return {"task": {"parties": ["a.csv", "b.csv"], "model": "logistic", "prepare": "table", **task},
            "run": {"rounds": 2, "engine": "reference"}}  # fmt: skip


def write(folder: Path, labels: tuple[str, str] = ("0", "1")) -> None:
    for name, years in (("a", (2019, 2020)), ("b", (2021, 2023))):
        rows = [f"{30 + k},{'xy'[k % 2]},{years[k % 2]}-03-0{1 + k},{labels[k % 2]}" for k in range(8)]
        (folder / f"{name}.csv").write_text("\n".join(["age,city,seen,y", *rows]) + "\n")


def run(folder: Path, **changes: Any) -> hansa.Result:
    table = {**tree(**changes.pop("task", {})), **changes}
    experiment = parse(table, folder=str(folder))
    return hansa.simulate(experiment.algorithm, experiment.build_task(), progress=False, **experiment.settings())


def test_an_experiment_with_tables_has_text_labels_and_a_test_file(tmp_path: Path) -> None:
    write(tmp_path, ("no", "yes"))
    (tmp_path / "t.csv").write_text("city,age,seen,y\nx,30,2020-01-01,no\nnew,?,?,yes\n")
    result = run(tmp_path, task={"labels": ["no", "yes"], "test": "t.csv"})
    assert "accuracy" in result.history[-1]
    with pytest.raises(DataError, match=r"a.csv, line 2: the target 'y' is 'no'; did you mean 'nope'"):
        run(tmp_path, task={"labels": ["nope", "yes"]})
    with pytest.raises(DataError, match=r"expected a number, got 'no'.* in task.labels"):
        run(tmp_path)


def test_a_table_run_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    write(tmp_path)
    experiment = parse(tree(), folder=str(tmp_path))
    settings = experiment.settings()
    whole = hansa.simulate(experiment.algorithm, experiment.build_task(), progress=False, **{**settings, "rounds": 4})
    for resume in (False, True):
        settings["rounds"] = 4 if resume else 2
        half = hansa.simulate(experiment.algorithm, experiment.build_task(), progress=False, run_dir=tmp_path / "run",
                              resume=resume, **settings)  # fmt: skip
    assert all(torch.equal(half.params[name], value) for name, value in whole.params.items())
    assert half.summary["bytes_up"] == whole.summary["bytes_up"]


@pytest.mark.parametrize(
    "privacy", [{"dp": {"kind": "central", "clip": 1.0, "sigma": 1.0}}, None], ids=["dp", "dp-sgd"]
)
def test_a_private_run_takes_a_table_whose_numbers_the_user_gives(tmp_path: Path, privacy: Any) -> None:
    write(tmp_path)
    columns = {"age": {"bounds": [20, 60]}, "city": {"categories": ["x", "y"]},
               "seen": {"parts": ["month", "weekday"], "scale": "bounds"}}  # fmt: skip
    more: dict[str, Any] = {"privacy": privacy} if privacy else {"algorithm": {"name": "fedavg", "local": "dp-sgd"}}
    result = run(tmp_path, task={"prepare": {"name": "table", "columns": columns}}, **more)
    assert result.described()["feature_names"] == ["age", "city=x", "city=y", "seen.month", "seen.weekday"]
    with pytest.raises(ConfigError, match=r"sums without noise over the parties' data \(seen\)"):
        run(tmp_path, task={"prepare": {"name": "table", "columns": {**columns, "seen": "date"}}}, **more)


@pytest.mark.parametrize(("changes", "message"), [
    ({"task": {"dataset": "digits", "parties": []}}, "expected a table with named columns"),
    ({"task": {"labels": ["a"]}}, "labels must be at least two distinct texts"),
    ({"task": {"labels": ["a", "b"], "prepare": "standardise"}}, "labels applies to parties as files with prepare"),
    ({"task": {"prepare": {"name": "table", "min_count": 0}}}, "min_count must be at least 1"),
    ({"task": {"prepare": {"name": "table", "limit": 10**6}}}, r"limit must be at least 1 and at most 4096"),
    ({"task": {"prepare": "standardise"}}, "set task.prepare = 'table'"),
    ({"task": {"ids": "age"}, "algorithm": "fedavg"}, "columns"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused_in_one_sentence(tmp_path: Path, changes: Any, message: str) -> None:
    write(tmp_path)
    changes["task"] = {name: value for name, value in changes["task"].items() if value != []}
    table = tree(**changes["task"])
    if "dataset" in table["task"]:
        del table["task"]["parties"]
    experiment: Any
    with pytest.raises((ConfigError, DataError), match=message):
        experiment = parse({**table, **{k: v for k, v in changes.items() if k != "task"}}, folder=str(tmp_path))
        hansa.simulate(experiment.algorithm, experiment.build_task(), progress=False, **experiment.settings())


def test_trusted_and_public_samples_are_prepared_too(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t.csv").write_text((tmp_path / "a.csv").read_text())
    fltrust = {"name": "fedavg", "fusion": {"name": "fltrust"}}
    result = run(tmp_path, task={"trusted": "t.csv"}, algorithm=fltrust)
    assert len(result.history) == 2
    result = run(tmp_path, task={"public": "t.csv"}, algorithm="fedmd")
    assert len(result.history) == 2


def test_weights_of_classes_are_named_by_their_labels(tmp_path: Path) -> None:
    write(tmp_path, ("no", "yes"))
    labels = {"labels": ["no", "yes"], "class_weight": {"yes": 3.0}}
    named = run(tmp_path, task=labels)
    numbered = run(tmp_path, task={**labels, "class_weight": {"1": 3.0}})
    assert all(torch.equal(named.params[name], numbered.params[name]) for name in named.params)
    with pytest.raises(ConfigError, match="class_weight: 'yess' is no class; did you mean 'yes'"):
        run(tmp_path, task={**labels, "class_weight": {"yess": 3.0}})
    with pytest.raises(ConfigError, match="names a class twice"):
        run(tmp_path, task={**labels, "class_weight": {"yes": 3.0, "1": 2.0}})


def test_groups_of_a_table_are_by_features_whose_values_the_user_knows(tmp_path: Path) -> None:
    write(tmp_path)
    ages = {"name": "accuracy", "by": "age", "edges": [34]}
    for wrong in (ages, {"name": "accuracy", "by": "city"}, {"name": "accuracy", "by": 0, "groups": [0]}):
        with pytest.raises(ConfigError, match="a table has groups by its features, and numbers are scaled"):
            run(tmp_path, task={"party_test": 0.5}, run={"metrics": [wrong]})
    options = {"name": "table", "min_count": 1, "columns": {"age": {"scale": "none"}}}
    metrics = [ages, {"name": "accuracy", "by": "city=x", "groups": [0, 1]}]
    line = run(tmp_path, task={"prepare": options, "party_test": 0.5}, run={"metrics": metrics}).history[-1]
    assert set(line["accuracy_by_age"]) == {"below 34", "from 34"} and set(line["accuracy_by_city_x"]) == {"0", "1"}
    with pytest.raises(ConfigError, match="a table has groups by its features"):  # in Python too
        hansa.simulate(hansa.FedAvg(), parse(tree(party_test=0.5), folder=str(tmp_path)).build_task(), metrics=[ages])


def test_a_file_may_be_listed_twice(tmp_path: Path) -> None:
    write(tmp_path)
    twice = {"parties": ["a.csv", "b.csv", "a.csv"], "test": "b.csv", "trusted": "b.csv"}
    experiment = parse(tree(**twice), folder=str(tmp_path))
    task = experiment.build_task()
    assert torch.equal(task.parties[0][0].nan_to_num(-1), task.parties[2][0].nan_to_num(-1))
    assert task.test is not None and torch.equal(task.test[0], task.parties[1][0])
    own, _ = own_samples(experiment)
    assert torch.equal(own["test"][0], own["trusted"][0])
