"""Norms of vectors of any magnitude, and the code that divides by norms or compares them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.algorithms.zenopp import ZenoPlusPlus
from hansa.core.op import Reply
from hansa.fusion import FLTrust, NormClip
from hansa.local import SGD
from hansa.numerics import norms
from hansa.numerics.norms import l2_norm, max_abs, norm_in_pieces, norm_over, row_norms
from hansa.plumbing.errors import ConfigError
from hansa.privacy.central import CentralDP, Contribution
from hansa.replies.reply_checks import Rules, fault
from hansa.transforms.clip import ClippedUpdate, clipped

DTYPES = [torch.float32, torch.float64]


def magnitudes(dtype: torch.dtype) -> st.SearchStrategy[float]:
    most = 38 if dtype == torch.float32 else 300
    ends = [0.0, torch.finfo(dtype).tiny, torch.finfo(dtype).max, 5e-324 if dtype == torch.float64 else 1.4e-45]
    return st.one_of(st.integers(-most, most).map(lambda p: 10.0**p), st.sampled_from(ends))


def vectors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    entries = st.tuples(magnitudes(dtype), st.sampled_from([1.0, -1.0, 0.3])).map(math.prod)
    return st.lists(entries, min_size=1, max_size=4).map(lambda v: torch.tensor(v, dtype=torch.float64).to(dtype))


@pytest.mark.thin(1)
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_length_is_that_of_exact_arithmetic(dtype: torch.dtype, data: st.DataObject) -> None:
    one, other = data.draw(vectors(dtype)), data.draw(vectors(dtype))
    wanted = math.hypot(*one.double().tolist(), *other.double().tolist())
    assert l2_norm([one, other]) == pytest.approx(wanted, rel=1e-14, abs=1e-320)
    assert row_norms(one.unsqueeze(0)).item() == pytest.approx(
        math.hypot(*one.double().tolist()), rel=1e-14, abs=1e-320
    )


def test_what_is_no_number_has_no_length() -> None:
    for value in (math.nan, math.inf):
        assert not math.isfinite(l2_norm([torch.tensor([value, 1.0])]))
        assert not math.isfinite(row_norms(torch.tensor([[value, 1.0]])).item())
    assert math.isnan(max_abs([torch.tensor([math.inf]), torch.tensor([math.nan])]))
    assert l2_norm([torch.zeros(0)]) == 0.0 and row_norms(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_an_update_of_any_length_is_clipped_and_keeps_its_direction(dtype: torch.dtype, data: st.DataObject) -> None:
    update = data.draw(vectors(dtype))
    clip = 10.0 ** data.draw(st.integers(-44 if dtype == torch.float32 else -320, 30))
    got, whole = clipped({"w": update}, clip)
    values, given_values = got["w"].double().tolist(), update.double().tolist()
    long = math.hypot(*given_values)
    assert math.hypot(*values) <= clip and whole == (long <= clip)
    if whole:
        assert torch.equal(got["w"], update)
    elif clip > 1e3 * torch.finfo(dtype).tiny:
        scale = max(map(abs, given_values))
        units = [value / scale for value in given_values]
        wanted = [value / math.hypot(*units) * clip for value in units]
        assert values == pytest.approx(wanted, rel=1e-5 if dtype == torch.float32 else 1e-11, abs=clip * 1e-6)


def test_a_contribution_that_no_float64_could_square_is_clipped_and_one_that_is_not_finite_is_zero() -> None:
    party: Any = None
    reply, _ = Contribution(SGD(), clip=1.0).after(
        party, {}, Reply({"w": torch.tensor([3e200, 4e200], dtype=torch.float64)}), {}
    )
    torch.testing.assert_close(reply.tensors["w"], torch.tensor([0.6, 0.8], dtype=torch.float64))
    reply, _ = Contribution(SGD(), clip=1.0).after(party, {}, Reply({"w": torch.tensor([math.inf, 4.0])}), {})
    assert reply.tensors["w"].tolist() == [0.0, 0.0]


def test_a_bound_that_is_no_length_is_refused() -> None:
    for clip in (0.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"must be positive|must be above 0|expected a number"):
            ClippedUpdate(SGD(), clip=clip)
        with pytest.raises(ConfigError, match=r"must be positive|must be above 0|expected a number"):
            CentralDP(sigma=1.0, clip=clip)
    with pytest.raises(ConfigError, match=r"must be finite|expected a number"):
        CentralDP(sigma=math.inf)


def test_a_norm_limit_measures_updates_that_no_float64_could_square() -> None:
    update = torch.tensor([3e200, 4e200], dtype=torch.float64)
    model = {"w": torch.zeros(2).double(), "stats": torch.zeros(0), "counts": torch.zeros(0)}
    reply = Reply({"w": update}, weight=1, metrics={})
    assert fault(reply, SGD(), {"model": model}, Rules(max_norm=6e200)) is None
    assert "5e+200, is over the limit" in str(fault(reply, SGD(), {"model": model}, Rules(max_norm=4e200)))


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_rules_that_compare_lengths_do_not_depend_on_the_magnitude_of_updates(size: float) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.3, -0.4], [30.0, 40.0]]).double()
    plain = NormClip(bound=1.0)(rows)
    torch.testing.assert_close(NormClip(bound=size)(rows * size) / size, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(NormClip()(rows * size) / size, NormClip()(rows), rtol=1e-12, atol=0)
    own = torch.tensor([1.0, 1.0]).double()
    wanted = FLTrust()(rows, trusted=own)
    torch.testing.assert_close(FLTrust()(rows * size, trusted=own), wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(FLTrust()(rows, trusted=own * size) / size, wanted, rtol=1e-12, atol=0)
    u, score = ZenoPlusPlus().judge(-rows[0] * size, own)
    wanted_u, wanted_score = ZenoPlusPlus().judge(-rows[0], own)
    assert u is not None and wanted_u is not None
    torch.testing.assert_close(u, wanted_u, rtol=1e-12, atol=0)
    assert score == pytest.approx(wanted_score)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_a_norm_in_pieces_decides_as_the_norm_of_the_whole(
    dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "PIECE", 7)
    vector = torch.randn(10, 100, generator=torch.Generator().manual_seed(1)).to(dtype) * scale
    norm = l2_norm([vector])
    assert norm_in_pieces([vector]) == pytest.approx(norm, rel=1e-12)
    assert norm_over([vector], norm) is None and norm_over([vector], math.nextafter(norm, math.inf)) is None
    assert norm_over([vector], math.nextafter(norm, 0)) == norm == norm_over([vector], 0.0)
    assert norm_over([], 0.0) is None and norm_over([torch.zeros(0)], 0.0) is None
