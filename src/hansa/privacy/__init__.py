"""The privacy settings of a run, central differential privacy and its accounting."""

from collections.abc import Sequence

from hansa.core.budget import Release
from hansa.privacy.central import CentralDP
from hansa.privacy.settings import Privacy, privacy

__all__ = ["CentralDP", "Privacy", "privacy", "spent"]


def spent(releases: Sequence[Release], delta: float) -> float:
    """The epsilon of a party's releases, by the accountant that runs use (`rdp`)."""
    from hansa.kernel.renyi import renyi_epsilon

    return renyi_epsilon(releases, delta)
