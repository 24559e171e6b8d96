"""What is done to a reply on its way out of a party."""

from hansa.transforms.clip import Clip

__all__ = ["Clip"]
