"""Published methods: recipes over the axes, or rounds of their own."""

from hansa.algorithms.dpsgd import DPSGD
from hansa.algorithms.fedavg import FedAvg, FedSGD
from hansa.algorithms.fedbuff import FedBuff
from hansa.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from hansa.algorithms.fsvrg import FSVRG

__all__ = ["DPSGD", "FSVRG", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedBuff", "FedSGD", "FedYogi"]
