"""A relay that dies at any named point loses no reply that it has acknowledged, and none counts twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_kit import ALGORITHMS, simulated, write_experiment
from relay_kit import RELAYED, RelayedFederation


@pytest.mark.slow
def test_a_job_survives_the_death_of_its_relay_at_every_point(tmp_path: Path) -> None:
    with RelayedFederation(tmp_path) as federation:
        exact = 'sums = "exact"\nmax_weight = 1000'
        experiment = write_experiment(tmp_path, "job", ALGORITHMS["scaffold"], rounds=20, run=exact)
        for name, dooms in RELAYED.items():
            federation.members[name].dooms = list(dooms)
        job = federation.run(experiment, "job")
        assert federation.kills == sum(map(len, RELAYED.values()))
        federation.check(job, rounds=20)
        assert federation.model(job) == simulated(experiment, tmp_path / "run")
        federation.check_passed_on(job)
