"""Classical models, learned from sums: linear models, naive Bayes, decision trees, boosting and forests."""

from hansa.classical.id3 import ID3
from hansa.classical.inference import Coefficient, coefficients
from hansa.classical.linear import KernelSVM, LeastSquares, LinearSVM, LogisticNewton
from hansa.classical.naive_bayes import GaussianNB
from hansa.classical.trees import Boosting, RandomForest, importances, lightgbm_model

__all__ = [
    "ID3", "Boosting", "Coefficient", "GaussianNB", "KernelSVM", "LeastSquares", "LinearSVM", "LogisticNewton",
    "RandomForest", "coefficients", "importances", "lightgbm_model",
]  # fmt: skip
