"""Tracked jobs of an aggregator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from league import League

from hansa.net.aggregator.federation import FederationFolder
from hansa.plumbing.errors import ConfigError

TREE: dict[str, Any] = {
    "task": {"dataset": "heart", "model": "logistic", "dtype": "float64"}, "algorithm": "fedavg", "run": {"rounds": 3}
}  # fmt: skip


def tracked(league: League, tables: str) -> None:
    """Start the aggregator again with trackers."""
    league.stop()
    path = league.folder / "federation.toml"
    path.write_text(path.read_text() + tables)
    league.start()


@pytest.mark.slow
def test_every_job_is_tracked_and_a_tracker_that_fails_is_none_of_its_business(league: League, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    tracked(league, f'\n[track.jsonl]\npath = "{events}"\n')
    league.join_all()
    job = league.submit(TREE)
    assert league.ended(job)["status"] == "finished"
    league.stop()  # which waits for the job's thread
    league.start()
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert [e["event"] for e in found] == ["start", "round", "round", "round", "finish"]
    assert {e["run"] for e in found} == {job} and found[0]["tags"]["hansa.engine"] == "network"
    assert found[-1]["summary"]["rounds"] == 3
    events.unlink()
    events.mkdir()  # nothing can be written there any more
    assert league.ended(league.submit(TREE))["status"] == "finished"


def test_trackers_of_a_federation_are_checked_when_it_is_opened(league: League) -> None:
    path = league.folder / "federation.toml"
    path.write_text(path.read_text() + "\n[track.jsonnl]\n")
    with pytest.raises(ConfigError, match="unknown tracker 'jsonnl'; did you mean 'jsonl'"):
        FederationFolder.open(league.folder)
