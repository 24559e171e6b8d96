"""Boosted trees and forests, grown from sums."""

from hansa.classical.trees.boosting import Boosting

__all__ = ["Boosting"]
