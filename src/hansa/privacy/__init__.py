"""Privacy: the settings of a run, and what differential privacy needs."""

from collections.abc import Sequence

from hansa.core.budget import Release
from hansa.privacy.central import CentralDP
from hansa.privacy.settings import Privacy, privacy

__all__ = ["CentralDP", "Privacy", "privacy", "spent"]


def spent(releases: Sequence[Release], delta: float) -> float:
    """The epsilon of a party's releases, by the accountant that runs use; what it needs is imported when it is used."""
    from hansa.privacy.accounting import epsilon

    return epsilon(releases, delta)
