"""An aggregator that turns every round into a question about one sample: ranges and the query budget stop it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import Stage, experiment, samples
from liars import Message, rewrite

pytestmark = pytest.mark.slow

ROUNDS, QUERIES = 6, 4


def asks_about_single_samples() -> None:
    """Send steps of one sample instead of the job's, with another rate in each round."""

    def change(party: int, message: Message) -> Message:
        if message["op"].get("name") != "sgd":
            return message
        return {**message, "op": {**message["op"], "batch": 1, "steps": 1, "lr": 0.5 + message["round"]}}

    rewrite(change)


def test_questions_about_single_samples_are_refused_or_counted(tmp_path: Path) -> None:
    parties: dict[str, Any] = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "cid"))}
    policies = {"ann": f"[budget]\nqueries = {QUERIES}", "bob": "[ranges]\nbatch = [8, 1000]"}
    lies = {"aggregator": "test_lying_questions:asks_about_single_samples"}
    with Stage(tmp_path, parties, policies, lies) as stage:
        job = stage.run(experiment(run={"rounds": ROUNDS}))
        spendings = {name: stage.spent(name) for name in parties}
    assert job["status"] == "finished", job["reason"]
    missing = [line["missing"] for line in job["rounds"]]
    assert all("requires a batch of 8 to 1000, and the job has 1 in 'sgd'" in reasons["bob"] for reasons in missing)
    answered = QUERIES - 1  # the description of its data was the first query
    assert ["ann" in reasons for reasons in missing] == [False] * answered + [True] * (ROUNDS - answered)
    assert "at a cost of 4 over all jobs, and they are used up" in missing[-1]["ann"]
    ann, bob, cid = (spendings[name] for name in parties)
    assert (ann["queries"], ann["train"], ann["describe"], ann["left"]["queries"]) == (QUERIES, answered, 1, 0)
    assert (bob["train"], bob["queries"], bob["left"]["queries"]) == (0, 1, None)
    assert cid["train"] == ROUNDS
