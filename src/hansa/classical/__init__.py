"""Classical models: naive Bayes and decision trees, learned from sums of counts."""

from hansa.classical.id3 import ID3
from hansa.classical.naive_bayes import GaussianNB

__all__ = ["ID3", "GaussianNB"]
