"""A party that multiplies its sums: it counts as at most ten medians, and the record says so truly."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import Stage, experiment, samples
from liars import answer

pytestmark = pytest.mark.slow

NAMES = ("ann", "bob", "cid", "dee", "eve", "fay")
PARTIES = {name: samples(seed=seed) for seed, name in enumerate(NAMES)}


def multiplies() -> None:
    def change(op, payload, reply):  # type: ignore[no-untyped-def]
        if op.name in ("gradient-histograms", "private-histograms"):
            reply.tensors = {name: 200 * tensor for name, tensor in reply.tensors.items()}
            reply.weight *= 200
        if op.name == "class-counts":
            reply.tensors["counts"] *= 200
        return reply

    answer(change)


def test_a_party_that_multiplies_its_histograms_is_rescaled_by_name(tmp_path: Path) -> None:
    boosting = {"name": "boosting", "max_depth": 2, "bins": 4, "cuts": "extents"}
    with Stage(tmp_path, PARTIES, lies={"eve": "test_lying_sums:multiplies"}) as stage:
        job = stage.run({**experiment(), "task": {"parties": ["each.npz"]}, "algorithm": boosting})
    assert job["status"] == "finished", job["reason"]
    for line in job["rounds"]:
        assert list(line["capped"]) == ["eve"]
        assert "as 400, 10 times the median of the replies; run.max_weight sets" in line["capped"]["eve"]
    first = job["rounds"][0]
    assert first["rejected"]["eve"] == "its counts has numbers that are more than 40 samples can add up to"


def test_max_weight_holds_for_sums_with_noise_too(tmp_path: Path) -> None:
    boosting = {"name": "boosting", "max_depth": 1, "bins": 4, "cuts": "public", "span": [-4.0, 4.0], "sigma": 1.0}
    with Stage(tmp_path, PARTIES, lies={"eve": "test_lying_sums:multiplies"}) as stage:
        tree = {**experiment(), "task": {"parties": ["each.npz"]}, "algorithm": boosting}
        job = stage.run({**tree, "run": {**tree["run"], "max_weight": 100}})
    assert job["status"] == "finished", job["reason"]
    for line in job["rounds"]:
        assert line["replies"] == 5 and list(line["rejected"]) == ["eve"]
        assert "over the limit of 100" in line["rejected"]["eve"]
