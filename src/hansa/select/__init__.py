"""Selectors: who trains this round."""

from hansa.select.poisson import Poisson
from hansa.select.power_of_choice import PowerOfChoice
from hansa.select.selector import Kept, Selector
from hansa.select.tiers import Tiers
from hansa.select.uniform import Uniform
from hansa.select.weighted import Weighted

__all__ = ["Kept", "Poisson", "PowerOfChoice", "Selector", "Tiers", "Uniform", "Weighted"]
