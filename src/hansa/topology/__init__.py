"""Topologies: which parties send to which in peer-to-peer learning, and the weights with which they mix."""

from hansa.topology.drawn import RandomGraph, RandomRegular, SmallWorld
from hansa.topology.edge_list import EdgeList
from hansa.topology.graph import Graph
from hansa.topology.regular import Complete, Lattice, Ring, Star
from hansa.topology.topology import Topology
from hansa.topology.weights import max_degree, metropolis, spectral_gap

__all__ = [
    "Complete",
    "EdgeList",
    "Graph",
    "Lattice",
    "RandomGraph",
    "RandomRegular",
    "Ring",
    "SmallWorld",
    "Star",
    "Topology",
    "max_degree",
    "metropolis",
    "spectral_gap",
]
