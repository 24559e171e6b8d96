"""How runs are displayed: one line, a table with curves, a data frame; and runs loaded from their folders."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.artifacts.run_folder import CHECKPOINT, EXPERIMENT, METRICS, MODEL, SUMMARY
from hansa.experiment.config import parse
from hansa.plumbing.errors import ConfigError, DataError
from hansa.report.display import rows_of, totals
from hansa.report.progress import NotebookBar, watcher
from hansa.run.resume import execute

NASTY = "<script>alert('x')</script>"


def task(**more: Any) -> hansa.Task:
    random = np.random.default_rng(0)
    parties = [(random.normal(size=(20, 3)).astype("float32"), random.integers(0, 2, 20)) for _ in range(3)]
    return hansa.Task(**{"model": net, "parties": parties, "test": parties[0], **more})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_result_is_one_line_and_a_page_of_its_own() -> None:
    result = hansa.simulate(hansa.FedAvg(), task(), rounds=4)
    accuracy, loss = result.summary["accuracy"], result.summary["loss"]
    assert repr(result) == f"<Result of fedavg, 4 rounds, accuracy {accuracy:.4f}, loss {loss:.4f}, all rounds done>"
    page = result._repr_html_()
    assert f"<td>{accuracy:.4f}</td>" in page and "4 (all rounds done)" in page
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', page)
    assert picture is not None and base64.b64decode(picture[1]).startswith(b"\x89PNG")
    assert "<script" not in page and "http" not in page


def test_what_a_result_shows_is_escaped() -> None:
    result = hansa.simulate(hansa.FedAvg(), task(test=None), rounds=2)
    result.experiment["algorithm"]["name"] = NASTY
    result.training.progress.stopped = NASTY
    page = result._repr_html_()
    assert "<script" not in page and page.count("&lt;script&gt;") == 2


def test_a_method_without_curves_shows_its_table_and_plots_nothing() -> None:
    result = hansa.simulate(hansa.GaussianNB(), task(model=None, test=None))
    assert "<table" in result._repr_html_() and "<img" not in result._repr_html_()
    with pytest.raises(ConfigError, match="nothing to plot"):
        result.plot()


def test_a_plot_has_every_evaluated_round() -> None:
    result = hansa.simulate(hansa.FedAvg(), task(), rounds=6, eval_every=2)
    losses = {line.get_label(): line for line in result.plot().axes[0].lines}
    assert losses["test"].get_xdata().tolist() == [2, 4, 6]
    assert losses["test"].get_ydata().tolist() == [line["loss"] for line in result.history if "loss" in line]


def test_a_frame_has_a_row_a_round_and_counts_parties() -> None:
    pytest.importorskip("pandas", reason="frames are of pandas: make extras")
    result = hansa.simulate(hansa.FedAvg(fusion=hansa.Median()), task(), rounds=4, eval_every=2,
                            absent=lambda party, round: party == 1 and round == 2)  # fmt: skip
    frame = result.to_frame()
    assert frame.index.name == "round" and frame.index.tolist() == [1, 2, 3, 4]
    assert frame["missing"].tolist() == [0, 0, 1, 0] and frame["rejected"].tolist() == [0] * 4
    assert frame["loss"].isna().tolist() == [True, False, True, False]
    assert frame["loss"].iloc[-1] == result.summary["loss"]
    assert frame["excluded"].tolist() == [len(line["fusion"]["excluded"]) for line in result.history]
    assert all(not isinstance(value, (dict, list)) for value in frame.to_numpy().ravel())


def test_a_frame_of_parties_has_what_each_measured() -> None:
    pytest.importorskip("pandas", reason="frames are of pandas: make extras")
    plain = task()
    result = hansa.simulate(hansa.FedAvg(), task(party_tests=plain.parties, names=["a", "b", "c"]), rounds=2)
    frame = result.to_frame(parties=True)
    assert frame.index.tolist() == [(r, p) for r in (1, 2) for p in ("a", "b", "c")]
    assert frame.loc[(2, "b"), "accuracy"] == result.history[1]["parties"]["b"]["accuracy"]
    with pytest.raises(ConfigError, match="party_tests"):
        hansa.simulate(hansa.FedAvg(), plain, rounds=1).to_frame(parties=True)


def test_without_pandas_a_frame_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'hansa\[notebook\]'"):
        hansa.simulate(hansa.FedAvg(), task(), rounds=1).to_frame()


def test_a_stored_run_is_what_the_result_was(tmp_path: Path) -> None:
    result = hansa.simulate(hansa.FedAvg(), task(prepare=hansa.Standardise()), rounds=3)
    stored = hansa.load(result.save(tmp_path / "run"))
    assert stored.history == result.history
    assert {**stored.summary, "run_dir": None} == result.summary
    assert repr(stored) == repr(result).replace("Result", "StoredRun")
    assert rows_of(stored.summary) == rows_of(result.summary)
    assert stored.params.keys() == result.params.keys() == net().state_dict().keys()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    x[0, 0] = torch.nan  # to be imputed
    assert torch.equal(stored.predict(x, net), result.predict(x))
    assert not stored.model(net).training


def test_a_stored_run_of_an_experiment_knows_its_model(tmp_path: Path) -> None:
    tree = {"task": {"dataset": "breast-cancer", "model": "logistic", "prepare": "standardise"}, "run": {"rounds": 1}}
    experiment = parse(tree)
    result = execute(experiment, tmp_path / "run")
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(hansa.load(tmp_path / "run").predict(x), result.predict(x))


def test_the_model_of_a_run_made_in_python_needs_its_function(tmp_path: Path) -> None:
    stored = hansa.load(hansa.simulate(hansa.FedAvg(), task(model=lambda: net()), rounds=1).save(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"model\(make_model\)"):
        stored.model()
    with pytest.raises(ConfigError, match=r"0\.bias is \(4,\) in the folder and \(3,\) in the module"):
        stored.model(lambda: nn.Sequential(nn.Linear(3, 3)))
    naive = hansa.simulate(hansa.GaussianNB(), task(model=None)).save(tmp_path / "naive")
    with pytest.raises(ConfigError, match="naive-bayes trains no torch module"):
        hansa.load(naive).model(net)


def test_tensors_that_layers_share_are_loaded(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        module[1].weight = module[0].weight
        return module

    result = hansa.simulate(hansa.FedAvg(), task(model=tied), rounds=1)
    loaded = hansa.load(result.save(tmp_path / "run")).model(tied)
    assert torch.equal(loaded[1].weight, result.model()[1].weight)  # type: ignore[index]


def test_a_run_that_is_not_finished_shows_what_it_has(tmp_path: Path) -> None:
    hansa.simulate(hansa.FedAvg(), task(), rounds=3, run_dir=tmp_path / "run")
    whole = hansa.load(tmp_path / "run").summary
    for name in (SUMMARY, MODEL):
        (tmp_path / "run" / name).unlink()
    stored = hansa.load(tmp_path / "run")
    assert repr(stored).startswith("<StoredRun of fedavg, 3 rounds") and repr(stored).endswith("not finished>")
    assert {**stored.summary, "seconds": 0} == {
        **{k: v for k, v in whole.items() if k not in ("stopped", "run_dir", "tested")},
        "seconds": 0,
    }
    with pytest.raises(ConfigError, match="not finished"):
        stored.model(net)
    (tmp_path / "run" / METRICS).unlink()
    assert "0 (not finished)" in hansa.load(tmp_path / "run")._repr_html_()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no experiment\.json$"):
        hansa.load(tmp_path)
    hansa.simulate(hansa.FedAvg(), task(), rounds=1).save(tmp_path / "inside")
    with pytest.raises(ConfigError, match=r"the latest of the 1 runs in it is .*inside$"):
        hansa.load(tmp_path)


def test_a_damaged_model_is_said_to_be_one(tmp_path: Path) -> None:
    folder = hansa.simulate(hansa.FedAvg(), task(), rounds=1).save(tmp_path / "run")
    (folder / MODEL).write_bytes(b"no model")
    with pytest.raises(DataError, match=f"{MODEL} is damaged"):
        hansa.load(folder).model(net)


def test_a_saved_run_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hansa.simulate(hansa.FedAvg(), task(), rounds=1, run_dir=folder)
    (folder / "notes.txt").write_text("mine")
    longer = hansa.simulate(hansa.FedAvg(), task(), rounds=2)
    with pytest.raises(ConfigError, match="already holds a run"):
        longer.save(folder)
    longer.save(folder, replace=True)
    assert hansa.load(folder).summary["rounds"] == 2
    assert not (folder / CHECKPOINT).exists()  # of the run before
    assert (folder / "notes.txt").read_text() == "mine" and (folder / EXPERIMENT).exists()


def test_a_partition_is_drawn_from_any_task() -> None:
    listed = task(names=["a", "b", "c"])
    x, y = (np.concatenate([pair[i] for pair in listed.parties]) for i in (0, 1))
    for drawn in (listed, task(parties=(x, y, [0, 20, 40, 60]), names=["a", "b", "c"])):
        sizes, shares = hansa.draw_partition(drawn).axes
        assert sizes.get_title(loc="left").startswith("3 parties, 60 samples: 20 to 20")
        assert [label.get_text() for label in shares.get_xticklabels()] == ["a", "b", "c"]
    assert len(hansa.draw_partition(task(loss="mse")).axes) == 1  # values have no classes to show


def test_progress_is_shown_on_standard_error_where_it_is_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = hansa.simulate(hansa.FedAvg(), task(), rounds=2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    seen: list[int] = []
    loud = hansa.simulate(
        hansa.FedAvg(), task(), rounds=2, progress=True, on_round=lambda line: seen.append(line["round"])
    )
    out, error = capsys.readouterr()
    assert out == "" and "2/2" in error and seen == [1, 2]
    assert loud.summary["loss"] == quiet.summary["loss"]


def test_what_went_wrong_is_counted_under_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython", reason="a notebook has IPython: make extras")
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data)

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(data)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    bar = NotebookBar(4)
    bar.start()
    bar.watch({"round": 1, "empty": "nobody"})
    bar.watch({"round": 2, "rejected": {"<a>": "it", "b": "is"}, "accuracy": 0.5})
    bar.close()
    assert shown[0]["text/plain"].startswith("round 0/4")
    assert shown[-1]["text/plain"].endswith("accuracy 0.5000  empty rounds: 1  rejected replies: 2")
    assert 'max="4" value="2"' in shown[-1]["text/html"]


def test_no_progress_is_shown_outside_of_notebooks_unless_it_is_wanted() -> None:
    assert watcher(3, None) is None and watcher(3, False) is None


def test_classes_that_no_party_holds_are_to_be_said() -> None:
    short = [(x, np.zeros(20, dtype=int)) for x, _ in task().parties]
    with pytest.raises(DataError, match=r"0\.\.0, got 0\.\.1; if no party holds .*Task\(classes=\.\.\.\)"):
        hansa.simulate(hansa.FedAvg(), task(parties=short), rounds=1)
    hansa.simulate(hansa.FedAvg(), task(parties=short, classes=2), rounds=1)


def test_a_figure_can_be_saved_as_any_other() -> None:
    out = io.BytesIO()
    hansa.simulate(hansa.FedAvg(), task(), rounds=2).plot().savefig(out, format="svg")
    assert b"<svg" in out.getvalue()


def test_a_summary_has_the_last_training_loss_and_all_epsilon_that_is_spent() -> None:
    """The values of the last round, not those of the last evaluation, which may be rounds ago or missing."""
    plain = {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    history = [{**plain, "round": k, "train_loss": 1.0 / k, "epsilon": 0.5 * k, "delta": 1e-5} for k in (1, 2, 3)]
    history[0]["loss"] = 0.7
    history.append({**plain, "round": 4, "epsilon": 2.0, "delta": 1e-5, "empty": "nobody answered"})
    for lines in (history, [{k: v for k, v in line.items() if k != "loss"} for line in history]):
        summary = totals(lines)
        assert (summary["train_loss"], summary["epsilon"], summary["delta"]) == (1 / 3, 2.0, 1e-5)
        assert summary["loss"] == lines[0].get("loss")
