"""Linear models over columns between deployed parties: the simulation's bits, scores of people, what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League
from test_split_jobs import HOLDER, PEOPLE, ROUNDS, join, rows, simulated, tree

import hansa
from hansa import VerticalLinear
from hansa.core.op import Memory
from hansa.net.people_scores import predict_people
from hansa.plumbing import codec
from hansa.testing import same_bits

pytest.importorskip("rbcl")
from hansa import FedV

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
OPEN = "matches = 100\nscores = true"
OPS = 'ops = ["route-*", "split-order", "split-same", "describe"]'  # those that agree on the rows, and no others
METHODS: dict[str, Any] = {
    "encrypted": VerticalLinear(match="same", batch=20, coordinator=2, key_bits=1024, lr=0.5),
    "svm": VerticalLinear(match="same", batch=20, coordinator=2, key_bits=1024, lr=0.2, loss="svm"),
    "fedv": FedV(match="same", batch=20, authority=2, least=3, lr=0.5),
}
SECRET = ("linear/w", "linear/key", "fedv/")  # names in a party's memory


def parts(memory: Memory) -> Memory:
    return {name: value for name, value in memory.items() if name == "linear/w"}


def deployed(league: League, name: str, job: str) -> list[Memory]:
    folder = league.folder / "homes" / name / "memory" / job
    return [codec.decode(path.read_bytes()[:-32]) for path in folder.glob("*.safetensors")]


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_job_has_the_bits_of_its_simulation_and_scores_people(league: League, method: str) -> None:
    join(league, lambda name: OPEN)
    own = METHODS[method]
    done = league.ended(league.submit(tree(own), min_parties=3))
    reference: hansa.Result = simulated(own)
    assert done["status"] == "finished", done["reason"]
    for line, expected in zip(done["rounds"], reference.history, strict=True):
        assert "empty" not in line, line
        assert (line["loss"], line["accuracy"]) == (expected["loss"], expected["accuracy"])
    for number, name in enumerate(PARTIES[:2]):
        part = parts(reference.memories[number])
        assert part and any(same_bits(part, parts(each)) for each in deployed(league, name, done["id"]))
    asked = predict_people(league.operator, done["id"], ["train 3", "nobody"])
    assert asked.ids == ["train 3"] and set(asked.unknown.values()) == {1}
    assert torch.equal(asked.outputs, reference.predict(ids=["train 3"]))


def test_the_aggregator_stores_no_label_column_weight_or_key(league: League) -> None:
    join(league)
    done = league.ended(league.submit(tree(METHODS["encrypted"]), min_parties=3))
    assert done["status"] == "finished"
    stored = b"".join(path.read_bytes() for path in Path(league.folder / "state").rglob("*") if path.is_file())
    secrets = [value for name in PARTIES for memory in deployed(league, name, done["id"])
               for key, value in memory.items() if key.startswith(SECRET)]  # fmt: skip
    secrets += [rows(HOLDER).y, *(rows(party).x for party in range(2))]  # type: ignore[list-item]
    assert len(secrets) >= 6
    for secret in secrets:
        raw = secret.contiguous().numpy().tobytes()
        assert raw[:24] not in stored
    assert b"linear-train" in stored  # what it does store was read


@pytest.mark.parametrize(
    ("who", "policy", "reason"),
    [
        ("cid", OPS, "its policy does not accept the op 'linear-train'"),
        ("ann", "[limits]\nparameters = 3", "its policy gives an ask at most 3 parameters"),
        ("bob", "[privacy]\ndp = true", "its policy requires differential privacy"),
    ],
)
def test_a_party_takes_part_by_its_policy(league: League, who: str, policy: str, reason: str) -> None:
    join(league, lambda name: f"matches = 100\n{policy}" if name == who else "matches = 100")
    done = league.ended(league.submit(tree(METHODS["encrypted"]), min_parties=3))
    assert all("empty" in line and reason in line["missing"][who] for line in done["rounds"]), done["rounds"]
    assert len(done["rounds"]) == ROUNDS and PEOPLE > 20
