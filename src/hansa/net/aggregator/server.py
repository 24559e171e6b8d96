"""The aggregator's HTTPS side: every route with who may use it and whether it must be signed; all else is denied.

Client certificates are optional in the handshake, because a party that enrols has none yet, and required by every
route but two. Every lookup goes by the authenticated identity: a party finds only what it was asked itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web

from hansa.core import disk
from hansa.core.errors import ConfigError, DataError, HansaError
from hansa.core.runtime import complete_async
from hansa.net.aggregator.asks import Conflict, NotNow, Sent, Unasked, named_ask, unoffered, whole
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.effects import Do, Wait, Write
from hansa.net.aggregator.files import served
from hansa.net.aggregator.intake import Intake
from hansa.net.aggregator.ledger import LINES, Ledger, LedgerError, log_lines
from hansa.net.aggregator.queue import Key, QueuedAsk, TaskQueue
from hansa.net.aggregator.registry import Denied, Registry
from hansa.net.audit.evidence import make_statement, signed_by
from hansa.net.transport import certificates, signing
from hansa.net.transport.admission import Admission, AdmittedRequest, until_disconnect
from hansa.net.transport.http import Refused, check_expect, errors_as_trouble, trouble
from hansa.net.transport.pacing import POLL, jittered, pacing_headers, poll_seconds
from hansa.net.transport.wire import (
    CHUNK,
    ENVELOPE,
    PROTOCOLS,
    UNWANTED,
    Answer,
    Enrolment,
    IssuedCertificate,
    Order,
    ask_name,
    pack,
    printable,
    unpack,
)  # fmt: skip

log = logging.getLogger("hansa.net")
PROTOCOL = "Hansa-Protocol"
DIGEST = re.compile(r"[0-9a-f]{64}")
ORDER = 2**18  # bytes of an order, at most: it may hold anything, and a byte can become a table
PAGE = 2**23  # bytes from which on a page of the exported log ends, with the entry that it ends in
CENTRAL = 2**34  # bytes of the aggregator's own samples, at most
Handler = Callable[["Call"], Awaitable[web.StreamResponse]]


class Jobs(Protocol):
    """What the server asks of those who run jobs."""

    def submit(self, order: Order) -> str: ...
    def stop(self, job: str) -> bool: ...
    def discard(self, blobs: list[str]) -> None: ...


@dataclass
class Call:
    """A request that was let in: who makes it, its body, and what its signature is about."""

    request: web.Request
    who: certificates.Identity | None
    body: bytes
    about: signing.About | None

    @property
    def name(self) -> str:
        assert self.who is not None
        return self.who.name

    def part(self, name: str) -> str:
        return self.request.match_info[name]

    def query(self, name: str, default: str = "") -> str:
        return self.request.query.get(name, default)


@dataclass(frozen=True)
class Route:
    """A route: who may use it ("anyone" needs no certificate), whether it is signed, how long its body may be."""

    method: str
    path: str
    role: str
    signed: bool
    handler: Handler
    limit: int = ENVELOPE


class Server:
    """The routes over the ledger, the blobs, the queue and the jobs."""

    def __init__(
        self, registry: Registry, ledger: Ledger, blobs: Blobs, queue: TaskQueue, jobs: Jobs, admission: Admission
    ) -> None:
        self.registry, self.ledger, self.blobs, self.queue, self.jobs = registry, ledger, blobs, queue, jobs
        self.admission, self.metrics = admission, admission.metrics
        self._seen: dict[bytes, certificates.Identity] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=CHUNK + 1, middlewares=[errors_as_trouble])
        ask = "/v1/jobs/{job}/asks/{round}/{phase}/{number}"
        for route in (
            Route("GET", "/v1/ca", "anyone", False, self.authority),
            Route("POST", "/v1/enrol", "anyone", False, self.enrol),
            Route("POST", "/v1/rotate", "party", True, self.rotate),
            Route("GET", "/v1/work", "party", False, self.work),
            Route("POST", "/v1/alive", "party", False, self.alive),
            Route("GET", ask + "/message", "party", False, self.message),
            Route("GET", ask + "/task", "party", False, self.task),
            Route("GET", ask + "/parts/{digest}", "party", False, self.part_stands),
            Route("PUT", ask + "/parts/{digest}", "party", True, self.part, CHUNK),
            Route("POST", ask + "/reply", "party", True, self.reply),
            Route("GET", "/v1/uploads/{digest}", "operator", False, self.stands),
            Route("PUT", "/v1/uploads/{digest}", "operator", True, self.upload, CHUNK),
            Route("GET", "/v1/parties", "operator", False, self.parties),
            Route("POST", "/v1/parties/{party}/invite", "operator", True, self.invite),
            Route("POST", "/v1/parties/{party}/revoke", "operator", True, self.revoke),
            Route("GET", "/v1/jobs", "operator", False, self.list_jobs),
            Route("POST", "/v1/jobs", "operator", True, self.submit, ORDER),
            Route("GET", "/v1/jobs/{job}", "operator", False, self.show_job),
            Route("POST", "/v1/jobs/{job}/stop", "operator", True, self.stop),
            Route("GET", "/v1/jobs/{job}/model", "operator", False, self.model),
            Route("GET", "/v1/log", "operator", False, self.log),
            Route("GET", "/v1/log/head", "operator", False, self.log_head),
            Route("GET", "/v1/log/lines", "operator", False, self.log_lines),
            Route("GET", "/v1/log/certificate", "party", False, self.log_certificate),
        ):  # fmt: skip
            app.router.add_route(route.method, route.path, self._guarded(route), expect_handler=check_expect)
        return app

    def _guarded(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler behind its checks; what goes wrong is answered in one sentence, and never with a traceback."""

        async def handle(request: web.Request) -> web.StreamResponse:
            admitted = AdmittedRequest(self.admission, request)
            try:
                return await route.handler(await self._admit(route, request, admitted))
            except web.HTTPException as error:
                return trouble(error.status, error.reason)
            except Refused as error:
                return trouble(error.status, str(error), error.headers)
            except Denied as error:
                self.admission.record_denial("denied", request, self._peer(request), str(error))
                return trouble(403, str(error))
            except signing.SignatureError as error:
                self.admission.record_denial("denied", request, self._peer(request), str(error))
                return trouble(401, str(error))
            except Conflict as error:
                self.admission.record_denial("conflict", request, self._peer(request), str(error))
                return trouble(409, str(error))
            except Gap as error:
                return trouble(416, str(error), {"Hansa-At": str(error.at)})
            except Unasked as error:
                return trouble(404, str(error))
            except NotNow as error:
                return trouble(503, str(error), {"Retry-After": "1"})
            except LedgerError as error:
                log.error("%s", error)
                return trouble(507 if error.full else 503, str(error), {"Retry-After": "5"})
            except HansaError as error:
                if isinstance(error.__cause__, OSError):  # not the fault of who asks: no more open files, say
                    log.error("%s", error)
                    return trouble(503, str(error), {"Retry-After": "5"})
                return trouble(400, str(error))
            except ConnectionError:  # who asked has gone
                raise
            except OSError as error:
                log.error("%s", error)
                status = 507 if error.errno in disk.FULL else 503
                return trouble(status, f"the aggregator cannot store this: {error.strerror}", {"Retry-After": "5"})
            finally:
                admitted.end()

        return handle

    def _peer(self, request: web.Request) -> certificates.Identity | None:
        """Whom the client's certificate names, the CA's signature on it having been checked in the handshake."""
        tls = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
        der = tls.getpeercert(binary_form=True) if tls is not None else None
        if not der:
            return None
        if der not in self._seen:
            if len(self._seen) > 65536:
                self._seen.clear()
            self._seen[der] = certificates.identity_of_der(der)
        return self._seen[der]

    async def _admit(self, route: Route, request: web.Request, admitted: AdmittedRequest) -> Call:
        spoken = request.headers.get(PROTOCOL, "")
        known = {version.strip() for version in spoken.split(",")} & {str(version) for version in PROTOCOLS}
        if not known and route.handler != self.authority:
            ours = ", ".join(map(str, PROTOCOLS))
            raise Refused(
                426,
                f"this aggregator speaks version {ours} of the protocol and the request version "
                f"{spoken[:32] or 'none'}; bring both to the same version of hansa",
            )
        who = self._peer(request)
        admitted.count(who)
        if route.role != "anyone":
            if who is None:
                raise Refused(401, "this needs a client certificate; enrol first (hansa join --token-file ...)")
            first = self.registry.used(who)
            if first is not None:
                await self._written(first)
                self.registry.reload_of(who.name)
            self._check(who)
            if who.role != route.role:
                raise Denied(f"this is for the role {route.role}, and {who.name} has the role {who.role}")
        body = await admitted.body(route.limit)
        about = None
        if route.signed:
            assert who is not None
            self._check(who)  # it may have ended while the body was on its way
            about = signing.verify(who.key, request.method, request.raw_path, body, request.headers)
        call = Call(request, who, body, about)
        if about is not None and about != (_about(_key(call)) if "round" in request.match_info else signing.About()):
            raise signing.SignatureError("the request was signed for another job, round or ask than its path names")
        return call

    def _check(self, who: certificates.Identity) -> None:
        """Deny what comes with a certificate that does not count (any more)."""
        if not self.registry.admits(who):
            raise Denied(f"the certificate of {who.name} is not valid here (any more); enrol again with a new token")

    async def _written(self, change: Callable[[Any], Any]) -> Any:
        return await asyncio.wrap_future(self.ledger.write(change))

    async def _perform(self, step: Write | Do | Wait) -> Any:
        """Do what a step of an answer wants, without holding up the loop."""
        if isinstance(step, Write):
            return await self._written(step.change)
        assert isinstance(step, Do)
        return await asyncio.to_thread(step.call)

    # Parties

    async def authority(self, call: Call) -> web.Response:
        return web.Response(body=self.registry.federation.read("ca.pem"), content_type="application/x-pem-file")

    async def enrol(self, call: Call) -> web.Response:
        given = unpack(call.body, Enrolment)
        try:
            return await self._certify(self.registry.enrol(given.secret, given.request))
        except Denied:  # a secret has 256 bits and cannot be guessed; this is against the noise
            self.admission.charge_wrong_token(call.request)
            raise

    async def rotate(self, call: Call) -> web.Response:
        assert call.who is not None
        self.admission.charge_rotation(call.who)
        return await self._certify(self.registry.rotate(call.who, call.body))

    async def _certify(self, change: Callable[[Any], tuple[str, bytes]]) -> web.Response:
        name, pem = await self._written(change)
        self.registry.reload_of(name)
        return packed(IssuedCertificate(self.registry.federation.name, name, pem))

    async def _heard(self, call: Call) -> tuple[int, str]:
        """The party that calls and which instance of it; whoever is heard of is there."""
        instance = call.query("instance")
        if not re.fullmatch(r"[0-9a-f]{1,64}", instance):
            raise DataError("the query names no instance of the party")
        number = self.registry.number(call.name)
        if call.name not in self.registry.met:
            await self._written(self.registry.joined(call.name))
            self.registry.met.add(call.name)
        if self.queue.heard(number, instance):
            log.info("connected", extra={"party": call.name})
        return number, instance

    async def work(self, call: Call) -> web.Response:
        number, instance = await self._heard(call)
        longest = self.registry.federation.serve.poll
        asked = whole(call.query("wait", f"{POLL:.0f}"), "wait: expected seconds that the question may be held open")
        seconds = jittered(min(asked, poll_seconds(self.queue.known, longest)))
        self.metrics.held.inc()
        try:
            with until_disconnect(call.request):
                work = await self.queue.wait_for_work(number, instance, seconds)
        finally:
            self.metrics.held.dec()
        assert call.who is not None
        self._check(call.who)  # it may have ended while the question was held open
        if work is None and self.admission.closing.is_set():
            raise self.admission.shutting_down()
        pace = pacing_headers(self.queue.known, longest)
        return web.Response(status=204, headers={"Retry-After": "0", **pace}) if work is None else packed(work, pace)

    async def alive(self, call: Call) -> web.Response:
        party, _ = await self._heard(call)
        ended = False
        if "job" in call.request.query:  # it says what it works on
            key = named_ask(call.request.query)
            ended = not self.queue.find(party, key) and isinstance(
                unoffered(self.ledger, key, party, call.name), Unasked
            )
        return web.Response(status=204, headers={UNWANTED: "1"} if ended else None)

    def _queued(self, call: Call) -> tuple[int, Key, QueuedAsk | None]:
        """The ask that the path names, as the calling party was asked it."""
        key, party = _key(call), self.registry.number(call.name)
        return party, key, self.queue.find(party, key)

    def _asked(self, call: Call) -> tuple[int, QueuedAsk]:
        party, key, queued = self._queued(call)
        if queued is None:
            raise unoffered(self.ledger, key, party, call.name)
        self.queue.heard(party, queued.instance)  # a large model takes its time, and that is a sign of life
        return party, queued

    async def message(self, call: Call) -> web.StreamResponse:
        return await served(call.request, self._asked(call)[1].message, self.admission.limits.stall)

    async def task(self, call: Call) -> web.StreamResponse:
        return await served(call.request, self._asked(call)[1].task, self.admission.limits.stall)

    def _owner(self, call: Call) -> str:
        assert call.who is not None
        return f"{call.who.role}.{call.name}"

    def _digest(self, call: Call) -> str:
        digest = call.part("digest")
        if not DIGEST.fullmatch(digest):
            raise DataError("the path names no SHA-256")
        return digest

    async def part_stands(self, call: Call) -> web.Response:
        self._asked(call)
        return await self.stands(call)

    async def stands(self, call: Call) -> web.Response:
        here = await asyncio.to_thread(self.blobs.received, self._owner(call), self._digest(call))
        return web.Response(status=204, headers={"Hansa-At": str(here)})

    async def part(self, call: Call) -> web.Response:
        _, queued = self._asked(call)
        return await self._append(call, queued.limit)

    async def upload(self, call: Call) -> web.Response:
        return await self._append(call, CENTRAL)

    async def _append(self, call: Call, limit: int) -> web.Response:
        at = whole(call.query("at"), "the query does not say at which byte the chunk begins (at=0)")
        here = await asyncio.to_thread(self.blobs.append, self._owner(call), self._digest(call), at, call.body, limit)
        return web.Response(status=204, headers={"Hansa-At": str(here)})

    async def reply(self, call: Call) -> web.Response:
        assert call.who is not None
        answer = unpack(call.body, Answer)
        if (answer.blob is None) == (answer.why is None) or (answer.blob is None) != (answer.weight is None):
            raise DataError("an answer has either a blob and its weight or a reason why there is none")
        statement = make_statement(self.registry.federation.name, call.name, _key(call), answer)
        if not signed_by(call.who.key, answer.signature, statement.signed_bytes()):
            raise signing.SignatureError(f"{call.name} has not signed what this answer says")
        if answer.why is not None:  # people will read it
            answer = msgspec.structs.replace(answer, why=printable(answer.why))
        party, key, queued = self._queued(call)
        seconds = self.queue.spent(queued) if queued is not None else 0.0
        sent = Sent(party, call.name, answer, seconds, statement, call.who.fingerprint)
        intake = Intake(self.ledger, self.blobs, self.queue, self.jobs.discard)
        receipt = await complete_async(intake.steps(key, sent, self._owner(call), queued), self._perform)
        self.metrics.replies.labels(receipt.status).inc()
        extra = {"job": key[0], "round": key[1], "party": call.name, "detail": {"ask": ask_name(*key[1:])}}
        log.info(f"answer {receipt.status}", extra=extra)
        return packed(receipt)

    # The operator

    async def parties(self, call: Call) -> web.Response:
        here = set(self.queue.present(self.registry.numbers.values()))
        rows = self.ledger.all("SELECT number, name, joined FROM parties ORDER BY number")
        valid = {r["name"] for r in self.ledger.all("SELECT DISTINCT name FROM certificates WHERE role = 'party' AND "
                                                    "state IN ('new', 'valid')")}  # fmt: skip
        return web.json_response([
            {"number": r["number"], "name": r["name"], "enrolled": r["name"] in valid, "connected": r["number"] in here}
            for r in rows
        ])  # fmt: skip

    async def invite(self, call: Call) -> web.Response:
        token, change = self.registry.invite(call.part("party"))
        await self._written(change)
        self.registry.reload_of(token.party)
        return web.json_response({"party": token.party, "token": token.text()})

    async def revoke(self, call: Call) -> web.Response:
        name = call.part("party")
        count = await self._written(self.registry.revoke(name))
        self.registry.reload_of(name)
        self.queue.gone(self.registry.number(name))
        return web.json_response({"party": name, "certificates": count})

    async def submit(self, call: Call) -> web.Response:
        order = unpack(call.body, Order)
        if order.central is not None:
            try:
                await asyncio.to_thread(self.blobs.finish, self._owner(call), order.central.digest, order.central.size)
            except Gap:
                if order.central.digest not in self.blobs:  # it may be the same order again
                    raise
        try:
            job = await asyncio.to_thread(self.jobs.submit, order)
        except ConfigError:
            if order.central is not None:
                await asyncio.to_thread(self.jobs.discard, [order.central.digest])
            raise
        return web.json_response({"job": job})

    def _job(self, call: Call) -> sqlite3.Row:
        row = self.ledger.one("SELECT * FROM jobs WHERE id = ?", call.part("job"))
        if row is None:
            raise Refused(404, f"there is no job {call.part('job')!r}; `hansa jobs` lists them")
        return row

    async def list_jobs(self, call: Call) -> web.Response:
        rows = self.ledger.all("SELECT j.*, (SELECT max(round) FROM rounds WHERE job = j.id) AS round FROM jobs j "
                               "ORDER BY submitted")  # fmt: skip
        return web.json_response([_job_tree(row) | {"round": row["round"] or 0} for row in rows])

    async def show_job(self, call: Call) -> web.Response:
        row, after = self._job(call), whole(call.query("after", "0"), "after: expected a round's number")
        rounds = self.ledger.all("SELECT * FROM rounds WHERE job = ? AND round > ? ORDER BY round", row["id"], after)
        lines = [
            {**json.loads(r["line"]), "members": json.loads(r["members"]), "model": r["model"],
             "head": json.loads(r["head"])}
            for r in rounds
        ]  # fmt: skip
        summary = json.loads(row["summary"]) if row["summary"] else None
        experiment = unpack(row["order_"], Order).experiment
        absent = self.ledger.all("SELECT party, detail FROM log WHERE job = ? AND event = 'not taking part'", row["id"])
        why = {entry["party"]: json.loads(entry["detail"])["why"] for entry in absent}
        return web.json_response(
            _job_tree(row) | {"rounds": lines, "absent": why, "summary": summary, "experiment": experiment}
        )

    async def stop(self, call: Call) -> web.Response:
        row = self._job(call)
        return web.json_response({"job": row["id"], "stopped": await asyncio.to_thread(self.jobs.stop, row["id"])})

    async def model(self, call: Call) -> web.StreamResponse:
        row = self._job(call)
        if row["model"] is None:
            raise Refused(404, f"the job {row['id']} has no model yet; it is {row['status']}")
        path = self.blobs.path(row["model"])
        return await served(call.request, path, self.admission.limits.stall, {"Hansa-Digest": row["model"]})

    async def log(self, call: Call) -> web.Response:
        after = whole(call.query("after", "0"), "after: expected an entry's number")
        rows = self.ledger.all("SELECT * FROM log WHERE seq > ? ORDER BY seq LIMIT 1000", after)
        return web.json_response([{**dict(row), "detail": json.loads(row["detail"])} for row in rows])

    async def log_head(self, call: Call) -> web.Response:
        """The signed head of the log as it is now."""
        head = await self._written(lambda db: db.head(db.size()))
        return web.json_response(msgspec.structs.asdict(head))

    async def log_lines(self, call: Call) -> web.Response:
        """The lines of an exported log, so many entries of it, with the heads of the rounds that they close. `Hansa-At`
        is the last of these entries; a page ends as soon as it is large."""
        after, size = (whole(call.query(name, "0"), f"{name}: expected an entry's number") for name in ("after", "to"))
        size, page = min(size, after + LINES), bytearray()
        while after < size and len(page) < PAGE and (lines := log_lines(self.ledger, after, after + 1)):
            page += b"".join(lines)
            after += 1
        return web.Response(body=bytes(page), headers={"Hansa-At": str(after)})

    async def log_certificate(self, call: Call) -> web.Response:
        """The certificate of the key that signs receipts."""
        return web.Response(body=self.ledger.notary.certificate, content_type="application/x-pem-file")


def _key(call: Call) -> Key:
    """The ask that the path names."""
    return named_ask(call.request.match_info)


def _about(key: Key) -> signing.About:
    return signing.About(key[0], key[1], ask_name(*key[1:]))


def _job_tree(row: sqlite3.Row) -> dict[str, Any]:
    return {"job": row["id"], "name": row["name"], "status": row["status"], "reason": row["reason"],
            "submitted": row["submitted"], "model": row["model"]}  # fmt: skip


def packed(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    """An envelope as a response."""
    return web.Response(body=pack(value), content_type="application/msgpack", headers=headers)
