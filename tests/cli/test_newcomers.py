"""First use: help texts are accurate, and a mistake gets one sentence that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hansa
from digits import digits
from hansa.cli import network  # noqa: F401 (adds the commands of a federation)
from hansa.cli.app import app
from hansa.cli.parts import show_parts
from hansa.report.run_report import run_report
from hansa.study.spec import parse_study

EXPERIMENT = digits(rounds=2, cohort=0.5)


class Tupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), x


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, generator=draws), torch.randint(0, 2, (8,), generator=draws)) for _ in range(3)]


def run(*words: str) -> str:
    got = CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})
    if got.exception is not None and not isinstance(got.exception, SystemExit):
        raise got.exception
    return got.output


@pytest.fixture
def done(tmp_path: Path) -> Path:
    (tmp_path / "digits.toml").write_text(EXPERIMENT)
    run("run", str(tmp_path / "digits.toml"), "--out", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.mark.slow
def test_show_prints_the_configuration(done: Path, tmp_path: Path) -> None:
    shown = run("show", str(done))
    assert all(text in shown for text in ("task.dataset", "digits", "partition.parties", "run.cohort", "0.5"))
    hansa.simulate(hansa.FedProx(), hansa.Task(lambda: nn.Linear(3, 2), parties=pairs()), rounds=1,
                   run_dir=tmp_path / "python")  # fmt: skip
    assert "algorithm.local.mu" in run("show", str(tmp_path / "python"))


@pytest.mark.slow
def test_the_report_says_who_was_asked(done: Path) -> None:
    history = hansa.load(done).history
    assert all(len(line["cohort"]) == line["asked"] == 2 for line in history)
    text = run_report(done).read_text()
    table = text[text.index("Participation") :]
    asked = sorted({party for line in history for party in line["cohort"]})
    assert all(f">{party}<" in table[:2000] for party in asked) and "rounds asked" in table[:2000]


def test_who_was_drawn_independently_is_not_recorded() -> None:
    task = hansa.Task(lambda: nn.Linear(3, 2), parties=pairs())
    result = hansa.simulate(hansa.FedAvg(), task, rounds=2, cohort=0.9, select="poisson")
    assert all("cohort" not in line for line in result.history)


@pytest.mark.slow
def test_a_folder_of_a_finished_run_is_not_said_to_be_resumable(done: Path, tmp_path: Path) -> None:
    with pytest.raises(hansa.ConfigError, match="that has finished") as caught:
        run("run", str(tmp_path / "digits.toml"), "--out", str(done))
    assert "resume" not in str(caught.value)
    (done / "summary.json").unlink()
    with pytest.raises(hansa.ConfigError, match="hansa resume"):
        run("run", str(tmp_path / "digits.toml"), "--out", str(done))


@pytest.mark.slow
def test_a_file_in_the_place_of_a_run_is_one_sentence(done: Path) -> None:
    with pytest.raises(hansa.ConfigError, match=r"metrics\.jsonl is a file; expected a run folder"):
        run("show", str(done / "metrics.jsonl"))
    with pytest.raises(hansa.ConfigError, match="is a folder; expected a TOML file"):
        run("run", str(done))


def test_parts_without_a_kind_lists_the_kinds() -> None:
    shown = run("parts")
    assert all(text in shown for text in ("local solver", "proximal", "trimmed-mean", "hansa parts KIND"))
    assert json.loads(run("parts", "--json"))["server"] == ["adagrad", "adam", "descent", "momentum", "yogi"]


def test_each_field_of_a_default_part_has_a_row_of_its_own() -> None:
    rows = [line.split("│")[1:4] for line in run("algorithms", "fedprox").splitlines() if line.startswith("│")]
    found = {name.strip(): default.strip() for name, _, default in rows}
    assert found["local"] == "proximal" and found["local.mu"] == "0.1" and found["server.lr"] == "1.0"


def test_a_task_shows_what_there_is_and_no_samples() -> None:
    task = hansa.Task(Tupled, parties=pairs() * 100, test=pairs()[0])
    assert repr(task) == "Task(model=Tupled, loss=cross_entropy, 300 parties, test=8 samples)"
    whole = (torch.zeros(5, 3), torch.zeros(5).long(), [0, 2, 5])
    assert "2 parties" in repr(hansa.Task(parties=whole)) and "0 parties" in repr(hansa.Task())


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_model_that_returns_a_tuple_is_refused_with_a_sentence(engine: str) -> None:
    task = hansa.Task(Tupled, parties=pairs(), test=pairs()[0])
    with pytest.raises(hansa.ConfigError, match=r"must return one tensor .* returns a tuple"):
        hansa.simulate(hansa.FedAvg(), task, rounds=1, engine=engine)


@pytest.mark.parametrize(
    "given",
    [{"dataset": hansa.Task()}, {"task": hansa.Task()}, {"dataset": pairs()}, {"model": lambda: nn.Linear(3, 2)},
     {"model": nn.Linear(3, 2)}, {"grid": {"run.cohort": [torch.tensor(0.5)]}}],
)  # fmt: skip
def test_compare_refuses_what_has_no_name_with_a_sentence(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(hansa.ConfigError, match="compare identifies runs by their configuration"):
        hansa.compare(["fedavg"], folder=tmp_path, rounds=1, **given)


def test_headings_of_a_study_are_readable() -> None:
    grid = {"task.model": ["logistic", {"name": "2nn", "hidden": 50}]}
    study = parse_study({"task": {"dataset": "digits"}, "study": {"grid": grid}}, "x")
    assert [cell.setting for cell in study.cells()] == [
        "default partition, task.model=logistic", "default partition, task.model=2nn (hidden=50)"
    ]  # fmt: skip
    files = parse_study({"task": {"parties": ["a.csv"], "model": "logistic"}}, "x")
    assert files.partitions[0].label == "parties' own files"


def test_a_part_is_described_with_the_limits_of_its_numbers_and_the_owners_ranges(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_parts("local", "dp-sgd", True)
    fields = {field["name"]: field for field in json.loads(capsys.readouterr().out)["fields"]}
    assert (
        fields["clip"]["limits"] == "at least 1e-06 and at most 1000000"
        and fields["clip"]["owner"] == "1e-09 to 1000000000"
    )
    assert fields["momentum"]["limits"] == "at least 0 and below 1"
    assert fields["epochs"]["owner"] == "none: counted by [limits] before the work begins"
    assert not {"limits", "owner"} & {*fields["per_layer"], *fields["schedule"]}
    show_parts("secure", "masking", True)
    fields = {field["name"]: field for field in json.loads(capsys.readouterr().out)["fields"]}
    assert fields["threshold"]["limits"] == "above 0.5 and at most 1" and "owner" not in fields["threshold"]
    show_parts("local", "dp-sgd", False)
    shown = capsys.readouterr().out
    assert "limits" in shown and "owner's range" in shown and "at least 1" in shown
    show_parts("secure", "masking", False)
    shown = capsys.readouterr().out
    assert "limits" in shown and "owner's range" not in shown


def test_an_op_is_described_with_what_it_reads_from_its_payload(capsys: pytest.CaptureFixture[str]) -> None:
    show_parts("op", "private-histograms", True)
    payload = json.loads(capsys.readouterr().out)["payload"]
    assert payload["slots"] == "a tensor of whole numbers (int64) of the shape [any, 2], at least 0"
    assert payload["before"].endswith("optional") and "points" not in payload
    show_parts("op", "cluster-train", False)
    assert "payload entry" in capsys.readouterr().out
