"""The method of the page "A method in one file" across a network, under parties' policies."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League, samples

from hansa.core.registry import registered

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "method-in-one-file.md"
TREE: dict[str, Any] = {
    "task": {"dataset": "heart", "dtype": "float64"}, "run": {"rounds": 1}, "privacy": {"secure": "masking"},
    "algorithm": {"name": "correlation", "features": 3},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the page, known at the aggregator and at the parties as an installed one is."""
    text = PAGE.read_text().partition("# correlation.py\n")[2].partition("```")[0]
    (tmp_path / "correlation.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    if "correlation" not in registered("algorithm"):
        importlib.import_module("correlation")


def test_an_op_of_ones_own_works_in_a_masked_sum_of_parties_with_a_floor(league: League) -> None:
    job = league.join_all(**dict.fromkeys(PARTIES, "[privacy]\nsecure = true\n")).submit(TREE)
    ended = league.ended(job)
    assert ended["status"] == "finished"
    found = torch.tensor([ended["rounds"][-1][f"correlation_{k}"] for k in range(3)], dtype=torch.float64)
    pairs = [samples(number)[0] for number in range(len(PARTIES))]
    x, y = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs]).double()
    pooled = torch.corrcoef(torch.cat([x, y[:, None]], 1).T)[3, :3]
    torch.testing.assert_close(found, pooled, rtol=0, atol=1e-7)


def test_a_party_with_differential_privacy_refuses_its_sums_without_noise(league: League) -> None:
    ended = league.ended(league.join_all(bob="[privacy]\ndp = true\nepsilon = 1.0\n").submit(TREE))
    assert ended["status"] == "failed" and "bob" in str(ended) and "differential privacy" in str(ended)
