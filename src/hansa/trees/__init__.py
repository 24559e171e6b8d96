"""Decision trees."""

from hansa.trees.id3 import ID3

__all__ = ["ID3"]
