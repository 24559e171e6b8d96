"""Drift in a run: the samples and parties of a round, what the model has forgotten, and alarms of parties.

Forgetting is that of Chaudhry et al. 2018 (their equation 3): over the concepts j before the present one, the mean of
the best accuracy that an earlier model had on j less the accuracy that the model has on j now; 0 before there is a past
concept. A concept begins in the first round and in each round in which a drift of samples is complete; its test set is
that of this round.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from hansa.core.algorithm import Algorithm, State
from hansa.core.task import Known
from hansa.drift import Course, Detector, Watch
from hansa.experiment.settings import Run
from hansa.metrics.names import FORGETTING
from hansa.plumbing.errors import ConfigError
from hansa.run.checkpoint import Progress
from hansa.run.evaluation import Evaluation
from hansa.run.hooks import CurrentRound, RoundHook

log = logging.getLogger("hansa")


@dataclass
class DriftOfRounds(RoundHook):
    """Which samples the parties hold in a round, which parties are there, and which test set fits."""

    course: Course
    evaluation: Evaluation

    def before(self, current: CurrentRound) -> None:
        self.enter(current.number + 1)
        current.available = self.course.present(current.available)

    def enter(self, round: int) -> None:
        """Go to a round, counted from 1."""
        self.course.begin(self.evaluation.test, self.evaluation.before)
        self.course.enter(round)
        test = self.course.test(round)
        if test is not None:
            self.evaluation.test, self.evaluation.before = test[:2], test[2]

    def forgotten(self, progress: Progress, algorithm: Algorithm, published: State) -> dict[str, Any]:
        """The accuracy of a model on the test set of each concept so far, and what it has forgotten of the past ones.

        Nothing without a central test set of classes, or if there is no single model.
        """
        begun = [round for round in self.course.concepts if round <= progress.round]
        if self.evaluation.test is None or self.evaluation.personal or self.evaluation.apart:
            return {}
        now: dict[str, float] = {}
        for round in begun:
            test = self.course.test(round)
            assert test is not None
            accuracy = self.evaluation.accuracy(test[:2], *algorithm.predictor(published))
            if accuracy is None:
                return {}
            now[str(round)] = accuracy
        best = progress.concepts
        lost = [best[concept] - now[concept] for concept in list(now)[:-1] if concept in best]
        progress.concepts = {concept: max(accuracy, best.get(concept, accuracy)) for concept, accuracy in now.items()}
        return {"concepts": now, FORGETTING: sum(lost) / len(lost) if lost else 0.0}


@dataclass
class DriftAlarms:
    """Alarms: the loss of a party on its own test samples has risen against its own past."""

    detector: Detector
    holdings: Known

    def check(self, evaluation: Evaluation, run: Run) -> None:
        """Refuse a detector that would hear nothing, or say more of a party than the run shows."""
        if evaluation.hides or run.min_cohort > 1:
            hides = "a secure sum hides" if evaluation.hides else "run.min_cohort hides"
            raise ConfigError(f"run.detect: it needs the loss of each party, which {hides}; leave one of them out")
        if not evaluation.at_parties:
            raise ConfigError(
                "run.detect: it needs the losses of the parties on their own test samples; set task.party_test (or "
                "Task(party_tests=...)), and run.eval_parties"
            )

    def hear(self, progress: Progress, losses: dict[int, float]) -> dict[str, Any]:
        """Compare the parties' losses with their own past; the field of the metrics line has the alarms."""
        alarms = {}
        for party, loss in sorted(losses.items()):
            known = progress.watches.get(str(party))
            watch, why = self.detector.hear(Watch() if known is None else Watch.of(known), loss)
            progress.watches[str(party)] = watch.tree()
            if why is not None:
                alarms[self.holdings.name(party)] = why
                log.warning("drift alarm in round %d: party %s: %s", progress.round, self.holdings.name(party), why)
        return {"alarms": alarms} if alarms else {}
