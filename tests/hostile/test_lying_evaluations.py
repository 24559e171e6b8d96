"""Evaluations as queries about samples: what a lying aggregator can learn, and what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import Stage, experiment
from liars import note, take_over

from hansa.core.predictor import Evaluate
from hansa.data.prepare import ColumnMoments
from hansa.net.aggregator import reply_rules, runtime
from hansa.secure.masking import Masking

pytestmark = pytest.mark.slow

FEATURES, FAR = 3, 2.0**10  # a bias that makes every residual positive, so that `mae` is linear


def targets(count: int, seed: int) -> tuple[Any, Any]:
    """Records of a regression, in eighths, so that learned values are exact."""
    draws = np.random.default_rng(seed)
    return (draws.integers(-800, 800, (count, FEATURES)) / 8).astype(np.float32), (
        draws.integers(-800, 800, count) / 8
    ).astype(np.float32)


def reads_a_record() -> None:
    """Ask in each round for `mae` of a unit vector on the held-out samples; from round 4 on hold out another sample."""
    offers = runtime.NetworkRuntime._offers

    def offer(self, ask, *more):  # type: ignore[no-untyped-def]
        if ask.round > FEATURES:
            self.task = {**self.task, "seed": 7}
            self._written = {name: blob for name, blob in self._written.items() if name[0] != "task"}
        return offers(self, ask, *more)

    async def round(algorithm, fed, state):  # type: ignore[no-untyped-def]
        w = torch.zeros_like(state.params.w)
        w[-1] = FAR
        if 0 < fed.round <= FEATURES:
            w[fed.round - 1] = 1.0
        payload = {"model": {**state.params._asdict(), "w": w}}
        answers = await fed.gather(Evaluate(), payload, parties=fed.parties)
        for party, reply in zip(answers.parties, answers.replies, strict=True):
            note({"party": party, "round": fed.round, "mae": reply.metrics["mae"], "samples": reply.weight})
        return state

    runtime.NetworkRuntime._offers = offer  # type: ignore[method-assign]
    reply_rules.WEIGHT_CAP = 10**6  # weights are told as they are
    take_over(round, "gather")


def test_no_record_is_read_by_holding_it_out(tmp_path: Path) -> None:
    records = targets(476, 0)
    parties = {name: records for name in ("active", "noisy", "open")}
    parties["tested"] = (*records, *targets(40, 1))  # type: ignore[assignment]
    policies = {"active": "[privacy]\nsecure = true\nactive = true", "noisy": "[privacy]\nepsilon = 1.0",
                "tested": "[privacy]\ndp = true\n[budget]\nper_job = { evaluate = 2 }"}  # fmt: skip
    lies = {"aggregator": "test_lying_evaluations:reads_a_record"}
    with Stage(tmp_path, parties, policies, lies) as stage:
        job = stage.run(experiment(task={"party_test": 0.0021, "loss": "mse"},
                                   run={"rounds": FEATURES + 2, "eval_parties": False}))  # fmt: skip
        read: dict[str, dict[int, Any]] = {name: {} for name in parties}
        for found in stage.notes():
            read[list(parties)[found["party"]]][found["round"]] = found
    # Without a floor the party answers, and the aggregator learns the record exactly: the reason for the floor.
    answers = {round: found["mae"] for round, found in read["open"].items()}
    y = FAR - answers[0]
    record = [answers[1 + k] - answers[0] for k in range(FEATURES)]
    assert any(np.array_equal(record, x) and y == target for x, target in zip(*records, strict=True))
    assert sorted(answers) == [0, 1, 2, 3] and read["open"][0]["samples"] == 1
    assert "they are fixed once per job" in job["rounds"][4]["missing"]["open"]
    # With a floor it refuses.
    for name in ("active", "noisy"):
        assert not read[name]
        for line in job["rounds"][:4]:
            assert "no job may evaluate on its training samples" in line["missing"][name]
    # On its own test samples it evaluates, on all of them, as often as its policy allows.
    assert sorted(read["tested"]) == [0, 1] and read["tested"][0]["samples"] == 40
    assert "its policy allows 2 evaluations per job, and they are used up" in job["rounds"][2]["missing"]["tested"]


def reads_all_records() -> None:
    """Ask, within a masked sum, for column sums about a centre with one dimension too many: one sum per record. The
    other parties get a centre that makes their part of the sum 0."""

    async def round(algorithm, fed, state):  # type: ignore[no-untyped-def]
        centre = torch.zeros(40, 1, FEATURES, dtype=torch.float64)
        known = {party: {"centre": torch.full_like(centre, torch.nan)} for party in fed.parties if party != 1}
        ask = fed._ask("reduce", op=ColumnMoments(), payload={"centre": centre}, parties=tuple(fed.parties), each=known)
        found = await Masking(active=True).reduce(fed._open(), ask)
        note({"records": found.sums["sum"].reshape(40, FEATURES) / 40})
        return state

    take_over(round, "gather", "reduce")


def test_no_record_is_read_by_the_shape_of_a_question(tmp_path: Path) -> None:
    parties = {name: targets(40, seed) for seed, name in enumerate(("ann", "bob", "cid"))}
    floor = dict.fromkeys(parties, "[privacy]\nsecure = true\nactive = true")
    with Stage(tmp_path, parties, floor, {"aggregator": "test_lying_evaluations:reads_all_records"}) as stage:
        job = stage.run(experiment(task={"loss": "mse"}, run={"rounds": 1}))
    for found in stage.notes():
        assert not np.array_equal(found["records"].numpy(), parties["bob"][0])
    assert job["status"] == "failed" and not stage.notes()
    assert "'centre' differs from party to party" in job["reason"]
