"""The [audit] table of an experiment: what a deployed job stores so that it can be examined later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.algorithm import Algorithm
from hansa.core.applies import Applies, If, check_applies
from hansa.core.plain_data import check_numbers
from hansa.core.quantities import Count
from hansa.plumbing.errors import ConfigError
from hansa.privacy import Privacy

BYTES = 2**30  # of kept replies, unless the experiment sets another limit


@dataclass(frozen=True)
class AuditTable:
    """The [audit] table. With `keep_replies` the aggregator stores every accepted reply of a deployed job, as it reads
    it, beside the payload that was sent: attacks can then measure what the replies reveal. Parties refuse such a job
    unless their policy allows it. At most `keep_bytes` bytes are stored; the replies of later asks are not kept.
    """

    keep_replies: bool = False
    keep_bytes: Count = BYTES
    applies: ClassVar[Applies] = {"keep_bytes": If("keep_replies", True)}

    def __post_init__(self) -> None:
        check_numbers(self)
        check_applies(self)

    def check(self, algorithm: Algorithm, privacy: Privacy) -> None:
        """Raise a ConfigError if nothing readable would be stored."""
        if not self.keep_replies:
            return
        if privacy.secure is not None:
            raise ConfigError(
                f"audit.keep_replies: the secure sum {privacy.secure.name!r} hides every single reply, so nothing "
                "readable would be stored; leave out one of them"
            )
        if "route" in algorithm.verbs or algorithm.data == "columns":
            raise ConfigError(
                f"audit.keep_replies: parties of {algorithm.name} seal their messages for each other, so nothing "
                "readable would be stored; leave it out"
            )

    def check_simulated(self) -> None:
        """Raise a ConfigError if the setting would be ignored in a simulation."""
        if self.keep_replies:
            raise ConfigError(
                "audit.keep_replies applies to deployed jobs (hansa submit); a simulation can be repeated with the "
                "same replies: leave it out"
            )
