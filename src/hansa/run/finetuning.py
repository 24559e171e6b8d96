"""What follows the last round: fine-tuning at the parties, and delivery of their own models."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any

from hansa.core.algorithm import Algorithm, State
from hansa.core.ask import Gathered
from hansa.core.delivery import Deliver
from hansa.core.federation import Federation
from hansa.core.op import Payload
from hansa.core.other_model import OtherModel
from hansa.core.round_record import LISTED
from hansa.core.runtime import Abort, Request
from hansa.local.finetune import FineTune, FineTuning
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.report.diagnosis import grouped
from hansa.run.evaluation import Evaluation
from hansa.run.exchanges import Exchanges
from hansa.run.party_fields import with_finite

log = logging.getLogger("hansa")
Steps = Generator[Request, Any, dict[str, Any]]
TUNED = "finetuned"  # the predictor of fine-tuned models
NOT_COVERED = (
    "metrics of the fine-tuned models depend on the parties' training samples, and differential privacy does not cover "
    "them; each party can measure its own model (hansa export)"
)


@dataclass
class FineTuner:
    """Fine-tunes the final model of a run at every party, and measures it before and after.

    The models stay with their parties. With differential privacy (`private`) their metrics stay there too. `summary`
    tells how it went.
    """

    exchanges: Exchanges
    evaluation: Evaluation
    algorithm: Algorithm
    settings: FineTuning
    private: bool

    def check(self, state: State) -> None:
        """Raise a ConfigError for a model that the parties cannot fine-tune."""
        if isinstance(self.algorithm.model(state), OtherModel):
            raise ConfigError(
                f"run.finetune: {self.algorithm.name} makes a model of another architecture than the task's, which the "
                "parties cannot train; leave run.finetune out"
            )

    def steps(self, round: int, state: State) -> Steps:
        """Fine-tune the model of a published state. The summary has the parties' metrics before and after."""
        name, payload = self.algorithm.predictor(state)
        summary: dict[str, Any] = {"epochs": self.settings.epochs, "lr": self.settings.lr}
        tuned = yield from self._tune(round, name, payload, summary)
        if tuned:
            summary |= yield from self._measure(round, name, payload, tuned)
        return summary

    def _tune(self, round: int, name: str, payload: Payload, summary: dict[str, Any]) -> Generator[Request, Any, Any]:
        """Have every party fine-tune the model; the parties that did."""
        op = FineTune(self.settings.solver, name)
        answers: Gathered | None = None
        try:
            answers = yield from self.exchanges.outside(
                round, "finetune", lambda fed: fed.gather(op, payload, parties=fed.parties), keeps=True
            )
        except RoundAborted as aborted:
            log.warning("no party has fine-tuned the model: %s", self.exchanges.explain(aborted))
            yield Abort(round)
        record, reasons = self.exchanges.record, self.exchanges.reasons()
        if reasons and answers is not None:
            log.warning("some parties have not fine-tuned the model: %s", grouped(reasons))
        tuned = () if answers is None else answers.parties
        summary |= {"parties": len(tuned), "bytes_up": record.bytes_up, "bytes_down": record.bytes_down}
        if reasons:
            summary["untuned"] = dict(list(reasons.items())[:LISTED])
        return tuned

    def _measure(self, round: int, name: str, payload: Payload, tuned: Collection[int]) -> Steps:
        """The metrics of the parties that have fine-tuned the model, before and after, on their own test samples."""
        if self.private:
            return {"unmeasured": NOT_COVERED}
        evaluation, holdings = self.evaluation, self.exchanges.holdings
        if not evaluation.at_parties:
            cause = "set task.party_test" if self.exchanges.run.eval_parties else "run.eval_parties is false"
            return {"unmeasured": f"no party measures the model on test samples of its own; {cause}"}
        before = yield from evaluation.over_parties(round, name, payload, only=tuned)
        after = yield from evaluation.over_parties(round, TUNED, {}, "evaluate-finetuned", tuned)
        measured: dict[str, Any] = {"before": with_finite(before), "after": with_finite(after)}
        unmeasured = [each.pop("unmeasured") for each in measured.values() if "unmeasured" in each]
        if not evaluation.hides and holdings.tests is not None:
            without = [holdings.name(party) for party in tuned if party not in holdings.tested]
            measured |= {"untested": without[:LISTED]} if without else {}
        return {**measured, **({"unmeasured": unmeasured[0]} if unmeasured else {})}


def deliver(exchanges: Exchanges, round: int, predictor: str, payload: Payload) -> Generator[Request, Any, None]:
    """Give the parties of a deployed job what their own models need, so that each can export its own."""

    async def ask(fed: Federation) -> Gathered:
        return await fed.gather(Deliver(predictor), payload, parties=fed.parties)

    try:
        yield from exchanges.outside(round, "deliver", ask)
    except RoundAborted as aborted:
        log.warning("no party has received its own model: %s", exchanges.explain(aborted))
        yield Abort(round)
    else:
        reasons = exchanges.reasons()
        if reasons:
            log.warning("some parties have not received their own model: %s", grouped(reasons))
