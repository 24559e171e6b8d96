"""Ask the joint model of a finished job for the scores of people, by their ids.

The ask is a job of its own: the parties take part by their policies, and it is in the audit log. It has hashes of the
ids, with a fresh salt. The scores come as the model of that job.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hansa.artifacts.saved_model import SavedModel, load
from hansa.core.columns import asked_people
from hansa.core.plain_data import to_config
from hansa.experiment.config import Experiment, parse
from hansa.net.operator import Operator
from hansa.plumbing.errors import ConfigError, DataError

MOST = 5000  # people per ask: an order has a limited size
KEPT = ("seed", "deadline", "min_cohort")  # settings of the run that the ask has in common with the finished job


@dataclass(frozen=True)
class Asked:
    """How an ask ended: its job, the ids of the people with scores, the outputs of the network for them, in the same
    order, and by party how many of the asked people it does not hold. `model` describes the outputs."""

    job: str
    ids: list[str]
    outputs: Tensor
    unknown: dict[str, int]
    model: SavedModel


def read_ids(path: Path) -> list[str]:
    """The ids of a text file, one per line; empty lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not a text file'}") from None
    return [line.strip() for line in lines if line.strip()]


def predict_people(operator: Operator, job: str, ids: Sequence[str]) -> Asked:
    """Ask the joint model of a finished job for scores of people; those whom all parties hold have one."""
    if len(ids) > MOST:
        raise ConfigError(f"an ask is for at most {MOST} people, and there are {len(ids)} ids; ask in several parts")
    salt = secrets.token_hex(16)
    experiment = _experiment(operator.job(job), asked_people(ids, salt), salt)
    asked, _ = operator.submit(experiment, f"{job}-scores"[:60])
    ended = operator.wait(asked, known=True)
    if ended["status"] != "finished":
        raise DataError(f"the people were not scored; the job {asked} {ended['status']}: {ended['reason']}")
    with tempfile.TemporaryDirectory() as folder:
        model = load(operator.pull(asked, Path(folder) / "scores.safetensors"))
    scored, names = model.payload["scored"], [row["name"] for row in operator.parties()]
    unknown = {names[int(party)]: count for party, count in model.payload["unknown"].items() if count}
    if not scored.any():
        counts = ", ".join(f"{name} does not hold {count}" for name, count in unknown.items())
        raise DataError(f"no person was scored: of the {len(ids)} people asked for, {counts}")
    rows = [text for text, has_score in zip(ids, scored.tolist(), strict=True) if has_score]
    return Asked(asked, rows, model.payload["scores"][scored], unknown, model)


def _experiment(job: Mapping[str, Any], people: tuple[str, ...], salt: str) -> Experiment:
    """The experiment of an ask: that of the finished job, with other settings of its algorithm and one round."""
    tree, id = job["experiment"], job["job"]
    if job["status"] != "finished":
        raise ConfigError(f"the job {id} is {job['status']}, and only the network of a finished job can be asked")
    before = parse(tree)
    config = to_config(before.algorithm)
    if "of_job" not in config:
        raise ConfigError(
            f"the job {id} trained {config['name']}, which does not score people by their ids; fetch its model with "
            "`hansa pull`, if it has one"
        )
    if config["of_job"] is not None:
        raise ConfigError(f"the job {id} asked for scores itself; name the job that trained: {config['of_job']}")
    run = {name: value for name in KEPT if (value := getattr(before.run, name)) is not None}
    tables = {name: table for name, table in tree.items() if name not in ("algorithm", "run", "track")}
    task = {**tree["task"], "loss": job["summary"]["serving"]["loss"]}
    algorithm = {**config, "of_job": id, "people": list(people), "salt": salt}
    return parse({**tables, "task": task, "algorithm": algorithm, "run": {**run, "rounds": 1}})
