"""With a minimum cohort, nothing computed from fewer parties' replies leaves the aggregator."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from league import PARTIES, PATIENCE, League, samples

import hansa
from hansa.core.ask import Ask
from hansa.core.round_record import Means, Medians
from hansa.fusion import Krum, MultiKrum
from hansa.net.party.asks import read_table
from hansa.plumbing.errors import ConfigError
from hansa.replies.reply_checks import Rules
from hansa.run.simulate import simulate
from hansa.testing import experiment_for

TREE = {"task": {"parties": ["x"], "model": "logistic"}, "algorithm": {"name": "fedavg"}}


def run(algorithm: Any = None, **settings: Any) -> list[dict[str, Any]]:
    algorithm = algorithm or hansa.FedAvg()
    experiment = experiment_for(algorithm)
    given = {**experiment.settings(), "engine": "reference", "rounds": 1, **settings}
    return simulate(algorithm, experiment.build_task(), **given).history


def test_no_metric_of_a_single_party_or_of_a_few_is_told() -> None:
    (each,), (together,) = run(), run(min_cohort=3)
    assert each["parties"] and "party_accuracy_worst_tenth" in each
    assert "parties" not in together and "party_accuracy_worst_tenth" not in together
    assert together["party_accuracy_mean"] == each["party_accuracy_mean"]


def test_a_metric_that_few_parties_give_is_not_told() -> None:
    for means in (Means(), Medians()):
        for numbers in ({"a": 1.0, "b": 2.0}, {"a": 3.0}, {"a": 5.0}):
            means.add(numbers, 1)
        assert means.result(2) == {"a": 3.0} and means.result() == {"a": 3.0, "b": 2.0}


@pytest.mark.parametrize("phase", ["round", "prepare", "publish", "evaluate"])
def test_every_exchange_has_the_least_cohort(phase: str) -> None:
    ask = Ask("reduce", 0, phase, 0, hansa.SGD(), {}, (0, 1, 2))
    assert Rules(min_cohort=3).of(ask).needed(3) == 3


@pytest.mark.parametrize("fusion", [Krum(), MultiKrum(m=2)])
def test_a_fusion_that_keeps_fewer_updates_is_refused(fusion: Any) -> None:
    with pytest.raises(ConfigError, match="makes the new model of the updates of"):
        run(hansa.FedAvg(fusion=fusion), min_cohort=3)


def test_a_fusion_that_has_kept_fewer_updates_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Krum, "used", lambda self, n: n)
    (line,) = run(hansa.FedAvg(fusion=Krum()), min_cohort=3)
    assert line["empty"] == "krum kept the updates of 1 parties, and min_cohort is 3"


def test_shares_and_scores_of_single_parties_are_not_told() -> None:
    rule = MultiKrum(m=3)
    (each,), (together,) = run(hansa.FedAvg(fusion=rule)), run(hansa.FedAvg(fusion=rule), min_cohort=3)
    assert {"shares", "scores"} <= set(each["fusion"])
    assert set(together["fusion"]) == {"rule", "excluded"}


def test_why_a_reply_was_rejected_is_told_without_its_numbers() -> None:
    (each,), (together,) = run(max_norm=1e-9), run(max_norm=1e-9, min_cohort=2)
    assert all(re.search(r"\d", why) for why in each["rejected"].values())
    assert all("the norm of its update" in why and not re.search(r"\d", why) for why in together["rejected"].values())


def test_a_job_does_not_begin_with_fewer_however_few_it_is_told_to_wait_for(league: League) -> None:
    league.join("ann", samples(0))
    job = league.submit({**TREE, "run": {"rounds": 1, "min_cohort": 2}}, min_parties=1)
    end = time.monotonic() + PATIENCE
    while "waiting for 1 of" not in str(league.shown(job)["reason"]):
        assert time.monotonic() < end and not league.shown(job)["rounds"]
        time.sleep(0.01)
    assert not league.ledger.all("SELECT * FROM replies WHERE job = ?", job)
    league.join("bob", samples(1))
    assert league.ended(job)["status"] == "finished"


def test_what_fewer_parties_say_of_their_data_is_told_to_nobody(league: League) -> None:
    for party, name in enumerate(PARTIES):
        league.join(name, samples(party), "" if name == "ann" else 'jobs = ["others"]')
    job = league.ended(league.submit({**TREE, "run": {"rounds": 1, "min_cohort": 2}}))
    assert job["status"] == "failed" and "needs 2 parties, and 1 are left" in job["reason"]
    fetched = league.members["ann"].agent._task
    assert fetched is None or "model" not in read_table(fetched[1])["task"]
