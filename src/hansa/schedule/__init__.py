"""Schedules: what changes from round to round."""

from hansa.schedule.rates import Constant, Cosine, Exponential, Schedule, Step

__all__ = ["Constant", "Cosine", "Exponential", "Schedule", "Step"]
