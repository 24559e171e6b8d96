"""Owners approve jobs of a lying aggregator, with real processes and the command `hansa approve`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kit import PATIENCE, Stage, experiment, samples
from liars import note, rewrite
from typer.testing import CliRunner

from hansa.cli import approve as approving  # noqa: F401 (adds its command)
from hansa.cli.app import app
from hansa.experiment.config import parse

pytestmark = pytest.mark.slow

PARTIES = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob"))}
RULES = '[approve]\nmode = "rules"\nepochs = 2\nrounds = 5\nmodels = ["logistic"]\n'


def approve(stage: Stage, party: str, *words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["approve", *words, "--state", str(stage.home(party)), "--json"])
    assert done.exit_code == 0, done.output
    tree: dict[str, Any] = json.loads(done.stdout)
    return tree


def ask_for_more() -> None:
    """The manifest says one epoch per round. Each round the aggregator asks for something else."""

    def change(party: int, message: dict[str, Any]) -> dict[str, Any]:
        op, payload, round = dict(message["op"]), dict(message["payload"]), message["round"]
        if op["name"] == "sgd":
            note({"asked": round})
            if round == 0:
                op["epochs"] = 50
            if round == 1:
                payload["work"] = {"steps": 5000}
            if round == 2:
                op = {"kind": "op", "name": "column-moments"}
        return {**message, "op": op, "payload": payload}

    rewrite(change)


def test_an_owner_who_approved_one_epoch_is_not_asked_for_fifty(tmp_path: Path) -> None:
    lies = {"aggregator": "test_approved_jobs:ask_for_more"}
    with Stage(tmp_path, PARTIES, {"ann": '[approve]\nmode = "ask"\n', "bob": RULES}, lies) as stage:
        job, _ = stage.operator.submit(parse(experiment(run={"rounds": 3, "deadline": None})), "job")
        end = time.monotonic() + PATIENCE
        while "owners of: ann" not in str(stage.operator.job(job)["reason"]):
            assert time.monotonic() < end, stage.log("ann")
            stage.all_run()
            time.sleep(0.1)
        assert approve(stage, "bob")["jobs"][job]["by"] == "the rules models, rounds, epochs"
        assert approve(stage, "ann", job, "--show")["status"] == "waiting"
        assert approve(stage, "ann", job, "--yes")["status"] == "approved"
        lines: list[dict[str, Any]] = []
        ended = stage.operator.wait(job, lines.append, stage.all_run)
        assert ended["status"] == "failed" and len(lines) == 3 and len(stage.notes()) >= 3
    for line, difference in zip(lines, ("sgd.epochs = 1, and the ask has 50", "no message to set steps",
                                        "and the ask has 'column-moments'"), strict=True):  # fmt: skip
        assert "empty" in line
        for party in ("ann", "bob"):
            assert difference in line["missing"][party], line
