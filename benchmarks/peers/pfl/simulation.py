"""FedAvg by pfl-research with a local step of one's own: what its contestants on the CPU and on a GPU share.

pfl decides on ranks and device when it is imported, so this module is imported late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
from torch import Tensor, nn

Step = Callable[[nn.Module, list[nn.Parameter], Tensor, Tensor], None]


class Lean(PyTorchModel):
    """A model whose local training is the given step on shuffled batches, and which is never evaluated."""

    def __init__(self, net: nn.Module, step: Step, batch: int) -> None:
        net.loss = net.metrics = step  # type: ignore[assignment]  # asked to be there, never called
        super().__init__(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
        self._step, self._batch = step, batch

    def do_multiple_epochs_of(self, user_dataset: Dataset, *_: Any, **__: Any) -> LocalResultMetaData:
        x, y = user_dataset.raw_data
        batches = torch.randperm(len(x), device=x.device).split(self._batch)
        parameters = list(self._model.parameters())
        for rows in batches:
            self._step(self._model, parameters, x.index_select(0, rows), y.index_select(0, rows))
        return LocalResultMetaData(num_steps=len(batches))

    def evaluate(self, *_: Any, **__: Any) -> Metrics:
        return Metrics()  # pfl evaluates the first cohort whatever it is told


class Clock(TrainingProcessCallback):
    """Marks the end of each round."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self._tick()
        return False, Metrics()


def federated_averaging(net: nn.Module, step: Step, batch: int, data: Callable[[int], tuple[Tensor, Tensor]],
                        parties: int, cohort: int, rounds: int, tick: Callable[[], None]) -> None:  # fmt: skip
    """Train `net`; `data` gives a party's samples, `tick` is called at the end of each round."""
    users = FederatedDataset(
        lambda index: Dataset(data(index), user_id=str(index)), get_user_sampler("random", list(range(parties)))
    )
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, cohort, None), SimulatedBackend(users, users), Lean(net, step, batch),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=1.0, local_batch_size=batch),
        callbacks=[Clock(tick)], send_metrics_to_platform=False,
    )  # fmt: skip
