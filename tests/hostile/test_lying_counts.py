"""A party that claims to stand for several parties is rejected by name, and the bits of the others stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import Stage, experiment, samples
from liars import answer

pytestmark = pytest.mark.slow

PARTIES = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "cid"))}


def stands_for_a_crowd() -> None:
    def change(op, payload, reply):  # type: ignore[no-untyped-def]
        if op.update is not None:
            reply.count = 1000
        return reply

    answer(change)


@pytest.mark.parametrize("sums", ["ordered", "exact"])
def test_a_party_that_stands_for_a_crowd_is_left_out_by_name(tmp_path: Path, sums: str) -> None:
    with Stage(tmp_path, PARTIES, lies={"bob": "test_lying_counts:stands_for_a_crowd"}) as stage:
        job = stage.run(experiment(run={"sums": sums}))
    assert job["status"] == "finished", job["reason"]
    for line in job["rounds"]:
        assert line["replies"] == 2
        assert line["rejected"] == {"bob": "it stands for 1000 parties, and a party answers for itself alone"}
