"""Local solvers: what a party does with the model."""

from hansa.local.gradient import Gradient
from hansa.local.sgd import SGD
from hansa.local.solver import Batch, Carry, Context, LocalSolver
from hansa.local.svrg import SVRG

__all__ = ["SGD", "SVRG", "Batch", "Carry", "Context", "Gradient", "LocalSolver"]
