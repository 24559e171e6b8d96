"""From a job to predictions: pulled models and parties' own models find the columns of a file by their names."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PARTIES, League

import hansa
from hansa.net.party import own_models
from hansa.net.party.samples import read_samples

HEADER = ["age", "dose", "sick"]


def write(path: Path, party: int, order: tuple[int, ...] = (0, 1, 2)) -> Path:
    drawn = np.random.default_rng(party)
    x = drawn.normal(size=(16, 2)) * [20, 0.1] + [50, 1]
    rows = np.column_stack([x.round(3), np.arange(16) % 2])
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([HEADER[at] for at in order])
        lines.writerows([[row[at] for at in order] for row in rows.tolist()])
    return path


def order(algorithm: str, model: str) -> dict[str, Any]:
    task = {"parties": ["x"], "model": model, "prepare": "standardise", "target": "sick"}
    return {"task": task, "algorithm": {"name": algorithm, "local": {"lr": 0.1, "batch": 6}}, "run": {"rounds": 1}}


@pytest.mark.slow
def test_a_pulled_model_and_a_partys_own_model_predict_files(league: League, tmp_path: Path) -> None:
    for number, name in enumerate(PARTIES):
        columns = (1, 0, 2) if number == 1 else (0, 1, 2)
        league.join(name, read_samples(str(write(tmp_path / f"{name}.csv", number, columns)), "sick"))
    jobs = [league.submit(order(*each)) for each in (("fedavg", "logistic"), ("fedper", "2nn"))]
    for job in jobs:
        assert league.ended(job)["status"] == "finished"
    pulled = league.operator.pull(jobs[0], tmp_path / "pulled.safetensors")
    own = own_models.export(league.folder / "homes" / "bob", jobs[1], tmp_path / "own.safetensors")
    source = write(tmp_path / "new.csv", 9, (2, 1, 0))
    with source.open() as file:
        x = np.array([[row["age"], row["dose"]] for row in csv.DictReader(file)], dtype=np.float32)
    for path in (pulled, own):
        header = json.loads(path.with_suffix(".json").read_text())["header"]
        assert header[0] == "sick" and sorted(header[1:]) == ["age", "dose"]
        stored = hansa.load(path)
        assert stored.predict_file(source, tmp_path / "out.csv") == 16
        with (tmp_path / "out.csv").open() as file:
            found = np.array([row["probability_1"] for row in csv.DictReader(file)], dtype=np.float32)
        outputs = stored.predict(x[:, [HEADER.index(name) for name in header[1:]]])
        np.testing.assert_allclose(found, torch.softmax(outputs, 1)[:, 1].numpy(), rtol=1e-6)
        assert torch.export.load(stored.export(tmp_path / f"{path.stem}.pt2")).module()(torch.from_numpy(x)).shape == (
            16,
            2,
        )
