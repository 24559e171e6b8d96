"""The rules for the replies of a deployed job: those of the run, and default limits where the run sets none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

from hansa.core.ask import Ask
from hansa.core.data_op import DataOp
from hansa.core.sums import StoredReply
from hansa.net.aggregator.asks import weight_differs
from hansa.net.aggregator.queue import Check
from hansa.net.aggregator.relayed import StoredReplies
from hansa.net.transport.wire import Answer, printable
from hansa.plumbing.errors import DataError
from hansa.plumbing.functions import is_function
from hansa.replies.partial_sums import PartialSum, unsuitable
from hansa.replies.replies import WEIGHT_CAP, expected_size
from hansa.replies.reply_checks import Rules, opener, received

REASON = 1000  # most characters of the reason of a rejection, which may quote names that the party chose
SLACK = 2**16  # bytes by which a reply may exceed its expected size: names of metrics
# Default limits. They are wide: targets may be prices, and updates as large as prices.
LARGE = 1e9  # most norm of an update, in norms of the model (plus one)
FAR = 1e9  # most change of a running mean or standard deviation, in multiples of its value (plus one)
HEAVY = 10**9  # most samples that a party may claim
WORST = 1e18  # most value of a metric, in squared norms of the model (plus one)


def limited(ask: Ask, rules: Rules, task: Mapping[str, Any]) -> Rules:
    """The rules for the replies of an ask. Where the run sets no limit, the defaults reject an update or a metric that
    dwarfs the model, or an impossible weight: an error or an attack."""
    rules = rules.of(ask)
    rules = replace(rules, max_weight=rules.max_weight or HEAVY, worst=WORST,
                    named_loss=not is_function(task.get("loss")))  # fmt: skip
    if not ask.in_round or ask.op is None:
        return rules
    return replace(rules, growth=LARGE, max_stats=rules.max_stats or FAR)


def is_capped(ask: Ask, rules: Rules) -> bool:
    """Whether the weight of a reply is capped at a multiple of the median weight; `rules` are those of the run."""
    assert ask.op is not None
    limited = rules.max_weight is not None and (ask.in_round or bool(ask.op.per_sample))
    return not (ask.op.serves or isinstance(ask.op, DataOp) or limited)


def heaviest_weight(ask: Ask, rules: Rules, blobs: Mapping[int, str], stored: StoredReplies) -> int | None:
    """The greatest weight (number of samples) with which a reply to an ask counts: a multiple of the median of its
    members (`blobs`: that of each). It depends only on the members. None where the run sets `max_weight` itself, or
    where there are fewer than two replies."""
    if not is_capped(ask, rules):
        return None
    assert ask.op is not None
    weights = []
    for party, digest in blobs.items():
        with contextlib.suppress(DataError, OSError):  # reported when the reply is read to be fused
            reply = stored.read(party, digest)
            if not isinstance(reply, PartialSum):  # relays sum where there is no cap
                weights.append(opener(ask.op).stated_samples(reply, ask.payload_of(party)))
    return WEIGHT_CAP * median_low(weights) if len(weights) > 1 else None


def summable(ask: Ask, rules: Rules) -> bool:
    """Whether relays may sum the replies to an ask; otherwise they pass them on one by one."""
    singly = ask.enough is not None or ask.packed is not None  # only the first replies count; the model travels packed
    return not singly and unsuitable(ask, rules, checked=True) is None


def expected_reply(ask: Ask, party: int, rules: Rules) -> tuple[int, Check]:
    """The most bytes of a party's reply, and the check that says why a reply must not be fused."""
    op, payload = ask.op, ask.payload_of(party)
    assert op is not None

    def check(path: Path, answer: Answer) -> str | None:
        try:
            reply = StoredReply.read(path)
        except DataError as error:
            return printable(str(error)[:REASON])
        reason = weight_differs(reply, answer) or received(reply, op, payload, rules, ask.verb != "gather")
        return printable(reason[:REASON]) if isinstance(reason, str) else None

    return expected_size(op, payload) + SLACK, check
