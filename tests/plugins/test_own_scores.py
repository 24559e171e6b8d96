"""A plug-in with several models and public samples keeps the promises of every algorithm."""

from __future__ import annotations

import pytest
from own_scores import OwnScores

from hansa.testing import NetworkPool, PartyPool, check_algorithm


@pytest.mark.slow
def test_it_keeps_the_promises_in_every_runtime(pool: PartyPool, network: NetworkPool) -> None:
    check_algorithm(OwnScores(), pool, network)
