"""CPU time and memory of peer-to-peer mixing: graph, checks, weights, one mixing step; and whole simulated rounds.

`python benchmarks/mixing.py 1000000` mixes a model of 60 numbers (float32) among a million parties.
`python benchmarks/mixing.py --round 2000` simulates whole rounds of d-psgd and push-sum, with training.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence

import torch

import hansa
from hansa.core.plain_data import build
from hansa.topology import metropolis

NUMBERS = 60


def peak() -> float:
    """The largest memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def mix(parties: int, topologies: Sequence[str]) -> None:
    """One mixing step on each topology."""
    models = torch.randn(parties, NUMBERS, generator=torch.Generator().manual_seed(0))
    print(f"{parties} parties, {NUMBERS} numbers; {peak():.2f} GB before the graph")
    for name in topologies:
        begun = time.process_time()
        graph = build("topology", name).checked("benchmark", parties, None, True)
        checked = time.process_time()
        mixing = metropolis(graph)
        weighed = time.process_time()
        after = mixing.apply(models)
        mixed = time.process_time()
        assert torch.allclose(after.mean(0), models.mean(0), atol=1e-5)
        size = sum(tensor.nbytes for tensor in mixing) / 2**20
        print(f"{name:15} graph and checks {checked - begun:.2f} s, weights {weighed - checked:.2f} s ({size:.0f} MB), "
              f"mixing {mixed - weighed:5.2f} s, peak {peak():.2f} GB", flush=True)  # fmt: skip


def simulate(parties: int) -> None:
    """Rounds of d-psgd and push-sum in simulation, the graph's checks included in the first one."""
    x = torch.randn(parties, 4, 5, generator=torch.Generator().manual_seed(0))
    y = (x.sum(2) > 0).long()
    joined = (x.flatten(0, 1), y.flatten(), torch.arange(parties + 1) * 4)
    task = hansa.Task(lambda: torch.nn.Linear(5, 2), "cross_entropy", joined, classes=2)
    for algorithm in (hansa.DecentralizedSGD(), hansa.PushSum()):
        begun = time.process_time()
        hansa.simulate(algorithm, task, rounds=2, engine="stacked", eval_every=2, progress=False)
        taken = (time.process_time() - begun) / 2
        print(f"{algorithm.name:9} {parties} parties: {taken:.2f} s of CPU per round, peak {peak():.2f} GB")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("parties", type=int)
    arguments.add_argument("--round", action="store_true", help="simulate whole rounds")
    arguments.add_argument("--topology", nargs="+", default=["ring", "grid", "random-regular", "small-world"])
    chosen = arguments.parse_args()
    simulate(chosen.parties) if chosen.round else mix(chosen.parties, chosen.topology)
