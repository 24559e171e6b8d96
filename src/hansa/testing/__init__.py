"""Conformance checks for parts of your own, as every registered part of Hansa passes them.

    from hansa.testing import check_algorithm
    check_algorithm(MyAlgorithm())

A check raises AssertionError with the promise that is broken.
"""

from __future__ import annotations

from hansa.testing.algorithms import (
    check_algorithm,
    check_codec,
    check_engines,
    check_missing_party,
    check_network,
    check_processes,
    check_replay,
)
from hansa.testing.arrivals import RecordedArrivals
from hansa.testing.engines import check_engine
from hansa.testing.experiments import (
    COLUMN_TREE,
    PARTIES,
    TREE,
    experiment_for,
    leaves,
    public_pairs,
    public_samples,
    published,
    same_bits,
)
from hansa.testing.fusions import check_fusion
from hansa.testing.metrics import check_metric
from hansa.testing.open_sizes import check_open_sizes
from hansa.testing.pools import PARTY_COMMAND, NetworkPool, PartyPool, history_on, party_columns, party_samples, run_on
from hansa.testing.solvers import check_solver
from hansa.testing.transforms import check_transform

__all__ = [
    "COLUMN_TREE",
    "PARTIES",
    "PARTY_COMMAND",
    "TREE",
    "NetworkPool",
    "PartyPool",
    "RecordedArrivals",
    "check_algorithm",
    "check_codec",
    "check_engine",
    "check_engines",
    "check_fusion",
    "check_metric",
    "check_missing_party",
    "check_network",
    "check_open_sizes",
    "check_processes",
    "check_replay",
    "check_solver",
    "check_transform",
    "experiment_for",
    "history_on",
    "leaves",
    "party_columns",
    "party_samples",
    "public_pairs",
    "public_samples",
    "published",
    "run_on",
    "same_bits",
]
