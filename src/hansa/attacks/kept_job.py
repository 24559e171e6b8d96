"""The target of an attack: a deployed job that kept its replies, as the folder of its aggregator has it.

The aggregator does not have the parties' samples, so it can rebuild samples but not say whether they are true. A party
can give its own file: then its records are the truth, and its test samples stand for records that no party held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hansa.artifacts import saved_model
from hansa.attacks.gradient_leakage import Prior
from hansa.attacks.recipe import TrainedModel
from hansa.attacks.updates import HIDDEN
from hansa.core.op import Op, Party, Payload
from hansa.core.task import Pair
from hansa.data.apply_table import TablePlan
from hansa.experiment.tasks import outputs_of
from hansa.local import LocalSolver
from hansa.net.aggregator.finished_job import FinishedJob, finished_job
from hansa.net.aggregator.kept_replies import KeptReply, kept_replies
from hansa.net.party.samples import preparer, read_samples
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, HansaError, nearest

ROUNDS = 5  # most updates of the scored party that are read
STANDARD = 3.0  # the range that an attacker assumes of standardised features


@dataclass(frozen=True)
class KeptUpdate:
    """An update that a party sent: the model from which it starts, the solver, and the party's number of samples.

    `samples` is the weight that the party claimed; None under central differential privacy, which hides it.
    """

    round: int
    party: str
    samples: int | None
    solver: LocalSolver
    payload: Payload
    update: Tensor

    @property
    def start(self) -> Params:
        return Params(**self.payload["model"])

    def gradient(self, count: int | None = None) -> Tensor:
        """Minus the update, divided by the learning rate and the steps: close to the gradient of all samples."""
        steps = max(self.solver.count(count or self.samples or 1), 1)
        rate = self.solver.rate(self.round) or 1.0
        return -self.update.to(self.start.w.dtype) / (rate * steps)


@dataclass(frozen=True)
class OwnerData:
    """The samples of one party, prepared as in the job, and samples of the same kind that nobody trained with."""

    party: Party
    name: str
    train: Pair
    others: Pair

    def replayed(self, update: KeptUpdate) -> float | None:
        """The cosine of a kept update and of the one that training on these samples gives; 1 if it is the same.

        None if the training cannot be repeated without the party's memory.
        """
        try:
            reply, _ = update.solver.run(replace(self.party, round=update.round), update.payload, {})
        except HansaError:
            return None
        return float(F.cosine_similarity(reply.tensors["w"].double(), update.update.double(), dim=0))


@dataclass(frozen=True)
class KeptJob:
    """A job, its final model, the first kept update of each party, and those of the party that gave its data."""

    folder: Path
    job: FinishedJob
    model: TrainedModel
    updates: list[KeptUpdate]
    owned: list[KeptUpdate]
    refused: str | None  # why there are no updates to attack
    prior: Prior
    owner: OwnerData | None

    @property
    def objective(self) -> Objective:
        return self.model.objective

    @property
    def classes(self) -> int | None:
        classes: int | None = self.job.serving["classes"]
        return classes


def kept_job(federation: str | Path, job: str, party: str | None = None, data: str | None = None,
             test: str | None = None, target: str | None = None, labels: Sequence[str] = ()) -> KeptJob:  # fmt: skip
    """Read a finished job and what it kept. A ConfigError says why it cannot be attacked."""
    place = Path(federation)
    folder = place.parent if place.is_file() else place
    finished = finished_job(folder, job)
    secure, algorithm = finished.experiment.privacy.secure, finished.experiment.algorithm
    replies = [] if secure is not None else kept_replies(folder, job)
    final = saved_model.opened(finished.model, finished.serving, folder)
    if final.predictor.name != "network" or final.personal:
        raise ConfigError(f"attacks need one shared torch model; the model of {job} is of the kind "
                          f"{final.predictor.name!r}")  # fmt: skip
    model = TrainedModel(final.objective, Params(**final.payload["model"]))
    owner = None
    if data is not None:
        owner = _owner(finished, final, party, data, test, target, labels)
    firsts, owned = dict[str, KeptUpdate](), list[KeptUpdate]()
    counted = finished.experiment.privacy.dp is None
    for reply in replies:
        update = _update(reply, model.params, counted)
        if update is None:
            continue
        firsts.setdefault(update.party, update)
        if owner is not None and update.party == owner.name and len(owned) < ROUNDS:
            owned.append(update)
    refused = None
    if secure is not None:
        refused = HIDDEN.format(name=secure.name).replace("the run", "the job").partition("; attack")[0]
    elif not firsts:
        refused = f"no kept reply of {algorithm.name} is an update of the shared model by a local solver"
    elif owner is not None and not owned:
        raise ConfigError(f"party {owner.name!r} sent no update that the job kept; parties that did: "
                          f"{', '.join(firsts)}")  # fmt: skip
    prior = Prior.of(owner.others[0]) if owner is not None else _assumed(finished)
    return KeptJob(folder, finished, model, list(firsts.values()), owned, refused, prior, owner)


def _update(reply: KeptReply, model: Params, counted: bool) -> KeptUpdate | None:
    """The update in a reply; None if it is none of the shared model."""
    vector, solver, sent = reply.update, _solver(reply.op), reply.payload.get("model")
    if vector is None or solver is None or not isinstance(sent, dict) or set(sent) != set(Params._fields):
        return None
    if vector.shape != model.w.shape or sent["w"].shape != model.w.shape:
        return None
    payload = {name: value for name, value in reply.payload.items() if name != "work"}
    solver = solver.at(reply.payload["work"]) if "work" in reply.payload else solver
    samples = reply.reply.weight if counted else None
    return KeptUpdate(reply.round, reply.party, samples, solver, payload, vector)


def _solver(op: Op) -> LocalSolver | None:
    """The local solver inside of wrappers."""
    inner: Any = op
    while inner is not None and not isinstance(inner, LocalSolver):
        inner = getattr(inner, "inner", None)
    return inner


def _assumed(job: FinishedJob) -> Prior:
    """What an aggregator without samples assumes: standardised features, or those of its two example samples."""
    shape, example = job.serving["shape"], job.serving.get("example")
    if "preparation" in job.model:
        return Prior(-STANDARD, STANDARD, torch.zeros(shape), 1.0)
    if example is not None:
        return Prior.of(torch.tensor(example, dtype=torch.float64).float())
    return Prior(-torch.inf, torch.inf, torch.zeros(shape), 1.0)


def _owner(job: FinishedJob, final: saved_model.SavedModel, party: str | None, data: str, test: str | None,
           target: str | None, labels: Sequence[str]) -> OwnerData:  # fmt: skip
    """The samples of a party, read from its file and prepared as the party does it."""
    if party is None:
        raise ConfigError(f"--data needs the name of the party whose file it is: --party; the job has "
                          f"{', '.join(job.parties)}")  # fmt: skip
    if party not in job.parties:
        raise ConfigError(f"--party: the job {job.id} has no party {party!r}{nearest(party, job.parties)}")
    samples = read_samples(data, target, test, None, labels)
    try:
        member = preparer(samples)(job.parties.index(party), _task(job, final.objective.base), "cpu")
        if final.preparation is not None:
            op, learned = final.preparation
            op.apply(member, learned)
        train = member.data.train("train")
        others = member.data.test("evaluate") if member.data.tests else None
    except HansaError as error:
        raise ConfigError(f"--data: {data} does not fit the job: {error}") from None
    if others is None:
        raise ConfigError(
            "--data: the score compares the party's records with records that nobody trained with; give the party's "
            "test file (--test)"
        )
    return OwnerData(member, party, train, others)


def _task(job: FinishedJob, base: str | None) -> dict[str, Any]:
    """The task of a job, as its parties are told of it."""
    table, run, serving = job.experiment.task, job.experiment.run, job.serving
    loss, classes = str(serving["loss"] or table.loss), serving["classes"]
    task = {
        "model": table.model, "dtype": table.dtype, "shape": serving["shape"], "outputs": outputs_of(loss, classes),
        "loss": loss, "classes": classes, "header": serving.get("header", []), "party_test": table.party_test,
        "seed": run.seed, "bf16": serving["bf16"], "prepared": table.prepare is not None,
    }  # fmt: skip
    if "columns" in serving:
        plan = TablePlan.of(job.model["preparation"]["payload"])
        task["table"] = {"columns": plan.layout.tree(), "missing": list(plan.missing), "labels": list(table.labels)}
    task |= {} if base is None else {"base": base}
    return task | ({} if table.augment is None else {"augment": table.augment})
