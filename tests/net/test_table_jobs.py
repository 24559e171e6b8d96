"""Jobs over tables with texts, dates and missing values: deployed equals the reference, bit for bit."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League, tensors

import hansa
from hansa.artifacts import saved_model
from hansa.core.ask import op_config
from hansa.core.op import Reply
from hansa.data.table_ops import TableMagnitudes
from hansa.experiment.config import parse
from hansa.net.party import own_models
from hansa.net.party.samples import PartySamples, preparer, read_samples
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError

pytestmark = pytest.mark.usefixtures("quick")
CITIES = ("Köln", "Lübeck", "Riga")
HEADER = ("age", "city", "seen", "sick")


def write(path: Path, party: int, header: tuple[str, ...] = HEADER, rows: int = 14, **changes: Any) -> Path:
    """A party's CSV file; columns in any order, some values missing."""
    lines = []
    for k in range(rows):
        row = {
            "age": "NA" if k == party else str(20 + 3 * k + party),
            "city": "" if k == 3 else CITIES[(k * k) % 3],
            "seen": f"20{18 + party}-0{1 + k % 9}-1{k % 10}",
            "sick": "yes" if (k + party) % 3 else "no",
        }
        lines.append([{**row, **changes}[name] for name in header])
    with path.open("w", newline="") as out:
        csv.writer(out).writerows([header, *lines])
    return path


def files(folder: Path) -> list[Path]:
    turned = (HEADER, ("city", "age", "seen", "sick"), HEADER)
    return [write(folder / f"{name}.csv", k, turned[k]) for k, name in enumerate(PARTIES)]


def tree(paths: list[Path], **privacy: Any) -> dict[str, Any]:
    task = {"parties": [str(path) for path in paths], "target": "sick", "labels": ["no", "yes"], "prepare": "table",
            "model": "logistic", "dtype": "float64"}  # fmt: skip
    return {"task": task, "algorithm": "fedavg", "run": {"rounds": 2, "deadline": 60.0, "engine": "reference"},
            **({"privacy": privacy} if privacy else {})}  # fmt: skip


def read(path: Path, test: Path | None = None) -> PartySamples:
    return read_samples(str(path), "sick", None if test is None else str(test), labels=("no", "yes"))


def apart(tree: Any) -> tuple[Any, list[float]]:
    """A tree without its real numbers, and these; in a secure sum their last digits are random."""
    numbers = list[float]()

    def number(text: str) -> str:
        numbers.append(float(text))
        return "a number"

    return json.loads(json.dumps(tree), parse_float=number), numbers


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{}, {"secure": "masking"}], ids=["plain", "masked"])
def test_a_table_job_gives_the_reference_s_bits(privacy: Any, found: Callable[..., League], tmp_path: Path) -> None:
    paths, league = files(tmp_path), found()
    for name, path in zip(PARTIES, paths, strict=True):
        league.join(name, read(path))
    ended = league.ended(league.submit(tree(paths, **privacy), min_parties=3))
    assert ended["status"] == "finished", ended["reason"]
    experiment = parse(tree(paths, **privacy))
    result = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    deployed, reference = league.model(ended["id"]), result.saved_model()
    (steps, numbers), (known, expected) = map(apart, (deployed["preparation"], reference["preparation"]))
    assert steps == known and numbers == (pytest.approx(expected, rel=1e-12) if privacy else expected)
    for one, other in zip(tensors(deployed), tensors(reference), strict=True):
        assert torch.equal(one, other) if not privacy else torch.allclose(one, other, atol=1e-6)
    file = tmp_path / "model.safetensors"
    file.write_bytes(codec.encode(deployed))
    file.with_suffix(".json").write_text(json.dumps(json.loads(ended["summary"])["serving"]))
    rows = [{"age": "44", "city": "Riga", "seen": "2019-01-01"}, {"age": None, "city": "Bergen", "seen": "?"}]
    predicted = saved_model.load(file).predict(rows)
    assert predicted.shape == (2, 2)
    if not privacy:
        assert torch.equal(predicted, result.predict(rows))


