"""Mixing weights of a graph: symmetric and doubly stochastic, so that mixing keeps the mean (Xiao and Boyd 2004)."""

from __future__ import annotations

import numpy as np
import torch

from hansa.core.mixing import Mixing
from hansa.topology.graph import Graph, Ids

DENSE = 500  # up to this many parties, all eigenvalues are computed


def metropolis(graph: Graph) -> Mixing:
    """W_ij = 1 / (1 + max(deg_i, deg_j)); each party keeps the rest, which is never 0."""
    degree = graph.incoming
    return _with_own(graph, 1.0 / (1 + np.maximum(degree[graph.senders], degree[graph.receivers])))


def max_degree(graph: Graph) -> Mixing:
    """W_ij = 1 / d, with the largest degree d of the graph. A party with d neighbours keeps no share for itself."""
    most = max(int(graph.incoming.max(initial=0)), 1)
    return _with_own(graph, np.full(len(graph), 1.0 / most))


def _with_own(graph: Graph, weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Mixing:
    """The matrix with the given weights of edges; the diagonal makes the sum of each row 1."""
    own = 1.0 - np.bincount(graph.receivers, weights, minlength=graph.n)
    own[np.abs(own) < 1e-12] = 0.0  # what rounding leaves
    every = np.arange(graph.n)
    rows: Ids = np.concatenate([graph.receivers, every])
    ids: Ids = np.concatenate([graph.senders, every])
    order = np.argsort(rows * max(graph.n, 1) + ids)
    starts = np.concatenate([[0], np.cumsum(graph.incoming + 1)])
    values = np.concatenate([weights, own])[order]
    return Mixing(torch.from_numpy(starts), torch.from_numpy(ids[order]), torch.from_numpy(values))


def spectral_gap(mixing: Mixing) -> float:
    """1 - max(|lambda_2|, |lambda_n|): the speed at which models agree; 0 if they never do.

    ||x - mean|| shrinks at least by the factor 1 - gap in each mixing. Above 500 parties the extreme eigenvalues are
    computed alone, by Lanczos' method.
    """
    n = mixing.parties
    if n < 2:
        return 1.0
    if n <= DENSE:
        values = torch.linalg.eigvalsh(mixing.dense()).abs().sort(descending=True).values
        return 1.0 - float(values[1])
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import LinearOperator, eigsh

    matrix = csr_array((mixing.weights.numpy(), mixing.ids.numpy(), mixing.starts.numpy()), shape=(n, n))
    without_mean = LinearOperator((n, n), matvec=lambda x: matrix @ x - x.mean(), dtype=np.float64)
    start = np.cos(np.arange(n))  # any vector that is not orthogonal to the wanted one; the same in every run
    extreme = eigsh(without_mean, k=1, which="LM", v0=start, tol=1e-8, return_eigenvectors=False)
    return 1.0 - float(abs(extreme[0]))
