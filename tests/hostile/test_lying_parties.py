"""A party that sends invalid replies: it is rejected by name, and the other parties continue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import Stage, experiment, samples
from liars import answer

pytestmark = pytest.mark.slow

PARTIES = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "cid"))}


def sends_nan() -> None:
    def change(op, payload, reply):  # type: ignore[no-untyped-def]
        for tensor in reply.tensors.values():
            if op.update is not None:
                tensor.fill_(torch.nan)
        return reply

    answer(change)


def test_a_party_that_sends_what_is_not_finite_is_left_out_by_name(tmp_path: Path) -> None:
    with Stage(tmp_path, PARTIES, lies={"bob": "test_lying_parties:sends_nan"}) as stage:
        job = stage.run(experiment())
    assert job["status"] == "finished", job["reason"]
    for line in job["rounds"]:
        assert line["replies"] == 2
        assert list(line["rejected"]) == ["bob"] and "not finite" in line["rejected"]["bob"]


def boasts() -> None:
    """Metrics that are finite, but that no party could have measured."""

    def change(op, payload, reply):  # type: ignore[no-untyped-def]
        for name in reply.metrics:
            reply.metrics[name] = 1.7e308
        return reply

    answer(change)


def outweighs() -> None:
    """Claim the largest possible weight, for a forged update and a forged evaluation."""

    def change(op, payload, reply):  # type: ignore[no-untyped-def]
        if op.update is not None:
            reply.tensors["w"].fill_(1.0)
            reply.weight, reply.metrics["train_loss"] = 10**9, 0.0
        if op.name == "evaluate":
            reply.weight, reply.metrics = 10**9, dict.fromkeys(reply.metrics, 0.0)
        return reply

    answer(change)


def test_no_party_owns_the_means_by_what_it_claims(tmp_path: Path) -> None:
    parties = PARTIES | {"dee": samples(seed=3), "eve": samples(seed=4)}
    lies = {"bob": "test_lying_parties:boasts", "eve": "test_lying_parties:outweighs"}
    with Stage(tmp_path, parties, lies=lies) as stage:
        job = stage.run(experiment(task={"party_test": 0.5}))
    assert job["status"] == "finished", job["reason"]
    for line in job["rounds"]:
        assert line["replies"] == 4 and line["rejected"]["bob"].startswith(
            "its metric train_loss is 1.7e+308, and must"
        )
        assert "its weight 1000000000 counts as 200, 10 times the median" in line["capped"]["eve"]
        assert list(line["capped"]) == ["eve"] and list(line["rejected"]) == ["bob"]
        # Three honest parties of 20 samples, and a party that counts as 200 samples with a loss of 0.
        honest = [line["parties"][name] for name in ("ann", "cid", "dee")]
        for name in ("loss", "accuracy"):
            expected = sum(metrics[name] for metrics in honest) * 20 / 260
            assert abs(line[name] - expected) < 1e-9 and 0 < line[f"party_{name}_mean"] < 10
        assert 0 < line["train_loss"] < 1 and "bob" not in line["parties"]


LIES = [("w.scales", torch.nan), ("w.scales", -1.0), ("w.codes", -128), ("w.scales", 3e38)]
REASONS = ["w.scales has values that are not finite", "it cannot be opened: a scale is negative",
           "it cannot be opened: a code is below -127", "the norm of its update, "]  # fmt: skip


def sends_parts_that_nobody_packs() -> None:
    """Another lie about a packed update in each round."""
    asks: list[str] = []

    def change(op, payload, reply):  # type: ignore[no-untyped-def]
        if op.name == "packed":
            part, value = LIES[len(asks)]
            reply.tensors[part].fill_(value)
            asks.append(part)
        return reply

    answer(change)


def test_a_party_that_sends_hostile_parts_is_left_out_by_name(tmp_path: Path) -> None:
    with Stage(tmp_path, PARTIES, lies={"bob": "test_lying_parties:sends_parts_that_nobody_packs"}) as stage:
        job = stage.run(experiment(run={"rounds": len(LIES), "compress": "int8"}))
    assert job["status"] == "finished", job["reason"]
    for line, reason in zip(job["rounds"], REASONS, strict=True):
        assert line["replies"] == 2
        assert list(line["rejected"]) == ["bob"] and line["rejected"]["bob"].startswith(reason), line
