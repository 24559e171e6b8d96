"""The example notebooks, each run from top to bottom in a fresh kernel."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks are run with nbclient and ipykernel: make extras")
pytest.importorskip("ipykernel", reason="notebooks are run with nbclient and ipykernel: make extras")
pytest.importorskip("pandas", reason="the notebooks show frames of pandas: make extras")
import nbformat  # noqa: E402
from traitlets.config import Config  # noqa: E402

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
KERNEL = "hansa-test"
ROUNDS = re.compile(r"\b(rounds|eval_every)=\d+")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # of the packages that run notebooks


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel that is this interpreter, whatever other kernels this machine has."""
    folder = tmp_path / "jupyter" / "kernels" / KERNEL
    folder.mkdir(parents=True)
    command = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": KERNEL, "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    return KERNEL


def executed(notebook: Any, kernel: str, folder: Path) -> Any:
    """Run a notebook in a folder and return it with its outputs; an error in a cell is raised."""
    folder.mkdir()
    resources = {"metadata": {"path": str(folder)}}
    with tempfile.TemporaryDirectory() as sockets:  # whose names are short; ports could be taken before they are used
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        nbclient.NotebookClient(notebook, timeout=600, startup_timeout=600, kernel_name=kernel, resources=resources,
                                config=config).execute()  # fmt: skip
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def shown(notebook: Any) -> list[dict[str, Any]]:
    """The displayed outputs, by MIME type."""
    return [dict(output.data) for output in outputs(notebook) if "data" in output]


def test_there_are_three_of_them() -> None:
    assert [path.name.partition("-")[0] for path in NOTEBOOKS] == ["01", "02", "03"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_example_notebook_is_valid_and_holds_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell["id"] for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_example_notebook_runs_and_shows_tables_and_pictures(path: Path, kernel: str, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:  # the same cells, in less time
        cell.source = ROUNDS.sub(r"\1=3", cell.source) if cell.cell_type == "code" else cell.source
    executed(notebook, kernel, tmp_path / "here")
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.get("text")
    seen = shown(notebook)
    assert any("<table" in data.get("text/html", "") for data in seen)
    assert any("image/png" in data for data in seen)


def test_a_notebook_shows_results_figures_and_where_a_run_stands(kernel: str, tmp_path: Path) -> None:
    setup = """
import torch, hansa
parties = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(4)]
task = hansa.Task(hansa.build("model", "logistic", inputs=(3,), outputs=2), parties=parties, test=parties[0])
result = hansa.simulate(hansa.FedAvg(), task, rounds=3)
"""
    quiet = "same = hansa.simulate(hansa.FedAvg(), task, rounds=3, progress=False)"
    watched = "same = hansa.simulate(hansa.FedAvg(), task, rounds=3, on_round=print)"
    imported = "import matplotlib.pyplot\nresult.plot()"  # then matplotlib's own way of showing figures is in use
    sources = [setup, quiet, watched, "result", "result.plot()", "hansa.draw_partition(task)", imported]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = executed(nbformat.v4.new_notebook(cells=cells), kernel, tmp_path / "here")
    progress, none, printed, result, curves, partition, again = (cell.outputs for cell in notebook.cells)
    assert len(progress) == 1 and 'max="3" value="3"' in progress[0].data["text/html"]
    assert progress[0].data["text/plain"].startswith("round 3/3")
    assert none == []
    assert [output.output_type for output in printed] == ["stream"]
    assert "<table" in result[0].data["text/html"] and "data:image/png;base64," in result[0].data["text/html"]
    assert result[0].data["text/plain"].startswith("<Result of fedavg, 3 rounds, accuracy 0.")
    for output in (curves, partition, again):
        assert len(output) == 1 and output[0].data["image/png"].startswith("iVBOR")
    assert curves[0].metadata["image/png"]["width"] < 800
