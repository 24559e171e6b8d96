"""The command line as a user sees it: real processes, real files."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from digits import digits
from hansa.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = digits(algorithm={"local": {"lr": 0.5, "batch": 50}}, rounds=3)


def hansa(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hansa", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=600)


def inside(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, for tests with many short commands: starting a process takes seconds."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    code: Any = 0
    sys.argv = ["hansa", *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    return path


def test_run_prints_one_json_object_last_and_fills_the_run_folder(experiment: Path) -> None:
    done = hansa("run", str(experiment), "--set", "algorithm.local.lr=0.25", "--json", cwd=experiment.parent)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"rounds", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "run_dir"} <= set(last)
    assert last["rounds"] == 3 and last["accuracy"] > 0.5
    folder = experiment.parent / last["run_dir"]
    recorded = json.loads((folder / "experiment.json").read_text())
    assert recorded["algorithm"]["local"]["lr"] == 0.25
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert (folder / "report.html").exists() and (folder / "model.safetensors").exists()
    assert last["simulated_seconds"] == 3.0  # an exchange takes a second
    shown = inside("show", str(folder), cwd=experiment.parent)
    assert shown.returncode == 0 and "fedavg" in shown.stdout and "accuracy" in shown.stdout
    assert re.search(r"simulated seconds +3\.0", shown.stdout)
    again = inside("resume", str(folder), cwd=experiment.parent)
    assert again.returncode == 2 and "has finished" in again.stderr


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["algorithm.local.lrr=1"], "algorithm (fedavg).local (sgd): unknown field 'lrr'; did you mean 'lr'?"),
        (["algorithm.local.lr=fast"], "algorithm (fedavg).local (sgd).lr: expected a number, got 'fast'"),
        (["algorithm.local.lr=-1"], "lr must be above 0, got -1"),
        (["algorithm=fedavgg"], "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"),
        (["task.dataset=digit"], "unknown data set 'digit'; did you mean 'digits'?"),
        (["task.model=cnnn"], "unknown model 'cnnn'; did you mean 'cnn'?"),
        (["run.round=3"], "run: unknown field 'round'; did you mean 'rounds'?"),
        (["run.cohort=3.0"], "cohort must be above 0 and at most 1, got 3; for a count, set cohort_size"),
        (["run.rounds=0"], "rounds must be at least 1"),
        (["run.device=tpu"], "run.device"),
        (["tsk.dataset=digits"], "unknown table [tsk]; did you mean 'task'?"),
        (["algorithm=fsvrg", "run.cohort=0.5"], "fsvrg needs every party in every round"),
        (["task.dataset=mnist", "task.data_dir=nowhere"], "train-images-idx3-ubyte"),
        (["task.dataset=my_data:load"], "there is no module 'my_data'"),
        (["task.dataset=heart", "partition=natural"], "missing values (NaN)"),
        (["task.dataset=digits", "partition=natural"], "natural"),
        (["run.metric=zzz"], "rmse, train_loss; and of most of them party_NAME_mean, _spread"),
        (["run.target=0.9", "run.metric=f11"], "run: metric: unknown metric 'f11'; did you mean 'f1'?"),
        (["lr"], "--set takes NAME=VALUE"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(experiment: Path, changes: list[str], sentence: str) -> None:
    sets = [word for change in changes for word in ("--set", change)]
    done = inside("run", str(experiment), *sets, "--json", cwd=experiment.parent)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_or_broken_file_is_one_sentence(experiment: Path) -> None:
    missing = inside("run", "nowhere.toml", cwd=experiment.parent)
    assert missing.returncode == 2 and "there is no file nowhere.toml" in missing.stderr
    experiment.write_text("[task\n")
    broken = inside("run", str(experiment), cwd=experiment.parent)
    assert broken.returncode == 2 and "is not valid TOML" in broken.stderr
    no_run = inside("show", str(experiment.parent), cwd=experiment.parent)
    assert no_run.returncode == 2 and "is not a run" in no_run.stderr


def test_lists_show_papers_fields_types_and_defaults(tmp_path: Path) -> None:
    every = inside("algorithms", "--json", cwd=tmp_path)
    names = {part["name"] for part in json.loads(every.stdout)}
    assert {"fedavg", "fedsgd", "fsvrg", "naive-bayes", "id3", "fedbuff", "d-psgd"} <= names
    one = inside("algorithms", "fedbuff", cwd=tmp_path)
    assert "Nguyen" in one.stdout and "buffer" in one.stdout and "a whole number" in one.stdout and "10" in one.stdout
    wrong = inside("algorithms", "fedbuf", cwd=tmp_path)
    assert wrong.returncode == 2 and "did you mean 'fedbuff'?" in wrong.stderr
    assert inside("datasets", cwd=tmp_path).returncode == 0
    assert "199,210" in inside("models", "2nn", cwd=tmp_path).stdout.replace("199210", "199,210")


def test_partition_counts_and_draws_what_each_party_holds(experiment: Path) -> None:
    done = inside("partition", str(experiment), "--set", "partition.parties=3", "--json", cwd=experiment.parent)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(shown["counts"]) == 3 and sum(map(sum, shown["counts"])) == 1438
    assert (experiment.parent / shown["picture"]).stat().st_size > 1000


@pytest.mark.slow
def test_a_module_function_and_party_files_are_tasks_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nfrom hansa.data import Data\n\n"
        "def load():\n    x = torch.arange(40.0).reshape(20, 2) / 40\n    y = (x[:, 0] > 0.5).long()\n"
        "    return Data(x=x, y=y, test=(x, y), parties=None, party_names=None, classes=2, loss='cross_entropy')\n\n"
        "def model():\n    return nn.Linear(2, 2)\n"
    )
    (tmp_path / "mine.toml").write_text(
        '[task]\ndataset = "mine:load"\nmodel = "mine:model"\n'
        '[partition]\nname = "iid"\nparties = 2\n[run]\nrounds = 2\n'
    )
    done = hansa("run", "mine.toml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, rows in (("a", "1,2,0\n2,1,1\n3,1,1\n"), ("b", "0,2,0\n,1,1\n")):
        (tmp_path / f"{name}.csv").write_text("u,v,label\n" + rows)
    (tmp_path / "files.toml").write_text(
        '[task]\nparties = ["a.csv", "b.csv"]\ntest = "a.csv"\nmodel = "logistic"\nprepare = "standardise"\n'
        "[run]\nrounds = 2\n"
    )
    files = inside("run", "files.toml", "--json", cwd=tmp_path)
    assert files.returncode == 0, files.stderr
    assert json.loads(files.stdout.strip().splitlines()[-1])["rounds"] == 2


@pytest.mark.slow
def test_a_third_party_algorithm_registers_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "from dataclasses import dataclass\nfrom hansa.algorithms import FedAvg\n\n"
        '@dataclass(frozen=True)\nclass Mine(FedAvg):\n    """A plugin. Nobody 2020."""\n'
    )
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hansa.algorithm]\nmine = plugin:Mine\n")
    done = hansa("algorithms", "mine", cwd=tmp_path)
    assert done.returncode == 0 and "Nobody 2020" in done.stdout


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["digits", "heart", "matching", "secureboost", "split", "split-sequential"])
def test_the_examples_run(name: str, tmp_path: Path) -> None:
    if name == "matching":
        pytest.importorskip("rbcl")
    done = inside("run", str(ROOT / "examples" / f"{name}.toml"), "--set", "run.rounds=2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
