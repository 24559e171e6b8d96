"""A deployed party's own rules for trees: the fewest rows of a node, and the size of asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import samples
from test_workload import LIMITS, answer

from hansa.classical.counts import SplitCounts
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.histograms import GradientHistograms
from hansa.classical.trees.table import TreeArrays, TreeTable
from hansa.core.op import Reply
from hansa.net.party.policy import Policy
from hansa.plumbing.errors import ConfigError

OP = GradientHistograms("logistic", 2)


def asked() -> tuple[dict[str, Any], int]:
    """An ask for both children of a split that only two rows pass, and the number of rows."""
    x = np.asarray(samples(0)[0][0], dtype=np.float64)
    cut = float(np.sort(x[:, 0])[-3])
    bins = Bins.of_features([[cut], [], []], [])
    table = TreeTable(1)
    root = table.add_root(0, 0, np.zeros(1))
    table.split(root, 0, 0, True, None, 1.0, (1, 1), (np.zeros(1), np.zeros(1)))
    payload = {"bins": bins.payload(), "trees": table.arrays().payload(), "before": TreeArrays.none(1).payload(),
               "base": torch.zeros(1, dtype=torch.float64), "slots": torch.tensor([[0, 1], [0, 2]]),
               "features": torch.arange(3)}  # fmt: skip
    return payload, len(x)


@pytest.mark.parametrize(("policy", "fewest"), [(LIMITS, 2), ("min_rows = 5\n" + LIMITS, 0)])
def test_a_party_sends_no_sums_of_fewer_rows_than_its_policy_allows(policy: str, fewest: int, tmp_path: Path) -> None:
    payload, n = asked()
    said = answer(tmp_path / "home", OP, payload, policy)
    assert isinstance(said, Reply), said
    counts = said.tensors["sums"][:, -1].sum(1) // 3
    assert counts.tolist() == [n - fewest, fewest]
    with pytest.raises(ConfigError, match="min_rows must be at least 1, got 0"):
        Policy(min_rows=0)


@pytest.mark.parametrize(("policy", "fewest"), [(LIMITS, 2), ("min_rows = 5\n" + LIMITS, 0)])
def test_a_party_counts_no_node_of_id3_with_fewer_rows_than_its_policy_allows(
    policy: str, fewest: int, tmp_path: Path
) -> None:
    x = np.asarray(samples(0)[0][0], dtype=np.float64)
    domain = [{"cuts": [float(np.sort(x[:, 0])[-3])]}, {"cuts": []}, {"cuts": []}]
    tree = {"feature": torch.tensor([0, -1, -1]), "child": torch.tensor([[1, 2], [-1, -1], [-1, -1]])}
    said = answer(tmp_path / "home", SplitCounts((1, 2), 3, 2, 2), {"domain": domain, **tree}, policy)
    assert isinstance(said, Reply), said
    assert said.tensors["totals"].sum(1).tolist() == [len(x) - fewest, fewest]
    assert said.tensors["splits"].sum((1, 2, 3)).tolist() == [3 * (len(x) - fewest), 3 * fewest]


def test_a_party_refuses_sums_that_do_not_fit_its_memory(tmp_path: Path) -> None:
    payload, _ = asked()
    wide = Bins.of_features([np.arange(60_000.0).tolist()] * 3, [])
    payload |= {"bins": wide.payload(), "slots": torch.tensor([[0, 1]] * 100)}
    said = answer(tmp_path / "home", OP, payload)
    assert isinstance(said, str) and "limits.memory" in said
    payload["slots"] = torch.tensor([[0, 1]] * 1000)
    assert "67108864 numbers are the most" in str(answer(tmp_path / "other", OP, payload))
