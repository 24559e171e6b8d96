"""Secure sums: the aggregator learns the sum of the replies and nothing else about any single reply."""

from hansa.secure.channel import Channel
from hansa.secure.masking import Masking

__all__ = ["Channel", "Masking"]
