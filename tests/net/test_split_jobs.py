"""Split learning between deployed parties: the simulation's bits, restarts, policy, and what the aggregator stores."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PARTIES, League, posting

import hansa
from hansa.core.op import Memory
from hansa.core.plain_data import to_config
from hansa.holdings.gateway import TableRows
from hansa.models.dense import TwoNN
from hansa.net.party.samples import PartySamples
from hansa.net.party.vault_lines import read_vault
from hansa.net.transport.wire import Work
from hansa.plumbing import codec
from hansa.testing import same_bits
from hansa.vertical.split import Split

pytestmark = pytest.mark.usefixtures("quick")
WIDTHS, HOLDER, PEOPLE, ROUNDS = (2, 4, 1), 1, 40, 2
BOTTOM, MIDDLE = TwoNN(hidden=4, outputs=3), TwoNN(hidden=3, outputs=2)
OPS = 'ops = ["route-*", "split-order", "split-same", "describe"]'  # those that agree on the rows, and no others
SHAPES: dict[str, dict[str, Any]] = {
    "vertical": {},
    "u": {"columns": (HOLDER,), "middle": MIDDLE, "middle_at": 2},
}


def rows(party: int, test: bool = False) -> TableRows:
    """A party's rows: the same people at all parties, in an order of its own."""
    draw = np.random.default_rng(100 * test + party)
    order = draw.permutation(PEOPLE)
    x = torch.from_numpy(draw.normal(size=(PEOPLE, WIDTHS[party])))
    ids = np.array([f"{'test' if test else 'train'} {k}" for k in order])
    return TableRows(x, torch.from_numpy(order % 2) if party == HOLDER else None, ids)


def algorithm(**fields: Any) -> Split:
    plain = {"bottoms": (BOTTOM,), "match": "same", "batch": 8, "momentum": 0.5, "dtype": "float64"}
    return Split(**{**plain, **fields})


def tree(own: Any) -> dict[str, Any]:
    table = {"dataset": "heart", "loss": "cross_entropy", "dtype": "float64"}
    return {"task": table, "partition": "columns", "algorithm": to_config(own), "run": {"rounds": ROUNDS, "seed": 3}}


def join(league: League, policy: Callable[[str], str] = lambda name: "matches = 100") -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, PartySamples(rows(number), rows(number, True)), policy(name))


def simulated(own: Any) -> hansa.Result:
    train, test = ([rows(party, late) for party in range(3)] for late in (False, True))
    task = hansa.Task(None, "cross_entropy", [each[:2] for each in train], None, [each[:2] for each in test],
                      list(PARTIES), 2, ids=[each.ids for each in train],
                      test_ids=[each.ids for each in test])  # fmt: skip
    return hansa.simulate(own, task, rounds=ROUNDS, seed=3)


def pieces(memory: Memory) -> Memory:
    return {name: value for name, value in memory.items() if name.startswith("split/")}


def deployed_pieces(league: League, name: str, job: str) -> list[Memory]:
    """The pieces in the memories that a party has of a job."""
    folder = league.folder / "homes" / name / "memory" / job
    return [pieces(codec.decode(path.read_bytes()[:-32])) for path in folder.glob("*.safetensors")]


def check_equal(league: League, done: dict[str, Any], reference: hansa.Result) -> None:
    assert done["status"] == "finished", done["reason"]
    for line, expected in zip(done["rounds"], reference.history, strict=True):
        assert (line["train_loss"], line["loss"], line["accuracy"]) == (
            expected["train_loss"], expected["loss"], expected["accuracy"]
        )  # fmt: skip
    for number, name in enumerate(PARTIES):
        if own := pieces(reference.memories.get(number, {})):
            assert any(same_bits(own, each) for each in deployed_pieces(league, name, done["id"]))


@pytest.mark.thin(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_deployed_job_has_the_bits_of_its_simulation(league: League, shape: str) -> None:
    join(league)
    own = algorithm(**SHAPES[shape])
    done = league.ended(league.submit(tree(own), min_parties=3))
    check_equal(league, done, simulated(own))


@pytest.mark.slow
@pytest.mark.parametrize("match", ["same", "psi"])
def test_rules_approve_a_split_job_and_every_ask_of_it_is_in_its_manifest(league: League, match: Any) -> None:
    if match == "psi":
        pytest.importorskip("rbcl")
    join(league, lambda name: 'matches = 100\n[approve]\nmode = "rules"\nalgorithms = ["split"]')
    own = algorithm(match=match)
    done = league.ended(league.submit(tree(own), min_parties=3))
    assert done["status"] == "finished" and not [line for line in done["rounds"] if line.get("missing")], done["rounds"]


def test_the_aggregator_stores_no_activation_gradient_piece_or_label(league: League) -> None:
    join(league)
    own = algorithm(batch=PEOPLE)
    done = league.ended(league.submit(tree(own), min_parties=3))
    assert done["status"] == "finished"
    stored = b"".join(path.read_bytes() for path in Path(league.folder / "state").rglob("*") if path.is_file())
    reference = simulated(own)
    secrets = [value for memory in reference.memories.values() for value in pieces(memory).values()]
    secrets += [rows(HOLDER).y, *(rows(party).x for party in range(3))]  # type: ignore[list-item]
    for secret in secrets:
        raw = secret.contiguous().numpy().tobytes()
        assert len(raw) < 16 or raw[:64] not in stored
    assert b"train_loss" in stored  # what it does store was read


@pytest.mark.slow
def test_a_party_that_loses_its_work_in_the_middle_repeats_the_round(league: League) -> None:
    join(league)
    failed = list[int]()

    def wrap(work: Work, office: Any) -> Any:
        exchange = office.exchange

        def broken(*args: Any) -> Any:
            if work.round == 1 and not failed and args[2].get(HOLDER, 0) == 2:
                failed.append(work.round)
                raise OSError(errno.ENOSPC, "the disk is full")
            return exchange(*args)

        office.exchange = broken
        return office

    posting(league.members["cid"], wrap)
    own = algorithm()
    done = league.ended(league.submit(tree(own), min_parties=3))
    assert failed == [1]
    check_equal(league, done, simulated(own))
    for name in PARTIES:  # in the repetition the others could have sent other messages: it is another query
        assert read_vault(league.members[name].store.folder).count()["train"] == ROUNDS + 1


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ('models = ["logistic"]', "its policy does not accept the model '2nn'"),
        (OPS, "its policy does not accept the op 'split-train'"),
        ("[limits]\nparameters = 10", "its policy gives an ask at most 10 parameters"),
        ("[privacy]\ndp = true", "its policy requires differential privacy"),
        ("[broadcast]\nnorm = 9.0", "its policy checks the models that it is sent"),
    ],
)
def test_a_party_takes_part_by_its_policy(league: League, policy: str, reason: str) -> None:
    join(league, lambda name: f"matches = 100\n{policy}" if name == "ann" else "matches = 100")
    done = league.ended(league.submit(tree(algorithm()), min_parties=3))
    assert all("empty" in line and reason in line["missing"]["ann"] for line in done["rounds"]), done["rounds"]
