"""Jobs with `sums = "exact"` save the reference's model, to the last bit."""

from __future__ import annotations

import pytest

import hansa
from hansa.testing import NetworkPool, check_network


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [hansa.FedAvg(), hansa.Scaffold()], ids=lambda part: part.name)
def test_a_job_with_exact_sums_gives_the_reference_s_bits(algorithm: hansa.Algorithm, network: NetworkPool) -> None:
    check_network(algorithm, network, sums="exact")
