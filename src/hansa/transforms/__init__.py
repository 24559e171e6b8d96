"""Transforms: how a party's update travels, packed at the party and opened at the aggregator."""

from hansa.transforms.clip import Clip, ClippedUpdate
from hansa.transforms.int8 import Int8
from hansa.transforms.transform import Packed, Transform, keys

__all__ = ["Clip", "ClippedUpdate", "Int8", "Packed", "Transform", "keys"]
