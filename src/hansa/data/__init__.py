"""Data sets, the ways to divide them among parties, and a party's own files."""

from hansa.core.class_counts import ClassCounts
from hansa.data.adult import ADULT_FEATURES, Adult
from hansa.data.cifar import Cifar10
from hansa.data.class_weights import WeighClasses
from hansa.data.column_options import ColumnOptions
from hansa.data.column_split import ColumnParts, Columns
from hansa.data.column_transformer import ColumnTransformer
from hansa.data.csv_file import CsvFile
from hansa.data.dataset import Data, Dataset
from hansa.data.describe import Describe
from hansa.data.heart import HEART_FEATURES, Heart
from hansa.data.idx import FashionMnist, Mnist
from hansa.data.label_skew import Dirichlet, Shards, Similarity
from hansa.data.partition import Iid, Natural, Noise, Partition, Quantity
from hansa.data.party_files import load_party_file
from hansa.data.party_folders import load_party_folder
from hansa.data.picture import draw, held, table
from hansa.data.prepare import KeepMissing, Preparation, Standardise
from hansa.data.scikit import BreastCancer, Digits
from hansa.data.shakespeare import Shakespeare
from hansa.data.synthetic import Synthetic
from hansa.data.table import Table

__all__ = [
    "ADULT_FEATURES",
    "HEART_FEATURES",
    "Adult",
    "BreastCancer",
    "Cifar10",
    "ClassCounts",
    "ColumnOptions",
    "ColumnParts",
    "ColumnTransformer",
    "Columns",
    "CsvFile",
    "Data",
    "Dataset",
    "Describe",
    "Digits",
    "Dirichlet",
    "FashionMnist",
    "Heart",
    "Iid",
    "KeepMissing",
    "Mnist",
    "Natural",
    "Noise",
    "Partition",
    "Preparation",
    "Quantity",
    "Shakespeare",
    "Shards",
    "Similarity",
    "Standardise",
    "Synthetic",
    "Table",
    "WeighClasses",
    "draw",
    "held",
    "load_party_file",
    "load_party_folder",
    "table",
]
