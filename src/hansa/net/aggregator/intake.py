"""Intake of an answer: make its upload a blob, check it, store it, and only then acknowledge it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hansa.core.crash_points import reach
from hansa.net.aggregator.asks import Sent, check_answered, earlier_receipt, store_answer, unoffered
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.effects import Do, Steps, Write
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.queue import Key, QueuedAsk, TaskQueue
from hansa.net.transport.wire import Receipt


@dataclass(frozen=True)
class Intake:
    """Takes answers into the ledger. `discard` deletes blobs that nothing needs."""

    ledger: Ledger
    blobs: Blobs
    queue: TaskQueue
    discard: Callable[[list[str]], None]

    def steps(self, key: Key, sent: Sent, owner: str, queued: QueuedAsk | None) -> Steps[Receipt]:
        """Take a party's answer; returns the receipt.

        `owner` owns the upload of the answer's blob. `queued` is the ask, None where it is no longer offered. A reply
        that must not be fused is rejected here, and the receipt says why.
        """
        receipt = earlier_receipt(self.ledger, key, sent, self.ledger.notary)
        if receipt is None:  # no blob is made of an upload that will not be stored
            receipt = yield from self._store(key, sent, owner, queued)
        reach("reply.acknowledged")
        self.queue.answered(key, sent.party, sent.answer.why if receipt.why is None else receipt.why)
        return receipt

    def _store(self, key: Key, sent: Sent, owner: str, queued: QueuedAsk | None) -> Steps[Receipt]:
        if queued is None:
            raise unoffered(self.ledger, key, sent.party, sent.name)
        check_answered(queued.work, sent.answer)
        blob = sent.answer.blob
        if blob is None:
            receipt: Receipt = yield Write(store_answer(key, sent, None))
            return receipt
        path = yield Do(lambda: self.blobs.finish(owner, blob.digest, blob.size))
        reach("reply.stored")
        needed = False
        try:
            try:
                rejected: str | None = yield Do(lambda: queued.check(path, sent.answer))
            except FileNotFoundError:  # another job with the same bytes has just discarded them
                raise Gap(0) from None
            receipt = yield Write(store_answer(key, sent, path, rejected, queued.work.min_cohort))
            needed = receipt.status == "accepted"
        finally:
            if not needed:
                yield Do(lambda: self.discard([path.name]))
        return receipt
