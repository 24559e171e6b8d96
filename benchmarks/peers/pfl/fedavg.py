"""pfl-research: its own federated averaging in two processes of one thread, with the lean step in its model.

    .envs/pfl/bin/python peers/pfl/fedavg.py [--model 2nn|cnn] [--rounds 20]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from typing import Any

WORLD = 2


def other_process() -> subprocess.Popen[bytes]:
    """Start this script a second time, as the other rank, and take the first rank here.

    pfl reads the ranks from the environment when its PyTorch part is imported.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([address] * WORLD)
    rank = "PFL_WORKER_RANK"
    os.environ[rank] = "0"
    return subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, rank: "1"}, stdout=subprocess.DEVNULL)


def main() -> None:
    other = other_process() if "PFL_WORKER_RANK" not in os.environ else None
    warnings.filterwarnings("ignore", category=FutureWarning)

    import numpy as np
    import torch
    from lean import module, step
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.context import LocalResultMetaData
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from workload import BATCH, COHORT, PARTIES, RATE, Laps, arguments, party

    given = arguments(__doc__)
    torch.set_num_threads(1)
    np.random.seed(0)  # both ranks draw the same cohorts

    class Lean(PyTorchModel):
        """A model whose local training is the lean step on shuffled batches."""

        def do_multiple_epochs_of(self, user_dataset: Dataset, *_: Any, **__: Any) -> LocalResultMetaData:
            x, y = user_dataset.raw_data
            batches = torch.randperm(len(x)).split(BATCH)
            parameters = list(self._model.parameters())
            for rows in batches:
                step(self._model, parameters, x.index_select(0, rows), y.index_select(0, rows))
            return LocalResultMetaData(num_steps=len(batches))

        def evaluate(self, *_: Any, **__: Any) -> Metrics:
            return Metrics()  # pfl evaluates the first cohort whatever the frequency; nobody else does

    class Clock(TrainingProcessCallback):
        """Marks the end of each round."""

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            laps()
            return False, Metrics()

    def dataset(index: int) -> Dataset:
        x, y = party(index)
        return Dataset((torch.from_numpy(x), torch.from_numpy(y)), user_id=str(index))

    net = module(given.model).to(memory_format=torch.channels_last)
    net.loss = net.metrics = lambda *_: None  # pfl asks that they be there; the lean step has its own loss
    model = Lean(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    data = FederatedDataset(dataset, get_user_sampler("random", list(range(PARTIES))))
    laps = Laps()
    FederatedAveraging().run(
        NNAlgorithmParams(given.rounds + 1, given.rounds + 2, COHORT, None), SimulatedBackend(data, data), model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        callbacks=[Clock()], send_metrics_to_platform=False,
    )  # fmt: skip
    if other is not None:
        other.wait()
        laps.report("pfl", "torch")


if __name__ == "__main__":
    main()
