"""A party that sends what is no reply: it is left out by name, and the others go on."""

from __future__ import annotations

from pathlib import Path

import torch
from kit import Stage, experiment, samples
from liars import answer

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