@pytest.mark.slow
def test_a_column_of_weights_counts_in_training_and_is_no_feature(found: Callable[..., League], tmp_path: Path) -> None:
    league, paths = found(), files(tmp_path)
    for path in paths:
        lines = path.read_text().splitlines()
        path.write_text("\n".join([f"w,{lines[0]}", *(f"{1 + k % 4},{line}" for k, line in enumerate(lines[1:]))]))
    write(tmp_path / "test.csv", 1)  # without weights
    for name, path in zip(PARTIES, paths, strict=True):
        league.join(name, read_samples(str(path), "sick", labels=("no", "yes"), weights="w"))
    job = tree(paths)
    job["task"] |= {"sample_weight": "w", "class_weight": "balanced", "party_test": 0.3, "test": "test.csv"}
    experiment = parse(job, folder=str(tmp_path))
    ended = league.ended(league.operator.submit(experiment, "job", 3)[0])
    assert ended["status"] == "finished", ended["reason"]
    result = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    deployed, reference = league.model(ended["id"]), result.saved_model()
    assert all(torch.equal(*pair) for pair in zip(tensors(deployed), tensors(reference), strict=True))
    task = experiment.build_task()
    assert [name for name, _ in task.table.columns] == ["age", "city", "seen"]
    unweighted = dataclasses.replace(task, weights=None)
    others = hansa.simulate(experiment.algorithm, unweighted, **experiment.settings()).saved_model()
    assert not all(torch.equal(*pair) for pair in zip(tensors(others), tensors(reference), strict=True))
    with pytest.raises(DataError, match=r"has no column 'v' \(task\.sample_weight\)"):
        parse({**job, "task": {**job["task"], "sample_weight": "v"}}, folder=str(tmp_path)).build_task()
    with pytest.raises(DataError, match="line 2, column 'city': expected a number"):
        parse({**job, "task": {**job["task"], "sample_weight": "city"}}, folder=str(tmp_path)).build_task()


@pytest.mark.slow
def test_held_out_rows_and_the_aggregator_s_test_file_give_the_reference_s_metrics(
    found: Callable[..., League], tmp_path: Path
) -> None:
    paths, league = files(tmp_path), found()
    write(tmp_path / "test.csv", 1, ("seen", "city", "age", "sick"), rows=9)
    for name, path in zip(PARTIES, paths, strict=True):
        league.join(name, read(path))
    job = tree(paths)
    job["task"] |= {"test": "test.csv", "party_test": 0.3}
    job["algorithm"] = "fedper"
    experiment = parse(job, folder=str(tmp_path))
    ended = league.ended(league.operator.submit(experiment, "job", 3)[0])
    assert ended["status"] == "finished", ended["reason"]
    result = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    names = [name for name in result.history[-1] if name.startswith(("loss", "accuracy", "party_", "parties"))]
    assert len(names) > 2
    assert {name: ended["rounds"][-1][name] for name in names} == {name: result.history[-1][name] for name in names}
    rows = [{"age": "44", "city": "Riga", "seen": "2019-01-01"}]
    for number, name in enumerate(PARTIES):
        exported = own_models.export(league.folder / "homes" / name, None, tmp_path / f"{name}.safetensors")
        own = hansa.load(exported)
        assert own.columns == {"age": "number", "city": "text", "seen": "date"}
        assert torch.equal(own.predict(rows), result.predict(rows, number))


@pytest.mark.slow
def test_a_party_whose_table_does_not_fit_says_so_in_one_sentence(found: Callable[..., League], tmp_path: Path) -> None:
    paths, league = files(tmp_path), found(parties=("a", "b", "c", "d", "e"))
    for name, path in zip("abc", paths, strict=True):
        league.join(name, read(path))
    league.join("d", read(write(tmp_path / "d.csv", 3, ("age", "seen", "sick"))))
    league.join("e", read(write(tmp_path / "e.csv", 4, age="old")))
    job = {**tree(paths), "run": {"rounds": 1, "deadline": 60.0}}
    ended = league.ended(league.submit(job, min_parties=5))
    assert ended["status"] == "finished", ended["reason"]
    why = {event["party"]: json.loads(event["detail"])["why"] for event in league.events("not taking part")}
    assert why.keys() == {"d", "e"}
    assert "(2,)" in why["d"] or "lack 'city'" in why["d"]
    assert "its column 'age' holds texts, and that of most parties numbers" in why["e"]


@pytest.mark.slow
def test_a_declared_kind_is_checked_at_the_party_without_a_value(found: Callable[..., League], tmp_path: Path) -> None:
    league = found(parties=("a", "b", "c"))
    paths = files(tmp_path)
    write(paths[2], 2, age="secret-value")
    for name, path in zip("abc", paths, strict=True):
        league.join(name, read(path))
    job = tree(paths)
    job["task"]["prepare"] = {"name": "table", "columns": {"age": "number"}}
    job["run"] = {"rounds": 1, "deadline": 60.0, "quorum": 0.5}
    ended = league.ended(league.submit(job, min_parties=2))
    assert ended["status"] == "finished", ended["reason"]
    told = json.dumps(ended["rounds"])
    assert "its column 'age' does not hold numbers" in told and "secret-value" not in told


