"""Published algorithms: combinations of parts (solver, fusion, server optimiser), or rounds of their own."""

from hansa.algorithms.adaptive_top_k import AdaptiveTopK
from hansa.algorithms.admm import ConsensusADMM
from hansa.algorithms.apfl import APFL
from hansa.algorithms.bayesian_gossip import BayesianGossip
from hansa.algorithms.coop import CoOp
from hansa.algorithms.dapper import DAPPER
from hansa.algorithms.decentralized_sgd import DecentralizedSGD
from hansa.algorithms.ditto import Ditto
from hansa.algorithms.easgd import EASGD, OverlapSGD
from hansa.algorithms.fedasync import FedAsync
from hansa.algorithms.fedavg import FedAvg, FedSGD
from hansa.algorithms.fedbuff import FedBuff
from hansa.algorithms.fedmd import FedMD
from hansa.algorithms.fednova import FedNova
from hansa.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from hansa.algorithms.fedper import FedPer
from hansa.algorithms.fedplus import FedAvgPlus, FedCoMedPlus, FedGeoMedPlus
from hansa.algorithms.fedprox import FedProx
from hansa.algorithms.fedrep import FedRep
from hansa.algorithms.fsvrg import FSVRG
from hansa.algorithms.hypcluster import HypCluster
from hansa.algorithms.ifca import IFCA
from hansa.algorithms.lg_fedavg import LGFedAvg
from hansa.algorithms.mapper import MAPPER
from hansa.algorithms.optimal_averaging import OptimalAveraging
from hansa.algorithms.prunefl import PruneFL
from hansa.algorithms.push_sum import PushSum
from hansa.algorithms.qfedavg import QFedAvg, QFedSGD
from hansa.algorithms.scaffold import Scaffold
from hansa.algorithms.self_aggregation import SelfAggregation
from hansa.algorithms.staleness import ConstantStaleness, HingeStaleness, PolynomialStaleness, Staleness
from hansa.algorithms.zenopp import ZenoPlusPlus

__all__ = [
    "APFL",
    "DAPPER",
    "EASGD",
    "FSVRG",
    "IFCA",
    "MAPPER",
    "AdaptiveTopK",
    "BayesianGossip",
    "CoOp",
    "ConsensusADMM",
    "ConstantStaleness",
    "DecentralizedSGD",
    "Ditto",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedAvgPlus",
    "FedBuff",
    "FedCoMedPlus",
    "FedGeoMedPlus",
    "FedMD",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSGD",
    "FedYogi",
    "HingeStaleness",
    "HypCluster",
    "LGFedAvg",
    "OptimalAveraging",
    "OverlapSGD",
    "PolynomialStaleness",
    "PruneFL",
    "PushSum",
    "QFedAvg",
    "QFedSGD",
    "Scaffold",
    "SelfAggregation",
    "Staleness",
    "ZenoPlusPlus",
]
