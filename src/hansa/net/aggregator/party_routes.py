"""HTTPS handlers for parties: enrolment, work, messages, uploads, answers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from hansa.core.errors import DataError
from hansa.core.runtime import complete_async
from hansa.net.aggregator.asks import Sent, Unasked, named_ask, unoffered, whole
from hansa.net.aggregator.effects import Do, Wait, Write
from hansa.net.aggregator.files import served
from hansa.net.aggregator.intake import Intake
from hansa.net.aggregator.queue import Key, QueuedAsk
from hansa.net.aggregator.registry import Denied
from hansa.net.aggregator.routes import Call, Endpoints, Route, owner, packed
from hansa.net.audit.evidence import make_statement, signed_by
from hansa.net.transport import signing
from hansa.net.transport.admission import until_disconnect
from hansa.net.transport.pacing import POLL, jittered, pacing_headers, poll_seconds
from hansa.net.transport.wire import CHUNK, UNWANTED, Answer, Enrolment, IssuedCertificate, ask_name, printable, unpack

log = logging.getLogger("hansa.net")


class PartyRoutes(Endpoints):
    """The routes of parties, and the two that need no certificate. A party reaches only its own asks."""

    def routes(self) -> list[Route]:
        ask = "/v1/jobs/{job}/asks/{round}/{phase}/{number}"
        return [
            Route("GET", "/v1/ca", "anyone", False, self.authority),
            Route("POST", "/v1/enrol", "anyone", False, self.enrol),
            Route("POST", "/v1/rotate", "party", True, self.rotate),
            Route("GET", "/v1/work", "party", False, self.work),
            Route("POST", "/v1/alive", "party", False, self.alive),
            Route("GET", ask + "/message", "party", False, self.message),
            Route("GET", ask + "/task", "party", False, self.task),
            Route("GET", ask + "/public", "party", False, self.public),
            Route("GET", ask + "/parts/{digest}", "party", False, self.part_received),
            Route("PUT", ask + "/parts/{digest}", "party", True, self.part, CHUNK),
            Route("POST", ask + "/reply", "party", True, self.reply),
            Route("GET", "/v1/log/certificate", "party", False, self.log_certificate),
        ]

    async def authority(self, call: Call) -> web.Response:
        return web.Response(body=self.registry.federation.read("ca.pem"), content_type="application/x-pem-file")

    async def enrol(self, call: Call) -> web.Response:
        enrolment = unpack(call.body, Enrolment)
        try:
            return await self._certify(self.registry.enrol(enrolment.secret, enrolment.request))
        except Denied:  # a token has 256 random bits and cannot be guessed; this limits the load
            self.admission.charge_wrong_token(call.request)
            raise

    async def rotate(self, call: Call) -> web.Response:
        assert call.identity is not None
        self.admission.charge_rotation(call.identity)
        return await self._certify(self.registry.rotate(call.identity, call.body))

    async def _certify(self, change: Callable[[Any], tuple[str, bytes]]) -> web.Response:
        name, pem = await self.written(change)
        self.registry.reload_of(name)
        return packed(IssuedCertificate(self.registry.federation.name, name, pem))

    async def _heard(self, call: Call) -> tuple[int, str]:
        """Note a contact with a party; returns its number and its instance."""
        instance = call.query("instance")
        if not re.fullmatch(r"[0-9a-f]{1,64}", instance):
            raise DataError("the query names no valid instance of the party")
        number = self.registry.number(call.name)
        if call.name not in self.registry.met:
            await self.written(self.registry.joined(call.name))
            self.registry.met.add(call.name)
        if self.queue.heard(number, instance):
            log.info("connected", extra={"party": call.name})
        return number, instance

    async def work(self, call: Call) -> web.Response:
        number, instance = await self._heard(call)
        longest = self.registry.federation.serve.poll
        asked = whole(call.query("wait", f"{POLL:.0f}"), "wait: expected the seconds that the poll may be held open")
        seconds = jittered(min(asked, poll_seconds(self.queue.known, longest)))
        self.admission.metrics.held.inc()
        try:
            with until_disconnect(call.request):
                work = await self.queue.wait_for_work(number, instance, seconds)
        finally:
            self.admission.metrics.held.dec()
        assert call.identity is not None
        self.check(call.identity)  # it may have been revoked while the poll was held open
        if work is None and self.admission.closing.is_set():
            raise self.admission.shutting_down()
        pace = pacing_headers(self.queue.known, longest)
        return web.Response(status=204, headers={"Retry-After": "0", **pace}) if work is None else packed(work, pace)

    async def alive(self, call: Call) -> web.Response:
        party, _ = await self._heard(call)
        ended = False
        if "job" in call.request.query:  # the party names the ask that it works on
            key = named_ask(call.request.query)
            ended = not self.queue.find(party, key) and isinstance(
                unoffered(self.ledger, key, party, call.name), Unasked
            )
        return web.Response(status=204, headers={UNWANTED: "1"} if ended else None)

    def _queued(self, call: Call) -> tuple[int, Key, QueuedAsk | None]:
        """The party's number, the key that the path names, and its ask, None where it is not offered."""
        key, party = call.key, self.registry.number(call.name)
        return party, key, self.queue.find(party, key)

    def _asked(self, call: Call) -> tuple[int, QueuedAsk]:
        party, key, queued = self._queued(call)
        if queued is None:
            raise unoffered(self.ledger, key, party, call.name)
        self.queue.heard(party, queued.instance)  # a long download or upload is also a contact
        return party, queued

    async def message(self, call: Call) -> web.StreamResponse:
        return await served(call.request, self._asked(call)[1].message, self.admission.limits.stall)

    async def task(self, call: Call) -> web.StreamResponse:
        return await served(call.request, self._asked(call)[1].task, self.admission.limits.stall)

    async def public(self, call: Call) -> web.StreamResponse:
        path = self._asked(call)[1].public
        if path is None:
            raise DataError("the job has no public samples")
        return await served(call.request, path, self.admission.limits.stall)

    async def part_received(self, call: Call) -> web.Response:
        self._asked(call)
        return await self.received(call)

    async def part(self, call: Call) -> web.Response:
        _, queued = self._asked(call)
        return await self.append(call, queued.limit)

    async def reply(self, call: Call) -> web.Response:
        assert call.identity is not None
        answer = unpack(call.body, Answer)
        if (answer.blob is None) == (answer.why is None) or (answer.blob is None) != (answer.weight is None):
            raise DataError("invalid answer: expected either a blob with its weight, or a reason for a refusal")
        statement = make_statement(self.registry.federation.name, call.name, call.key, answer)
        if not signed_by(call.identity.key, answer.signature, statement.signed_bytes()):
            raise signing.SignatureError(f"the signature of {call.name} does not match this answer")
        if answer.why is not None:  # shown to people
            answer = msgspec.structs.replace(answer, why=printable(answer.why))
        party, key, queued = self._queued(call)
        seconds = self.queue.spent(queued) if queued is not None else 0.0
        sent = Sent(party, call.name, answer, seconds, statement, call.identity.fingerprint)
        intake = Intake(self.ledger, self.blobs, self.queue, self.jobs.discard)
        receipt = await complete_async(intake.steps(key, sent, owner(call), queued), self._perform)
        self.admission.metrics.replies.labels(receipt.status).inc()
        extra = {"job": key[0], "round": key[1], "party": call.name, "detail": {"ask": ask_name(*key[1:])}}
        log.info(f"answer {receipt.status}", extra=extra)
        return packed(receipt)

    async def log_certificate(self, call: Call) -> web.Response:
        """The certificate of the key that signs receipts."""
        return web.Response(body=self.ledger.notary.certificate, content_type="application/x-pem-file")

    async def _perform(self, step: Write | Do | Wait) -> Any:
        """Carry out an effect without blocking the event loop."""
        if isinstance(step, Write):
            return await self.written(step.change)
        assert isinstance(step, Do)
        return await asyncio.to_thread(step.call)
