"""Matched averaging: neurons and other atoms of several parties are matched before they are averaged."""

from hansa.matching.beta_bernoulli import Matching, Process, match

__all__ = ["Matching", "Process", "match"]
