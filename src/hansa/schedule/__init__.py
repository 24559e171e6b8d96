"""Schedules: what changes from round to round, learning rates and the amount of local work."""

from hansa.schedule.pace import AdaComm, Fixed, Pace, Random
from hansa.schedule.rates import Constant, Cosine, Exponential, Schedule, Step

__all__ = ["AdaComm", "Constant", "Cosine", "Exponential", "Fixed", "Pace", "Random", "Schedule", "Step"]
