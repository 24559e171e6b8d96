"""`hansa attack` and `hansa.attack`: the same numbers twice, one report, and one sentence for what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from victims import linear, make_task, samples, trained

import hansa
from digits import digits
from hansa.attacks import NAMES, attack
from hansa.attacks.recipe import recipe_of
from hansa.cli.app import app
from hansa.plumbing.errors import ConfigError
from hansa.report.attack_report import contents
from hansa.report.html import Detail, Sheet

FAST = ("membership", "epsilon", "attributes")
TOML = digits(5, rounds=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hansa.experiment.config import read
    from hansa.run.resume import execute

    place = tmp_path_factory.mktemp("attacked")
    (place / "small.toml").write_text(TOML)
    execute(read(place / "small.toml"), place / "run")
    return place / "run"


@pytest.mark.slow
def test_the_same_run_gives_the_same_numbers_from_its_folder_and_twice(folder: Path) -> None:
    one, other = (attack(folder, FAST, references=1, canaries=50).tree for _ in range(2))
    assert json.dumps(one) == json.dumps(other)
    assert one["command"] == (
        f"hansa attack {folder} --attack membership --attack epsilon --attack attributes --references 1 --canaries 50"
    )


TABLE = """
[task]
parties = ["north.csv", "south.csv"]
target = "ill"
model = "logistic"
prepare = "table"
party_test = 0.3
[run]
rounds = 3
"""


def write_tables(folder: Path) -> None:
    for at, name in enumerate(("north", "south")):
        rows = [f"{20 + (7 * k + at) % 60},{'abc'[k % 3 if k % 11 else 1]},{(k * k + at) % 2}" for k in range(80)]
        (folder / f"{name}.csv").write_text("age,drug,ill\n" + "\n".join([",b,1", *rows]) + "\n")


PREPARED = TOML.replace('dataset = "digits"', 'dataset = "breast-cancer"\nprepare = "standardise"')


@pytest.mark.parametrize("toml", [TOML, PREPARED, TABLE], ids=["digits", "standardised", "table"])
def test_a_result_in_memory_gives_the_numbers_of_its_folder(toml: str, tmp_path: Path) -> None:
    from hansa.experiment.config import read
    from hansa.run.resume import execute

    (tmp_path / "small.toml").write_text(toml)
    write_tables(tmp_path)
    result = execute(read(tmp_path / "small.toml"), tmp_path / "run")
    one, other = (attack(each, ("membership",), references=1).tree["membership"] for each in (result, tmp_path / "run"))
    assert one == other


def test_a_table_is_attacked_by_the_features_that_the_run_learned(tmp_path: Path) -> None:
    from hansa.experiment.config import read
    from hansa.run.resume import execute

    (tmp_path / "small.toml").write_text(TABLE)
    write_tables(tmp_path)
    result = execute(read(tmp_path / "small.toml"), tmp_path / "run")
    recipe = recipe_of(tmp_path / "run")
    assert recipe.columns == ("age", "drug=a", "drug=b", "drug=c")
    features = torch.cat([recipe.members.x, recipe.others[0]])
    lines = [line.split(",") for name in ("north", "south") for line in (tmp_path / f"{name}.csv").read_text().split()]
    raw = [{"age": float(age) if age else None, "drug": drug} for age, drug, _ in lines if age != "age"]
    outputs = [outputs[:, 1] - outputs[:, 0] for outputs in (recipe.model.outputs(features), result.predict(raw))]
    assert torch.equal(outputs[0].sort().values, outputs[1].sort().values)
    found = attack(tmp_path / "run", ("epsilon", "attributes"), canaries=20).tree
    assert found["epsilon"]["canaries"] == 20 and "drug=a" in {row["column"] for row in found["attributes"]["columns"]}


def test_trees_are_asked_about_members_and_canaries_and_have_no_updates() -> None:
    task = make_task(per_party=40, model=None)
    tree = attack(hansa.simulate(hansa.Boosting(max_depth=6), task, rounds=6, progress=False), references=1).tree
    assert tree["membership"]["loss"]["auc_interval"][0] > 0.5  # deep trees know their rows by heart
    assert tree["epsilon"]["unit"] == "sample" and tree["epsilon"]["correct"] > tree["epsilon"]["guesses"] / 2
    assert "the kind 'trees'" in tree["epsilon"]["all_rounds"]["refused"]
    for name in ("inversion", "extraction"):
        assert "needs a torch model; the model of this run is of the kind 'trees'" in tree[name]["refused"]
    for name in ("gradients", "properties"):
        assert "has no local solver" in tree[name]["refused"]
    assert "boosting, 6 rounds" in contents(tree)[1][0]


def test_a_prepared_task_is_attacked_with_the_features_that_the_model_takes() -> None:
    task = make_task()
    task.parties = [(100 * x + 5, y) for x, y in task.parties]  # type: ignore[misc]
    task.test = (100 * task.test[0] + 5, task.test[1])  # type: ignore[index]
    task.prepare = hansa.Standardise()
    recipe = recipe_of(trained(task=task))
    assert abs(float(recipe.members.x.mean())) < 0.1 and abs(float(recipe.others[0].std()) - 1) < 0.2


@pytest.mark.slow
def test_the_command_writes_both_files_and_prints_who_could_learn_what(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hansa.cli import attack as command  # noqa: F401 (adds the command)

    words = ["attack", str(folder), "--attack", "membership", "--references", "0", "--out", str(tmp_path)]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0 and "membership (loss)" in said.output and "attacks.html" in said.output
    tree = json.loads((tmp_path / "attacks.json").read_text())
    assert tree["run"]["algorithm"] == "fedavg" and (tmp_path / "attacks.html").read_text().count("<h2") >= 4
    said = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(said.output.splitlines()[-1])["membership"]["loss"]["members"] > 300


def test_a_secure_run_is_reported_as_nothing_to_read_for_single_updates() -> None:
    result = trained(rounds=1, privacy={"secure": "masking"})
    tree = attack(result, ("gradients", "properties")).tree
    assert (
        "nothing to read" in tree["gradients"]["single"]["refused"]
        and "nothing to read" in tree["properties"]["refused"]
    )
    assert tree["gradients"]["parties_sum"]["parties"] == 3
    sheet = contents(tree)[2][0]
    assert isinstance(sheet, Sheet)
    said = {row[2]: row[3] for row in sheet.rows}
    assert said["records from one update"] == said["property of an update"] == "nothing to read"


@pytest.mark.slow
def test_every_attack_has_its_section_in_the_report() -> None:
    tree = attack(trained(task=make_task(model=linear)), canaries=50, references=1).tree
    assert set(NAMES) <= set(tree)
    titles = [section.title for section in contents(tree)[2]]
    for title in ("Who could learn what", "Membership", "Empirical epsilon and canaries", "Samples from updates",
                  "Model inversion", "Attributes", "Properties of a party", "A copy of the model", "Defences", "Limits",
                  "Repeat these attacks"):  # fmt: skip
        assert title in titles
    rows = {row["defence"].split(" ")[0]: row for row in tree["defences"]["rows"]}
    assert set(rows) == {"as", "none", "clipping", "DP-SGD", "secure", "compression"}
    assert "nothing to read" in rows["secure"]["single"]["refused"]
    assert rows["none"]["single"]["recovered"] == 1.0 > rows["DP-SGD"]["single"]["recovered"]


def test_names_in_a_report_are_text() -> None:
    tree = attack(trained(rounds=1), ("extraction",)).tree
    tree["run"]["name"] = "<script>alert(1)</script>"
    from hansa.report.html import render

    assert "<script>alert" not in render(*contents(tree))
    assert any(isinstance(section, Detail) and section.code for section in contents(tree)[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attacks": ("membrship",)}, "unknown attack 'membrship'; did you mean 'membership'"),
        ({"references": -1}, "references must lie in 0 to 64"),
        ({"canaries": 3}, "canaries must be at least 8"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attack("nowhere", **arguments)


def test_an_unknown_attribute_is_refused_before_any_attack() -> None:
    result = trained(rounds=1)
    with pytest.raises(ConfigError, match="there is no feature '99'; features have the numbers 0 to 11"):
        attack(result, ("membership", "attributes"), attribute=("99",), on_attack=pytest.fail)


def test_the_command_says_why_an_attack_was_not_possible(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hansa.attacks import AttackAudit
    from hansa.cli import attack as command  # noqa: F401 (adds the command)
    from hansa.experiment.config import read
    from hansa.run.resume import execute

    (tmp_path / "cells.toml").write_text(TOML.replace("digits", "breast-cancer"))
    execute(read(tmp_path / "cells.toml"), tmp_path / "run")
    said = CliRunner().invoke(app, ["attack", str(tmp_path / "run"), "--attack", "attributes", "--out", str(tmp_path)])
    assert said.exit_code == 0 and "meaning" not in said.output
    assert "not possible: attributes: no feature has between 2 and 20 values" in said.output
    kept = AttackAudit(json.loads((tmp_path / "attacks.json").read_text()))
    assert list(kept.refusals) == ["attributes"] and kept.defences is None


def test_a_later_attack_keeps_what_an_earlier_report_of_the_run_has(tmp_path: Path) -> None:
    result = trained(rounds=1)
    first, second = attack(result, ("extraction",)), attack(result, ("inversion",))
    first.save(tmp_path)
    second.save(tmp_path)
    kept = json.loads((tmp_path / "attacks.json").read_text())
    assert kept["extraction"] == json.loads(json.dumps(first.tree["extraction"]))
    assert kept["inversion"] == json.loads(json.dumps(second.tree["inversion"]))
    assert kept["command"] == "hansa attack RUN --attack extraction && hansa attack RUN --attack inversion"
    page = (tmp_path / "attacks.html").read_text()
    assert "A copy of the model" in page and "Model inversion" in page
    second.save(tmp_path)
    assert json.loads((tmp_path / "attacks.json").read_text())["commands"] == kept["commands"]
    other = attack(trained(rounds=2), ("inversion",))
    other.save(tmp_path)  # of another run
    assert "extraction" not in json.loads((tmp_path / "attacks.json").read_text())


def test_runs_that_cannot_be_attacked_are_refused_with_the_reason(tmp_path: Path, folder: Path) -> None:
    task = make_task()
    task.test = None
    with pytest.raises(ConfigError, match="the task has none; give it a test set"):
        attack(trained(rounds=1, task=task))
    task = make_task()
    task.test = samples(5, 3)
    with pytest.raises(ConfigError, match="at least 20 training and 20 test samples; there are 60 and 5"):
        attack(trained(rounds=1, task=task))
    with pytest.raises(ConfigError, match=r"repeat the run without \[adversary\]"):
        attack(trained(rounds=1, adversary={"name": "sign-flip", "fraction": 0.34}))
    with pytest.raises(ConfigError, match=r"one shared model that gives probabilities.*'personal'"):
        attack(hansa.simulate(hansa.FedPer(), make_task(), rounds=1, progress=False))
    with pytest.raises(ConfigError, match="is not a run folder"):
        attack(tmp_path)
    result = trained(rounds=1)
    saved = result.save(tmp_path / "python")
    with pytest.raises(ConfigError, match=r"was made from Python.*hansa.attack\(result\)"):
        attack(saved)
    with pytest.raises(ConfigError, match="stores its task; leave task out"):
        attack(folder, task=make_task())
    with pytest.raises(ConfigError, match=r"repeat the run without run\.own"):
        attack(trained(rounds=1, own={"0": {"lr": 0.1}}))


def test_of_a_fine_tuned_run_the_shared_model_is_attacked(tmp_path: Path) -> None:
    tuned = trained(rounds=1, finetune={"epochs": 1})
    shared = attack(trained(rounds=1), ("membership",), references=1).tree["membership"]
    assert attack(tuned, ("membership",), references=1).tree["membership"] == shared
    folder = tuned.save(tmp_path / "tuned")
    assert attack(folder, ("membership",), references=1, task=make_task()).tree["membership"] == shared


def test_a_saved_run_from_python_is_attacked_with_its_task(tmp_path: Path) -> None:
    result = trained(rounds=2)
    folder = result.save(tmp_path / "python")
    one = attack(folder, ("membership",), references=1, task=make_task()).tree["membership"]
    assert one == attack(result, ("membership",), references=1).tree["membership"]


@pytest.mark.slow
def test_a_mistake_on_the_command_line_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hansa.cli", "attack", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_the_module_is_not_changed_by_an_attack() -> None:
    result = trained(rounds=1)
    before = {name: tensor.clone() for name, tensor in result.params.items()}
    attack(result, ("inversion", "extraction"))
    assert all(torch.equal(before[name], tensor) for name, tensor in result.params.items())
