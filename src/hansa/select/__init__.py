"""Selectors: which parties train in a round."""

from hansa.select.merit import Merit
from hansa.select.poisson import Poisson
from hansa.select.power_of_choice import PowerOfChoice
from hansa.select.selector import Selector, SelectorState
from hansa.select.tiers import Tiers
from hansa.select.uniform import Uniform
from hansa.select.weighted import Weighted

__all__ = ["Merit", "Poisson", "PowerOfChoice", "Selector", "SelectorState", "Tiers", "Uniform", "Weighted"]
