"""Server optimisers: how the global model applies an update."""

from hansa.server.adaptive import Adagrad, ServerAdam, Yogi
from hansa.server.momentum import Momentum
from hansa.server.optimiser import Descent, ServerOptimizer

__all__ = ["Adagrad", "Descent", "Momentum", "ServerAdam", "ServerOptimizer", "Yogi"]
