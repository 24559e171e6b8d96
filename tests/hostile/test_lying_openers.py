"""Threshold sums with a party that deals, names and opens keys wrongly, and a dealer that deals a wrong share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Stage, experiment, samples
from liars import answer

import hansa
from hansa.experiment.tasks import make_model
from hansa.secure import envelopes
from hansa.secure.byte_tensors import from_rows, to_rows

PARTIES = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "cid", "dan", "eve"))}
NAMES = list(PARTIES)


def lie_about_the_key() -> None:
    """In the first job the party deals a wrong key and claims 80,000 shares; in the second it deals a correct key, then
    opens and recalls it wrongly."""
    dealt: list[int] = []

    def change(op: Any, payload: Any, reply: Any) -> Any:
        tensors = reply.tensors
        if op.name == "secure-threshold-deal":
            dealt.append(1)
            if len(dealt) == 1:
                tensors["checks"] = tensors["checks"].flip(0)
        if op.name == "secure-threshold-ready" and len(dealt) == 1:
            tensors["name"].fill_(1)
            tensors["total"].fill_(80_000)
        if op.name == "secure-threshold-open":
            values = [value * (1 + 7 * 2**1000) % 2**1022 | 1 for value in from_rows(tensors["partial"])]
            tensors["partial"] = to_rows(values, 128)
        if op.name == "secure-threshold-recall":
            tensors["owners"] = tensors["owners"] + 80_000
        return reply

    answer(change)


def give_a_wrong_share() -> None:
    """To the third holder, in an envelope that only that party can open."""
    seal, count = envelopes.seal, iter(range(10**6))
    envelopes.seal = lambda key, data: seal(key, data[:-1] + b"\1" if next(count) == 2 else data)


def losses(missing: dict[int, set[int]], rounds: int) -> list[float]:
    """The training losses of the same job without a secure sum, and without these parties in these rounds."""
    task = hansa.Task(make_model("logistic", "float32", ".", (3,), 2), "cross_entropy",
                      [tuple(map(torch.from_numpy, PARTIES[name])) for name in NAMES], names=NAMES,
                      classes=2)  # fmt: skip
    local = hansa.SGD(lr=0.1, epochs=1, batch=16)
    done = hansa.simulate(hansa.FedAvg(local=local), task, rounds=rounds, seed=0, engine="reference",
                          absent=lambda party, round: party in missing.get(round, set()))  # fmt: skip
    return [line["train_loss"] for line in done.history]


@pytest.mark.slow
def test_who_lies_about_a_shared_key_is_named_and_the_sums_are_right(tmp_path: Path) -> None:
    """In 0.1.0 one party made the update 7.0 larger in every coordinate, or froze the aggregator by a factorial."""
    job = experiment(run={"rounds": 2}, privacy={"secure": "threshold-paillier", "key_bits": 1024, "threshold": 0.6})
    lies = {"ann": "test_lying_openers:lie_about_the_key", "bob": "test_lying_openers:give_a_wrong_share"}
    with Stage(tmp_path, PARTIES, lies=lies) as stage:
        over, alive = threading.Event(), []

        def look() -> None:
            while not over.wait(0.2):
                alive.append(len(stage.operator.jobs()))

        watching = threading.Thread(target=look)
        watching.start()
        try:
            first, second = stage.run(job, "one"), stage.run(job, "two")
        finally:
            over.set()
            watching.join()
    assert first["status"] == second["status"] == "finished", (first["reason"], second["reason"])
    assert alive and alive[-1] == 2, "the aggregator answered meanwhile"

    dealt, kept = first["rounds"]
    assert "the key that it dealt is wrong" in dealt["rejected"]["ann"]
    assert "the share of the key does not match its verification key" in dealt["missing"]["dan"]
    assert dealt["replies"] == 3 and kept["replies"] == 5
    assert [dealt["train_loss"], kept["train_loss"]] == pytest.approx(losses({0: {0, 3}}, 2), abs=1e-5)

    opened, recalled = second["rounds"]
    assert opened["rejected"] == {"ann": "its partial decryption of the secure sum is wrong"}
    assert list(recalled["rejected"]) == ["ann"]
    assert "it sent a wrong public part of the key of the secure sum" in recalled["rejected"]["ann"]
    assert [opened["train_loss"], recalled["train_loss"]] == pytest.approx(losses({1: {0}}, 2), abs=1e-5)
