"""What fusions report beside the fused update, also when a row is read in several blocks."""

from __future__ import annotations

import pytest
import torch
from rules import draw

from hansa.fusion import FLTrust, MeaMed, Median, NormClip
from hansa.fusion.distances import WIDE, layer_norms
from hansa.numerics.rows import Rows


def test_norms_of_layers_that_begin_and_end_in_other_blocks() -> None:
    rows = draw(0, 4, WIDE, dtype=torch.float64)
    lengths = [3, WIDE // 2, 5, WIDE // 2 - 8]
    wanted = torch.stack([part.norm(dim=1) for part in rows.split(lengths, dim=1)], 1)
    torch.testing.assert_close(layer_norms(Rows(rows), lengths), wanted, rtol=1e-12, atol=0)


def test_shares_count_the_coordinates_of_all_blocks() -> None:
    rows = draw(1, 5, WIDE, dtype=torch.float64)
    wanted = (rows == rows.median(0).values).double().mean(1).tolist()
    assert Median().examine(rows).shares == pytest.approx(wanted, abs=1e-12)


def test_the_limits_of_meamed_are_those_of_the_values_that_it_chose_among_ties() -> None:
    rows = torch.tensor([[2.0], [-1], [0], [-2], [1]], dtype=torch.float64)
    seen = MeaMed(q=1).examine(rows)  # 2 and -2 are equally far from the median 0: the earlier one stays
    assert seen.w.tolist() == [0.5]
    assert seen.shares == [1, 1, 1, 0, 1]


def test_the_scores_of_fltrust_are_cosines_whatever_the_lengths() -> None:
    rows, own = draw(2, 6, 7, dtype=torch.float64), 20 * draw(3, 1, 7, dtype=torch.float64)[0]
    rows[0] = own / 7
    for trusted in (own, own / 1000):
        scores = FLTrust().examine(rows, trusted=trusted).scores
        assert scores == pytest.approx(torch.cosine_similarity(rows, own[None], dim=1).tolist())


def test_the_shares_of_norm_clipping_are_the_weights() -> None:
    rows = draw(4, 4, 3)
    assert NormClip().examine(rows).shares == [0.25] * 4
