"""Server optimisers: how the global model takes an update."""

from hansa.server.optimiser import Descent, ServerOptimizer

__all__ = ["Descent", "ServerOptimizer"]
