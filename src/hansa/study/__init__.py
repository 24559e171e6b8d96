"""Studies: many runs compared. Algorithms within settings, over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hansa.plumbing.lazy import exports

if TYPE_CHECKING:
    from hansa.metrics.measures import MEASURES, TO_TARGET, Measure
    from hansa.metrics.statistics import Difference, Estimate, Ranking
    from hansa.study.cell import Cell
    from hansa.study.results import Outcome, Results, Trial
    from hansa.study.runner import compare
    from hansa.study.spec import Study, parse_study, read_study

# Imported at first use: worker processes do not need the statistics.
_FROM = {
    "Cell": ".cell", "compare": ".runner", "Outcome": ".results", "Results": ".results", "Trial": ".results",
    "Study": ".spec", "parse_study": ".spec", "read_study": ".spec",
    **dict.fromkeys(("MEASURES", "TO_TARGET", "Measure"), "hansa.metrics.measures"),
    **dict.fromkeys(("Difference", "Estimate", "Ranking"), "hansa.metrics.statistics"),
}  # fmt: skip

__all__ = [
    "MEASURES",
    "TO_TARGET",
    "Cell",
    "Difference",
    "Estimate",
    "Measure",
    "Outcome",
    "Ranking",
    "Results",
    "Study",
    "Trial",
    "compare",
    "parse_study",
    "read_study",
]

__getattr__ = exports("hansa.study", _FROM)
