"""Server optimisers: how the global model takes an update."""

from hansa.server.adaptive import Adagrad, Adam, Yogi
from hansa.server.momentum import Momentum
from hansa.server.optimiser import Descent, ServerOptimizer

__all__ = ["Adagrad", "Adam", "Descent", "Momentum", "ServerOptimizer", "Yogi"]
