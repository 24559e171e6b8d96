"""Matched averaging: neurons and other atoms of several parties are matched before they are averaged."""

from hansa.matching.beta_bernoulli import Matching, Process, match
from hansa.matching.permute import MatchPermute

__all__ = ["MatchPermute", "Matching", "Process", "match"]
