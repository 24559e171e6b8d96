"""Trees over columns between deployed parties: the simulation's bits, predictions, and what the aggregator stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League
from test_split_jobs import rows, simulated, tree

from hansa.core.op import Memory
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.samples import PartySamples
from hansa.net.people_scores import predict_people
from hansa.plumbing import codec
from hansa.testing import same_bits
from hansa.vertical.secureboost import ColumnForest, SecureBoost

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]

PLAIN: dict[str, Any] = {"match": "same", "bins": 6, "max_depth": 2, "key_bits": 1024}


def join(league: League, policy: str = "matches = 100\nscores = true", first: str = "") -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, PartySamples(rows(number), rows(number, True)), policy if number or not first else first)


def kept(memory: Memory) -> Memory:
    """What a party remembers of trees, without the key, which a deployed party draws from its own secret."""
    return {name: value for name, value in memory.items() if name.startswith("trees/") and name != "trees/key"}


def deployed(league: League, name: str, job: str) -> list[Memory]:
    folder = league.folder / "homes" / name / "memory" / job
    return [kept(codec.decode(path.read_bytes()[:-32])) for path in folder.glob("*.safetensors")]


@pytest.mark.parametrize("own", [SecureBoost(**PLAIN), ColumnForest(**PLAIN, trees=2)], ids=["boosting", "forest"])
def test_a_deployed_job_has_the_bits_of_its_simulation_and_scores_people(league: League, own: Any) -> None:
    join(league)
    done = league.ended(league.submit(tree(own), min_parties=3))
    assert done["status"] == "finished", done["reason"]
    reference = simulated(own)
    for line, expected in zip(done["rounds"], reference.history, strict=True):
        assert (line["loss"], line["accuracy"]) == (expected["loss"], expected["accuracy"])
    for number, name in enumerate(PARTIES):
        expected = kept(reference.memories[number])
        assert any(same_bits(expected, each) for each in deployed(league, name, done["id"]))
    stored = b"".join(path.read_bytes() for path in Path(league.folder / "state").rglob("*") if path.is_file())
    for number in range(3):
        secrets = [value for name, value in reference.memories[number].items() if name.startswith("trees/")]
        for secret in [*secrets, rows(number).x]:
            raw = secret.contiguous().numpy().tobytes()
            assert len(raw) < 48 or raw[:64] not in stored
    ids = ["test 3", "train 17"]
    asked = predict_people(league.operator, done["id"], ids)
    assert list(asked.ids) == ids
    assert torch.equal(torch.as_tensor(asked.outputs), reference.predict(ids=ids))


def test_rules_approve_a_job_and_every_ask_of_it_is_in_its_manifest(league: League) -> None:
    join(league, 'matches = 100\n[approve]\nmode = "rules"\nalgorithms = ["secureboost"]')
    done = league.ended(league.submit(tree(SecureBoost(**PLAIN)), min_parties=3))
    assert done["status"] == "finished" and not [line for line in done["rounds"] if line.get("missing")], done["rounds"]


def test_a_party_whose_policy_has_a_floor_refuses_small_nodes(league: League, caplog: pytest.LogCaptureFixture) -> None:
    join(league, first="matches = 100\nmin_rows = 15")
    done = league.ended(league.submit(tree(SecureBoost(**PLAIN)), min_parties=3))
    assert REFUSAL in str(done["rounds"]), done["rounds"]
    assert "raise algorithm.min_samples" in caplog.text
