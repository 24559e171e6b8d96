"""A finished job as the folder of its aggregator has it: experiment, parties, rounds and final model."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hansa.experiment.config import Experiment, parse
from hansa.net.aggregator.federation import FederationFolder
from hansa.net.aggregator.kept_replies import reading
from hansa.net.aggregator.order import NOT_LISTED
from hansa.net.transport.wire import Order, unpack
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError
from hansa.plumbing.functions import only


@dataclass(frozen=True)
class FinishedJob:
    """A job with its final model: `model` as it is stored, and `serving` with what the model needs to predict."""

    id: str
    parties: tuple[str, ...]
    experiment: Experiment
    model: dict[str, Any]
    serving: dict[str, Any]
    history: list[dict[str, Any]]


def finished_job(federation: str | Path, job: str) -> FinishedJob:
    """Read a finished job from the folder of the aggregator, which may be serving.

    A ConfigError says why there is none.
    """
    folder = FederationFolder.open(federation)
    with reading(folder.folder) as (db, blobs):
        try:
            row = db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone()
            facts = db.execute("SELECT parties FROM job_facts WHERE job = ?", (job,)).fetchone()
            lines = db.execute("SELECT line FROM rounds WHERE job = ? ORDER BY round", (job,)).fetchall()
        except sqlite3.Error as error:
            raise DataError(f"cannot read the job {job}: {error}") from None
        if row is None or facts is None:
            raise ConfigError(f"there is no job {job!r} that began; `hansa jobs` lists them")
        serving = json.loads(row["summary"] or "{}").get("serving")
        if row["model"] is None or serving is None:
            why = f" ({row['reason']})" if row["reason"] else ""
            raise ConfigError(f"the job {job} has no final model: it is {row['status']}{why}; name a finished job")
        try:
            model = codec.decode(blobs.read(row["model"]))
        except (OSError, DataError) as error:
            raise DataError(f"the model of {job} is damaged: {error}") from None
    order = unpack(row["order_"], Order)
    with only(folder.serve.functions, NOT_LISTED):
        experiment = parse({name: table for name, table in order.experiment.items() if name != "track"})
    return FinishedJob(job, tuple(json.loads(facts["parties"])), experiment, model, serving,
                       [json.loads(line["line"]) for line in lines])  # fmt: skip
