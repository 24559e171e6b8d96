"""Over-selection: more parties than the cohort are asked, and the first replies make the round."""

import dataclasses

import pytest
import torch

import hansa
from hansa.core.ask import Ask
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError
from hansa.run.simulate import simulate
from hansa.testing import experiment_for

SPEEDS = {"compute": {"name": "constant", "value": 1.0}, "speed": {"name": "exponential", "mean": 5.0}}


def run(**settings: object) -> hansa.Result:
    experiment = experiment_for(hansa.FedAvg())
    given = {**experiment.settings(), "engine": "reference", **settings}
    return simulate(hansa.FedAvg(), experiment.build_task(), **given)


def test_the_first_to_answer_make_the_round() -> None:
    lines = run(cohort_size=2, over_select=1.0, devices=SPEEDS).history
    for line in lines:
        assert (line["asked"], line["replies"]) == (4, 2)
        assert set(line["missing"].values()) == {"the cohort was complete before it answered"}


def test_the_slow_are_those_left_out_and_nobody_waits_for_them() -> None:
    experiment = experiment_for(hansa.FedAvg(), devices=SPEEDS)
    task = experiment.build_task()
    clock = experiment.run.clock(task.holdings(Objective(task.model, task.loss, 0)))
    ask = Ask("reduce", 0, "round", 0, hansa.SGD(), {}, (0, 1, 2, 3))
    everybody, first = clock.plan(ask), clock.plan(dataclasses.replace(ask, enough=2))
    slow = sorted(everybody.seconds, key=everybody.seconds.__getitem__)[2:]
    assert set(first.lost) == set(slow)
    assert first.lasts == sorted(everybody.seconds.values())[1] < everybody.lasts


def test_without_over_selection_nothing_changes() -> None:
    with_none, plain = run(cohort_size=2, over_select=0.0), run(cohort_size=2)
    assert all(torch.equal(with_none.params[name], plain.params[name]) for name in plain.params)


def test_over_selection_stops_at_the_number_of_parties() -> None:
    assert run(cohort_size=3, over_select=5.0, rounds=1).history[0]["asked"] == 4


def test_a_sum_of_fewer_parties_than_the_least_cohort_is_never_made() -> None:
    lines = run(min_cohort=4, absent=lambda party, round: party == 0 and round == 1).history
    assert [("empty" in line) for line in lines] == [False, True, False]
    assert "quorum 4" in lines[1]["empty"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"min_cohort": 5}, "can never be met"), ({"min_cohort": 0}, "min_cohort must be at least 1"),
     ({"over_select": -0.1}, "over_select must be at least 0")],
)  # fmt: skip
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**settings)


def test_a_method_that_chooses_parties_itself_cannot_over_select() -> None:
    with pytest.raises(ConfigError, match="over_select"):
        experiment_for(hansa.FedBuff(), over_select=0.5)
    task = experiment_for(hansa.FedBuff()).build_task()
    with pytest.raises(ConfigError, match="over_select"):
        simulate(hansa.FedBuff(), task, over_select=0.5)
