"""Transforms: how a party's update travels, packed at the party and opened at the aggregator."""

from hansa.transforms.by_layer import ByLayer
from hansa.transforms.clip import Clip, ClippedUpdate
from hansa.transforms.error_feedback import AccumulatedTopK, ErrorFeedback
from hansa.transforms.identity import IdentityTransform
from hansa.transforms.int8 import Int8
from hansa.transforms.qsgd import QSGD
from hansa.transforms.rand_k import RandK
from hansa.transforms.sign import Sign
from hansa.transforms.stochastic_rounding import StochasticRounding
from hansa.transforms.top_k import TopK
from hansa.transforms.transform import Packed, Transform, keys

__all__ = [
    "QSGD",
    "AccumulatedTopK",
    "ByLayer",
    "Clip",
    "ClippedUpdate",
    "ErrorFeedback",
    "IdentityTransform",
    "Int8",
    "Packed",
    "RandK",
    "Sign",
    "StochasticRounding",
    "TopK",
    "Transform",
    "keys",
]
