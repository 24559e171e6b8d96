"""`hansa attack FEDERATION JOB`: attacks on deployed jobs that kept their replies, against the true samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PARTIES, League

from hansa.attacks.job_audit import attack_job
from hansa.attacks.kept_job import kept_job
from hansa.attacks.kept_updates import class_shares
from hansa.net.party.samples import read_samples
from hansa.plumbing.errors import ConfigError, DataError
from hansa.report.job_attack_report import job_contents

SIZES = {"ann": 1, "bob": 6, "cid": 60}
ALLOWED = "keep_replies = true"
ONE_STEP = {"name": "sgd", "lr": 0.1, "epochs": 1, "batch": 100}  # the update is the gradient of all samples


def order(rounds: int = 1, keep: bool = True, local: Any = ONE_STEP, **tables: Any) -> dict[str, Any]:
    tree = {"task": {"parties": ["x"], "model": "logistic", "dtype": "float64"},
            "algorithm": {"name": "fedavg", "local": local},
            "run": {"rounds": rounds, "seed": 3, "eval_parties": False}, **tables}  # fmt: skip
    return tree | ({"audit": {"keep_replies": True}} if keep else {})


def write(path: Path, count: int, seed: int, shift: float = 0.0) -> Path:
    """A file of samples in four columns; the class is 1 for two thirds of them."""
    draw = np.random.default_rng(seed)
    y = (np.arange(count) % 3 > 0).astype(int)
    x = draw.normal(size=(count, 4)) + shift + y[:, None]
    lines = [",".join(map(repr, map(float, row))) + f",{label}" for row, label in zip(x, y, strict=True)]
    path.write_text("a,b,c,d,ill\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A file per party, and one that nobody trains with."""
    out = {name: write(tmp_path / f"{name}.csv", SIZES[name], at) for at, name in enumerate(PARTIES)}
    return out | {"test": write(tmp_path / "test.csv", 60, 9)}


def finished(league: League, files: dict[str, Path], tree: dict[str, Any]) -> str:
    for name in PARTIES:
        if name not in league.members:
            league.join(name, read_samples(str(files[name]), "ill"), ALLOWED)
    job = league.submit(tree)
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    return job


def scored(league: League, job: str, files: dict[str, Path], party: str, **given: Any) -> dict[str, Any]:
    audit = attack_job(league.folder, job, party=party, data=str(files[party]), test=str(files["test"]), target="ill",
                       **given)  # fmt: skip
    return audit.tree


@pytest.mark.slow
def test_the_sample_of_a_small_party_is_read_from_its_update_and_its_own_file_confirms_it(
    league: League, files: dict[str, Path]
) -> None:
    job = finished(league, files, order())
    kept = kept_job(league.folder, job)
    assert kept.owner is None and [update.party for update in kept.updates] == list(PARTIES)
    blind = attack_job(league.folder, job).tree
    row = next(row for row in blind["gradients"]["kept"] if row["party"] == "ann" and row["method"] == "analytic")
    assert row["match"] == pytest.approx(1.0, abs=1e-9) and row["labels"] == [0] and "score" not in row
    assert "the aggregator has none" in blind["membership"]["refused"]
    tree = scored(league, job, files, "ann")
    row = next(row for row in tree["gradients"]["kept"] if row["party"] == "ann" and row["method"] == "analytic")
    assert row["score"]["error"] < 1e-9 and row["score"]["recovered"] == row["score"]["labels"] == 1.0
    assert tree["gradients"]["replayed"] == pytest.approx(1.0, abs=1e-9)
    assert all("score" not in row for row in tree["gradients"]["kept"] if row["party"] != "ann")
    assert "membership needs at least 2 training" in tree["membership"]["refused"]
    sheet = job_contents(tree)[2][0]
    assert any("1.00 recovered" in cell for line in sheet.rows for cell in line)  # type: ignore[union-attr]


