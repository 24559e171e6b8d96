"""Naive Bayes."""

from hansa.bayes.naive import GaussianNB

__all__ = ["GaussianNB"]
