"""What excludes what: a table of rules, evaluated with what is known."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

import hansa
from hansa.core.plain_data import build
from hansa.experiment.config import parse
from hansa.experiment.rules import RULES, Facts, Judgement, Rule, check, judge
from hansa.plumbing.errors import ConfigError

TREE = {"task": {"dataset": "digits", "model": "logistic"}, "run": {"cohort_size": 4}}
RULE = Rule("so many", "privacy.secure", lambda f: f.parties < 3 and f.parties, "{found} of {algorithm.name}", "use 3")


def judged(rule: Rule, **known: Any) -> Judgement | None:
    return rule.judge(Facts(algorithm=hansa.FedAvg(), **known))


def test_every_rule_has_a_name_of_its_own_and_a_reason() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.why for rule in RULES)


def test_a_rule_is_absent_met_broken_or_decided_later() -> None:
    secure = hansa.Privacy(secure=build("secure", "masking"))
    assert judged(RULE, privacy=hansa.Privacy(), parties=1) is None
    later, met, broken = (judged(RULE, privacy=secure, **known) for known in ({}, {"parties": 3}, {"parties": 2}))
    assert later and met and broken
    assert (later.verdict, later.needs) == ("later", "the number of parties")
    assert met.verdict == "met"
    assert (broken.verdict, str(broken.error)) == ("broken", "2 of fedavg; use 3")


def test_a_rule_whose_setting_is_not_known_is_decided_later_only_if_it_could_be_broken() -> None:
    assert judged(RULE, parties=3) is None
    later = judged(RULE, parties=2)
    assert later is not None and (later.verdict, later.needs) == ("later", "the privacy settings")


def test_a_word_that_is_no_fact_is_a_mistake() -> None:
    with pytest.raises(AttributeError):
        _ = Facts().parteis


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule.given, str)], ids=lambda rule: rule.name)
def test_what_is_given_can_be_looked_up_for_any_experiment(rule: Rule) -> None:
    facts = parse(TREE).facts(relays=False)
    assert isinstance(rule.given, str)
    attrgetter(rule.given)(facts)


def test_more_is_refused_as_more_becomes_known() -> None:
    experiment = parse({**TREE, "algorithm": "d-psgd"})
    experiment.check(deployed=True, networked=True)
    with pytest.raises(ConfigError, match=r"set the cohort to 1\.0 \(it selects 4 of 10\)"):
        experiment.check(parties=10, names=None, cohort_size=4)


def test_no_experiment_breaks_a_rule_that_it_does_not_name() -> None:
    verdicts = list(judge(RULES, parse(TREE).facts()))
    assert {each.verdict for each in verdicts} <= {"met", "later"}
    check(parse(TREE).facts(deployed=False))