def test_the_classes_of_a_party_are_read_from_its_update(league: League, files: dict[str, Path]) -> None:
    job = finished(league, files, order())
    tree = scored(league, job, files, "cid", attacks=("properties",))
    row = next(row for row in tree["properties"]["kept"] if row["party"] == "cid")
    assert row["true"] == [1 / 3, 2 / 3] and row["distance"] < 0.1 and row["guess"] == 0.0
    kept = kept_job(league.folder, job, "cid", str(files["cid"]), str(files["test"]), "ill")
    assert kept.owner is not None
    update = next(update for update in kept.updates if update.party == "cid")
    exact = class_shares(kept.objective, update.start, update.gradient(), 2, kept.owner.train[0])
    assert exact is not None
    torch.testing.assert_close(exact, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.slow
def test_updates_tell_members_of_an_overfitted_model_and_a_wrong_file_is_noticed(
    league: League, files: dict[str, Path], tmp_path: Path
) -> None:
    draw = np.random.default_rng(5)
    for name, count in (("ann", 20), ("bob", 20), ("cid", 20), ("test", 20), ("wrong", 20)):
        x, y = draw.normal(size=(count, 40)), draw.integers(2, size=count)
        files[name] = tmp_path / f"{name}.npz"
        np.savez(files[name], x=x, y=y)
    for name in PARTIES:
        league.join(name, read_samples(str(files[name])), ALLOWED)
    job = finished(league, files, order(rounds=6, local={"name": "sgd", "lr": 0.5, "epochs": 5, "batch": 10}))
    tree = attack_job(league.folder, job, ("membership", "gradients"), party="bob", data=str(files["bob"]),
                      test=str(files["test"])).tree  # fmt: skip
    assert tree["membership"]["updates"]["auc_interval"][0] > 0.6 and tree["membership"]["rounds"] == 5
    assert tree["membership"]["loss"]["auc"] > 0.6
    assert tree["gradients"]["replayed"] == pytest.approx(1.0, abs=1e-9)
    wrong = attack_job(league.folder, job, ("membership", "gradients"), party="bob", data=str(files["wrong"]),
                       test=str(files["test"])).tree  # fmt: skip
    low, high = wrong["membership"]["updates"]["auc_interval"]
    assert low < 0.5 < high and wrong["gradients"]["replayed"] < 0.9
    assert any("is not what the party trained with" in (getattr(section, "note", None) or "")
               for section in job_contents(wrong)[2])  # fmt: skip


def test_under_a_secure_sum_there_is_no_single_update_and_the_report_says_so(
    league: League, files: dict[str, Path]
) -> None:
    secure = order(keep=False, privacy={"secure": "masking"})
    job = finished(league, files, secure)
    tree = scored(league, job, files, "cid")
    for name in ("gradients", "properties"):
        assert "the aggregator sees no single update, so there is nothing to read" in tree[name]["refused"]
    assert 0 <= tree["membership"]["loss"]["auc"] <= 1 and "updates" not in tree["membership"]
    titles = [section.title for section in job_contents(tree)[2]]
    assert titles[0] == "Who could learn what" and titles[-1] == "Repeat these attacks"


@pytest.mark.slow
def test_the_command_repeats_the_numbers_and_writes_the_report(league: League, files: dict[str, Path]) -> None:
    import shlex

    from typer.testing import CliRunner

    from hansa.cli import attack as command  # noqa: F401 (adds the command)
    from hansa.cli.app import app

    job = finished(league, files, order())
    tree = scored(league, job, files, "bob")
    words = shlex.split(tree["command"])
    assert words[:2] == ["hansa", "attack"]
    said = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert said.exit_code == 0 and "classes of bob" in " ".join(said.output.split()), said.output
    place = league.folder / "attacks" / job
    assert json.loads((place / "attacks.json").read_text()) == json.loads(json.dumps(tree))
    assert "Samples from kept updates" in (place / "attacks.html").read_text()


def test_what_cannot_be_attacked_is_said_in_one_sentence(league: League, files: dict[str, Path]) -> None:
    job = finished(league, files, order())
    plain = finished(league, files, order(keep=False))
    for target, given, message in (
        ("other-1", {}, r"there is no job 'other-1' that began; `hansa jobs`"),
        (plain, {}, r"has no kept replies: it did not keep them; submit it with audit.keep_replies"),
        (job, {"attacks": ("membrship",)}, "unknown attack 'membrship'; did you mean 'membership'"),
        (job, {"attacks": ("epsilon",)}, "trains again with the parties' samples.* simulate the job"),
        (job, {"party": "ann"}, "--party belongs to the file of a party; give the file too: --data"),
        (job, {"data": str(files["ann"])}, "--data needs the name of the party whose file it is: --party.*ann, bob"),
        (job, {"data": str(files["ann"]), "party": "anne"}, "has no party 'anne'; did you mean 'ann'"),
        (job, {"data": "none.csv", "party": "ann"}, r"none\.csv"),
        (job, {"data": str(files["ann"]), "party": "ann"}, r"records that nobody trained with.*\(--test\)"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=message):
            attack_job(league.folder, target, **given)
    narrow = files["ann"].with_name("narrow.csv")
    narrow.write_text("a,ill\n1.0,0\n2.0,1\n")
    with pytest.raises(ConfigError, match="does not fit the job"):
        attack_job(league.folder, job, party="ann", data=str(narrow), test=str(narrow), target="ill")
    with pytest.raises(ConfigError, match=r"there is no file .*federation\.toml"):
        attack_job(league.folder / "homes", job)
    league.operator.forget(job)
    with pytest.raises(ConfigError, match="has no kept replies: they were deleted"):
        attack_job(league.folder, job)


@pytest.mark.slow
def test_a_table_and_a_standardised_job_are_scored_with_the_features_of_the_job(
    league: League, files: dict[str, Path]
) -> None:
    for prepare in ("table", "standardise"):
        tree = order()
        tree["task"] |= {"prepare": prepare, "target": "ill"}
        job = finished(league, files, tree)
        found = scored(league, job, files, "ann", attacks=("gradients",))
        row = next(row for row in found["gradients"]["kept"] if row["party"] == "ann" and row["method"] == "analytic")
        assert found["gradients"]["replayed"] == pytest.approx(1.0, abs=1e-6)
        assert row["score"]["recovered"] == 1.0


@pytest.mark.slow
def test_noise_of_dp_sgd_hides_the_sample_that_a_plain_update_reveals(league: League, files: dict[str, Path]) -> None:
    private = {"name": "dp-sgd", "lr": 0.1, "batch": 10, "sigma": 4.0, "clip": 1.0}
    job = finished(league, files, order(local=private))
    tree = scored(league, job, files, "ann", attacks=("gradients",))
    row = next(row for row in tree["gradients"]["kept"] if row["party"] == "ann" and row["method"] == "analytic")
    assert row["score"]["error"] > 0.1 and tree["gradients"]["replayed"] < 0.99
    assert tree["run"]["dp"]["unit"] == "sample"
