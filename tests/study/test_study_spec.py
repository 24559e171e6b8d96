"""Studies read from files, flags and Python: the same cells, and one sentence for every mistake."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up
from typer.testing import CliRunner

import hansa
from hansa.cli.app import app
from hansa.cli.compare import print_results
from hansa.experiment.config import read
from hansa.local import SGD
from hansa.metrics.measures import measure_of, written
from hansa.plumbing.errors import ConfigError
from hansa.report.display import human_bytes
from hansa.study import Study, parse_study, read_study
from hansa.study.inputs import modules_of
from hansa.study.runner import named, plain, run_study, tree_of
from hansa.study.spec import lay

EXAMPLES = Path(__file__).parents[2] / "examples"


def study(tree: dict[str, Any] | None = None, **keys: Any) -> Study:
    return parse_study({**(tree or {}), "study": {"algorithms": ["fedavg"], **keys}}, "x")


def test_a_study_is_the_product_of_its_axes() -> None:
    tree = {"partition": {"parties": 7}, "algorithm": {"local": {"lr": 0.2, "epochs": 2}}, "run": {"rounds": 5}}
    found = study(tree, algorithms=["fedavg", {"name": "fedprox", "mu": 0.5}], partitions=["iid", "dirichlet:0.1"],
                  adversaries=["none", "sign-flip:0.2"], grid={"run.cohort": [0.5, 1.0]}, seeds=2)  # fmt: skip
    cells = found.cells()
    assert len(cells) == 2 * 2 * 2 * 2 * 2
    assert len({cell.key for cell in cells}) == len(cells)
    last = cells[-1]
    assert last.label == "fedprox (mu=0.5), dirichlet:0.1, sign-flip:0.2, run.cohort=1, seed 1"
    assert last.setting == "dirichlet:0.1, sign-flip:0.2, run.cohort=1"
    assert cells[0].setting == "iid, run.cohort=0.5" and cells[0].adversary == ""
    made: Any = last.experiment
    assert made.algorithm.local.mu == 0.5 and made.algorithm.local.lr == 0.2 and made.algorithm.local.epochs == 2
    assert made.partition.parties == 7 and made.partition.alpha == 0.1 and made.adversary[0].fraction == 0.2
    assert (made.run.rounds, made.run.cohort, made.run.seed) == (5, 1.0, 1)
    assert hansa.build("algorithm", "fedavg", **{"local.lr": 0.2, "local.epochs": 2}) == cells[0].experiment.algorithm


def test_a_table_with_a_name_is_replaced_by_an_axis_and_kept_without_one() -> None:
    tree = {"algorithm": {"name": "fedprox", "local": {"mu": 0.5}}, "partition": {"name": "shards", "per_party": 3}}
    replaced = study(tree, partitions=["iid"]).cells()[0]
    assert replaced.tree["algorithm"] == {"name": "fedavg"} and replaced.tree["partition"] == {"name": "iid"}
    kept = parse_study({**tree, "study": {"seeds": 1}}, "x").cells()[0]
    assert kept.algorithm == "fedprox (local.mu=0.5)" and kept.partition == "shards:3"


def test_every_run_goes_to_its_end_and_parties_have_tests_of_their_own() -> None:
    found = study({"run": {"target": 0.9, "seed": 4}}, seeds=2)
    assert found.target == 0.9 and found.seeds == (4, 5)
    cell = found.cells()[0]
    assert cell.experiment.run.target is None and cell.experiment.task.party_test == 0.2
    said = study({"task": {"dataset": "digits", "model": "2nn", "party_test": 0.0}})
    assert said.cells()[0].experiment.task.party_test == 0.0


def test_digits_and_the_2nn_are_there_when_nothing_is_said() -> None:
    (cell,) = study().cells()
    assert cell.experiment.task.dataset == "digits" and cell.experiment.task.model == "2nn"
    assert cell.partition == "dirichlet:0.3"
    (cell,) = study({"task": {"dataset": "mnist"}}).cells()
    assert cell.experiment.task.model == "2nn" and cell.experiment.partition is None


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [("dirichlet:0.1", "alpha", 0.1), ("shards:2", "per_party", 2), ("quantity:0.5", "alpha", 0.5),
     ("similarity:0", "similarity", 0.0), ("noise:0.3", "sigma", 0.3), ("iid:12", "parties", 12)],
)  # fmt: skip
def test_a_number_after_a_colon_is_the_partitions_own(text: str, field: str, value: float) -> None:
    (cell,) = study(partitions=[text]).cells()
    assert getattr(cell.experiment.partition, field) == value
    assert cell.partition == text or text.startswith("iid")


def test_a_part_made_in_python_is_the_same_cell_as_its_table() -> None:
    parts = plain([hansa.FedProx(local=hansa.Proximal(mu=0.5)), hansa.FedAvg(fusion=hansa.Krum(f=1))])
    found = study(algorithms=parts).cells()
    tables = [{"name": "fedprox", "mu": 0.5}, {"name": "fedavg", "fusion": {"name": "krum", "f": 1}}]
    assert [cell.key for cell in found] == [cell.key for cell in study(algorithms=tables).cells()]
    assert found[0].algorithm == "fedprox (local.mu=0.5)"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"algorithms": []}, "study.algorithms must be a list"),
    ({"algorithms": "fedavg"}, "study.algorithms must be a list"),
    ({"algorithms": ["fedavgg"]}, r"study.algorithms\[0\]: unknown algorithm 'fedavgg'; did you mean 'fedavg'"),
    ({"algorithms": ["fedavg", "fedavg"]}, "two entries have the label 'fedavg'; give one of them another label"),
    ({"algorithms": [{"mu": 1}]}, "the algorithm needs a name"),
    ({"algorithms": [7]}, "expected a name or a table, got 7"),
    ({"algorithms": [{"name": "fedavg", "label": ""}]}, "a label must be a string"),
    ({"algorithms": [{"name": "fedprox", "mue": 1}]}, r"the run \(fedprox \(mue=1\), .*unknown field 'mue'"),
    ({"partitions": ["dirichlet:much"]}, "expected a number after the colon, the alpha of dirichlet"),
    ({"partitions": ["dirichlet:-1"]}, r"the run \(fedavg, dirichlet:-1, seed 0\).*alpha must be above 0, got -1"),
    ({"partitions": ["natural:1"]}, "'natural' takes no number"),
    ({"partitions": ["iidd"]}, "unknown partition 'iidd'; did you mean 'iid'"),
    ({"adversaries": ["alice"]}, "unknown adversary 'alice'; did you mean 'alie'"),
    ({"adversaries": ["alie:2"]}, r"the run \(fedavg, dirichlet:0.3, alie:2, seed 0\)"),
    ({"grid": {"run.cohort": 0.1}}, "study.grid: 'run.cohort' needs a list of values"),
    ({"grid": {"run.cohort": [2.0]}}, r"the run \(fedavg, .*run.cohort=2.*cohort must be above 0 and at most 1"),
    ({"grid": {"run.seed": [1]}}, "use study.seeds instead of 'run.seed'"),
    ({"grid": {"local.lr": [0.1, 0.1]}}, "has a value twice"),
    ({"grid": [1]}, "study.grid must be a table"),
    ({"tune": {"local.rl": [0.1, 0.2]}}, r"the run \(fedavg, dirichlet:0.3, seed 1000\).*unknown field 'rl'"),
    ({"seeds": 0}, "study.seeds must be a number of seeds, at least 1"),
    ({"seeds": [1, 1]}, "study.seeds"),
    ({"seeds": True}, "study.seeds"),
    ({"seeds": "three"}, "study.seeds"),
    ({"target": "high"}, "study.target must be a number"),
    ({"metric": "acuracy"}, "study.metric: unknown metric 'acuracy'; did you mean 'accuracy'"),
    ({"jobs": 0}, "study.jobs must be a whole number, at least 1"),
    ({"tune_seeds": 1.5}, "study.tune_seeds must be a whole number"),
    ({"sedes": 3}, r"\[study\]: unknown key 'sedes'; did you mean 'seeds'"),
    ({"algorithms": ["fedavg", {"name": "fedyogi", "tune": {"server.lr": [0.1, 0.2]}}]}, "same number of candidates"),
]


@pytest.mark.parametrize(("keys", "message"), BAD)
def test_a_bad_study_is_one_sentence(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run_study(named(study(**keys), tmp_path / "one"))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("one/cells/*"))  # before anything ran


@pytest.mark.parametrize(
    ("tree", "message"),
    [({"tsak": {}}, r"unknown table \[tsak\]; did you mean 'task'"), ({"run": 3}, r"\[run\] must be a table"),
     ({"task": {"dataset": "digit", "model": "2nn"}}, r"the run \(fedavg, .*unknown data set 'digit'"),
     ({"task": {"dataset": "heart"}}, "trains a model: set task.model"),
     ({"adversary": {"fraction": 0.2}}, r"\[adversary\] needs a kind"),
     ({"run": {"rounds": 0}}, "rounds must be at least 1")],
)  # fmt: skip
def test_a_bad_base_is_one_sentence(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study(tree).cells()


def test_a_task_made_in_python_is_refused_with_the_way_out() -> None:
    x = [[0.0]]
    with pytest.raises(ConfigError, match='dataset="my_module:function"'):
        hansa.compare(["fedavg"], task=hansa.Task(None, "mse", [(x, x)]))


def test_workers_are_told_where_parts_of_ones_own_come_from() -> None:
    @hansa.register("study-own")
    @dataclass(frozen=True)
    class Own(SGD):
        """A user-defined local solver."""

    assert modules_of(study().cells()[0].experiment) == set()
    own = study(algorithms=[{"name": "fedavg", "local": "study-own"}])
    assert modules_of(own.cells()[0].experiment) == {Own.__module__}


@pytest.mark.parametrize("name", ["compare-digits.toml", "compression.toml", "study-mnist.toml"])
def test_the_examples_are_good_studies(name: str) -> None:
    found = read_study(EXAMPLES / name)
    cells = found.cells()
    assert len({cell.key for cell in cells}) == len(cells) >= 8
    assert found.target is not None


def test_flags_say_the_same_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        '[task]\ndataset = "digits"\nmodel = "2nn"\n[partition]\nparties = 5\n[run]\nrounds = 3\n'
        '[study]\nalgorithms = ["fedavg"]\npartitions = ["iid", "dirichlet:0.1"]\nseeds = 2\ntarget = 0.9\n'
        "grid = { local.lr = [0.1, 0.2] }\n"
    )
    file = read_study(tmp_path / "s.toml")
    flags = parse_study(
        tree_of({"task.dataset": "digits", "partition.parties": 5, "run.rounds": 3},
                {"algorithms": ["fedavg"], "partitions": ["iid", "dirichlet:0.1"], "seeds": 2, "target": 0.9,
                 "grid": {"local.lr": [0.1, 0.2]}}), "flags",
    )  # fmt: skip
    assert [cell.key for cell in file.cells()] == [cell.key for cell in flags.cells()]
    laid = read_study(tmp_path / "s.toml", {"study.algorithms": ["scaffold"], "run.rounds": 4, "study.seeds": [7]})
    assert {(c.algorithm, c.seed, c.experiment.run.rounds) for c in laid.cells()} == {("scaffold", 7, 4)}


def test_fields_without_a_name_are_common_and_another_name_drops_the_old_ones_fields() -> None:
    assert lay({"local": {"lr": 1}}, {"local": {"name": "adam"}}) == {"local": {"lr": 1, "name": "adam"}}
    assert lay({"local": {"name": "sgd", "lr": 1}}, {"local": {"name": "adam"}}) == {"local": {"name": "adam"}}
    assert lay({"local": {"name": "sgd", "lr": 1}}, {"local": "sgd"}) == {"local": {"name": "sgd", "lr": 1}}


runner = CliRunner()


@pytest.mark.slow
def test_the_command_compares_tells_it_as_one_object_and_a_failed_run_is_the_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        '[task]\ndataset = "digits"\nmodel = { name = "2nn", hidden = 16 }\n[partition]\nparties = 4\n'
        '[study]\npartitions = ["iid"]\njobs = 1\n'
        'algorithms = ["fedavg", { name = "fedavg", fusion = { name = "krum", f = 2 }, label = "krum" }]\n'
    )
    out = tmp_path / "one"
    flags = ["--rounds", "2", "--seeds", "2", "--target", "0.1", "--out", str(out), "--json"]
    result = runner.invoke(app, ["compare", str(tmp_path / "s.toml"), *flags], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    told = json.loads(result.output.strip().splitlines()[-1])
    assert [row["algorithm"] for row in told["rows"]] == ["fedavg", "krum"] and len(told["runs"]) == 4
    assert [each["run"] for each in told["failed"]] == ["krum, iid, seed 0", "krum, iid, seed 1"]
    assert told["rows"][0]["rounds_to_target"]["n"] == 2 and told["seeds"] == [0, 1]
    assert (out / "report.html").exists() and str(out / "report.html") in told["files"]
    shown = runner.invoke(app, ["show", told["runs"][0]["run_dir"], "--json"], catch_exceptions=False)
    assert shown.exit_code == 0 and len(json.loads(shown.output)["rounds"]) == 2


@pytest.mark.slow
def test_a_report_is_made_anew_and_the_table_printed(tmp_path: Path) -> None:
    hansa.compare(["fedavg", "fedprox"], partitions=["iid"], parties=4, seeds=1, rounds=2, jobs=1, target=0.1,
                  folder=tmp_path / "one", model={"name": "2nn", "hidden": 16})  # fmt: skip
    again = runner.invoke(app, ["compare", "--report", str(tmp_path / "one")], catch_exceptions=False)
    assert again.exit_code == 0 and (tmp_path / "one" / "report.html").exists()
    assert "fedprox" in again.output and "final accuracy" in again.output and "rounds to 0.1" in again.output
    assert "One seed: no intervals and no tests" in again.output


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_figure_of_the_table_is_cut_off_on_a_narrow_console(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = made_up(("fedavg", "scaffold", "fedyogi (server.lr=0.03)"), seeds=2, target=0.9)
    print_results(found, [], as_json=False)
    printed = capsys.readouterr().out
    rows = found.table()
    assert len(rows) > 3
    for row in rows:
        shown = [written(row[name], 3, measure_of(name, "accuracy")) for name in ("final_accuracy", "worst_tenth")]
        figures = (*shown, human_bytes(row["bytes_up"].mean))
        assert all(figure in printed for figure in figures), row["algorithm"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "nothing to compare"), (["nowhere.toml"], "there is no file nowhere.toml"),
     (["-a", "fedavg", "--seeds", "many"], "--seeds takes a number of seeds"),
     (["-a", "fedavg", "--tune", "lr"], "--tune takes"),
     (["-a", "fedavg", "--grid", "run.cohort="], "--grid takes"), (["--report", "nowhere"], "holds no results"),
     (["-a", "fedavg", "--dataset", "mnist", "--data-dir", "nowhere"], "mnist")],
)  # fmt: skip
def test_bad_flags_are_one_sentence(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["compare", *flags])
    assert isinstance(result.exception, hansa.HansaError) and message in str(result.exception)


def test_a_cell_is_an_experiment_that_hansa_run_takes(tmp_path: Path) -> None:
    cell = study().cells()[0]
    (tmp_path / "e.toml").write_text('[task]\ndataset = "digits"\nmodel = "2nn"\n')
    assert read(tmp_path / "e.toml", {"task.party_test": 0.2}).task == cell.experiment.task


def test_runs_of_an_algorithm_that_cannot_have_a_setting_are_left_out_with_the_reason() -> None:
    for table in ({"run": {"finetune": {"epochs": 2}}}, {"task": {"class_weight": "balanced"}}):
        study = parse_study({"study": {"algorithms": ["fedavg", "random-forest"], "seeds": 2}, **table}, "s")
        assert [cell.algorithm for cell in study.cells()] == ["fedavg"] * 2
        assert list(study.skipped) == ["random-forest"] and "leave" in study.skipped["random-forest"]
        with pytest.raises(ConfigError, match="random-forest"):  # nothing would be left
            parse_study({"study": {"algorithms": ["random-forest"]}, **table}, "s").cells()
    assert parse_study({"study": {"algorithms": ["fedavg"]}}, "s").skipped == {}
    with pytest.raises(ConfigError, match="unknown field"):  # a mistake is one for all
        parse_study({"study": {"algorithms": ["fedavg"]}, "run": {"finetune": {"epoch": 2}}}, "s").cells()
