"""Privacy: the settings of a run, and what differential privacy needs."""

from hansa.privacy.central import CentralDP
from hansa.privacy.settings import Privacy, privacy

__all__ = ["CentralDP", "Privacy", "privacy"]
