"""When a run stops: target, patience, budgets, number of rounds."""

from __future__ import annotations

from typing import Any

from hansa.core.algorithm import Algorithm, State
from hansa.core.task import Known
from hansa.experiment.settings import Run
from hansa.metrics.names import higher_is_better
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError
from hansa.privacy.guard import Guard
from hansa.run.checkpoint import Progress


class StoppingRules:
    """The stopping rules of a run. `metric` is the metric that target and patience look at."""

    def __init__(self, run: Run, algorithm: Algorithm, holdings: Known, objective: Objective,
                 guard: Guard | None) -> None:  # fmt: skip
        self.run, self.algorithm, self.parties, self.guard = run, algorithm, len(holdings), guard
        classifies = holdings.classes is not None or objective.loss == "bce"
        self.metric = run.metric or ("accuracy" if classifies else "loss")
        self._rises = higher_is_better(self.metric)

    def reason(self, progress: Progress, line: dict[str, Any], state: State) -> str | None:
        """Why the run stops after this metrics line; None if it continues."""
        run, value = self.run, line.get(self.metric)
        if run.target is not None and value is not None and (value == run.target or self._better(value, run.target)):
            return f"{self.metric} reached {run.target}"
        if run.patience is not None and progress.stale >= run.patience:
            return f"{self.metric} did not improve in {run.patience} evaluations"
        if run.byte_budget is not None and progress.bytes_up + progress.bytes_down >= run.byte_budget:
            return f"the byte budget of {run.byte_budget} is spent"
        if run.time_budget is not None and progress.seconds >= run.time_budget:
            return f"the time budget of {run.time_budget} s is spent"
        if len(progress.exhausted) == self.parties:
            return "every party's privacy budget is spent"
        if self.algorithm.finished(state):
            return "the algorithm has finished"
        if progress.round >= run.rounds:
            return "all rounds done"
        return None if self.guard is None else self.guard.spent(progress.privacy)

    def compare(self, progress: Progress, line: dict[str, Any], state: State) -> None:
        """Compare the metrics of an evaluation with the best ones so far, and keep the best state if the run does."""
        if self.metric not in line:
            self._check_measured(line)
            return
        value, margin = line[self.metric], self.run.min_delta if self._rises else -self.run.min_delta
        if value is not None and (progress.best is None or self._better(value, progress.best + margin)):
            progress.best, progress.stale = value, 0
            if self.run.keep == "best":
                progress.kept, progress.kept_round = state.tree(), progress.round
        else:
            progress.stale += 1

    def _check_measured(self, line: dict[str, Any]) -> None:
        """Refuse a metric that this run never measures."""
        run = self.run
        if "unmeasured" in line or "empty" in line:  # this round failed; the next one may not
            return
        if run.target is not None or run.patience is not None or run.metric is not None or run.keep == "best":
            measured = [name for name, value in line.items() if isinstance(value, float)]
            raise ConfigError(
                f"the run stops on {self.metric!r}, which is not measured here; give the task a test set, or "
                f"choose one of: {', '.join(measured)}"
            )

    def _better(self, value: float, than: float) -> bool:
        return value > than if self._rises else value < than
