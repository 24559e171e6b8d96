"""The [audit] table of an experiment: what a deployed job stores so that it can be examined later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hansa.core.applies import Applies, If, check_applies
from hansa.core.plain_data import check_numbers
from hansa.core.quantities import Count

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
