"""Privacy: the settings of a run, and what differential privacy needs."""

from hansa.privacy.settings import Privacy, privacy

__all__ = ["Privacy", "privacy"]
