"""HypCluster: user clustering (Mansour, Mohri, Ro and Suresh 2020, "Three Approaches for Personalization")."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.algorithms.clustering import Clustering
from hansa.core.registry import register


@register("hypcluster")
@dataclass(frozen=True)
class HypCluster(Clustering):
    """k models; each party trains the one that fits its samples best. Mansour et al. 2020, Algorithm HypCluster.

    Each party of the cohort takes the model of least loss on its own training samples (the first of equals), trains it
    with `local`, and the server averages the updates of each cluster, weighted by samples. A model that no party took
    stays as it is. So the sum over parties of n_k min_c F_k(h_c) falls, if each cluster's step lowers its own loss.
    """
