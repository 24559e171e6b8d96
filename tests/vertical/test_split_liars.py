"""Split learning against liars: numbers that the aggregator announces, and people whom other parties choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_split import algorithm, run

from hansa.core.op import Op, Party
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.models.dense import TwoNN
from hansa.net.party.workload import Workload
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import PartyError
from hansa.vertical.modules import Piece
from hansa.vertical.psi_ops import TEST_ROWS
from hansa.vertical.split_ops import SplitTest, SplitTrain
from hansa.vertical.split_sequential_ops import SplitTurns, SplitTurnsTest

HUGE = 10**18
BOTTOM = TwoNN(hidden=2, outputs=2)
ROLES: dict[str, Any] = {"shapes": {"0": [3], "1": [3]}, "joins": 1, "holder": 1, "rows": HUGE, "outputs": 2}
TURNS: dict[str, Any] = {"server": 0, "sizes": {"1": HUGE}, "shape": [3], "outputs": 2}


@pytest.mark.parametrize("op, payload", [
    (SplitTrain((BOTTOM,)), ROLES), (SplitTest((BOTTOM,)), ROLES), (SplitTurns(BOTTOM, BOTTOM), TURNS),
    (SplitTurnsTest(BOTTOM, BOTTOM), TURNS),
])  # fmt: skip
def test_announced_rows_are_bounded_before_anything_is_made_of_them(op: Op, payload: dict[str, Any]) -> None:
    """One message per batch of announced rows would fill the memory before the party counts its own rows."""
    assert "at most 1000000 steps (limits.steps in party.toml)" in str(Workload().refuses(op, 5, payload))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_network_that_diverges_is_answered_and_its_last_finite_weights_stay(dtype: Any) -> None:
    """A refusal because numbers are not finite would be an answer about samples: the job chooses the learning rate."""
    result = run(algorithm(dtype=dtype, lr=1e300 if dtype == "float64" else 1e30), 2)
    assert not any("missing" in line or "empty" in line for line in result.history)
    kept = [value for memory in result.memories.values() for value in memory.values() if value.is_floating_point()]
    assert kept and all(bool(value.isfinite().all()) for value in kept)


@pytest.mark.parametrize("number", [3e38, -3e38])
def test_a_huge_number_of_another_party_is_answered_like_any_other(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label holder's loss would not be finite, and the label holder would be blamed for it."""
    plain = Piece.forward

    def lying(self: Piece, x: torch.Tensor, first: bool = False) -> torch.Tensor:
        outputs = plain(self, x, first)
        return outputs * 0 + number if self._name == "bottom 2" else outputs

    monkeypatch.setattr(Piece, "forward", lying)
    result = run(algorithm(dtype="float32"), 2)
    assert not any("missing" in line or "empty" in line for line in result.history)
    assert result.history[-1]["train_loss"] > 1e3


@pytest.mark.parametrize("common, refused", [(0, False), (1, True), (4, True), (5, False)])
def test_a_party_evaluates_only_if_enough_of_its_test_rows_are_common(common: int, refused: bool) -> None:
    """Whoever brings the other people decides which are common: with one of them, the metrics would be its label."""
    rows = TableRows(torch.zeros(9, 3), torch.zeros(9, dtype=torch.int64))
    data = SampleGateway(rows, rows)
    data.least = 5
    party = Party(1, Objective(None, "cross_entropy", 2), data, 0)
    payload = {**ROLES, "shapes": {"1": [3]}, "rows": common}
    talk = SplitTest((BOTTOM,)).talk(party, payload, {TEST_ROWS: torch.arange(common)})
    if refused:
        with pytest.raises(PartyError, match="at least 5 test samples, and fewer are common to all parties"):
            next(talk)
    else:
        with pytest.raises(StopIteration):
            next(talk)
