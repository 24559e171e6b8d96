"""Push-sum, Bayesian gossip and self-aggregation between organisations, over sealed routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from league import PARTIES, League, logistic_task, memory
from test_routed_jobs import TASK

import hansa
from hansa.core.plain_data import from_config
from hansa.testing import same_bits

pytestmark = pytest.mark.usefixtures("quick")
LOCAL = {"name": "sgd", "lr": 0.2, "steps": 2, "batch": 5}
ONE_WAY = {"name": "edges", "edges": [f"{a} -> {b}" for a, b in zip(PARTIES, (*PARTIES[1:], PARTIES[0]), strict=True)]}
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "push-sum", "local": LOCAL, "topology": ONE_WAY},
    {"name": "bayesian-gossip", "belief": "full", "repeats": 2},
    {"name": "self-aggregation", "local": LOCAL, "fusions": ["median", "mean"],
     "tolerances": [10.0, 0.0], "patience": 1},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each["name"])
def test_a_deployed_job_has_the_bits_of_its_simulation(found: Callable[..., League], algorithm: dict[str, Any]) -> None:
    league = found().join_all()
    order = {"task": TASK, "algorithm": algorithm, "run": {"rounds": 3, "deadline": 60.0}}
    done = league.ended(league.submit(order, min_parties=3))
    assert done["status"] == "finished", done["reason"]
    made = from_config("algorithm", algorithm, "test")
    reference = hansa.simulate(made, logistic_task(), engine="reference", rounds=3)
    assert same_bits(league.model(done["id"]), reference.saved_model())
    for k, name in enumerate(PARTIES):
        held = memory(league, name, done["id"])
        for entry, expected in reference.memories[k].items():
            assert torch.equal(held[entry], expected), f"{name}: {entry}"


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [({"name": "edges", "edges": ["ann -- nobody"]}, "names 'nobody', which is no party"),
     ({"name": "random", "probability": 0.0}, "the topology random is not connected")],
)  # fmt: skip
def test_an_order_with_a_topology_that_cannot_work_is_refused_when_it_is_submitted(
    found: Callable[..., League], topology: dict[str, Any], sentence: str
) -> None:
    league = found().join_all()
    order = {"task": TASK, "algorithm": {"name": "d-psgd", "topology": topology}, "run": {"rounds": 1}}
    with pytest.raises(hansa.ConfigError, match=sentence):
        league.submit(order, min_parties=3)
