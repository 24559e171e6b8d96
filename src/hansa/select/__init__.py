"""Selectors: who trains this round."""

from hansa.select.uniform import Selector, Uniform

__all__ = ["Selector", "Uniform"]
