"""From a trained model to predictions: files of samples in, a table of predictions out."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hansa
from hansa.artifacts import saved_model
from hansa.artifacts.torch_export import export
from hansa.cli import predict as _commands  # noqa: F401 (adds the commands)
from hansa.cli.app import app
from hansa.core.data_op import DataOp
from hansa.core.registry import register
from hansa.data.feature_blocks import ROWS, WantedFeatures, feature_blocks
from hansa.experiment.config import parse
from hansa.plumbing.errors import ConfigError, DataError
from hansa.run.predictions import predict_file
from hansa.run.resume import execute

HEADER = ["age", "dose", "sick"]


def write(path: Path, rows: Any, header: list[str] = HEADER) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(path: Path) -> tuple[list[str], np.ndarray]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return header, np.array(rows, dtype=np.float64)


def patients(count: int, seed: int) -> np.ndarray:
    made = np.random.default_rng(seed)
    x = made.normal(size=(count, 2)) * [20, 0.1] + [50, 1]
    return np.column_stack([x.round(3), (x[:, 0] > 50).astype(int)])


def trained(folder: Path, **changes: Any) -> tuple[Any, Path]:
    """A run over two CSV files, and its folder."""
    folder.mkdir(exist_ok=True)
    for name, seed in (("a", 1), ("b", 2)):
        rows = patients(30, seed).tolist()
        if changes.get("prepare"):
            rows[3][1] = ""
        write(folder / f"{name}.csv", rows)
    task = {"parties": ["a.csv", "b.csv"], "model": "logistic"}
    task |= {name: value for name, value in changes.items() if name != "algorithm"}
    tree = {"task": task, "run": {"rounds": 2, "engine": "reference"}}
    algorithm = changes.get("algorithm")
    if algorithm is not None:
        tree["algorithm"] = algorithm
        if algorithm != "fedper":
            del task["model"]
    return execute(parse(tree, str(folder)), folder / "run"), folder / "run"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return trained(tmp_path_factory.mktemp("scaled"), prepare="standardise")


def softmax(outputs: torch.Tensor) -> np.ndarray:
    return torch.softmax(outputs, 1).numpy()


def test_columns_are_found_by_name_and_rows_keep_their_order(scaled: tuple[Any, Path], tmp_path: Path) -> None:
    result, run = scaled
    x = patients(ROWS + 7, 5)  # more than a block
    source = write(tmp_path / "new.csv", [[f"p{k}", d, s, a] for k, (a, d, s) in enumerate(x)],
                   ["id", "dose", "sick", "age"])  # fmt: skip
    out = tmp_path / "out.csv"
    assert hansa.load(run).predict_file(source, out, keep=["id"]) == len(x)
    with out.open() as file:
        header, *rows = csv.reader(file)
    assert header == ["id", "class", "probability_0", "probability_1"]
    assert [row[0] for row in rows] == [f"p{k}" for k in range(len(x))]
    outputs = result.predict(x[:, :2].astype(np.float32))
    assert [int(row[1]) for row in rows] == outputs.argmax(1).tolist()
    np.testing.assert_array_equal(np.array([row[2:] for row in rows], dtype=np.float32), softmax(outputs))


def test_a_missing_value_is_filled_in_as_in_training_or_refused(scaled: tuple[Any, Path], tmp_path: Path) -> None:
    result, run = scaled
    source = write(tmp_path / "new.csv", [[50, "", 0], [60, 1, 1]])
    hansa.load(run).predict_file(source, tmp_path / "out.csv")
    outputs = result.predict(torch.tensor([[50, float("nan")], [60, 1]]))
    np.testing.assert_allclose(read(tmp_path / "out.csv")[1][:, 1:], softmax(outputs), rtol=1e-6)
    _, plain = trained(tmp_path / "plain")
    with pytest.raises(DataError, match=r"new\.csv, line 2: 'dose' is missing, and the model was trained without"):
        hansa.load(plain).predict_file(source, tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists() and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (["age", "sick"], [[1, 0]], r"line 1: the column 'dose' is missing, which the model takes"),
        (["age", "dose", "city"], [[1, 2, 3]], r"line 1: the column 'city' is none that the model takes; .*--keep"),
        (["age", "dose"], [[1, 2], [1, "much"]], r"line 3: dose should be a number, .*'much'"),
        (["age", "dose"], [[1, 2], [1]], r"line 3: 1 values where the header names 2"),
        (["age", "dose"], [], "has no rows below its header"),
        (["age", "dose", "age"], [[1, 2, 3]], "two columns are called 'age'"),
        (["1", "2"], [[1, 2]], "numbers instead of column names"),
        (["age", "dose"], [[1e300, 2]], "line 2: 'age' is infinite or too large"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_a_sentence(
    scaled: tuple[Any, Path], tmp_path: Path, header: list[str], rows: Any, message: str
) -> None:
    source = write(tmp_path / "new.csv", rows, header)
    with pytest.raises(DataError, match=message):
        hansa.load(scaled[1]).predict_file(source, tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_arrays_and_parquet_give_the_same_predictions(scaled: tuple[Any, Path], tmp_path: Path) -> None:
    x = patients(9, 4)[:, :2].astype(np.float32)
    stored = hansa.load(scaled[1])
    stored.predict_file(write(tmp_path / "x.csv", x.tolist(), HEADER[:2]), tmp_path / "csv.csv")
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x, y=np.zeros(9))
    sources = ["x.npy", "x.npz"]
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        pass
    else:
        pq.write_table(pa.table({"dose": x[:, 1], "id": list("abcdefghi"), "age": x[:, 0]}), tmp_path / "x.parquet")
        stored.predict_file(tmp_path / "x.parquet", tmp_path / "x-out.parquet", keep=["id"])
        table = pq.read_table(tmp_path / "x-out.parquet")
        assert table["id"].to_pylist() == list("abcdefghi") and table.column_names[1:3] == ["class", "probability_0"]
        pq.write_table(table.drop(["id"]), tmp_path / "y.parquet")
        with pytest.raises(DataError, match="the columns 'age', 'dose' are missing"):
            stored.predict_file(tmp_path / "y.parquet", tmp_path / "out.csv")
        pq.write_table(pa.table({"dose": ["a"], "age": [1.0]}), tmp_path / "z.parquet")
        with pytest.raises(DataError, match="the column 'dose' holds string, and numbers are needed"):
            stored.predict_file(tmp_path / "z.parquet", tmp_path / "out.csv")
        pq.write_table(pa.table({"dose": x[:, 1], "age": x[:, 0]}), tmp_path / "only.parquet")
        sources.append("only.parquet")
    for source in sources:
        stored.predict_file(tmp_path / source, tmp_path / "out.csv")
        assert (tmp_path / "out.csv").read_text() == (tmp_path / "csv.csv").read_text(), source
    np.save(tmp_path / "wrong.npy", x[:, :1])
    with pytest.raises(DataError, match=r"has the shape \(9, 1\); the model takes samples of the shape \(2,\)"):
        stored.predict_file(tmp_path / "wrong.npy", tmp_path / "out.csv")
    with pytest.raises(DataError, match="--keep names columns"):
        stored.predict_file(tmp_path / "x.npy", tmp_path / "out.csv", keep=["id"])
    np.save(tmp_path / "texts.npy", np.array([["a", "b"]]))
    for name in ("texts.npy", "x.xls", "absent.csv"):
        (tmp_path / "x.xls").write_text("")
        with pytest.raises(DataError):
            stored.predict_file(tmp_path / name, tmp_path / "out.csv")


@pytest.mark.parametrize("name", ["naive-bayes", "id3", "logistic-regression", "kernel-svm", "linear-svm"])
def test_classical_models_predict_through_the_same_command(name: str, tmp_path: Path) -> None:
    result, run = trained(tmp_path / "runs", algorithm=name)
    x = patients(9, 4)
    out = CliRunner().invoke(app, ["predict", str(run), str(write(tmp_path / "x.csv", x)), "--out",
                                   str(tmp_path / "out.csv")])  # fmt: skip
    assert out.exit_code == 0 and out.output == f"wrote 9 predictions to {tmp_path / 'out.csv'}\n"
    header, rows = read(tmp_path / "out.csv")
    outputs = result.predict(x[:, :2].astype(np.float32))
    machine = name.endswith("svm")  # margins are no probabilities
    assert header == ["class", *(f"{'score' if machine else 'probability'}_{k}" for k in range(2))]
    assert rows[:, 0].tolist() == outputs.argmax(1).tolist()
    np.testing.assert_allclose(rows[:, 1:], outputs.numpy() if machine else softmax(outputs), rtol=1e-12, atol=1e-300)


def test_numbers_and_the_logit_of_one_class_have_columns_of_their_own(tmp_path: Path) -> None:
    for loss, header in (("mse", ["value"]), ("bce", ["class", "probability"])):
        result, run = trained(tmp_path / loss, loss=loss)
        x = patients(9, 4)
        hansa.load(run).predict_file(write(tmp_path / "x.csv", x), tmp_path / "out.csv")
        found, rows = read(tmp_path / "out.csv")
        outputs = result.predict(x[:, :2].astype(np.float32))[:, 0]
        assert found == header
        np.testing.assert_allclose(rows[:, -1], outputs if loss == "mse" else torch.sigmoid(outputs), rtol=1e-6)
        if loss == "bce":
            assert rows[:, 0].tolist() == (outputs > 0).tolist()


def test_a_party_predicts_by_its_own_model(tmp_path: Path) -> None:
    result, run = trained(tmp_path / "runs", algorithm="fedper", model="2nn")
    x = patients(9, 4)
    source = write(tmp_path / "x.csv", x)
    stored = hansa.load(run)
    for party in (0, 1):
        stored.predict_file(source, tmp_path / "out.csv", party=party)
        outputs = result.predict(x[:, :2].astype(np.float32), party=party)
        np.testing.assert_allclose(read(tmp_path / "out.csv")[1][:, 1:], softmax(outputs), rtol=1e-6)
    with pytest.raises(ConfigError, match="each party has its own model: set party"):
        stored.predict_file(source, tmp_path / "none.csv")


def test_a_run_folder_a_model_file_and_a_copy_of_it_predict_alike(scaled: tuple[Any, Path], tmp_path: Path) -> None:
    result, run = scaled
    x = torch.from_numpy(patients(5, 3)[:, :2].astype(np.float32))
    shutil.copy(run / "model.safetensors", tmp_path / "pulled.safetensors")
    shutil.copy(run / "model.json", tmp_path / "pulled.json")
    saved = result.save(tmp_path / "saved")
    for place in (run, run / "model.safetensors", tmp_path / "pulled.safetensors", saved):
        assert torch.equal(hansa.load(place).predict(x), result.predict(x)), place


def test_a_model_without_column_names_takes_columns_in_order(tmp_path: Path) -> None:
    wanted = WantedFeatures((2, 2))
    path = write(tmp_path / "x.csv", [[1, 2, 3, 4]], ["a", "b", "c", "d"])
    [block] = feature_blocks(path, wanted)
    assert block.x.tolist() == [[[1, 2], [3, 4]]] and block.x.dtype == np.float32
    with pytest.raises(DataError, match="3 columns, and the model takes 4 numbers per sample"):
        list(feature_blocks(path, wanted, keep=["a"]))
    whole = WantedFeatures((4,), whole=True)
    assert next(feature_blocks(path, whole)).x.dtype == np.int64
    with pytest.raises(DataError, match=r"line 2: 'b' must be a whole number"):
        list(feature_blocks(write(tmp_path / "y.csv", [[1, 2.5, 3, 4]], ["a", "b", "c", "d"]), whole))


@register("sum-of-ages")
@dataclass(frozen=True)
class SumOfAges(DataOp):
    """A preparation that reads columns of a table as they are."""

    def prepared(self, x: Any, payload: Any, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
        ages = {"young": 20.0, "old": 80.0}
        return torch.tensor([[ages[age], float(dose)] for age, dose in zip(x["age"], x["dose"], strict=True)])


def test_a_preparation_of_a_table_gets_its_columns_as_they_are(tmp_path: Path) -> None:
    _, run = trained(tmp_path / "runs")
    model = saved_model.load(run)
    about = {**model.about, "columns": [["age", "text"], ["dose", "number"]]}
    table = dataclasses.replace(model, about=about, preparation=(SumOfAges(), {}))
    source = write(tmp_path / "x.csv", [["a", 1, "old"], ["b", 2, "young"]], ["city", "dose", "age"])
    assert predict_file(table, source, tmp_path / "out.csv", keep=["city"]) == 2
    wanted = softmax(model.predict([[80.0, 1.0], [20.0, 2.0]]))
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["city"] for row in rows] == ["a", "b"]
    np.testing.assert_allclose([float(row["probability_1"]) for row in rows], wanted[:, 1], rtol=1e-6)
    with pytest.raises(DataError, match="the column 'age' is missing"):
        predict_file(table, write(tmp_path / "y.csv", [[1]], ["dose"]), tmp_path / "none.csv")
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match="the model takes the columns of a table"):
        predict_file(table, tmp_path / "x.npy", tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="a model of a table takes texts and dates too"):
        export(table, tmp_path / "table.pt2")


@pytest.mark.slow
def test_a_long_file_is_read_and_written_in_blocks(scaled: tuple[Any, Path], tmp_path: Path) -> None:
    """Ten times the rows take no more memory: the largest block does not grow."""
    import tracemalloc

    stored, peaks = hansa.load(scaled[1]), []
    for count in (ROWS, 6 * ROWS):
        source = write(tmp_path / "x.csv", patients(count, 1)[:, :2].tolist(), HEADER[:2])
        tracemalloc.start()
        stored.predict_file(source, tmp_path / "out.csv")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_mistakes_of_the_command_are_told_in_a_sentence(scaled: tuple[Any, Path], tmp_path: Path) -> None:
    stored, source = hansa.load(scaled[1]), write(tmp_path / "x.csv", patients(3, 1))
    for out, keep, message in (
        ("out.txt", [], "must end in .csv or .parquet"),
        ("none/out.csv", [], "cannot write .*No such file"),
        ("out.csv", ["sick", "sick"], "'sick' twice"),
        ("out.csv", ["weight"], "0 columns are called 'weight'"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            stored.predict_file(source, tmp_path / out, keep=keep)
    with pytest.raises(ConfigError, match=r"x\.csv has the samples; name another file"):
        stored.predict_file(source, source)
    with pytest.raises(ConfigError, match="--party: the model is that of all parties"):
        stored.predict_file(source, tmp_path / "out.csv", party=0)
    assert stored.predict_file(source, tmp_path / "out.csv", keep=["age", "sick"]) == 3  # a feature, and the target
    assert read(tmp_path / "out.csv")[0] == ["age", "sick", "class", "probability_0", "probability_1"]
    np.testing.assert_array_equal(read(tmp_path / "out.csv")[1][:, :2], patients(3, 1)[:, [0, 2]])
    named = write(tmp_path / "y.csv", [[1, 2, 3]], ["age", "dose", "class"])
    with pytest.raises(ConfigError, match="the predictions have a column 'class' too"):
        stored.predict_file(named, tmp_path / "out.csv", keep=["class"])


def test_without_pyarrow_a_parquet_file_is_refused(
    scaled: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    source = write(tmp_path / "x.csv", patients(3, 1))
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for samples, out in ((source, "out.parquet"), (tmp_path / "x.parquet", "out.csv")):
        with pytest.raises(ConfigError, match="need the package pyarrow"):
            hansa.load(scaled[1]).predict_file(samples, tmp_path / out)


def test_a_party_is_named_by_its_name_or_its_number() -> None:
    samples = [(torch.randn(6, 2), torch.tensor([0, 1] * 3)) for _ in range(2)]
    task = hansa.Task(lambda: torch.nn.Linear(2, 2), "cross_entropy", samples, names=["ann", "bob"])
    done, x = hansa.simulate(hansa.FedPer(), task, rounds=1), samples[0][0]
    assert torch.equal(done.predict(x, "bob"), done.predict(x, 1)) and done.described()["names"] == ["ann", "bob"]
    assert torch.equal(done.predict(x, "0"), done.predict(x, 0))
    assert torch.equal(next(done.model("bob").parameters()), next(done.model(1).parameters()))
    with pytest.raises(ConfigError, match="there is no party 'bop'; did you mean 'bob'"):
        done.predict(x, "bop")
