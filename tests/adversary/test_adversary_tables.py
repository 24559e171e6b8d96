"""Adversaries in experiment files and on the command line, and combinations that are refused with the reason."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hansa
from digits import digits
from hansa.cli.app import app
from hansa.core.ask import Ask, Reduced
from hansa.core.federation import Federation
from hansa.experiment.config import parse, read
from hansa.testing import PARTY_COMMAND, run_on
from hansa.testing.party_process import load
from hansa.testing.processes import ProcessRuntime

BASE = digits(10, rounds=1)
TREE: dict[str, Any] = {"task": {"dataset": "digits", "model": "logistic"}}


def write(folder: Path, text: str) -> Path:
    path = folder / "attacked.toml"
    path.write_text(BASE + text)
    return path


def task(**given: Any) -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(8, 3, generator=draws), torch.randint(0, 2, (8,), generator=draws)) for _ in range(5)]
    names = ["ada", "ben", "cleo", "dan", "eva"]
    return hansa.Task(**{"model": lambda: nn.Linear(3, 2), "parties": pairs, "names": names, "classes": 2, **given})


def run(adversary: Any, algorithm: hansa.Algorithm | None = None, **settings: Any) -> hansa.Result:
    given = settings.pop("task", None) or task()
    return hansa.simulate(algorithm or hansa.FedAvg(), given, rounds=1, adversary=adversary, **settings)


# --- forms ---


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ()),
        ('[adversary]\nkind = "alie"\nz = 1.5\nfraction = 0.3', (hansa.ALIE(z=1.5, fraction=0.3),)),
        ('[adversary]\nname = "ipm"\nparties = ["0", 3]', (hansa.IPM(parties=("0", 3)),)),
        ('[[adversary]]\nkind = "bit-flip"\nbits = [32]\n[[adversary]]\nname = "free-rider"',
         (hansa.BitFlip(bits=(32,)), hansa.FreeRider())),
    ],
)  # fmt: skip
def test_a_file_names_one_adversary_or_several(text: str, wanted: tuple[Any, ...], tmp_path: Path) -> None:
    assert read(write(tmp_path, text)).adversary == wanted


@pytest.mark.parametrize("before", ["", '[adversary]\nkind = "alie"\nz = 1.5', '[adversary]\nname = "alie"\nz = 1.5',
                                    '[[adversary]]\nkind = "alie"\n[[adversary]]\nkind = "gambler"'])  # fmt: skip
@pytest.mark.parametrize("word", ["kind", "name"])
def test_another_kind_on_the_command_line_drops_the_fields_of_the_old_one(
    before: str, word: str, tmp_path: Path
) -> None:
    path = write(tmp_path, before)
    assert read(path, {f"adversary.{word}": "ipm", "adversary.fraction": 0.3}).adversary == (hansa.IPM(fraction=0.3),)
    assert read(path, {"adversary": "ipm"}).adversary == (hansa.IPM(),)


def test_a_field_on_the_command_line_keeps_the_files_adversary(tmp_path: Path) -> None:
    path = write(tmp_path, '[adversary]\nkind = "alie"\nfraction = 0.3')
    assert read(path, {"adversary.z": 2.0}).adversary == (hansa.ALIE(z=2.0, fraction=0.3),)
    assert read(path, {"adversary.kind": "alie"}).adversary == (hansa.ALIE(fraction=0.3),)


@pytest.mark.parametrize("name", ["adversary.fraction", "adversary.1.fraction"])
def test_the_command_line_does_not_reach_into_a_list_of_groups(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, '[[adversary]]\nkind = "alie"\n[[adversary]]\nkind = "gambler"')
    with pytest.raises(
        hansa.ConfigError, match=r"a list of 2 groups of attackers .*, and --set cannot change an entry of a list"
    ):
        read(path, {name: 0.3})


@pytest.mark.parametrize(
    "given",
    ["sign-flip", {"name": "sign-flip"}, {"kind": "sign-flip"}, hansa.SignFlip(), ["sign-flip"], (hansa.SignFlip(),)],
)
def test_python_takes_parts_names_and_tables(given: Any) -> None:
    wanted = run(hansa.SignFlip())
    made = run(given)
    assert torch.equal(made.state.params.w, wanted.state.params.w)
    assert made.experiment["adversary"] == wanted.experiment["adversary"]


@pytest.mark.slow
def test_a_run_of_a_file_records_its_adversary_and_resumes_with_it(tmp_path: Path) -> None:
    path = write(tmp_path, '[[adversary]]\nkind = "gaussian"\nsigma = 1.0\n[[adversary]]\nkind = "label-flip"')
    folder = tmp_path / "run"
    arguments = ["run", str(path), "--out", str(folder), "--set", "run.rounds=2", "--json"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    record = json.loads((folder / "experiment.json").read_text())
    assert [group["name"] for group in record["adversary"]] == ["gaussian", "label-flip"]
    assert len(record["attackers"]) == 4
    (folder / "summary.json").unlink()
    hansa.resume(folder)


def test_the_command_line_lists_the_attacks() -> None:
    out = CliRunner().invoke(app, ["parts", "adversary"]).output
    assert all(name in out for name in ("alie", "backdoor", "label-flip", "gambler"))


# --- refusals ---


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"kind": "alie", "name": "ipm"}, "kind and name mean the same"),
        ({"fraction": 0.2}, "adversary: the adversary needs a name"),
        ({"kind": "ali"}, "unknown adversary 'ali'"),
        ({"kind": "alie", "zz": 1}, "unknown field 'zz'"),
        ([{"kind": "alie"}, {"kind": "ipm", "epsilon": "much"}], r"adversary\[1\] \(ipm\)"),
        (3, r"\[adversary\] must be a table"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(table: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        parse({**TREE, "adversary": table})


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (hansa.IPM(parties=("eve",)), "there is no party 'eve'"),
        (hansa.IPM(parties=(5,)), "there is no party '5'"),
        (hansa.IPM(parties=("ada", 0)), "is listed twice"),
        ([hansa.IPM(parties=(1,)), hansa.SignFlip(parties=("ben",))], "is listed twice"),
        ([hansa.IPM(fraction=0.8), hansa.SignFlip(fraction=0.5)], "needs 2 of 5 parties, and the other groups"),
        (
            hansa.LabelFlip(fraction=0.15),
            r"a fraction of 0\.15 of 5 parties is rounded down to no party; use 0\.2 for one party",
        ),
        (
            hansa.BitFlip(fraction=0.1, mode="dimensional"),
            r"a fraction of 0\.1 of 5 parties of a round is rounded down to no party",
        ),
        (hansa.ALIE(fraction=1.0), "needs the updates of honest parties, and all 5 parties are hostile"),
        ([hansa.SignFlip(fraction=0.6), hansa.IPM(parties=(0, 1))], "and all 5 parties are hostile"),
        (hansa.Backdoor(), r"samples of shape \[3\] are not images"),
        (hansa.LabelFlip(source=0, target=2), r"target must be a class in 0\.\.1, got 2"),
    ],
)
def test_groups_that_do_not_fit_the_parties_are_refused(groups: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        run(groups)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 33, 1000])
def test_the_fraction_that_is_said_to_be_one_party_is_one(count: int) -> None:
    parties = [(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))] * count
    given = task(parties=parties, names=None)
    with pytest.raises(hansa.ConfigError, match="for one party") as refused:
        run(hansa.FreeRider(fraction=0.9 / count), task=given)
    said = re.search(r"(\S+) for one party", str(refused.value))
    assert said is not None
    made = run(hansa.FreeRider(fraction=float(said[1])), task=given)
    assert len(made.training.attackers or ()) == 1


def test_dimensional_flips_must_reach_somebody_of_a_cohort() -> None:
    attack = hansa.BitFlip(fraction=0.4, mode="dimensional")
    assert run(attack, cohort_size=3).history[0]["replies"] == 3
    with pytest.raises(
        hansa.ConfigError, match=r"0\.4 of 2 parties of a round is rounded down to no party; use 0\.5 for one party"
    ):
        run(attack, cohort_size=2)


@pytest.mark.parametrize("name", ["sign-flip", "label-flip", "gambler"])
def test_a_fraction_of_zero_is_allowed_and_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = run({"name": name, "fraction": 0.0})
    assert made.experiment["attackers"] == []
    assert f"adversary[0] ({name}): its fraction is 0, so nobody attacks" in caplog.text


def test_labels_that_are_no_classes_cannot_be_flipped() -> None:
    parties = [(torch.zeros(4, 3), torch.zeros(4, 1))] * 5
    numbers = task(model=lambda: nn.Linear(3, 1), loss="mse", parties=parties, classes=None)
    with pytest.raises(hansa.ConfigError, match="one class number per sample"):
        run(hansa.LabelFlip(), task=numbers)


def pictures() -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.rand(8, 1, 6, 6, generator=draws), torch.randint(0, 2, (8,), generator=draws)) for _ in range(5)]
    return task(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), parties=pairs)


def test_a_trigger_larger_than_the_images_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="size is 7, but the images have 6 by 6 pixels"):
        run(hansa.Backdoor(size=7), task=pictures())


@pytest.mark.parametrize("adversary", [hansa.ALIE(), hansa.ALIE(knows="own"), hansa.IPM(), hansa.Omniscient(),
                                       hansa.Backdoor(), hansa.BitFlip(mode="dimensional")])  # fmt: skip
def test_an_asynchronous_run_refuses_attacks_that_need_the_rounds_other_updates(adversary: hansa.Adversary) -> None:
    with pytest.raises(hansa.ConfigError, match=r"each update arrives alone|give scale, or replace = false"):
        run(adversary, hansa.FedBuff(buffer=2), task=pictures())


@pytest.mark.parametrize("adversary", [hansa.Backdoor(scale=3.0), hansa.Backdoor(replace=False), hansa.Gambler(),
                                       hansa.BitFlip()], ids=lambda a: a.name)  # fmt: skip
def test_an_asynchronous_run_takes_attacks_that_go_by_their_own_update(adversary: hansa.Adversary) -> None:
    assert run(adversary, hansa.FedBuff(buffer=2), task=pictures()).history[0]["replies"] == 2


def test_a_backdoor_needs_to_know_the_servers_rate_or_a_scale() -> None:
    with pytest.raises(hansa.ConfigError, match="give scale, or replace = false"):
        run(hansa.Backdoor(), hansa.FedAdam(), task=pictures())
    assert run(hansa.Backdoor(scale=2.0), hansa.FedAdam(), task=pictures()).history[0]["replies"] == 5


@pytest.mark.parametrize("algorithm", [hansa.QFedAvg(), hansa.QFedSGD(), hansa.FedNova(), hansa.EASGD(),
                                       hansa.FSVRG()], ids=lambda a: a.name)  # fmt: skip
def test_a_backdoor_needs_a_scale_where_the_step_is_not_the_mean_of_the_updates(algorithm: hansa.Algorithm) -> None:
    with pytest.raises(hansa.ConfigError, match="give scale, or replace = false"):
        run(hansa.Backdoor(fraction=0.25), algorithm, task=pictures())
    run(hansa.Backdoor(fraction=0.25, replace=False), algorithm, task=pictures())


def test_parties_in_processes_of_their_own_refuse_adversaries() -> None:
    experiment = parse({**TREE, "adversary": "label-flip"})
    with pytest.raises(hansa.ConfigError, match="adversaries exist only in a simulation"):
        load({"experiment": experiment.tree, "folder": ".", "party": 0})
    with pytest.raises(hansa.ConfigError, match="adversaries exist only in a simulation"):
        asyncio.run(run_on(experiment, ProcessRuntime(2, PARTY_COMMAND)))


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (hansa.DecentralizedSGD(), "parties send to each other"),
        (hansa.GaussianNB(), "send no updates"),
        (hansa.ID3(), "send no updates"),
    ],
    ids=["d-psgd", "nb", "id3"],
)
def test_where_no_updates_travel_only_data_can_be_poisoned(algorithm: hansa.Algorithm, reason: str) -> None:
    for name in ("sign-flip", "gambler"):
        with pytest.raises(hansa.ConfigError, match=f"'{name}' changes updates of the model.*{reason}"):
            run(hansa.build("adversary", name), algorithm)
    flipped, plain = (run(adversary, algorithm) for adversary in (hansa.LabelFlip(fraction=0.5), None))
    assert flipped.training.attackers and not torch.equal(*(r.predict(torch.eye(3)) for r in (flipped, plain)))


def test_a_secure_sum_leaves_attackers_their_data_alone() -> None:
    class Sum:
        async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
            answer: Reduced = await ask
            return answer

    with pytest.raises(hansa.ConfigError, match="with a secure sum only masked updates are visible"):
        run(hansa.SignFlip(), protocol=Sum())
    run(hansa.LabelFlip(), protocol=Sum())
