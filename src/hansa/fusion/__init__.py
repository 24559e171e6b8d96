"""Fusions: how updates become one."""

from hansa.fusion.mean import Fusion, WeightedMean, mean_update
from hansa.fusion.update import Update

__all__ = ["Fusion", "Update", "WeightedMean", "mean_update"]
