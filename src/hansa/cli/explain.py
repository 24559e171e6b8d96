"""Print which rules concern an experiment, and what they say of it."""

from __future__ import annotations

import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hansa.experiment.config import Experiment
from hansa.experiment.rules import RULES, judge


def show_rules(experiment: Experiment, as_json: bool) -> bool:
    """Print the rules that concern an experiment; returns whether it breaks none."""
    rows = [(each.rule.name, each.verdict, str(each.error or "") or (each.needs and f"needs: {each.needs}"))
            for each in judge(RULES, experiment.facts())]  # fmt: skip
    broken = any(verdict == "broken" for _, verdict, _ in rows)
    if as_json:
        rules = [{"rule": rule, "verdict": verdict, "why": why} for rule, verdict, why in rows]
        print(json.dumps({"broken": broken, "rules": rules}))
        return not broken
    table = Table("rule", "", "why", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    return not broken
