"""Sums that nobody can open: the aggregator learns the sum of the replies and nothing about any one of them."""

from hansa.secure.channel import Channel
from hansa.secure.masking import Masking

__all__ = ["Channel", "Masking"]
