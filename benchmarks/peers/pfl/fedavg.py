"""pfl-research: its own federated averaging in two processes of one thread, with the lean step in its model.

.envs/pfl/bin/python peers/pfl/fedavg.py [--model 2nn|cnn] [--rounds 20]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings

import numpy as np
import torch
from lean import module, step
from workload import BATCH, COHORT, PARTIES, Laps, arguments, party

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


def other_process() -> subprocess.Popen[bytes]:
    """Start this script a second time as the other rank; the first rank is here."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    os.environ |= {ADDRESSES: f"{address},{address}", RANK: "0"}
    return subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, RANK: "1"}, stdout=subprocess.DEVNULL)


def main() -> None:
    given = arguments(__doc__)
    other = other_process() if RANK not in os.environ else None
    warnings.filterwarnings("ignore", category=FutureWarning)
    from peers.pfl.simulation import federated_averaging

    torch.set_num_threads(1)
    np.random.seed(0)  # both ranks draw the same cohorts
    laps = Laps()
    federated_averaging(
        module(given.model).to(memory_format=torch.channels_last), step, BATCH,
        lambda index: tuple(map(torch.from_numpy, party(index))), PARTIES, COHORT, given.rounds + 1, laps,
    )  # fmt: skip
    if other is not None:
        other.wait()
        laps.report("pfl", "torch")


if __name__ == "__main__":
    main()
