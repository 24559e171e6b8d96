"""The result of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hansa.artifacts import saved_model
from hansa.artifacts.run_folder import METRICS, PERSONAL, RunFolder, write_atomic
from hansa.core.algorithm import PeopleScores, State
from hansa.core.ask import op_config
from hansa.core.columns import asked_people
from hansa.core.federation import Federation
from hansa.core.other_model import OtherModel
from hansa.core.plain_data import build, to_config
from hansa.core.predictor import Predictor
from hansa.core.runtime import complete
from hansa.data.apply_table import TablePlan
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.determinism import deterministic, threads
from hansa.plumbing.errors import ConfigError, DataError, RoundAborted
from hansa.report.diagnosis import check_trained
from hansa.report.display import LATEST, Displayed, totals
from hansa.run.loop import Training
from hansa.sim.runtime import Simulation

log = logging.getLogger("hansa")
PERSONAL_BYTES = 2**28  # largest size of the parties' own models that a run saves


@dataclass(repr=False)
class Result(Displayed):
    """A finished run: `params` by name, `history` with one metrics line per round, `model()` the trained module.

    A notebook shows a result as a table and curves; `to_frame()` and `plot()` return them.
    """

    training: Training
    state: State
    experiment: dict[str, Any]
    run_dir: Path | None
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)  # the metrics of `run.baselines` by name

    @property
    def params(self) -> dict[str, Tensor]:
        """The trained model's tensors by name; none for methods that train no torch module."""
        if not self._has_module:
            return {}
        model, objective = self.training.algorithm.model(self.state), self._objective()
        params = model.params if isinstance(model, OtherModel) else model
        named = objective.spec.named(params) | objective.frozen
        return {name: tensor.clone() for name, tensor in named.items()}

    @property
    def _has_module(self) -> bool:
        """Whether the model is a torch module: the task's, or one of another architecture."""
        other = isinstance(self.training.algorithm.model(self.state), OtherModel)
        return other or (self.training.algorithm.trains and self.training.task.model is not None)

    def _objective(self) -> Objective:
        """The objective of the model."""
        model = self.training.algorithm.model(self.state)
        return model.objective(self.training.objective) if isinstance(model, OtherModel) else self.training.objective

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.training.history

    @property
    def memories(self) -> Mapping[int, dict[str, Tensor]]:
        """What the simulated parties remember (in a deployment it never leaves the parties)."""
        return getattr(self.training.runtime, "memories", {})

    def model(self, party: int | str | None = None) -> nn.Module:
        """The trained module, in evaluation mode; the module of `party` if each party has its own."""
        if not self._has_module and self.training.algorithm.models == "one":
            raise ConfigError(f"{self.training.algorithm.name} trains no torch module; use result.predict(x)")
        return self._trained().model(party)

    def predict(self, x: Any = None, party: int | str | None = None, ids: Iterable[Any] | None = None) -> Tensor:
        """Outputs (class scores, or values) for samples, which are prepared (imputed, scaled) as in training; `party`
        says whose model, if each party has its own.

        A joint model, whose parts lie at several parties, is asked by the `ids` of people, in place of samples; the
        outputs of people whom not all parties hold are NaN.
        """
        if (x is None) == (ids is None) or (ids is not None and party is not None):
            raise ConfigError("give predict either samples, or ids= of people whom parties with different columns hold")
        return self._trained().predict(x, party) if ids is None else self._scores(ids)

    def _scores(self, ids: Iterable[Any]) -> Tensor:
        """The outputs of a joint model for people by their ids: the simulated parties compute them together."""
        training, people = self.training, asked_people(ids, "")
        algorithm, runtime = training.algorithm, training.runtime
        if not isinstance(runtime, Simulation):
            raise ConfigError("the parties of a federation are asked by `hansa predict --federation`")

        async def ask(fed: Federation) -> PeopleScores:
            return await algorithm.score_people(fed, self.state, people, "")

        steps = training.exchanges.outside(training.progress.round, "predict", ask, algorithm.verbs)
        with deterministic(training.run.device), threads(1):
            try:
                found: PeopleScores = complete(steps, runtime.answer)
            except RoundAborted as aborted:
                raise DataError(f"the people were not scored: {training.exchanges.explain(aborted)}") from None
        return found.outputs.masked_fill(~found.scored[:, None], float("nan"))

    def fitted(self, x: Any, y: Any) -> saved_model.SavedModel:
        """The model for a new party with these samples and targets, if the parties form clusters.

        It is the model of least loss on the samples; `predict(x)` and `model()` of the result need no party.
        """
        return self._trained().fitted(x, y)

    @property
    def personal(self) -> bool:
        """Whether each party has a model of its own."""
        return self._final().personal

    def _trained(self) -> saved_model.SavedModel:
        check_trained(self.history)
        return self._final()

    def _final(self) -> saved_model.SavedModel:
        training = self.training
        name, payload = training.predictor(self.state)
        predictor: Predictor = build("predictor", name)
        counts = dict(enumerate(self._sample_counts())) if predictor.personal else {}
        return saved_model.SavedModel(self.described(), predictor, self._objective(), payload,
                                      training.preparation, self.memories, counts,
                                      training.holdings.models)  # fmt: skip

    def _sample_counts(self) -> list[int]:
        """The number of samples of each simulated party; none for deployed parties, which do not say it."""
        train = getattr(self.training.holdings, "train", None)
        counts: list[int] = [] if train is None else train.sizes(range(len(train))).tolist()
        return counts

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the run: rounds, metrics of the last evaluation, bytes, seconds, simulated seconds."""
        progress = self.training.progress
        return totals(self.history) | self._kept() | {
            "rounds": progress.round, "bytes_up": progress.bytes_up, "bytes_down": progress.bytes_down,
            "seconds": round(progress.seconds, 3), "stopped": progress.stopped,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            **({} if self.training.finetuned is None else {"finetuned": self.training.finetuned}),
            **({} if not self.baselines else {"baselines": self.baselines}),
            **({} if self.training.evaluation.tested is None else {"tested": self.training.evaluation.tested}),
            **({} if not self.training.evaluation.combined else {"combined": self.training.evaluation.combined}),
        }  # fmt: skip

    def _kept(self) -> dict[str, Any]:
        """With `run.keep = "best"`: the round of the kept model, and the metrics of that round's evaluation."""
        kept = self.training.progress.kept_round
        if kept is None:
            return {}
        names = {"seconds", "simulated_seconds", *LATEST}
        metrics = {name: value for name, value in self.history[kept - 1].items()
                   if isinstance(value, float) and name not in names}  # fmt: skip
        return {**metrics, "kept_round": kept}

    def saved_model(self) -> dict[str, Any]:
        """The predictor's name and payload (parameters by name where it is the task's model), the model's frozen
        parameters, the preparation, and whether the parties have fine-tuned the model."""
        name, payload = self.training.algorithm.predictor(self.state)
        model: dict[str, Any] = {"params": self.params} if name == "network" else {"payload": payload}
        if name != "network" and self._frozen():
            model["frozen"] = self._frozen()
        if self.training.preparation is not None:
            op, learned = self.training.preparation
            model["preparation"] = {"op": op_config(op), "payload": learned}
        tuned = {} if self.training.finetuned is None else {saved_model.TUNED: True}
        return {"predictor": name, **model, **tuned}

    def _frozen(self) -> dict[str, Any]:
        """The frozen parameters by name; where the parties have several models, by the model's name."""
        models = self.training.holdings.models
        if models is None:
            return dict(self.training.objective.frozen)
        return {name: each.frozen for name, each in models.objectives.items() if each.frozen}

    def described(self) -> dict[str, Any]:
        """What the saved model needs to predict, as plain data."""
        training = self.training
        about = saved_model.describe(training.task, training.objective, training.holdings, training.run.seed)
        if training.prepared is not None:  # the model takes rows of a table, not the features that are made of them
            about |= TablePlan.of(training.prepared.learned[1]).about()
        model = training.algorithm.model(self.state)
        if not isinstance(model, OtherModel):
            return about
        dtype = str(model.params.w.dtype).removeprefix("torch.")
        return {**about, "model": to_config(model.architecture), "dtype": dtype}

    def save(self, path: str | Path, replace: bool = False) -> Path:
        """Write model, metrics and summary to a run folder, for `hansa show` and `hansa.load`.

        A ConfigError if the folder holds a run already, unless `replace` is set.
        """
        folder = RunFolder(path)
        if replace:
            folder.remove()
        folder.create(self.experiment)
        write_atomic(folder.path / METRICS, b"".join(json.dumps(line).encode() + b"\n" for line in self.history))
        self.keep_personal(folder.path)
        folder.finish(self.saved_model(), self.described(), {**self.summary, "run_dir": str(folder.path)})
        return folder.path

    def keep_personal(self, folder: Path) -> None:
        """Save the own models of simulated parties to a folder, if they have any and these are not too large.

        Deployed parties keep their own.
        """
        if not self.personal or not self.memories:
            return
        by_party: dict[str, Any] = {}
        size = 0
        for party in range(len(self.training.holdings)):
            memory = dict(self.memories.get(party, {}))
            size += sum(tensor.nbytes for tensor in memory.values())
            if size > PERSONAL_BYTES:
                log.warning(
                    "the parties' own models are not saved: together they have more than %d bytes; "
                    "result.model(party) and result.predict(x, party) have them while this process runs",
                    PERSONAL_BYTES,
                )
                return
            by_party[str(party)] = memory
        counts = torch.tensor(self._sample_counts(), dtype=torch.int64)
        write_atomic(folder / PERSONAL, codec.encode({**by_party, saved_model.SAMPLES: counts}))
