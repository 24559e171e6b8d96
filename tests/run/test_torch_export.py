"""A model is exported for plain PyTorch, with its preparation and for batches of any size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hansa
from hansa.cli import predict as _commands  # noqa: F401 (adds the commands)
from hansa.cli.app import app
from hansa.experiment.config import parse
from hansa.plumbing.errors import ConfigError
from hansa.run.resume import execute

TASK = {"dataset": "digits", "model": "logistic"}
# torch's own loader, once per process
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")


def trained(folder: Path, task: dict[str, Any] = TASK, algorithm: Any = "fedavg") -> Any:
    tree = {"task": task, "partition": {"name": "iid", "parties": 2}, "algorithm": algorithm,
            "run": {"rounds": 1, "engine": "reference"}}  # fmt: skip
    return execute(parse(tree), folder)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("task", "algorithm"),
    [
        (TASK, "fedavg"),
        ({**TASK, "model": "2nn", "prepare": "standardise"}, "fedavg"),
        ({**TASK, "model": "cnn", "dtype": "float64"}, "fedavg"),
        ({"dataset": "digits"}, "naive-bayes"),
        ({"dataset": "breast-cancer", "prepare": "standardise"}, "kernel-svm"),
        ({"dataset": "breast-cancer", "prepare": "standardise"}, {"name": "logistic-regression", "ridge": 0.1}),
    ],
    ids=str,
)
def test_the_file_gives_the_outputs_of_the_model_for_any_batch(tmp_path: Path, task: Any, algorithm: Any) -> None:
    trained(tmp_path / "run", task, algorithm)
    stored, x = hansa.load(tmp_path / "run"), hansa.data.Digits().load().x
    if task["dataset"] == "breast-cancer":
        x = hansa.data.BreastCancer().load().x
    module = torch.export.load(stored.export(tmp_path / "model.pt2")).module()
    x = x.to(getattr(torch, task.get("dtype", "float32")))
    for rows in (x[:1], x[:3], x[:300]):
        wanted = stored.predict(rows)
        assert module(rows).dtype == wanted.dtype
        torch.testing.assert_close(module(rows), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_file_needs_no_hansa(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", {**TASK, "prepare": "standardise"})
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--torch", str(tmp_path / "model.pt2")])
    assert done.exit_code == 0 and "torch.export.load" in done.output
    code = (
        "import sys, torch\n"
        "sys.modules['hansa'] = None\n"
        f"module = torch.export.load({str(tmp_path / 'model.pt2')!r}).module()\n"
        "print(module(torch.full((2, 1, 8, 8), 0.5))[1].tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    wanted = result.predict(torch.full((2, 1, 8, 8), 0.5))[1]
    torch.testing.assert_close(torch.tensor(eval(out.stdout)), wanted, rtol=1e-6, atol=1e-6)


def test_the_model_of_a_party_is_exported(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", {**TASK, "model": "2nn"}, "fedper")
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for party in (0, 1):
        out = hansa.load(tmp_path / "run").export(tmp_path / f"{party}.pt2", party)
        torch.testing.assert_close(torch.export.load(out).module()(x), result.predict(x, party))
    with pytest.raises(ConfigError, match="each party has its own model"):
        hansa.load(tmp_path / "run").export(tmp_path / "none.pt2")


class Counting(nn.Module):
    """A module whose output depends on the number of samples, which no export for any batch can have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if float(x.sum()) > 0 else self.linear(x) * 2


def make_counting() -> nn.Module:
    return Counting()


@pytest.mark.slow
def test_a_model_that_cannot_be_exported_is_named_in_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "id3", {"dataset": "digits"}, {"name": "id3", "max_depth": 2})
    with pytest.raises(ConfigError, match=r"^torch\.export cannot export the model \(id3\): the way of a sample"):
        hansa.load(tmp_path / "id3").export(tmp_path / "tree.pt2")
    pairs = [(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))] * 2
    hansa.simulate(hansa.FedAvg(), hansa.Task(make_counting, "cross_entropy", pairs), rounds=1,
                   run_dir=tmp_path / "own")  # fmt: skip
    with pytest.raises(ConfigError, match=r"cannot export the model \(Counting\)"):
        hansa.load(tmp_path / "own").export(tmp_path / "own.pt2")
    assert not list(tmp_path.glob("*.pt2")) and capfd.readouterr() == ("", "")


def test_mistakes_of_the_command_are_told(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"must end in \.pt2"):
        hansa.load(tmp_path / "run").export(tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="cannot write"):
        hansa.load(tmp_path / "run").export(tmp_path / "none" / "model.pt2")
    for call, message in (
        ([], "give either MODEL"),
        (["run", "--state", "x"], "give either MODEL"),
        (["run"], "name the file with --torch"),
        (["run", "--torch", "x.pt2", "--out", "y"], "--job and --out belong to --state"),
        (["--state", "x", "--torch", "x.pt2"], "belong to MODEL"),
    ):
        assert message in str(CliRunner().invoke(app, ["export", *call]).exception)
