"""HTTPS handlers for relays, which ask and answer for the parties behind them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from aiohttp import web

from hansa.net.aggregator.asks import Unasked, named_ask, unoffered_to
from hansa.net.aggregator.queue import Key, QueuedAsk
from hansa.net.aggregator.registry import Denied
from hansa.net.aggregator.routes import Call, Endpoints, packed
from hansa.net.transport.admission import until_disconnect
from hansa.net.transport.pacing import jittered, pacing_headers, poll_seconds
from hansa.net.transport.wire import CHUNK, LeafWork, RelayOrders, RelayPoll, RelayWork, ask_name, unpack
from hansa.plumbing.errors import DataError
from hansa.replies.reply_checks import Rules

SPARE = 0.8  # share of the time until a deadline in which a relay must answer; the rest is for its own answer
PER_LEAF = 4400  # bytes of a relay's answer per party, beside its reply: its outcome, with a reason
LIMBS = 8  # a partial sum is at most this many times as large as a reply
MARGIN = 2**16


class RelayRoutes(Endpoints):
    """The requests of relays. A relay reaches only the asks of the parties behind it."""

    async def work(self, call: Call) -> web.Response:
        """A relay's poll for work."""
        if call.name not in self.registry.federation.relays:
            raise Denied(f"{call.name} is no relay here; federation.toml lists relays in its table [relays]")
        poll = unpack(call.body, RelayPoll, CHUNK)
        number = await self.met(call, poll.instance)
        leaves = self.registry.federation.relays[call.name]
        connected = [self.registry.number(name) for name in poll.connected if name in leaves]
        held = {self.registry.number(name): frozenset(jobs) for name, jobs in poll.unapproved.items() if name in leaves}
        self.queue.report(number, connected, held)
        busy = {_key(text): text for text in poll.busy}
        longest = self.registry.federation.serve.poll
        seconds = jittered(min(poll.wait, poll_seconds(self.queue.known, longest)))
        with until_disconnect(call.request):
            key = await self.queue.wait_for_relayed(number, poll.instance, seconds, busy.keys(),
                                                    lambda: bool(self._unwanted(call, number, busy)))  # fmt: skip
        assert call.identity is not None
        self.check(call.identity)  # it may have been revoked while the poll was held open
        if key is None and self.admission.closing.is_set():
            raise self.admission.shutting_down()
        offers = self.queue.find_relayed(number, key) if key is not None else {}
        orders = RelayOrders(self._work(offers) if offers else None, self._unwanted(call, number, busy),
                             [name for name in poll.connected if name not in leaves])  # fmt: skip
        return packed(orders, pacing_headers(self.queue.known, longest))

    def _unwanted(self, call: Call, relay: int, busy: dict[Key, str]) -> list[str]:
        """Those of the asks that a relay works on whose answers are not wanted any more."""

        def wanted(key: Key) -> bool:
            if self.queue.find_relayed(relay, key):
                return True
            return not isinstance(unoffered_to(self.ledger, key, self.queue.leaves[relay], call.name), Unasked)

        return [text for key, text in busy.items() if not wanted(key)]

    def _work(self, offers: dict[int, QueuedAsk]) -> RelayWork:
        first = next(iter(offers.values()))
        names = {number: name for name, number in self.registry.numbers.items()}
        leaves = [
            LeafWork(names[leaf], offer.work.party, offer.work.base, offer.work.tip, offer.work.pending,
                     None if offer.work.message == first.work.message else offer.work.message)
            for leaf, offer in offers.items()
        ]  # fmt: skip
        terms = first.terms
        assert terms is not None
        seconds = None if terms.until is None else max(0.0, terms.until - time.monotonic()) * SPARE
        limit = max(offer.limit for offer in offers.values())
        rules = rules_tree(terms.rules) if terms.sums else {}
        return RelayWork(first.work, leaves, terms.sums, terms.ask.uniform, limit, rules, seconds, terms.patient)

    def queued(self, call: Call) -> tuple[int, Key, QueuedAsk | None]:
        """The relay's number, the key that the path names, and the ask as it is offered to the first of its parties, or
        to the one that the query names (`for`)."""
        relay, key = self.registry.number(call.name), call.key
        offers = self.queue.find_relayed(relay, key)
        name = call.query("for")
        if name and self.registry.relay_of.get(name) != call.name:
            raise DataError(f"the party {name[:64]!r} is not behind the relay {call.name}")
        return relay, key, offers.get(self.registry.number(name)) if name else next(iter(offers.values()), None)

    def limit(self, call: Call) -> int:
        """The most bytes of a relay's answer."""
        offers = self.queue.find_relayed(self.registry.number(call.name), call.key)
        each = [offer.limit + PER_LEAF for offer in offers.values()]
        return max(sum(each), LIMBS * max(each, default=0) + PER_LEAF * len(each)) + MARGIN


def rules_tree(rules: Rules) -> dict[str, Any]:
    """Rules as a message."""
    return dataclasses.asdict(rules)


def _key(text: str) -> Key:
    job, round, phase, number = (text.split("/") + [""] * 4)[:4]
    return named_ask({"job": job, "round": round, "phase": phase, "number": number})


def ask_text(key: Key) -> str:
    """An ask as a relay names it."""
    return f"{key[0]}/{ask_name(*key[1:])}"
