"""The network of a finished job is asked for people by their ids: the parties compute their scores together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PARTIES, League
from test_split_jobs import SHAPES, algorithm, join, rows, simulated, tree

from hansa.holdings.gateway import TableRows
from hansa.net.party import own_models
from hansa.net.party.samples import PartySamples
from hansa.net.people_scores import predict_people, read_ids
from hansa.net.transport.client import Refusal
from hansa.plumbing.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

ASKED = ["Train 3", "test 5", "train  7", "nobody"]
OPEN = "matches = 100\nscores = true"


def trained(league: League, **fields: Any) -> str:
    job = league.submit(tree(algorithm(**fields)), min_parties=3)
    assert league.ended(job)["status"] == "finished"
    return job


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_a_deployed_job_are_those_of_its_simulation(league: League, shape: str) -> None:
    join(league, lambda name: OPEN)
    job = trained(league, **SHAPES[shape])
    asked = predict_people(league.operator, job, ASKED)
    expected = simulated(algorithm(**SHAPES[shape])).predict(ids=ASKED)
    assert asked.ids == ASKED[:3] and set(asked.unknown.values()) == {1}
    assert torch.equal(asked.outputs, expected[:3]) and torch.isnan(expected[3]).all()


def test_the_aggregator_stores_no_asked_id(league: League) -> None:
    join(league, lambda name: OPEN)
    predict_people(league.operator, trained(league), ["train 13", "train 14"])
    stored = b"".join(path.read_bytes() for path in Path(league.folder / "state").rglob("*") if path.is_file())
    assert b"train 13" not in stored and b"of_job" in stored


@pytest.mark.parametrize(
    ("who", "policy", "reason"),
    [
        ("bob", "matches = 100", "see scores in party.toml"),
        ("ann", "matches = 100", "see scores in party.toml"),
        ("ann", "matches = 1\nscores = true", "its policy allows 1 asks over all jobs"),
        ("cid", OPEN + "\n[limits]\npeople = 3", "at most 3 people (limits.people in party.toml)"),
    ],
)
def test_every_party_is_asked_by_its_policy(league: League, who: str, policy: str, reason: str) -> None:
    join(league, lambda name: policy if name == who else OPEN)
    job = trained(league)
    with pytest.raises(DataError, match="the people were not scored") as refused:
        predict_people(league.operator, job, ASKED)
    assert reason in str(refused.value) and who in str(refused.value)


def test_bad_asks_are_refused_with_one_sentence(league: League, tmp_path: Path) -> None:
    join(league, lambda name: OPEN)
    job = trained(league)
    matching = {**tree(algorithm()), "algorithm": "psi", "run": {"rounds": 1}}
    matched = league.submit(matching, min_parties=3)
    league.ended(matched)
    with pytest.raises(Refusal, match="there is no job 'other-1'"):
        predict_people(league.operator, "other-1", ASKED)
    with pytest.raises(ConfigError, match="trained psi, which does not score people"):
        predict_people(league.operator, matched, ASKED)
    with pytest.raises(DataError, match="the id 'train 3' is there twice"):
        predict_people(league.operator, job, ["train 3", "TRAIN 3"])
    with pytest.raises(DataError, match="there is no id"):
        predict_people(league.operator, job, [])
    with pytest.raises(ConfigError, match="at most 5000 people"):
        predict_people(league.operator, job, [str(k) for k in range(5001)])
    with pytest.raises(DataError, match="no person was scored: of the 2 people asked for, ann does not hold 2"):
        predict_people(league.operator, job, ["x", "y"])
    with pytest.raises(DataError, match="cannot read"):
        read_ids(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="lie at several parties, so this party alone cannot predict"):
        own_models.export(league.folder / "homes" / "ann", job, tmp_path / "own.safetensors")


def test_people_who_come_later_do_not_change_how_columns_are_scaled(league: League) -> None:
    join(league, lambda name: OPEN)
    own = tree(algorithm())
    job = league.submit({**own, "task": {**own["task"], "prepare": "standardise"}}, min_parties=3)
    assert league.ended(job)["status"] == "finished"
    before = predict_people(league.operator, job, ASKED)
    for number, name in enumerate(PARTIES):
        league.members[name].leave()
        x, y, ids = rows(number)[:3]
        assert isinstance(x, torch.Tensor) and ids is not None
        more = TableRows(
            torch.cat([x, 100 + x[:1]]), None if y is None else torch.cat([y, y[:1]]), np.append(ids, "new")
        )
        league.join(name, PartySamples(more, rows(number, True)), OPEN)
    after = predict_people(league.operator, job, [*ASKED, "new"])
    assert after.ids == [*before.ids, "new"]
    assert torch.equal(after.outputs[:3], before.outputs)


def test_a_party_that_has_forgotten_its_piece_says_so(league: League) -> None:
    join(league, lambda name: OPEN)
    job = trained(league)
    (league.folder / "homes" / "cid" / "memory" / job / own_models.FILE).unlink()
    with pytest.raises(DataError, match=r"cid.*it has kept no model of the job"):
        predict_people(league.operator, job, ASKED)
