"""Schedules over rounds: learning rates and the amount of local work."""

from hansa.schedule.pace import AdaComm, Fixed, Pace, Random
from hansa.schedule.rates import ConstantRate, Cosine, ExponentialDecay, RateSchedule, StepDecay

__all__ = [
    "AdaComm",
    "ConstantRate",
    "Cosine",
    "ExponentialDecay",
    "Fixed",
    "Pace",
    "Random",
    "RateSchedule",
    "StepDecay",
]
