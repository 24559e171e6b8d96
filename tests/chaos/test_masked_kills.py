"""Parties that are killed between the exchanges of a masked sum; each party is a process started by `hansa join`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos_kit import AGGREGATOR, PATIENCE, Federation, simulated

from hansa.experiment.config import Experiment, read
from hansa.net.operator import ENDED
from hansa.plumbing import codec

pytestmark = pytest.mark.slow

TOML = """
[task]
parties = ["north.npz", "north-east.npz", "south.npz"]
model = "logistic"
[algorithm]
name = "fedavg"
[run]
rounds = {rounds}
seed = 3
engine = "reference"
{privacy}
"""
MASKED = '[privacy]\nsecure = "masking"\nthreshold = 0.6\nactive = false'  # two of three
# The answers of a party: its description, then keys, shares, masked numbers and unmasking shares, per round.
AFTER_ITS_NUMBERS, AFTER_ITS_NEXT_KEYS = 4, 6


def experiment(folder: Path, rounds: int, privacy: str = "") -> Experiment:
    path = folder / f"{rounds}.toml"
    path.write_text(TOML.format(rounds=rounds, privacy=privacy))
    return read(path)


def test_a_masked_sum_survives_kill_9_after_the_numbers_came_and_says_why_where_too_few_are_left(
    tmp_path: Path,
) -> None:
    with Federation(tmp_path) as federation:
        for path in tmp_path.glob("*.npz"):  # without missing values no preparation is needed
            held = np.load(path)
            np.savez(path, x=np.nan_to_num(held["x"]), y=held["y"])
        toml = federation.home / "federation.toml"
        toml.write_text(toml.read_text().replace("# absent_after = 300", "absent_after = 20"))
        federation.members["south"].dooms = [("party.received", AFTER_ITS_NUMBERS)]
        federation.members["north-east"].dooms = [("party.received", AFTER_ITS_NEXT_KEYS)]
        until = time.monotonic() + PATIENCE
        while len(federation.rows("SELECT 1 FROM parties WHERE joined = 1")) < 3:
            federation.tend()
            assert time.monotonic() < until, federation.logs()
            time.sleep(0.02)
        federation.operator.submit(experiment(tmp_path, 2, MASKED), "masked")  # from here on a dead party stays dead
        while not (ended := federation.rows(f"SELECT * FROM jobs WHERE status IN {ENDED}")):
            assert time.monotonic() < until, federation.logs()
            time.sleep(0.02)
        assert ended[0]["status"] == "finished", ended[0]["reason"]
        alive = {name: member.process.is_alive() for name, member in federation.members.items()}
        assert alive == {AGGREGATOR: True, "north": True, "north-east": False, "south": False}
        first, second = (json.loads(row["line"]) for row in federation.rows("SELECT line FROM rounds ORDER BY round"))
        assert (first["replies"], "empty" in first) == (3, False)
        assert "south" in first["missing"]
        assert second["empty"] == "1 parties shared their secrets, and the secure sum needs 2"
        assert set(second["missing"]) == {"north-east"}  # the other party is known to be absent, and is not asked
        masked = codec.decode(federation.model("masked-1"))
    plain = codec.decode(simulated(experiment(tmp_path, 1), tmp_path / "plain"))
    assert masked["params"].keys() == plain["params"].keys()
    for name, value in plain["params"].items():
        assert torch.allclose(masked["params"][name], value, atol=1e-6)
