"""Every registered algorithm passes the suite that all algorithms must pass."""

import pytest

from every_op import quick
from hansa.core.algorithm import Algorithm
from hansa.core.registry import registered
from hansa.testing import PartyPool, check_algorithm

OURS = [name for name, part in registered("algorithm").items() if part.__module__.startswith("hansa.")]


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", OURS)
def test_every_registered_algorithm_keeps_the_promises(name: str, pool: PartyPool) -> None:
    algorithm = quick(registered("algorithm")[name])
    if type(algorithm).__module__.startswith("hansa.vertical"):
        pytest.importorskip("rbcl")
    assert isinstance(algorithm, Algorithm)
    check_algorithm(algorithm, pool)
