"""A party's own model survives the deaths of its processes: it has the bits of the simulation afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chaos_kit import AGGREGATOR, ALGORITHMS, PARTIES, Federation, simulated, write_experiment

from hansa.net.party.store import strip_checksum
from hansa.plumbing import codec
from hansa.run.simulate import simulate

DEATHS = {
    AGGREGATOR: [("round.fused", 1), ("round.closed", 2)],
    "north": [("memory.rename", 1), ("party.trained", 2)],
    "north-east": [("memory.fsync", 2), ("party.forgot", 1)],
    "south": [("memory.folder", 1), ("upload.sent", 2)],
}
FEDMD = 'name = "fedmd"\nalign = 8\nprivate_epochs = 2\nlocal = { lr = 0.1, batch = 4 }'


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ditto", "admm", "fedcomed+", "fedmd"])
def test_personal_state_survives_deaths_and_restarts(kind: str, tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        algorithm, task = (FEDMD, 'public = "test.npz"') if kind == "fedmd" else (ALGORITHMS[kind], "")
        experiment = write_experiment(tmp_path, "job", algorithm, rounds=4, task=task)
        for name, dooms in DEATHS.items():
            federation.members[name].dooms = list(dooms)
        job = federation.run(experiment, "job")
        assert federation.kills == sum(map(len, DEATHS.values()))
        assert federation.model(job) == simulated(experiment, tmp_path / "run")
        memories = simulate(experiment.algorithm, experiment.build_task(), **experiment.settings()).memories
        for party, name in enumerate(PARTIES):
            stored = [
                codec.decode(strip_checksum(path.read_bytes()))
                for path in (tmp_path / "homes" / name / "memory" / job).glob("*.safetensors")
            ]
            wanted = memories[party]
            assert any(torch.equal(memory["own/w"], wanted["own/w"]) for memory in stored), name
            if "admm/y" in wanted:
                assert any(torch.equal(memory["admm/y"], wanted["admm/y"]) for memory in stored), name
