"""A run that is no longer referenced frees its memory at once, without a garbage collection."""

import gc
import weakref

import pytest

import hansa
from hansa.experiment.config import parse

TREE = {
    "task": {"dataset": "digits", "model": "2nn", "party_test": 0.2},
    "partition": {"name": "iid", "parties": 4},
    "run": {"rounds": 2, "cohort": 0.5},
}


@pytest.mark.parametrize("engine", ("reference", "stacked"))
@pytest.mark.parametrize("algorithm", ("fedavg", "scaffold"))
def test_a_run_is_freed_with_the_last_reference_to_it(algorithm: str, engine: str) -> None:
    experiment = parse({**TREE, "algorithm": {"name": algorithm}, "run": {**TREE["run"], "engine": engine}})
    seen: list[int] = []
    task = experiment.build_task()
    gc.disable()
    try:
        result = hansa.simulate(
            experiment.algorithm, task, on_round=lambda line: seen.append(line["round"]), **experiment.settings()
        )
        training, holdings = weakref.ref(result.training), weakref.ref(result.training.holdings)
        del result
        assert seen == [1, 2]
        assert training() is None and holdings() is None
    finally:
        gc.enable()
