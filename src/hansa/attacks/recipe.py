"""The target of an attack: a finished simulated run, its samples, and how to train again as it did.

Attacks with reference models and canaries repeat the run with other samples or another seed. Everything else
(algorithm, rounds, cohort, privacy, compression) is that of the run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.artifacts import saved_model
from hansa.artifacts.run_folder import SUMMARY
from hansa.core.algorithm import Algorithm
from hansa.core.op import Payload
from hansa.core.plain_data import build, fill, from_config
from hansa.core.predictor import Predictor
from hansa.core.task import Task
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.prepare import Preparation
from hansa.local.finetune import FineTuning
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError
from hansa.privacy import Privacy, privacy
from hansa.run import Run
from hansa.run.result import Result
from hansa.run.resume import stored_experiment
from hansa.run.simulate import simulate
from hansa.run.simulated_table import prepare_table

FEW = 20  # fewer members or non-members than this give no useful interval
# Settings of the run that only measure or save; a repetition leaves them out.
UNUSED: dict[str, Any] = {"metrics": (), "baselines": (), "eval_parties": False}


@dataclass(frozen=True)
class Samples:
    """Samples of parties: party k has rows offsets[k] to offsets[k + 1]."""

    x: Tensor
    y: Tensor
    offsets: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def party(self) -> np.ndarray[Any, Any]:
        """The party of each row."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @classmethod
    def of(cls, x: Tensor, y: Tensor, party: np.ndarray[Any, Any], parties: int) -> Samples:
        """Rows in any order, with the party of each."""
        order = torch.from_numpy(np.argsort(party, kind="stable"))
        counts = np.bincount(party, minlength=parties)
        return cls(x[order], y[order], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


@dataclass(frozen=True)
class TrainedModel:
    """A trained model that an attacker can ask, or whose parameters it has."""

    objective: Objective
    params: Params

    def outputs(self, x: Tensor) -> Tensor:
        return self.objective.outputs(self.params, x)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample."""
        return self.objective.loss_of(self.outputs(x), y).double()

    def probabilities(self, x: Tensor) -> Tensor:
        """The probability of each class."""
        return torch.softmax(self.outputs(x).double(), -1)

    def chance(self, x: Tensor, y: Tensor) -> Tensor:
        """The probability that the model gives each sample's target, at most 1."""
        return torch.exp(-self.losses(x, y))

    def check_network(self) -> None:
        """Raise a ConfigError if the model is no torch module."""

    def differentiable(self, x: Tensor) -> Tensor:
        """The outputs in evaluation mode, as a function of x that can be differentiated."""
        self.check_network()
        module = self.objective.network().eval()
        tensors = {name: tensor.detach() for name, tensor in self.objective.spec.named(self.params).items()}
        output: Tensor = torch.func.functional_call(module, tensors, (x,))
        return output


@dataclass(frozen=True)
class PredictedModel(TrainedModel):
    """A trained model that is no torch module, such as trees; an attacker can ask it."""

    predictor: Predictor
    payload: Payload

    def outputs(self, x: Tensor) -> Tensor:
        return self.predictor.outputs(self.objective, self.payload, x)

    def check_network(self) -> None:
        raise ConfigError(
            f"this attack needs a torch model; the model of this run is of the kind {self.predictor.name!r}"
        )


@dataclass(frozen=True)
class Recipe:
    """A run, its final model, the parties' training samples (members), and samples that no party held (others)."""

    algorithm: Algorithm
    task: Task
    settings: dict[str, Any]
    model: TrainedModel
    members: Samples
    others: tuple[Tensor, Tensor]
    classes: int | None
    columns: tuple[str, ...]
    seed: int
    run_dir: Path | None = None
    epsilon: float | None = None  # what the run claims; None without differential privacy
    delta: float | None = None

    @property
    def parties(self) -> int:
        return len(self.members.offsets) - 1

    @property
    def unit(self) -> str:
        """What the differential privacy of the run protects: a "party", or a "sample"."""
        return "sample" if self.settings["privacy"].dp is None else "party"

    def with_samples(self, samples: Samples) -> Task:
        """The task of the run with other training samples, which are prepared already."""
        missing = isinstance(self.task.prepare, Preparation) and self.task.prepare.keeps_missing
        return dataclasses.replace(
            self.task, parties=(samples.x, samples.y, samples.offsets), party_tests=None,
            prepare=self.task.prepare if missing else None, names=None,
            classes=self.classes, test=self.others, header=())  # fmt: skip

    def train(self, samples: Samples, purpose: str, **changes: Any) -> Result:
        """Train as the run did, with other samples and another seed, which follows from the purpose."""
        seed = int(rng.key(self.seed, "attack", purpose) % 2**31)
        changes = {"eval_every": self.settings["rounds"], **changes} if not self._stops else changes
        algorithm = changes.pop("algorithm", self.algorithm)
        settings = {**self.settings, **UNUSED, "own": {}, "seed": seed, **changes}
        return simulate(algorithm, self.with_samples(samples), alone=True, progress=False, **settings)

    def trained(self, samples: Samples, purpose: str) -> TrainedModel:
        """The final model of `train`, without the secure sum, which takes time and changes sums by rounding alone."""
        protection = self.settings["privacy"]
        dp = None if protection.dp is None else dataclasses.replace(protection.dp, noise=None)
        return final_model(self.train(samples, purpose, privacy=Privacy(None, dp, protection.bound)))

    @property
    def _stops(self) -> bool:
        """Whether evaluations decide when the run ends, or which of its models is the result."""
        run = self.settings
        return run["target"] is not None or run["patience"] is not None or run["keep"] == "best"

    def generator(self, *purpose: str | int) -> np.random.Generator:
        """The random stream of an attack."""
        return rng.generator(self.seed, "attack", *purpose)

    def balanced(self, most: int) -> tuple[Tensor, Tensor]:
        """Rows of as many members as others, drawn at random, at most `most` of each."""
        draw = self.generator("balanced")
        count = min(len(self.members), len(self.others[1]), most)
        inside, outside = (np.sort(draw.permutation(size)[:count]) for size in (len(self.members), len(self.others[1])))
        return torch.from_numpy(inside), torch.from_numpy(outside)


def final_model(result: Result) -> TrainedModel:
    """The shared model of a run in memory."""
    name, payload = result.training.predictor(result.state)
    return _model(result._objective(), build("predictor", name), payload)


def _model(objective: Objective, predictor: Predictor, payload: Payload) -> TrainedModel:
    if predictor.name == "network":
        return TrainedModel(objective, Params(**payload["model"]))
    if predictor.name == saved_model.TUNED:  # the parties' own models stay with them: only the shared one is known
        return _model(objective, build("predictor", payload["inner"]), payload["payload"])
    if predictor.personal or predictor.joint or predictor.gives != "probabilities" or not predictor.probable(payload):
        raise ConfigError(
            "attacks need one shared model that gives probabilities; the model of this run is of the kind "
            f"{predictor.name!r}"
        )
    return PredictedModel(objective, Params.none(), predictor, payload)


def recipe_of(run: str | Path | Result, task: Task | None = None) -> Recipe:
    """The recipe of a finished simulated run: its folder, or its result. A run from Python needs its `task`."""
    if isinstance(run, Result):
        training = run.training
        settings = {f.name: getattr(training.run, f.name) for f in dataclasses.fields(training.run)}
        settings |= {"privacy": training.privacy}
        _check(training.algorithm, training.task, run.experiment.get("adversary"), run.experiment.get("drift"))
        holdings: Any = training.holdings
        train, test, tests = holdings.train, training.evaluation.test, holdings.tests
        others = test if test is not None else None if tests is None else (tests.x, tests.y)
        return _recipe(training.algorithm, training.task, settings, final_model(run),
                       Samples(_memory(train.x), train.y, train.offsets), others, training.holdings, run.run_dir,
                       run.history)  # fmt: skip
    folder = Path(run)
    from hansa.run.stored_run import load

    stored = load(folder)
    if not stored.experiment:
        raise ConfigError(f"{folder} is a model without its run; attacks need the run folder of a simulation")
    if not (folder / SUMMARY).exists():
        raise ConfigError(f"the run {folder} is not finished; finish it with `hansa resume {folder}`, then attack it")
    record = stored.experiment
    if record["experiment"] is not None:
        if task is not None:
            raise ConfigError(f"{folder} stores its task; leave task out")
        experiment = stored_experiment(folder)
        algorithm, settings, place = experiment.algorithm, experiment.settings(), experiment.folder
        adversary, task, make = settings.pop("adversary"), experiment.build_task(), None
        drift = settings.pop("drift")
    elif task is None:
        raise ConfigError(
            f"{folder} was made from Python, so its task is not stored; attack it from Python: hansa.attack(result), "
            "or hansa.attack(folder, task=task)"
        )
    else:
        algorithm = from_config("algorithm", record["algorithm"], where="algorithm")
        run_settings: Run = fill(Run, record["run"], where="run")
        settings = {f.name: getattr(run_settings, f.name) for f in dataclasses.fields(run_settings)}
        settings |= {"privacy": privacy(record["privacy"])}
        adversary, place, make = record.get("adversary"), ".", task.model
        drift = record.get("drift")
    _check(algorithm, task, adversary, drift)
    table = task.prepare if isinstance(task.prepare, ColumnTransformer) else None
    if table is not None:  # learned again, to the same bits: the features depend on the rows alone
        task = _of_table(algorithm, task, settings)
        make = task.model if make is not None else None
    final = saved_model.load(folder, place, make)
    model = _model(final.objective, final.predictor, final.payload)
    objective = Objective(task.model, task.loss, settings["seed"])
    holdings = task.holdings(objective)
    x, test = _memory(holdings.train.x), holdings.test
    if test is None and holdings.tests is not None:
        test = (_memory(holdings.tests.x), holdings.tests.y)
    if final.preparation is not None and table is None:
        op, learned = final.preparation
        x = op.transform(x, learned)
        test = None if test is None else (op.transform(test[0], learned), test[1])
    return _recipe(algorithm, task, settings, model, Samples(x, holdings.train.y, holdings.train.offsets),
                   test, holdings, folder, list(stored.history))  # fmt: skip


def _of_table(algorithm: Algorithm, task: Task, settings: dict[str, Any]) -> Task:
    """The task with the features that the run learned from rows of a table."""
    names = {field.name for field in dataclasses.fields(Run)}
    run = Run(**{name: value for name, value in settings.items() if name in names})
    protection = dataclasses.replace(settings["privacy"], secure=None)  # which changes no bit of what is learned
    return prepare_table(algorithm, task, run, protection, None)[0]


def _recipe(algorithm: Algorithm, task: Task, settings: dict[str, Any], model: TrainedModel, members: Samples,
            others: Any, holdings: Any, run_dir: Path | None, history: list[dict[str, Any]]) -> Recipe:  # fmt: skip
    if others is None:
        raise ConfigError(
            "attacks compare the training samples with samples that no party trained with, and the task has none; give "
            "it a test set, or set task.party_test"
        )
    if settings["own"]:
        raise ConfigError("attacks repeat the run with other samples and parties; repeat the run without run.own first")
    if min(len(members), len(others[1])) < FEW:
        raise ConfigError(
            f"attacks need at least {FEW} training and {FEW} test samples; there are {len(members)} and "
            f"{len(others[1])}"
        )
    spent = [line for line in history if line.get("epsilon") is not None]
    claimed = (float(spent[-1]["epsilon"]), float(spent[-1]["delta"])) if spent else (None, None)
    header = tuple(task.header[1:]) if task.header else tuple(holdings.columns)
    settings = {**settings, "finetune": FineTuning()}  # of which no model leaves a party
    return Recipe(algorithm, task, settings, model, members, (others[0], others[1]), holdings.classes, header,
                  settings["seed"], run_dir, *claimed)  # fmt: skip


def _check(algorithm: Algorithm, task: Task, adversary: Any, drift: Any) -> None:
    """Refuse runs that the attacks cannot repeat, with the reason."""
    if task.ids is not None:
        raise ConfigError(
            "attacks are for parties with the same columns; for parties with different columns see "
            "benchmarks/split_leakage.py and benchmarks/tree_leakage.py"
        )
    if task.models is not None or (task.model is not None and not algorithm.trains):
        raise ConfigError(f"attacks need one model that all parties train; {algorithm.name} has none here")
    if adversary:
        raise ConfigError("attacks repeat the run with other parties; repeat the run without [adversary] first")
    if drift:
        raise ConfigError("attacks look at the samples of a run, which changed with [drift]; repeat the run without it")
    if task.weights is not None:
        raise ConfigError("attacks repeat the run with other samples, which have no weights; leave sample_weight out")


def _memory(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise ConfigError("attacks need all samples in memory, and some parties' samples stay in files")
    if not x.is_floating_point():
        raise ConfigError("attacks need features that are numbers; samples of this task are whole-number codes (text)")
    return x
