"""Studies: many runs compared. Algorithms within settings, over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hansa.core.lazy import exports

if TYPE_CHECKING:
    from hansa.study.cell import Cell
    from hansa.study.measures import MEASURES, TO_TARGET, Measure
    from hansa.study.perform import compare
    from hansa.study.results import Outcome, Results, Trial
    from hansa.study.spec import Study, parse_study, read_study
    from hansa.study.statistics import Difference, Estimate, Ranking

# Imported when asked for: worker processes need none of the statistics.
_FROM = {
    "Cell": ".cell", "compare": ".perform", "MEASURES": ".measures", "TO_TARGET": ".measures", "Measure": ".measures",
    "Outcome": ".results", "Results": ".results", "Trial": ".results", "Study": ".spec", "parse_study": ".spec",
    "read_study": ".spec", "Difference": ".statistics", "Estimate": ".statistics", "Ranking": ".statistics",
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
