"""Runs: settings, rounds, checkpoints, results."""

from hansa.run.result import Result
from hansa.run.resume import resume
from hansa.run.settings import Run
from hansa.run.simulate import simulate

__all__ = ["Result", "Run", "resume", "simulate"]
