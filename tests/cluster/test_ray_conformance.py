"""Every algorithm gives the bits of one machine on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from every_op import quick
from hansa.core.algorithm import Algorithm
from hansa.core.registry import registered
from hansa.experiment.config import Experiment
from hansa.plumbing.errors import ConfigError
from hansa.run.result import Result
from hansa.testing import check_engine
from hansa.testing.experiments import experiment_for, measured, published, same_bits, simulated
from shapes import by_shape

pytestmark = pytest.mark.slow

ALGORITHMS = {name: part for name, part in registered("algorithm").items() if part.__module__.startswith("hansa.")}


@pytest.fixture(scope="module")
def actors(cluster: Any) -> Iterator[Any]:
    """An engine whose two actors are used again by all tests of this file."""
    from hansa.cluster.crew import kept_actors
    from hansa.cluster.engines import Ray

    cluster.grow(2)
    engine = Ray(address=cluster.address, actors=2)
    with kept_actors(engine):
        yield engine


def remembered(result: Result) -> dict[str, Any]:
    return {str(party): memory for party, memory in sorted(result.memories.items())}


def check_alike(experiment: Experiment, here: Any, there: Any) -> None:
    one, other = (simulated(experiment, engine=engine) for engine in (here, there))
    assert same_bits(published(one), published(other))
    assert same_bits(remembered(one), remembered(other))
    assert measured(one.history) == measured(other.history)
    for name in ("bytes_up", "bytes_down", "asked", "replies"):
        assert [line.get(name) for line in one.history] == [line.get(name) for line in other.history]


@pytest.mark.parametrize("name", by_shape(name for name, part in ALGORITHMS.items() if part.data != "columns"))  # type: ignore[attr-defined]
def test_every_algorithm_has_the_bits_of_one_machine_on_a_cluster(name: str, actors: Any) -> None:
    algorithm = quick(ALGORITHMS[name])
    assert isinstance(algorithm, Algorithm)
    check_alike(experiment_for(algorithm, rounds=2), "reference", replace(actors, inner="reference"))
    sums = {"sums": "exact"} if "reduce" in algorithm.verbs else {}
    stacked = "stacked" if algorithm.models == "one" else "reference"
    # gathered updates stay on the cluster
    check_alike(experiment_for(algorithm, rounds=2, reply_memory=1, **sums), stacked, actors)


@pytest.mark.parametrize("name", [name for name, part in ALGORITHMS.items() if part().data == "columns"])  # type: ignore[attr-defined]
def test_every_algorithm_for_different_columns_is_refused(name: str, actors: Any) -> None:
    pytest.importorskip("rbcl")
    with pytest.raises(ConfigError, match="for parties with the same columns"):
        simulated(experiment_for(ALGORITHMS[name]()), engine=actors)  # type: ignore[arg-type]


@pytest.mark.parametrize("inner", ["reference", "stacked"])
def test_the_ray_engine_passes_the_conformance_suite_of_engines(inner: str, actors: Any) -> None:
    check_engine(replace(actors, inner=inner), 0.0 if inner == "reference" else 1e-9)
