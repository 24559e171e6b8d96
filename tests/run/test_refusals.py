"""Settings, data and runs that cannot be right are refused with the reason, and no run is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.artifacts.run_folder import RunFolder
from hansa.experiment.config import parse


def pairs(scale: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, generator=draws) * scale, torch.randint(0, 2, (8,), generator=draws)) for _ in range(3)]


def task(**given: Any) -> hansa.Task:
    return hansa.Task(**{"model": lambda: nn.Linear(3, 2), "parties": pairs(), "test": pairs()[0], **given})


def begin(folder: Path, **settings: Any) -> hansa.Result:
    return hansa.simulate(hansa.FedAvg(), task(), run_dir=folder, **{"rounds": 2, **settings})


def test_a_run_does_not_go_on_with_another_algorithm_seed_or_data(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    again = {"run_dir": tmp_path / "run", "resume": True, "rounds": 4}
    with pytest.raises(hansa.ConfigError, match="begun with another algorithm"):
        hansa.simulate(hansa.FedSGD(), task(), **again)
    with pytest.raises(hansa.ConfigError, match=r"another run .*seed was 0 and is 7"):
        hansa.simulate(hansa.FedAvg(), task(), seed=7, **again)
    with pytest.raises(hansa.ConfigError, match="the data are not those"):
        hansa.simulate(hansa.FedAvg(), task(parties=pairs(2.0)), **again)


def test_a_finished_run_given_more_rounds_goes_on_as_if_it_had_had_them(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    longer = hansa.simulate(hansa.FedAvg(), task(), run_dir=tmp_path / "run", resume=True, rounds=4)
    straight = begin(tmp_path / "other", rounds=4)
    assert [line["round"] for line in longer.history] == [1, 2, 3, 4]
    assert torch.equal(longer.state.params.w, straight.state.params.w)


def test_a_run_of_an_earlier_version_lacks_later_settings_and_goes_on(tmp_path: Path) -> None:
    begin(tmp_path / "run", engine="reference")
    path = tmp_path / "run" / "experiment.json"
    record = json.loads(path.read_text())
    assert record["run"].pop("sums") == "ordered" and record["run"]["engine"] == {"name": "reference"}
    path.write_text(json.dumps({**record, "run": {**record["run"], "engine": "reference"}}))
    again = {"run_dir": tmp_path / "run", "resume": True, "rounds": 4}
    with pytest.raises(hansa.ConfigError, match=r"sums was 'ordered' and is 'exact'"):
        hansa.simulate(hansa.FedAvg(), task(), engine="reference", sums="exact", **again)
    assert len(hansa.simulate(hansa.FedAvg(), task(), engine="reference", **again).history) == 4


def test_two_processes_cannot_work_on_one_run(tmp_path: Path) -> None:
    store = RunFolder(tmp_path / "run")
    begin(tmp_path / "run")
    store.lock()
    with pytest.raises(hansa.ConfigError, match="another process is at work"):
        hansa.simulate(hansa.FedAvg(), task(), run_dir=tmp_path / "run", resume=True, rounds=4)
    store.close()


def test_whole_number_features_are_scaled_like_any_other() -> None:
    whole = [((x * 100).long(), y) for x, y in pairs()]
    exact = [((x * 100).long().double(), y) for x, y in pairs()]
    results = [
        hansa.simulate(
            hansa.GaussianNB(), task(model=None, parties=p, test=None, prepare=hansa.Standardise()), rounds=1
        )
        for p in (whole, exact)
    ]
    torch.testing.assert_close(results[0].state.slots["mean"], results[1].state.slots["mean"], rtol=0, atol=1e-6)


def test_limits_on_replies_do_not_apply_to_publishing_and_evaluation() -> None:
    limited, free = (
        hansa.simulate(hansa.DecentralizedSGD(), task(party_tests=pairs()), rounds=2, **limits)
        for limits in ({"max_norm": 1e-6, "max_weight": 8}, {})
    )
    assert torch.equal(limited.state.params.w, free.state.params.w)
    assert "party_accuracy_mean" in limited.history[-1]


def test_an_empty_party_does_not_pollute_the_average_of_a_gossip() -> None:
    empty = (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    done = hansa.simulate(hansa.DecentralizedSGD(topology="complete"), task(parties=[*pairs(), empty]), rounds=3)
    models = torch.stack([done.memories[k]["gossip/w"] for k in range(3)])
    torch.testing.assert_close(done.state.params.w, models.double().mean(0).float())


def test_feature_frequencies_are_learned_again_when_others_take_part() -> None:
    def run(away: bool) -> hansa.Result:
        absent = (lambda party, round: party == 2 and round == 0) if away else None
        return hansa.simulate(hansa.FSVRG(form="full"), task(), rounds=2, absent=absent)

    with_all, later = run(False).state.slots, run(True).state.slots
    assert torch.equal(later["frequency"], with_all["frequency"])


def test_aborted_rounds_do_not_age_an_update() -> None:
    algorithm = hansa.FedBuff(buffer=1, max_staleness=0)
    dead = hansa.simulate(algorithm, task(), rounds=3, cohort_size=1, absent=lambda party, round: round < 2, seed=1)
    assert ["empty" in line for line in dead.history] == [True, True, False]
    assert dead.history[-1]["replies"] == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"names": ["a", "b", "a"]}, "two parties are called 'a'"),
        ({"model": nn.Linear(3, 2)}, "expected a function that returns a torch.nn.Module, got a Linear"),
        ({"model": lambda: {}["no"]}, "the function that makes it failed: KeyError"),
        ({"loss": "bce", "parties": [(torch.zeros(2, 3), torch.tensor([0, 4]))]}, "bce needs targets from 0 to 1"),
        ({"parties": []}, "give a list of"),
        ({"loss": "mze"}, "did you mean 'mse'"),
        ({"test": (torch.zeros(2, 5), torch.zeros(2))}, r"test: samples are \(5,\)"),
    ],
)
def test_a_task_that_cannot_be_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(hansa.HansaError, match=reason):
        hansa.simulate(hansa.FedAvg(), task(**given), rounds=1)


def test_fields_are_checked_however_a_part_is_made() -> None:
    assert hansa.FedAvg(local="sgd") == hansa.FedAvg()  # type: ignore[arg-type]
    for wrong in (lambda: hansa.SGD(lr="fast"), lambda: hansa.SGD(epochs=1.5), lambda: hansa.FedAvg(local=hansa.SGD)):  # type: ignore[arg-type]
        with pytest.raises(hansa.ConfigError, match="expected"):
            wrong()
    with pytest.raises(hansa.ConfigError, match=r"expected a hansa\.Task"):
        hansa.simulate(hansa.FedAvg(), None)  # type: ignore[arg-type]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "data.csv").write_text("u,label\n1,0\n2,1\n")
    tree = {"task": {"parties": ["a/data.csv", "b/data.csv"], "model": "logistic"}}
    assert parse(tree, str(tmp_path)).build_task().names == ["a/data.csv", "b/data.csv"]


def test_regression_with_a_loss_of_ones_own_gets_regression_metrics() -> None:
    targets = [(x, x.sum(1)) for x, _ in pairs()]
    given = hansa.Task(
        lambda: nn.Linear(3, 1),
        lambda out, y: nn.functional.huber_loss(out.squeeze(-1), y, reduction="none"),
        targets,
        test=targets[0],
    )
    assert {"rmse", "mae", "r2"} <= set(hansa.simulate(hansa.FedAvg(), given, rounds=1).history[-1])


@pytest.mark.parametrize(
    "tree", [{"\ud800": {}}, {"task": {"\udfff": 1}}, {"task": {"dataset": "digits"}, "algorithm": "a\ud800"}]
)
def test_a_refusal_can_be_written_down_whatever_it_repeats(tree: dict[str, Any]) -> None:
    with pytest.raises(hansa.HansaError, match="unknown") as caught:
        parse(tree)
    assert "\\ud" in str(caught.value).encode().decode()


def test_a_preparation_that_cannot_be_learned_says_why_and_of_which_parties() -> None:
    x = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    y = torch.arange(6) % 2
    parties = [(x, y), (x * 1e30, y), (x, y)]
    task = hansa.Task(lambda: nn.Linear(2, 2).double(), parties=parties, names=["ann", "bob", "cid"],
                      prepare=hansa.Standardise())  # fmt: skip
    with pytest.raises(hansa.ConfigError, match=r"could not be learned: .*bob: square has .*; scale the data"):
        hansa.simulate(hansa.FedAvg(), task, rounds=1, privacy={"secure": "masking", "threshold": 1.0})


@pytest.mark.parametrize("force", [False, True])
def test_a_run_of_an_algorithm_with_an_ambiguous_name_is_not_resumed(tmp_path: Path, force: bool) -> None:
    """Hansa 0.1.1 called decentralised SGD "dpsgd"."""
    hansa.simulate(hansa.DecentralizedSGD(), task(), run_dir=tmp_path / "run", rounds=1)
    path = tmp_path / "run" / "experiment.json"
    path.write_text(path.read_text().replace('"d-psgd"', '"dpsgd"'))
    again: dict[str, Any] = {"run_dir": tmp_path / "run", "resume": True, "force": force, "rounds": 2}
    with pytest.raises(hansa.ConfigError, match=r"'dpsgd' is ambiguous: 'd-psgd' is .*, 'dp-sgd' is"):
        hansa.simulate(hansa.DecentralizedSGD(), task(), **again)
    record = {"tree": {"task": {"dataset": "digits", "model": "2nn"}, "algorithm": "dpsgd"}, "folder": ".", "name": ""}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"experiment": record}))
    with pytest.raises(hansa.ConfigError, match=r"'dpsgd' is ambiguous: 'd-psgd' is .*, 'dp-sgd' is"):
        hansa.resume(tmp_path / "run", force=force)
