"""Promises of every selector: replay, resume, other processes, configuration, refusals."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import hansa
from hansa.core.plain_data import from_config, to_config
from hansa.core.registry import registered
from hansa.experiment.config import read
from hansa.replies.journal import Journal
from hansa.select import Merit, Poisson, PowerOfChoice, Selector, Tiers, Uniform, Weighted
from hansa.testing import PartyPool, experiment_for, run_on, same_bits

SIZES = [6, 9, 5, 14, 8, 12, 7, 10, 6, 11]
SELECTORS: list[Selector] = [
    Uniform(), Weighted(), PowerOfChoice(), PowerOfChoice(variant="cpow-d", batch=3, decay=4),
    PowerOfChoice(d=8, variant="rpow-d"), Tiers(tiers=3), Tiers(tiers=2, policy="adaptive", interval=2, credits=3),
    Poisson(), Merit(strength=6.0),
]  # fmt: skip


def named(selector: Selector) -> str:
    given = vars(selector)
    return "-".join([selector.name, *(str(given[field]) for field in ("variant", "policy") if field in given)])


def test_every_registered_selector_is_tried_here() -> None:
    assert set(registered("select")) == {selector.name for selector in SELECTORS}


@pytest.mark.thin(4)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("selector", SELECTORS, ids=named)
def test_a_resumed_run_selects_the_same_and_gives_the_same_bits(
    run: Any, tmp_path: Path, selector: Selector, engine: str
) -> None:
    given = {
        "rounds": 6,
        "cohort_size": 3,
        "engine": engine,
        "devices": {"latency": "exponential"},
        "checkpoint_seconds": 0.0,
    }
    whole = run(selector, SIZES, tests=True, **given)

    class Stop(BaseException):
        pass

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise Stop

    with contextlib.suppress(Stop):
        run(selector, SIZES, tests=True, run_dir=tmp_path / "run", on_round=stop, **given)
    resumed = run(selector, SIZES, tests=True, run_dir=tmp_path / "run", resume=True, **given)
    assert resumed.cohorts == whole.cohorts[3:]
    assert same_bits(resumed.result.state.tree(), whole.result.state.tree())
    assert same_bits(resumed.kept, whole.kept)
    assert [line["simulated_seconds"] for line in resumed.result.history] == [
        line["simulated_seconds"] for line in whole.result.history
    ]


@pytest.mark.thin(3)
@pytest.mark.parametrize("selector", SELECTORS, ids=named)
def test_the_engines_select_the_same_parties(run: Any, selector: Selector) -> None:
    runs = [run(selector, SIZES, tests=True, rounds=5, cohort_size=3, engine=e, devices={"latency": "exponential"})
            for e in ("reference", "stacked")]  # fmt: skip
    assert runs[0].cohorts == runs[1].cohorts
    if not selector.independent:
        assert [len(cohort) for cohort in runs[0].cohorts] == [3] * 5


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS, ids=named)
def test_parties_in_processes_of_their_own_give_the_bits_of_the_reference(selector: Selector, pool: PartyPool) -> None:
    experiment = experiment_for(hansa.FedAvg(), cohort_size=2, select=to_config(selector))
    settings = {**experiment.settings(), "engine": "reference"}
    reference = hansa.simulate(experiment.algorithm, experiment.build_task(), **settings).state.tree()
    journal = Journal()
    assert same_bits(pool.call(run_on(experiment, pool.runtime, journal)).tree(), reference)
    half = journal.head(len(journal) // 2)
    assert same_bits(pool.call(run_on(experiment, pool.runtime, half)).tree(), reference)


@pytest.mark.parametrize("selector", SELECTORS, ids=named)
def test_a_selector_is_read_from_its_plain_description(selector: Selector) -> None:
    assert from_config("select", to_config(selector), "check") == selector


def test_a_file_and_set_name_a_selector_and_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(
        '[task]\ndataset = "breast-cancer"\nmodel = "logistic"\n[partition]\nname = "iid"\nparties = 8\n'
        '[algorithm]\nname = "fedavg"\n[run]\nselect = {name = "power-of-choice", d = 7}\n'
    )
    assert read(path).run.select == PowerOfChoice(d=7)
    assert read(path, {"run.select.variant": "rpow-d"}).run.select == PowerOfChoice(d=7, variant="rpow-d")
    assert read(path, {"run.select": "weighted"}).run.select == Weighted()
    tiers = {"name": "tiers", "tiers": 2, "probabilities": [0.25, 0.75]}
    assert read(path, {"run.select": tiers}).run.select == Tiers(tiers=2, probabilities=(0.25, 0.75))


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [(hansa.FSVRG(), "fsvrg needs every party in every round"), (hansa.FedBuff(), "fedbuff chooses parties itself")],
    ids=["fsvrg", "fedbuff"],
)
@pytest.mark.parametrize("selector", SELECTORS[1:], ids=named)
def test_a_method_that_does_not_select_refuses_all_but_uniform(
    selector: Selector, algorithm: hansa.Algorithm, reason: str
) -> None:
    experiment = experiment_for(algorithm)
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(algorithm, experiment.build_task(), **{**experiment.settings(), "select": selector})


@pytest.mark.parametrize("selector", [PowerOfChoice(), Tiers()], ids=named)
def test_what_tries_the_model_is_refused_where_there_is_none(selector: Selector) -> None:
    experiment = experiment_for(hansa.GaussianNB())
    with pytest.raises(hansa.ConfigError, match="trains no model; use 'uniform' or 'weighted'"):
        hansa.simulate(hansa.GaussianNB(), experiment.build_task(), **{**experiment.settings(), "select": selector})
