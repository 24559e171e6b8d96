"""Processes (the aggregator and parties) killed at random moments lose nothing and change no bit."""

from __future__ import annotations

from pathlib import Path

from chaos_kit import campaign


def test_jobs_whose_processes_are_killed_at_random_end_with_the_bits_of_their_simulation(tmp_path: Path) -> None:
    """`make chaos` does the same with many more kills."""
    assert len(campaign(tmp_path, kills=10, seed=0)) >= 2
