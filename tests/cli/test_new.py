"""`hansa new` writes an experiment that runs at once, and says its guesses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hansa
from hansa.cli import new  # noqa: F401 (adds the command)
from hansa.cli.app import app
from hansa.experiment.config import parse, read
from hansa.plumbing.errors import ConfigError, DataError

DRAWS = random.Random(1)


def table(path: Path, rows: int = 60, kind: str = "classes") -> Path:
    lines = ["patient_id,age,site,score,same,outcome,"[:-1]]
    for row in range(rows):
        age, score = DRAWS.randint(20, 90), DRAWS.gauss(0, 1)
        sick = age + 20 * score > 60
        outcome = ("sick" if sick else "healthy") if kind == "classes" else f"{3 * score + age / 10:.3f}"
        lines.append(f"{row},{age},{DRAWS.choice('AB')},{'' if row % 7 == 0 else f'{score:.3f}'},1,{outcome}")
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["new", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_the_file_runs_at_once_from_any_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "plans").mkdir()
    table(tmp_path / "data" / "patients.csv", kind=kind)
    monkeypatch.chdir(tmp_path)
    out = run("data/patients.csv", "--out", "plans/first.toml")
    assert "hansa run plans/first.toml" in out
    text = (tmp_path / "plans" / "first.toml").read_text()
    assert 'file = "../data/patients.csv"' in text and 'target = "outcome"' in text
    for guess in ('"patient_id": an id', 'prepare = "table"', "raw = true", '"same": constant', "in 1 columns",
                  "guessed by its name"):  # fmt: skip
        assert guess in text
    monkeypatch.chdir("/")
    experiment = read(tmp_path / "plans" / "first.toml")
    result = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    assert result.summary["loss"] is not None
    result.save(tmp_path / "run")
    assert hansa.load(tmp_path / "run").feature_names == ["age", "site=A", "site=B", "score"]
    if kind == "classes":
        assert result.summary["accuracy"] > 0.6 and '2 different values ("healthy", "sick")' in text
    else:
        assert result.summary["r2"] > 0.3


def test_the_last_column_is_the_target_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n" + "\n".join(f"{k},{k % 3 + 1},{k / 7}" for k in range(40)) + "\n")
    run(str(path), "--out", str(tmp_path / "1.toml"))
    assert "guessed: the last column" in (tmp_path / "1.toml").read_text()
    run(str(path), "--target", "b", "--out", str(tmp_path / "2.toml"))
    text = (tmp_path / "2.toml").read_text()
    assert "as --target says" in text and '3 different values ("1", "2", "3")' in text
    data = read(tmp_path / "2.toml").build_task()
    assert data.classes == 3
    with pytest.raises(ConfigError, match="exists already; name another file with --out"):
        run(str(path), "--out", str(tmp_path / "2.toml"))


def test_numbers_alone_need_no_table_and_dates_are_features(tmp_path: Path) -> None:
    numbers, dates = tmp_path / "n.csv", tmp_path / "d.csv"
    numbers.write_text("a,b,y\n" + "\n".join(f"{k},{k % 7},{k % 2}" for k in range(40)) + "\n")
    rows = (f"2020-{k % 12 + 1:02}-{k % 28 + 1:02},name{k},NA,{k % 2}" for k in range(40))
    dates.write_text("seen,name,empty,y\n" + "\n".join(rows) + "\n")
    for path in (numbers, dates):
        run(str(path), "--out", str(path.with_suffix(".toml")))
    assert 'prepare = "standardise"' in numbers.with_suffix(".toml").read_text()
    assert "raw" not in numbers.with_suffix(".toml").read_text()
    text = dates.with_suffix(".toml").read_text()
    assert '"name": text, with 40 different values' in text and 'drop = ["name", "empty"]' in text
    task = read(dates.with_suffix(".toml")).build_task()
    assert task.table is not None and task.table.columns == (("seen", "date"),)


def test_texts_without_raw_are_refused_with_the_settings_for_them(tmp_path: Path) -> None:
    table(tmp_path / "t.csv")
    dataset = {"name": "csv-file", "file": "t.csv", "target": "outcome"}
    tree = {"task": {"dataset": dataset, "model": "logistic", "prepare": "table"}}
    with pytest.raises(DataError, match=r"line 2: site .* set raw = true in task.dataset, and task.prepare = 'table'"):
        parse(tree, folder=str(tmp_path)).build_task()


def test_a_data_set_that_is_a_table_has_the_usual_words_for_missing_values(tmp_path: Path) -> None:
    table(tmp_path / "t.csv")
    dataset = {"name": "csv-file", "file": "t.csv", "target": "outcome", "raw": True}
    tree: dict[str, Any] = {"task": {"dataset": dataset, "model": "logistic"}}
    tree["task"]["prepare"] = {"name": "table", "missing": ["A"]}
    with pytest.raises(ConfigError, match=r"task.prepare.missing: the data set has read its table"):
        parse(tree, folder=str(tmp_path)).build_task()


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        (None, [], "there is no file"),
        ("a;b\n1;2\n", [], "separated by semicolons"),
        ("a,b\n", [], "has no rows below its header"),
        ("a,b\n1,2,3\n", [], "3 values where the header names 2 columns"),
        ("a,b\n1,2\n3,4\n", ["--target", "c"], "has no column 'c'"),
        ("a,b\n1,x\n2,\n", [], "the target 'b' is missing in some rows"),
        ("a,b\n1,x\n2,x\n", [], "has one value only"),
        (
            "a,b\n" + "\n".join(f"name{k},{k % 2}" for k in range(40)) + "\n",
            [],
            "no column but the target 'b' could be",
        ),
        ("a,b\n" + "\n".join(f"{k},name{k}" for k in range(40)) + "\n", [], "which are hardly classes"),
        ("1,2\n3,4\n", [], "numbers instead of column names"),
    ],
)
def test_bad_input_is_one_sentence(text: str | None, more: list[str], sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=sentence):
        run(str(tmp_path / "t.csv"), "--out", str(tmp_path / "t.toml"), *more)
    assert not (tmp_path / "t.toml").exists()
