"""A party's own models: what a job delivers at its end is kept in the party's folder, and can be exported.

The file of a job lies beside the party's memory of that job, and is deleted with it. It has the final payload of the
job's predictor, the party's memory at that time, and what the party knows of the task. Nothing of it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hansa.artifacts import saved_model
from hansa.artifacts.run_folder import beside, write_json
from hansa.core.ask import op_of
from hansa.core.data_op import DataOp
from hansa.core.op import Memory, Party, Payload
from hansa.core.plain_data import build
from hansa.core.predictor import NetworkPredictor, Predictor
from hansa.core.registry import lookup
from hansa.data.apply_table import ApplyTable, TablePlan
from hansa.data.class_weights import WeighClasses
from hansa.net.party.policy import Policy
from hansa.net.party.store import PartyMemory, strip_checksum
from hansa.net.party.task_party import task_model, task_objective
from hansa.numerics.params import Params
from hansa.plumbing import codec, disk
from hansa.plumbing.errors import ConfigError, DataError, PartyError

FILE = "own.model"  # the memory's own files end with .safetensors
TASK = ("model", "dtype", "shape", "outputs", "loss", "classes", "seed", "bf16", "base", "header")


def keep(memories: PartyMemory, job: str, party: Party, predictor: str, payload: Payload, memory: Memory,
         task: Mapping[str, Any], preparations: list[Any]) -> None:  # fmt: skip
    """Keep what the party's own model of a job needs, beside the party's memory of the job."""
    tree = {
        "party": party.id, "samples": party.n, "predictor": predictor, "payload": payload, "memory": memory,
        "task": {name: task[name] for name in TASK if name in task}, "preparations": preparations,
    }  # fmt: skip
    memories.put(job, FILE, tree)


def continued(memories: PartyMemory, job: str) -> tuple[Memory, list[Any]]:
    """A party's memory at the end of a job, and the preparations of its data; a PartyError if it has not kept them."""
    known = {path.parent.name for path in memories.folder.glob(f"*/{FILE}")}  # the aggregator names the job
    tree = memories.get(job, FILE) if job in known else None
    if tree is None:
        raise PartyError(
            f"it has kept no model of the job {job!r}: the job has not finished, this party was not there at its end, "
            "or other jobs have replaced it since (limits.jobs in party.toml)"
        )
    return tree["memory"], tree["preparations"]


def jobs(state: Path) -> list[str]:
    """The jobs of which a party has a model of its own."""
    return sorted(path.parent.name for path in (state / "memory").glob(f"*/{FILE}"))


def export(state: Path, job: str | None, out: Path) -> Path:
    """Write a party's own model of a job to a file, with a JSON file beside it, for `hansa.load`.

    `state` is the party's folder; the party may be running. Without `job`, the only job that has a model.
    """
    if not (state / "party.toml").exists():
        raise ConfigError(f"{state} is not the folder of a party; give the --state of its `hansa join`")
    if beside(out) == out:
        raise ConfigError(f"--out: {out} ends with .json; name a model file, for example own.safetensors")
    job = job if job is not None else _only(state)
    tree = _read(state, job)
    kind: Any = lookup("predictor", tree["predictor"])
    if kind.joint:
        raise ConfigError(
            f"the parts of the model of the job {job!r} lie at several parties, so this party alone cannot predict; "
            "the operator asks all of them with `hansa predict --federation`"
        )
    try:
        with Policy.read(state / "party.toml").only_listed():  # the names are the aggregator's choice
            disk.put(out, codec.pieces(_own_model(tree)))  # readable for its owner alone, as the party's folder
            write_json(beside(out), _about(tree))
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    return out


def _only(state: Path) -> str:
    known = jobs(state)
    if len(known) != 1:
        names = f"of several jobs ({', '.join(known)}); name one with --job" if known else "of no job yet"
        raise ConfigError(f"the party in {state} has models of its own {names}")
    return known[0]


def _read(state: Path, job: str) -> dict[str, Any]:
    known = jobs(state)
    if job not in known:
        others = f"; it has those of: {', '.join(known)}" if known else ""
        raise ConfigError(
            f"the party in {state} has no model of its own of the job {job!r}: the job has not finished, its parties "
            "have no models of their own (`hansa pull` fetches the common model at the aggregator), or this party was "
            f"not there at its end{others}"
        )
    path = state / "memory" / job / FILE
    try:
        tree: dict[str, Any] = codec.decode(strip_checksum(path.read_bytes()))
    except (OSError, DataError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return tree


def _own_model(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The model file: the predictor with the payload of this party alone."""
    objective = task_objective(tree["task"], "cpu")
    predictor: Predictor = build("predictor", tree["predictor"])
    absent = Party(tree["party"], objective, saved_model.AbsentSamples(tree["samples"]), tree["task"]["seed"])
    try:
        own = predictor.own(absent, tree["payload"], tree["memory"])
        fits = not isinstance(predictor, NetworkPredictor) or [v.shape for v in Params(**own["model"])] == [
            wanted.shape for wanted in objective.initial
        ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError):
        fits = False
    if not fits:  # the payload is the aggregator's choice
        raise DataError("the aggregator has delivered no valid model of this job's task")
    out: dict[str, Any] = {"predictor": tree["predictor"], "payload": dict(own), saved_model.OWN: True}
    if objective.frozen:
        out["frozen"] = dict(objective.frozen)
    steps = [step for step in tree["preparations"] if step["op"].get("name") != WeighClasses.name]  # of training alone
    if len(steps) > 1:
        raise DataError(f"the job prepares the data in {len(steps)} steps, and a saved model has at most one")
    if steps:
        if not isinstance(op_of(steps[0]["op"], where="task"), DataOp):
            raise DataError("the job's preparation of the data is invalid")
        out["preparation"] = dict(steps[0])
    return out


def _about(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What the model file needs to predict, as `saved_model.describe` says it of a run."""
    task = tree["task"]
    dtype = task_objective(task, "cpu").dtype
    return {
        "model": saved_model.named(task_model(task)), "dtype": str(dtype).removeprefix("torch."), "seed": task["seed"],
        "loss": task["loss"] if isinstance(task["loss"], str) else None, "bf16": task["bf16"],
        "shape": list(task["shape"]), "features": str(dtype).removeprefix("torch."),
        "classes": task["classes"], "parties": 1, "example": None,
        **_columns(tree["preparations"]),
        **saved_model.column_names(task.get("header", ()), task["shape"]),
    }  # fmt: skip


def _columns(preparations: list[Any]) -> dict[str, Any]:
    """The columns and features of a table, if the job prepares one."""
    tables = [step for step in preparations if isinstance(op_of(step["op"], where="task"), ApplyTable)]
    return TablePlan.of(tables[0]["payload"]).about() if tables else {}
