"""Vertical learning: parties hold different columns of the same people, and first find the people they share."""

from hansa.vertical.fedv import FedV
from hansa.vertical.linear import VerticalLinear
from hansa.vertical.linkage import Linkage
from hansa.vertical.psi import PSI, People, aligned, counted
from hansa.vertical.secureboost import ColumnForest, SecureBoost
from hansa.vertical.split import Split
from hansa.vertical.split_sequential import SequentialSplit

__all__ = [
    "PSI",
    "ColumnForest",
    "FedV",
    "Linkage",
    "People",
    "SecureBoost",
    "SequentialSplit",
    "Split",
    "VerticalLinear",
    "aligned",
    "counted",
]
