"""Intake of an answer: make its upload a blob, check it, store it, and only then acknowledge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hansa.net.aggregator.asks import (
    WHERE,
    Sent,
    check_answered,
    earlier_receipt,
    store_answer,
    unoffered,
    unoffered_to,
)
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.effects import Do, Steps, Write
from hansa.net.aggregator.ledger import Ledger
from hansa.net.aggregator.queue import Key, QueuedAsk, TaskQueue
from hansa.net.aggregator.relayed import earlier_relayed, judged, read_relayed, store_relayed
from hansa.net.transport.wire import LeafOutcome, Receipt
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import DataError


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

    def relayed_steps(self, key: Key, sent: Sent, owner: str, leaves: Sequence[int]) -> Steps[Receipt]:
        """Take a relay's answer, for the parties behind it (`leaves`); returns the receipt."""
        receipt = earlier_relayed(self.ledger, key, sent, leaves, self.ledger.notary)
        if receipt is None:
            receipt = yield from self._store_relayed(key, sent, owner, leaves)
        reach("reply.acknowledged")
        rows = self.ledger.all(f"SELECT party, why FROM replies WHERE {WHERE}", *key)
        for party, why in ((row["party"], row["why"]) for row in rows if row["party"] in set(leaves)):
            self.queue.answered(key, party, why)
        return receipt

    def _store_relayed(self, key: Key, sent: Sent, owner: str, leaves: Sequence[int]) -> Steps[Receipt]:
        offers = self.queue.find_relayed(sent.party, key)
        blob = sent.answer.blob
        if blob is None:
            raise DataError("a relay answers with what became of the ask at each of its parties, not with a refusal")
        if not offers:
            raise unoffered_to(self.ledger, key, leaves, sent.name)
        work, terms = next((offer.work, offer.terms) for offer in offers.values())
        check_answered(work, sent.answer)
        assert terms is not None
        path = yield Do(lambda: self.blobs.finish(owner, blob.digest, blob.size))
        reach("reply.stored")
        needed = False
        try:
            asked = terms.behind(set(leaves))

            def outcomes() -> dict[int, LeafOutcome]:
                try:
                    content = read_relayed(path)
                except FileNotFoundError:  # another job with the same bytes has just discarded them
                    raise Gap(0) from None
                if content.weight != sent.answer.weight:
                    raise DataError(f"its weight is {content.weight}, but the relay signed {sent.answer.weight}")
                outcomes = judged(content, sent.name, terms, asked)
                return {terms.own_number(party): outcome for party, outcome in outcomes.items()}

            told: dict[int, LeafOutcome] = yield Do(outcomes)
            receipt: Receipt = yield Write(store_relayed(key, sent, path, told, leaves, work.min_cohort))
            needed = receipt.status == "accepted"
        finally:
            if not needed:
                yield Do(lambda: self.discard([path.name]))
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
