"""Processes (the aggregator and parties) killed at random moments lose nothing and change no bit."""

from __future__ import annotations

from pathlib import Path

import chaos_kit
import pytest
from chaos_kit import AGGREGATOR, ALGORITHMS, Federation, campaign, write_experiment

from hansa.plumbing.errors import ConfigError

pytestmark = pytest.mark.slow


def test_jobs_whose_processes_are_killed_at_random_end_with_the_bits_of_their_simulation(tmp_path: Path) -> None:
    """`make chaos` does the same with many more kills."""
    assert len(campaign(tmp_path, kills=10, seed=0)) >= 2


def test_a_job_that_is_refused_or_makes_no_progress_ends_the_campaign_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = write_experiment(tmp_path, "job", ALGORITHMS["scaffold"], rounds=2)
    with Federation(tmp_path) as federation:
        with pytest.raises(ConfigError, match="invalid name 'no name'"):
            federation.run(experiment, "no name")
        monkeypatch.setattr(chaos_kit, "PATIENCE", 3.0)
        monkeypatch.setattr(chaos_kit, "FUTILE", 10**9)
        with pytest.raises(AssertionError, match=r"no progress of job .* since [1-9]\d* kills"):
            federation.run(experiment, "job", lambda: federation.kill(AGGREGATOR))
