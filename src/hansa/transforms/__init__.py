"""Transforms of a reply before it leaves a party."""

from hansa.transforms.clip import Clip

__all__ = ["Clip"]
