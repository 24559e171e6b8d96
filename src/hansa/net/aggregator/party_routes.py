"""HTTPS handlers for parties: enrolment, work, messages, uploads, answers."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from hansa.core.runtime import complete_async
from hansa.net.aggregator.asks import Sent, Unasked, named_ask, unoffered, unoffered_to, whole
from hansa.net.aggregator.attesting import EvidenceCommand
from hansa.net.aggregator.effects import Do, Wait, Write
from hansa.net.aggregator.files import served
from hansa.net.aggregator.intake import Intake
from hansa.net.aggregator.queue import Key, QueuedAsk
from hansa.net.aggregator.registry import Denied
from hansa.net.aggregator.relay_routes import RelayRoutes
from hansa.net.aggregator.routes import Call, Endpoints, Route, owner, packed
from hansa.net.attestation.verifier import NONCE, bound_data, public_key_bytes
from hansa.net.audit.evidence import make_statement, signed_by, vault_bytes
from hansa.net.transport import certificates, signing
from hansa.net.transport.admission import until_disconnect
from hansa.net.transport.names import NAME
from hansa.net.transport.pacing import POLL, jittered, pacing_headers, poll_seconds
from hansa.net.transport.wire import (
    CHUNK,
    UNWANTED,
    WAITING,
    Answer,
    Enrolment,
    IssuedCertificate,
    SessionCall,
    VaultMark,
    ask_name,
    printable,
    unpack,
)
from hansa.plumbing.errors import DataError

log = logging.getLogger("hansa.net")


class PartyRoutes(Endpoints):
    """The routes of parties, and the two that need no certificate. A party reaches only its own asks."""

    @functools.cached_property
    def _relays(self) -> RelayRoutes:
        return RelayRoutes(self.registry, self.ledger, self.blobs, self.queue, self.jobs, self.admission)

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
            Route("GET", ask + "/manifest", "party", False, self.manifest),
            Route("GET", ask + "/parts/{digest}", "party", False, self.part_received),
            Route("PUT", ask + "/parts/{digest}", "party", True, self.part, CHUNK),
            Route("POST", ask + "/session", "party", False, self.session, CHUNK),
            Route("POST", ask + "/reply", "party", True, self.reply),
            Route("GET", "/v1/log/certificate", "party", False, self.log_certificate),
            Route("GET", "/v1/vault", "party", False, self.vault),
            Route("POST", "/v1/attest", "party", False, self.attest),
            Route("POST", "/v1/relay", "party", False, self._relays.work, CHUNK),
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
        return await self._certify(self.registry.rotate(call.identity, bytes(call.body)))

    async def _certify(self, change: Callable[[Any], tuple[str, bytes]]) -> web.Response:
        name, pem = await self.written(change)
        self.registry.reload_of(name)
        return packed(IssuedCertificate(self.registry.federation.name, name, pem))

    async def _heard(self, call: Call) -> tuple[int, str]:
        """Note a contact with a party; returns its number and its instance."""
        instance = call.query("instance")
        if not re.fullmatch(r"[0-9a-f]{1,64}", instance):
            raise DataError("the query names no valid instance of the party")
        self._check_direct(call)
        if call.name in self.registry.federation.relays:
            raise Denied(f"{call.name} is a relay here, not a party; run it with `hansa relay`")
        return await self.met(call, instance), instance

    def _check_direct(self, call: Call) -> None:
        """Refuse a party that is behind a relay, although it may have a certificate of this aggregator.

        Its own answer would take the place of that of the relay, and so of the answers of all parties there.
        """
        above = self.registry.relay_of.get(call.name)
        if above is not None:
            raise Denied(f"{call.name} is behind the relay {above} here; it joins that relay, with a token from there")

    async def work(self, call: Call) -> web.Response:
        number, instance = await self._heard(call)
        longest = self.registry.federation.serve.poll
        asked = whole(call.query("wait", f"{POLL:.0f}"), "wait: expected the seconds that the poll may be held open")
        seconds = jittered(min(asked, poll_seconds(self.queue.known, longest)))
        unapproved = _jobs(call.query("unapproved", ""))
        self.admission.metrics.held.inc()
        try:
            with until_disconnect(call.request):
                work = await self.queue.wait_for_work(number, instance, seconds, unapproved)
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
        if call.name in self.registry.federation.relays:
            return self._relays.queued(call)
        self._check_direct(call)
        key, party = call.key, self.registry.number(call.name)
        return party, key, self.queue.find(party, key)

    def _asked(self, call: Call) -> tuple[int, QueuedAsk]:
        party, key, queued = self._queued(call)
        if queued is None:
            leaves = self.queue.leaves.get(party, (party,))  # of a relay
            raise unoffered_to(self.ledger, key, leaves, call.name)
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

    async def manifest(self, call: Call) -> web.StreamResponse:
        path = self._asked(call)[1].manifest
        if path is None:
            raise DataError("the job has no manifest")
        return await served(call.request, path, self.admission.limits.stall)

    async def part_received(self, call: Call) -> web.Response:
        self._asked(call)
        return await self.received(call)

    async def part(self, call: Call) -> web.Response:
        _, queued = self._asked(call)
        return await self.append(call, queued.limit if queued.terms is None else self._relays.limit(call))

    async def session(self, call: Call) -> web.Response:
        """SessionCall messages with other parties of the same ask. They are sealed, so the request is not signed."""
        party, queued = self._asked(call)
        if queued.session is None:
            raise DataError("the parties of this ask exchange no messages")
        with until_disconnect(call.request):
            return packed(await queued.session.serve(party, unpack(call.body, SessionCall, CHUNK)))

    async def reply(self, call: Call) -> web.Response:
        assert call.identity is not None
        answer = unpack(call.body, Answer)
        if (answer.blob is None) == (answer.why is None) or (answer.blob is None) != (answer.weight is None):
            raise DataError("invalid answer: expected either a blob with its weight, or a reason for a refusal")
        statement = make_statement(self.registry.federation.name, call.name, call.key, answer)
        if not signed_by(call.identity.key, answer.signature, statement.signed_bytes()):
            raise signing.SignatureError(f"the signature of {call.name} does not match this answer")
        if answer.vault is not None:
            marked = vault_bytes(self.registry.federation.name, call.name, answer.vault.mark)
            if not signed_by(call.identity.key, answer.vault.signature, marked):
                raise signing.SignatureError(f"the signature of {call.name} does not match the mark of its vault")
        if answer.why is not None:  # shown to people
            answer = msgspec.structs.replace(answer, why=printable(answer.why))
        party, key, queued = self._queued(call)
        seconds = self.queue.spent(queued) if queued is not None else 0.0
        sent = Sent(party, call.name, answer, seconds, statement, call.identity.fingerprint)
        intake = Intake(self.ledger, self.blobs, self.queue, self.jobs.discard)
        steps = intake.steps(key, sent, owner(call), queued)
        if party in self.queue.leaves:
            steps = intake.relayed_steps(key, sent, owner(call), self.queue.leaves[party])
        receipt = await complete_async(steps, self._perform)
        self.admission.metrics.replies.labels(receipt.status).inc()
        extra = {"job": key[0], "round": key[1], "party": call.name, "detail": {"ask": ask_name(*key[1:])}}
        log.info(f"answer {receipt.status}", extra=extra)
        return packed(receipt)

    async def log_certificate(self, call: Call) -> web.Response:
        """The certificate of the key that signs receipts."""
        return web.Response(body=self.ledger.notary.certificate, content_type="application/x-pem-file")

    @functools.cached_property
    def _evidence(self) -> EvidenceCommand:
        return EvidenceCommand(self.registry.federation.serve.evidence)

    async def attest(self, call: Call) -> web.Response:
        """Evidence of the aggregator's trusted execution environment, for its TLS key and the party's nonce."""
        if len(call.body) != NONCE:
            raise DataError(f"a nonce of {len(call.body)} bytes; expected {NONCE}")
        key = public_key_bytes(certificates.parse_certificate(self.registry.federation.read("server.pem")))
        return packed(await self._evidence.evidence(bound_data(key, bytes(call.body))))

    async def vault(self, call: Call) -> web.Response:
        """The newest mark of the party's vault that came with an answer."""
        row = self.ledger.one(
            "SELECT mark, signature, pem FROM vault_marks JOIN certificates ON fingerprint = certificate "
            "WHERE party = ?", call.name,
        )  # fmt: skip
        return web.Response(status=204) if row is None else packed(VaultMark(*row))

    async def _perform(self, step: Write | Do | Wait) -> Any:
        """Carry out an effect without blocking the event loop."""
        if isinstance(step, Write):
            return await self.written(step.change)
        assert isinstance(step, Do)
        return await asyncio.to_thread(step.call)


def _jobs(text: str) -> frozenset[str]:
    """The jobs in a query, by commas; a DataError if there are too many or if one is no name of a job."""
    jobs = frozenset(text.split(",")) if text else frozenset[str]()
    if len(jobs) > WAITING or not all(re.fullmatch(NAME, job) for job in jobs):
        raise DataError(f"unapproved: expected at most {WAITING} names of jobs, separated by commas")
    return jobs
