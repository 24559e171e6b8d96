"""Boosted trees and forests, grown from sums."""

from hansa.classical.trees.boosting import Boosting
from hansa.classical.trees.export import importances, lightgbm_model
from hansa.classical.trees.forest import RandomForest

__all__ = ["Boosting", "RandomForest", "importances", "lightgbm_model"]
