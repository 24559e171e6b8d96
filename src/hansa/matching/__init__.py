"""Matched averaging: neurons and other atoms of several parties are matched before they are averaged."""

from hansa.matching.beta_bernoulli import Matching, Process, match
from hansa.matching.fedma import FedMA
from hansa.matching.permute import MatchPermute
from hansa.matching.pfnm import PFNM
from hansa.matching.spahm import SPAHM

__all__ = ["PFNM", "SPAHM", "FedMA", "MatchPermute", "Matching", "Process", "match"]
