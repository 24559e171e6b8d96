"""What excludes what: one table of rules, evaluated whenever more is known about a run.

A file is checked with what it says, a submitted job also with the parties, and before the first round all is known.
"""

from hansa.experiment.rules.algorithm import ALGORITHM
from hansa.experiment.rules.data import DATA
from hansa.experiment.rules.places import PLACES
from hansa.experiment.rules.privacy import PRIVACY
from hansa.experiment.rules.rule import Facts, Judgement, Rule, judge, packings, task_facts
from hansa.experiment.rules.settings import SETTINGS
from hansa.experiment.rules.transforms import TRANSFORMS

TABLE = {
    "The parties and their samples": DATA,
    "Simulations and deployments": PLACES,
    "The algorithm and its parts": ALGORITHM,
    "Privacy": PRIVACY,
    "The settings of the run": SETTINGS,
    "Transforms": TRANSFORMS,
}
RULES = [rule for rules in TABLE.values() for rule in rules]


def check(facts: Facts) -> None:
    """Raise the error of the first rule that is broken, as far as the facts are known."""
    for verdict in judge(RULES, facts):
        if verdict.error is not None:
            raise verdict.error from None


__all__ = ["RULES", "TABLE", "Facts", "Judgement", "Rule", "check", "judge", "packings", "task_facts"]
