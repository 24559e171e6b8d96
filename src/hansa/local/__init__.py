"""Local solvers: how a party trains the model on its own samples."""

from hansa.local.adam import Adam
from hansa.local.alternating import Alternating
from hansa.local.consensus import Consensus
from hansa.local.context import Batch, Context
from hansa.local.data_interpolation import DataInterpolation
from hansa.local.ditto import TwoModels
from hansa.local.dp_sgd import DPSGD
from hansa.local.elastic import Elastic, Overlapped
from hansa.local.fair import Fair, FairGradient
from hansa.local.finetune import FineTuning
from hansa.local.gradient import Gradient
from hansa.local.halves import Halves
from hansa.local.mixed import Mixed
from hansa.local.model_interpolation import ModelInterpolation
from hansa.local.normalise import Normalise
from hansa.local.nova import Normalised
from hansa.local.personal import Personal, Representation
from hansa.local.plus import Plus
from hansa.local.proximal import Proximal
from hansa.local.pruned import Pruned, SquaredGradient
from hansa.local.scaffold import Controlled
from hansa.local.sgd import SGD
from hansa.local.solver import Carry, LocalSolver
from hansa.local.step_rule import ClipRule, StepRule
from hansa.local.svrg import SVRG

__all__ = [
    "DPSGD", "SGD", "SVRG", "Adam", "Alternating", "Batch", "Carry", "ClipRule", "Consensus", "Context", "Controlled",
    "DataInterpolation", "Elastic", "Fair", "FairGradient", "FineTuning", "Gradient", "Halves", "LocalSolver", "Mixed",
    "ModelInterpolation", "Normalise", "Normalised", "Overlapped", "Personal", "Plus", "Proximal", "Pruned",
    "Representation", "SquaredGradient", "StepRule", "TwoModels",
]  # fmt: skip
