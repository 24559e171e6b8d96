"""Runs: the training loop, simulate, resume, results."""

from hansa.experiment.settings import Run
from hansa.run.callbacks import Callback
from hansa.run.result import Result
from hansa.run.resume import resume
from hansa.run.simulate import simulate
from hansa.run.stored_run import StoredRun, load

__all__ = ["Callback", "Result", "Run", "StoredRun", "load", "resume", "simulate"]
