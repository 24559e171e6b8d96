"""Studies: many runs compared. Algorithms within settings, over seeds."""

from hansa.study.cell import Cell
from hansa.study.perform import compare
from hansa.study.results import MEASURES, TO_TARGET, Measure, Outcome, Results, Trial
from hansa.study.spec import Study, parse_study, read_study
from hansa.study.statistics import Difference, Estimate, Ranking

__all__ = ["MEASURES", "TO_TARGET", "Cell", "Difference", "Estimate", "Measure", "Outcome", "Ranking", "Results",
           "Study", "Trial", "compare", "parse_study", "read_study"]  # fmt: skip