def test_a_party_whose_classes_have_another_order_declines(found: Callable[..., League], tmp_path: Path) -> None:
    league, paths = found(parties=("a", "b", "c")), files(tmp_path)
    for name, path in zip("abc", paths, strict=True):
        labels = ("yes", "no") if name == "c" else ("no", "yes")
        league.join(name, read_samples(str(path), "sick", labels=labels))
    job = {**tree(paths), "run": {"rounds": 1, "deadline": 60.0, "quorum": 0.5}}
    ended = league.ended(league.submit(job, min_parties=3))
    assert ended["status"] == "finished", ended["reason"]
    assert "its classes (hansa join --labels) have other names, or another order" in ended["rounds"][-1]["missing"]["c"]


@pytest.mark.slow
def test_an_augmented_table_job_gives_the_reference_s_bits(
    found: Callable[..., League], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table_augment.py").write_text("def shift(sample, key):\n    return sample + (key % 5) / 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    paths, league, name = files(tmp_path), found(), "table_augment:shift"
    for party, path in zip(PARTIES, paths, strict=True):
        league.join(party, read(path), policy=f'functions = ["{name}"]\n')
    job = tree(paths)
    plain, job["task"] = parse(tree(paths)), {**job["task"], "augment": name}
    ended = league.ended(league.submit(job, min_parties=3))
    assert ended["status"] == "finished", ended["reason"]
    experiment = parse(job)
    with_it, without = (
        hansa.simulate(one.algorithm, one.build_task(), **one.settings()).saved_model() for one in (experiment, plain)
    )
    deployed = tensors(league.model(ended["id"])["params"])
    assert all(torch.equal(one, other) for one, other in zip(deployed, tensors(with_it["params"]), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(deployed, tensors(without["params"]), strict=True))


def test_jobs_without_a_table_refuse_texts_and_table_jobs_refuse_arrays(found: Callable[..., League],
                                                                       tmp_path: Path) -> None:  # fmt: skip
    league, paths = found(parties=("a", "b")), files(tmp_path)
    league.join("a", read(paths[0]))
    league.join("b", read(paths[1]))
    job = {"task": {"dataset": "heart", "model": "logistic"}, "run": {"rounds": 1, "deadline": 60.0}}
    ended = league.ended(league.submit(job, min_parties=2))
    assert ended["status"] == "failed"
    assert "its column 'city' holds texts; set task.prepare = 'table'" in ended["reason"]


def test_test_tables_have_the_columns_of_the_training_table_in_any_order(tmp_path: Path) -> None:
    paths = files(tmp_path)
    both = read(paths[0], paths[1])
    assert both.tables is not None and both.tables[1] is not None
    assert list(both.tables[1].columns) == list(both.tables[0].columns)
    with pytest.raises(DataError, match="lack 'city'"):
        read(paths[0], write(tmp_path / "t.csv", 1, ("age", "seen", "sick")))
    with pytest.raises(DataError, match="line 2: the target 'sick' is 'maybe'"):
        read(write(tmp_path / "t.csv", 1, sick="maybe"))


def test_an_aggregator_cannot_change_a_job_s_table_to_ask_about_values(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "party.toml").write_text("")
    store = PartyStore(folder)
    worker = Worker(store, preparer(read(files(tmp_path)[0])))

    def answer(missing: list[str]) -> Reply | str:
        table = {"columns": [["age", "number"], ["city", "text"]], "missing": missing, "labels": []}
        task = {"model": None, "dtype": "float64", "shape": [2], "outputs": 2, "loss": "mse", "classes": None,
                "party_test": 0.0, "seed": 0, "bf16": False, "prepared": True, "table": table}  # fmt: skip
        message = {"op": op_config(TableMagnitudes()), "payload": {"features": [[0, ""]]}, "round": 0}
        blobs = []
        for one in (message, {"task": task, "preparations": []}):
            data = codec.encode(one)
            blobs.append(Blob(hashlib.sha256(data).hexdigest(), len(data)))
        work = Work("job-1", "job", 0, 0, "prepare", 0, *blobs, None, None, None, 1)
        return worker.answer(work, message, {"task": task, "preparations": []})[0]

    try:
        assert isinstance(answer(["NA"]), Reply)
        again = answer(["NA", "20"])
        assert isinstance(again, str) and "they are fixed once per job" in again
    finally:
        store.close()
