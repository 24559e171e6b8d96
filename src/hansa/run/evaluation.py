"""Evaluate the model of a run: on the aggregator's test set, and at the parties on their own test samples."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hansa.core.algorithm import Algorithm, State
from hansa.core.ask import Gathered, Reduced
from hansa.core.data_op import DataOp
from hansa.core.federation import Federation
from hansa.core.op import Payload
from hansa.core.plain_data import build
from hansa.core.predictor import Evaluate, evaluate
from hansa.core.registry import lookup
from hansa.core.runtime import Abort, Attend, Request
from hansa.core.task import Known, Pair, PartyShards
from hansa.core.trusted import Trusted
from hansa.holdings.stored_rows import column_of
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.metrics.function import functions, loaded
from hansa.metrics.metric import HOW, Metric
from hansa.metrics.names import MEMBERSHIP
from hansa.metrics.predictions import Predictions
from hansa.numerics.losses import auc
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import threads
from hansa.plumbing.errors import AlgorithmError, ConfigError, DataError, RoundAborted, nearest
from hansa.run import party_fields
from hansa.run.exchanges import Exchanges

log = logging.getLogger("hansa")
MEMBERS = 5000  # about as many training samples are compared with test samples
AGAIN = 3  # most times that parties count again, to agree on the range of scores or targets
FOUND = 20  # most values of a column that become groups by themselves
Metrics = Generator[Request, Any, dict[str, Any]]


@dataclass
class Evaluation:
    """Publishes and evaluates the model of a run.

    Parties that hide their updates behind a secure sum (`hides`) hide their metrics as well. `test` is the aggregator's
    test set, `probe` test samples with the classes that attackers want.
    """

    exchanges: Exchanges
    algorithm: Algorithm
    objective: Objective
    hides: bool
    threads: int
    test: Pair | None
    probe: tuple[torch.Tensor, torch.Tensor] | None
    personal: bool = False  # whether each party has a model of its own
    apart: bool = False  # whether the parts of the model lie at several parties
    trusted: Trusted | None = None
    chosen: EvaluateMetrics | None = None  # the metrics of `run.metrics`
    losses: dict[int, float] = dataclasses.field(default_factory=dict)  # of each party, in the last evaluation
    before: torch.Tensor | None = None  # the features of the test set, before their preparation

    def check(self, state: State, private: bool = False) -> None:
        """Refuse stopping rules on a metric if nothing can be evaluated.

        With differential privacy (`private`), refuse an algorithm's own evaluation: the guarantee would not cover it.
        """
        if self._joint and (private or self.algorithm.budget is not None):
            raise ConfigError(
                f"{self.algorithm.name} asks the parties for numbers to evaluate its model (Algorithm.evaluate), and "
                "differential privacy does not cover them; use another algorithm, or no differential privacy"
            )
        run, holdings = self.exchanges.run, self.exchanges.holdings
        predictor: Any = lookup("predictor", self.algorithm.predictor(state)[0])
        self.personal, self.apart = predictor.personal, predictor.joint
        if holdings.layout is not None and holdings.tests is not None and not self._joint:
            raise ConfigError(
                f"{self.algorithm.name} does not evaluate its model (Algorithm.evaluate), so test samples of parties "
                "with different columns would not be used; leave them out (party_tests, task.party_test)"
            )
        stops = run.target is not None or run.patience is not None or run.keep == "best"
        if run.keep == "best" and self.personal:
            raise ConfigError(
                f"run.keep: with {self.algorithm.name} each party has a model of its own, which is not kept by round; "
                "leave it out"
            )
        if run.keep == "best" and self.apart:
            raise ConfigError(
                f"run.keep: the parts of the model of {self.algorithm.name} stay at the parties, which keep those of "
                "the last round; leave it out"
            )
        central = self.test is not None and not self.personal and not self.apart
        if stops and not central and not self._joint and (holdings.tests is None or not run.eval_parties):
            hint = f"; {self.algorithm.name} has no single model to test" if self.personal else ""
            raise ConfigError(
                f"target, patience and keep need a test set: give the task one, or each party its own{hint}"
            )
        if run.metric == MEMBERSHIP:
            self._check_membership(central)
        if run.metrics:
            self._check_measured(central)
            predicts = lookup("predictor", self.algorithm.predictor(state)[0]).gives  # type: ignore[attr-defined]
            self.chosen = choose(run.metrics, self.objective, holdings, self.test, predicts)

    def _check_measured(self, central: bool) -> None:
        """Refuse chosen metrics that nobody would measure."""
        if self.exchanges.holdings.layout is not None or self.apart:
            raise ConfigError(
                f"run.metrics: the model is at several parties, so the metrics are those of {self.algorithm.name} "
                "(Algorithm.evaluate); leave run.metrics out"
            )
        if not central and not self.at_parties:
            raise ConfigError(
                "run.metrics needs test samples: give the task a test set, or each party its own (task.party_test) "
                "with run.eval_parties"
            )

    @property
    def tested(self) -> str | None:
        """The samples on which the loss and the accuracy of a run are measured; None without an evaluation."""
        if self._joint or self.apart:
            return None
        if self.test is not None and not self.personal:
            return "the test set"
        return "the parties' own test samples" if self.at_parties else None

    @property
    def combined(self) -> dict[str, str]:
        """How each metric that was chosen combines over the parties."""
        if self.chosen is None or not self.at_parties or (self.test is not None and not self.personal):
            return {}
        return {metric.key: HOW[metric.combines] for metric in self.chosen.metrics}

    def prepare(self, op: DataOp, payload: Payload) -> None:
        """Prepare the aggregator's test samples as the parties prepare theirs."""
        if self.test is not None:
            self.before = self.test[0]
            self.test = (op.transform(self.test[0], payload), self.test[1])
        if self.probe is not None:
            self.probe = (op.transform(self.probe[0], payload), self.probe[1])

    def publish(self, round: int, state: State, published: State) -> Generator[Request, Any, State]:
        """The state to evaluate and save; the last published one if no party replies."""
        try:
            new: State = yield from self.exchanges.outside(
                round, "publish", lambda fed: self.algorithm.publish(fed, state)
            )
        except RoundAborted as aborted:
            reason = self.exchanges.explain(aborted)
            log.warning("the model could not be published, the last one stays: %s", reason)
            yield Abort(round)
            return published
        return new

    def metrics(self, round: int, published: State) -> Metrics:
        """The metrics of a published state."""
        predictor, payload = self.algorithm.predictor(published)
        metrics: dict[str, Any] = {}
        self.losses = {}
        if self.at_parties:
            metrics |= yield from self.over_parties(round, predictor, payload)
        if self.test is not None and not self.personal and not self.apart:
            metrics |= self._central(self.test, predictor, payload)
        if self._joint:
            metrics |= yield from self._by_algorithm(round, published)
        if self.exchanges.run.metric == MEMBERSHIP:
            metrics |= {MEMBERSHIP: self._membership(predictor, payload)}
        return party_fields.with_finite(metrics)

    def _membership(self, predictor: str, payload: Payload) -> float:
        """The AUC of telling training samples from test samples by their losses (Yeom et al. 2018), in a simulation."""
        assert self.test is not None
        train: PartyShards = self.exchanges.holdings.train  # type: ignore[attr-defined]
        step = max(len(train.y) // MEMBERS, 1)
        losses = []
        for x, y in ((train.x[::step], train.y[::step]), self.test):
            output = build("predictor", predictor).outputs(self.objective, payload, x)
            losses.append(self.objective.loss_of(output, y).double())
        member = torch.cat([torch.ones(len(losses[0])), torch.zeros(len(losses[1]))])
        area = auc(-torch.cat(losses), member)
        assert area is not None
        return area

    def _check_membership(self, central: bool) -> None:
        """Refuse to measure membership where training samples, test samples or one shared model are missing."""
        train = getattr(self.exchanges.holdings, "train", None)
        if not central or train is None or not isinstance(train.x, torch.Tensor):
            raise ConfigError(
                f"run.metric: {MEMBERSHIP!r} compares the losses of training samples with those of the task's test set "
                "under one shared model; it needs a simulation, a test set, and samples in memory"
            )

    @property
    def at_parties(self) -> bool:
        """Whether parties evaluate models on their own test samples: each alone, so it must have all columns."""
        holdings = self.exchanges.holdings
        alone = holdings.layout is None and not self.apart
        return self.exchanges.run.eval_parties and holdings.tests is not None and alone

    @property
    def _joint(self) -> bool:
        """Whether the algorithm has metrics that no single place can compute."""
        return type(self.algorithm).evaluate is not Algorithm.evaluate

    def _by_algorithm(self, round: int, published: State) -> Metrics:
        """The metrics of `Algorithm.evaluate`."""
        verbs = (
            ({"reduce", "gather"} | self.algorithm.verbs) - {"submit", "next"} - ({"gather"} if self.hides else set())
        )

        async def evaluate(fed: Federation) -> dict[str, float]:
            fed.trusted = self.trusted
            return await self.algorithm.evaluate(fed, published)

        try:
            metrics = yield from self.exchanges.outside(round, "evaluate-joint", evaluate, verbs)
        except RoundAborted as aborted:
            reason = self.exchanges.explain(aborted)
            log.warning("%s could not evaluate its model: %s", self.algorithm.name, reason)
            yield Abort(round)
            return {"unmeasured": reason}
        if not isinstance(metrics, dict) or not all(
            isinstance(name, str) and isinstance(value, (int, float)) for name, value in metrics.items()
        ):
            raise AlgorithmError(f"{self.algorithm.name}: evaluate() must return a dict of numbers by name")
        return {name: float(value) for name, value in metrics.items()}

    def _central(self, test: Pair, predictor: str, payload: Payload) -> dict[str, Any]:
        """The metrics on the aggregator's test set."""
        try:
            with threads(self.threads):
                metrics = self._measured_centrally(test, predictor, payload)
                if self.probe is not None:
                    attack = evaluate(predictor, self.objective, payload, *self.probe)
                    metrics |= {"attack_success": attack["accuracy"]} if "accuracy" in attack else {}
        except (RuntimeError, ValueError, IndexError) as error:
            raise DataError(f"the model cannot be evaluated on the test set: {error}") from error
        return metrics

    def accuracy(self, test: Pair, predictor: str, payload: Payload) -> float | None:
        """The accuracy on some test samples at the aggregator; None if the targets are numbers."""
        with threads(self.threads):
            return evaluate(predictor, self.objective, payload, *test).get("accuracy")

    def _measured_centrally(self, test: Pair, predictor: str, payload: Payload) -> dict[str, Any]:
        if self.chosen is None:
            return dict(evaluate(predictor, self.objective, payload, *test))
        x, y = test
        output = build("predictor", predictor).outputs(self.objective, payload, x)
        predictions = Predictions.of(self.objective.loss, output, y, self.chosen.classes)
        features = x if self.before is None else self.before
        columns = self.exchanges.holdings.columns
        return self.chosen.at_once(predictions, lambda by: features[:, position(by, columns, features.shape[1:])])

    def over_parties(self, round: int, predictor: str, payload: Payload, phase: str = "evaluate",
                     only: Collection[int] | None = None) -> Metrics:  # fmt: skip
        """The parties' metrics on their own test samples; with `only`, of these parties.

        Behind a secure sum only their means over all test samples, of as many parties as a round asks. The phase
        "evaluate" asks all parties, so that a second evaluation of the same model repeats the ask of the first.
        """
        tested: Sequence[int] = self.exchanges.holdings.tested
        asked = range(len(self.exchanges.holdings)) if only is None or phase == "evaluate" else sorted(only)
        tested = sorted(set(tested) & set(asked))
        if self.hides and self.exchanges.attended is not None:
            present = yield Attend(round, 0, f"{phase}-present")
            tested = sorted(set(tested) & set(present))

        chosen = None if self.chosen is None else dataclasses.replace(self.chosen, predictor=predictor)
        op = Evaluate(predictor) if chosen is None else chosen

        async def ask(fed: Federation, sent: Payload, again: bool) -> Gathered | Reduced:
            if not self.hides:
                return await fed.gather(op, sent, parties=asked)
            if len(tested) < 2:
                raise RoundAborted(f"{len(tested)} parties have test samples; a secure sum needs at least 2")
            drawn = fed.rng("evaluate").permutation(len(tested))[: fed.cohort_size]
            parties = [tested[int(k)] for k in drawn]
            # Two sums over cohorts that differ by one party would show its numbers.
            need: Literal["all"] | None = "all" if again else None
            return await fed.reduce(op, sent, parties=parties, uniform=chosen is not None, need=need)

        try:
            answers: Gathered | Reduced = yield from self.exchanges.outside(
                round, phase, lambda fed: ask(fed, payload, again=False)
            )
        except RoundAborted as aborted:
            reason = self.exchanges.explain(aborted)
            log.warning("the parties could not evaluate the model: %s", reason)
            yield Abort(round)
            return {"unmeasured": reason}
        agreed: dict[str, torch.Tensor] = {}
        for number in range(AGAIN if chosen is not None else 0):
            assert chosen is not None
            counts = party_fields.summed_counts(chosen, answers, self.exchanges.run.min_cohort)
            agreed = {} if counts is None else chosen.agreement(counts, agreed)
            away = isinstance(answers, Reduced) and answers.count < min(len(tested), self.exchanges.cohort_size)
            if not agreed or away:
                break
            more = functools.partial(ask, sent={**payload, "agreed": agreed}, again=True)
            try:
                counted = yield from self.exchanges.outside(round, f"{phase}-again-{number}", more)
            except RoundAborted as aborted:
                log.warning("the metrics of scores and numbers are less exact: %s", self.exchanges.explain(aborted))
                yield Abort(round)
                break
            if isinstance(answers, Gathered) and counted.parties != answers.parties:
                break
            answers = counted
        if isinstance(answers, Reduced):
            return self._summed(answers)
        if only is not None:
            answers = party_fields.of_parties(answers, only)
        least, name = self.exchanges.run.min_cohort, self.exchanges.holdings.name
        if self.exchanges.run.detect is not None and phase == "evaluate":
            self.losses = party_fields.losses(chosen, answers)
        if chosen is None:
            return party_fields.over_parties(answers, least, name)
        return party_fields.counted_over_parties(chosen, answers, least, name)

    def _summed(self, answers: Reduced) -> dict[str, Any]:
        """The metrics of a secure sum, and whether one that must be there is missing."""
        if self.chosen is not None:
            counts = dict(answers.sums)
            wrong_counts = self.chosen.fault(counts)
            values = self.chosen.results(counts) if wrong_counts is None else {}
            reason = f"the parties' numbers add up to no metrics: {wrong_counts}"
            hides = {"hidden": "a secure sum hides the metrics of each party"}
            return {**values, **hides, **({} if wrong_counts is None else {"unmeasured": reason})}
        expected = {"loss", "accuracy"} if self.objective.loss in ("cross_entropy", "bce") else {"loss"}
        wrong = {"unmeasured": "the parties' numbers add up to no metrics: a party sent wrong numbers"}
        hidden = {"hidden": "a secure sum hides the metrics of each party"}
        return {**answers.metrics, **hidden, **(wrong if expected - set(answers.metrics) else {})}


def choose(metrics: Sequence[Metric], objective: Objective, holdings: Known, test: Pair | None,
           predicts: str) -> EvaluateMetrics:  # fmt: skip
    """The op that measures the loss, the accuracy of classes and the chosen metrics; a ConfigError for a wrong one.

    `predicts` is what the model gives (`Predictor.gives`). In a simulation, values of columns become groups.
    """
    classes = 2 if objective.loss == "bce" else holdings.classes or 0
    for reference in functions(tuple(metrics)):
        loaded(reference)
    fitted = []
    for metric in metrics:
        try:
            metric.check(predicts, classes)
            fitted.append(metric if metric.by is None else _grouped(metric, holdings, test))
        except ConfigError as error:
            raise ConfigError(f"run.metrics: {error}") from None
    usual = ["loss", *(["accuracy"] if classes else [])]
    keys = {metric.key for metric in fitted}
    first = (build("metric", name) for name in usual if name not in keys)
    return EvaluateMetrics(metrics=(*first, *fitted), classes=classes)


def _grouped(metric: Metric, holdings: Known, test: Pair | None) -> Metric:
    """A metric by groups of a column that exists, with the values of the column if the samples are here."""
    assert metric.by is not None
    at = position(metric.by, holdings.columns, holdings.shape)
    if metric.groups or metric.edges:
        return metric
    here = [holdings.tests.x] if isinstance(holdings.tests, PartyShards) else []
    here += [] if test is None else [test[0]]
    values = torch.cat([column_of(x, at).cpu() for x in here]).double()
    found = torch.unique(values[values.isfinite()]).tolist()
    if not 0 < len(found) <= FOUND:
        raise ConfigError(
            f"{metric.name} by {metric.by!r}: the column has {len(found)} values, and a group for each of at most "
            f"{FOUND} is made; give edges between groups, as in edges = [{found[len(found) // 2] if found else 0:g}]"
        )
    return dataclasses.replace(metric, groups=tuple(found))


def position(column: str | int, columns: Sequence[str], shape: Sequence[int]) -> int:
    """The number of a column of samples of this shape; a ConfigError if there is no such column."""
    if len(shape) != 1:
        raise ConfigError(f"by = {column!r}: samples of the shape {tuple(shape)} have no columns; leave by out")
    if isinstance(column, str) and column not in columns:
        hint = nearest(column, columns) if columns else "; the columns have no names here, so give a number from 0"
        raise ConfigError(f"by = {column!r}: there is no such column{hint}")
    at = columns.index(column) if isinstance(column, str) else column
    if not 0 <= at < shape[0]:
        raise ConfigError(f"by = {at}: the columns are numbered from 0 to {shape[0] - 1}")
    return at
