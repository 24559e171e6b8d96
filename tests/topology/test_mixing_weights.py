"""Mixing weights: symmetric, doubly stochastic, on the graph, and sparse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.core.mixing import Mixing, MixingRows
from hansa.topology import Complete, Graph, RandomGraph, RandomRegular, Ring, max_degree, metropolis, spectral_gap
from hansa.topology import weights as rules


def matrix(graph: Graph) -> torch.Tensor:
    out = torch.zeros(graph.n, graph.n, dtype=torch.bool)
    out[graph.receivers, graph.senders] = True
    return out


@settings(max_examples=40)
@given(st.integers(1, 9), st.floats(0, 1), st.integers(0, 50), st.booleans())
def test_weights_are_symmetric_doubly_stochastic_and_on_the_graph(n: int, p: float, seed: int, by_max: bool) -> None:
    graph = RandomGraph(p, seed).graph(n)
    weights = (max_degree if by_max else metropolis)(graph).dense()
    assert torch.equal(weights, weights.T)
    assert torch.allclose(weights.sum(1), torch.ones(n, dtype=torch.float64), atol=1e-14)
    assert torch.equal(weights - torch.diag(weights.diagonal()) > 0, matrix(graph))
    degree = graph.incoming
    for i, j in zip(graph.receivers, graph.senders, strict=True):
        most = degree.max() if by_max else 1 + max(degree[i], degree[j])
        assert float(weights[i, j]) == pytest.approx(1 / most, abs=1e-15)
    assert by_max or bool((weights.diagonal() > 0).all())  # so that no eigenvalue is -1, on a bipartite graph either


def test_the_spectral_gap_is_that_of_known_graphs() -> None:
    # Ring of n with weights 1/3: eigenvalues (1 + 2 cos(2 pi k / n)) / 3; n = 4 gives 1, 1/3, -1/3, 1/3.
    assert spectral_gap(metropolis(Ring().graph(4))) == pytest.approx(2 / 3)
    assert spectral_gap(metropolis(Complete().graph(5))) == pytest.approx(1.0)
    assert spectral_gap(metropolis(RandomGraph(0.0).graph(4))) == pytest.approx(0.0)
    assert spectral_gap(max_degree(Ring().graph(4))) == pytest.approx(0.0)  # two sides: the eigenvalue -1
    assert spectral_gap(metropolis(Ring().graph(1))) == 1.0


def test_the_gap_of_a_large_graph_is_that_of_all_eigenvalues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert spectral_gap(metropolis(Ring().graph(600))) == pytest.approx(
        2 / 3 * (1 - math.cos(2 * math.pi / 600)), rel=1e-3
    )
    mixing = metropolis(RandomRegular(4).graph(600))
    sparse = spectral_gap(mixing)
    monkeypatch.setattr(rules, "DENSE", 600)
    assert sparse == pytest.approx(spectral_gap(mixing), rel=1e-6)


@settings(max_examples=40)
@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 20))
def test_the_sparse_product_is_the_product_with_the_matrix_and_keeps_the_mean(n: int, p: float, seed: int) -> None:
    mixing = metropolis(RandomGraph(p, seed).graph(n))
    models = torch.from_numpy(np.random.Generator(np.random.Philox(seed)).normal(size=(n, 3)))
    after = mixing.apply(models)
    assert torch.allclose(after, mixing.dense() @ models, atol=1e-14)
    assert torch.allclose(after.mean(0), models.mean(0), atol=1e-14)
    factor = 1 - spectral_gap(mixing)
    assert float((after - after.mean(0)).norm()) <= factor * float((models - models.mean(0)).norm()) + 1e-12


@settings(max_examples=40)
@given(st.integers(1, 9), st.floats(0, 1), st.integers(0, 20))
def test_the_sparse_form_of_a_matrix_is_the_matrix(n: int, p: float, seed: int) -> None:
    mixing = metropolis(RandomGraph(p, seed).graph(n))
    again = Mixing.of(mixing.dense())
    assert all(torch.equal(a, b) for a, b in zip(mixing, again, strict=True))
    rows = MixingRows(mixing)
    assert len(rows) == n
    for party, payload in rows.items():
        line = torch.zeros(n, dtype=torch.float64)
        line[payload["mixing"]["ids"]] = payload["mixing"]["weights"]
        assert torch.equal(line, mixing.dense()[party])
    with pytest.raises(KeyError):
        rows[n]


def test_a_twenty_thousand_parties_mix_without_a_matrix() -> None:
    mixing = metropolis(RandomRegular(4).graph(20_000))
    models = torch.ones(20_000, 4)
    assert torch.allclose(mixing.apply(models), models)
    assert sum(tensor.nbytes for tensor in mixing) < 2_000_000
