"""The aggregator's HTTPS server: all routes, and the checks before each of them.

A route names the role that may use it and whether requests are signed; everything else is denied. The TLS handshake
does not require a client certificate, since a party that enrols has none yet; every route but two does. Every lookup
uses the authenticated identity: a party finds only its own asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from hansa.net.aggregator.asks import Conflict, NotNow, Unasked
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.ledger import Ledger, LedgerError
from hansa.net.aggregator.operator_routes import OperatorRoutes
from hansa.net.aggregator.party_routes import PartyRoutes
from hansa.net.aggregator.queue import Key, TaskQueue
from hansa.net.aggregator.registry import Denied, Registry
from hansa.net.aggregator.routes import Call, Jobs, Route
from hansa.net.transport import certificates, signing
from hansa.net.transport.admission import Admission, AdmittedRequest
from hansa.net.transport.http import Refused, check_expect, errors_as_trouble, trouble
from hansa.net.transport.wire import CHUNK, PROTOCOLS, ask_name
from hansa.plumbing import disk
from hansa.plumbing.errors import HansaError

log = logging.getLogger("hansa.net")
PROTOCOL = "Hansa-Protocol"
LARGE = 2**18  # bytes: larger bodies are hashed in a thread


class Server:
    """The routes of an aggregator, behind their checks."""

    def __init__(
        self, registry: Registry, ledger: Ledger, blobs: Blobs, queue: TaskQueue, jobs: Jobs, admission: Admission
    ) -> None:
        self.registry, self.admission = registry, admission
        self._parties = PartyRoutes(registry, ledger, blobs, queue, jobs, admission)
        self._operator = OperatorRoutes(registry, ledger, blobs, queue, jobs, admission)
        self._seen: dict[bytes, certificates.Identity] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=CHUNK + 1, middlewares=[errors_as_trouble])
        for route in (*self._parties.routes(), *self._operator.routes()):
            app.router.add_route(route.method, route.path, self._guarded(route), expect_handler=check_expect)
        return app

    def _guarded(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler behind its checks. An error becomes a response of one sentence, never a traceback."""

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
                if isinstance(error.__cause__, OSError):  # not the client's fault: for example, no more open files
                    log.error("%s", error)
                    return trouble(503, str(error), {"Retry-After": "5"})
                return trouble(400, str(error))
            except ConnectionError:  # the client has gone
                raise
            except OSError as error:
                log.error("%s", error)
                status = 507 if error.errno in disk.FULL else 503
                return trouble(status, f"the aggregator cannot store this: {error.strerror}", {"Retry-After": "5"})
            finally:
                admitted.end()

        return handle

    def _peer(self, request: web.Request) -> certificates.Identity | None:
        """The identity in the client's certificate, whose signature by the CA the handshake has checked."""
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
        versions = request.headers.get(PROTOCOL, "")
        common = {version.strip() for version in versions.split(",")} & {str(version) for version in PROTOCOLS}
        if not common and route.handler != self._parties.authority:
            ours = ", ".join(map(str, PROTOCOLS))
            raise Refused(
                426,
                f"this aggregator speaks version {ours} of the protocol and the request version "
                f"{versions[:32] or 'none'}; install the same version of hansa on both sides",
            )
        identity = self._peer(request)
        admitted.count(identity)
        if route.role != "anyone":
            if identity is None:
                raise Refused(401, "this needs a client certificate; enrol first (hansa join --token-file ...)")
            first = self.registry.used(identity)
            if first is not None:
                await self._parties.written(first)
                self.registry.reload_of(identity.name)
            self._parties.check(identity)
            if identity.role != route.role:
                raise Denied(f"this route is for the role {route.role}; {identity.name} has the role {identity.role}")
        body = await admitted.body(route.limit)
        about = None
        if route.signed:
            assert identity is not None
            self._parties.check(identity)  # it may have been revoked while the body arrived
            signed = (identity.key, request.method, request.raw_path, body, request.headers)
            about = await asyncio.to_thread(signing.verify, *signed) if len(body) > LARGE else signing.verify(*signed)
        call = Call(request, identity, body, about)
        if about is not None and about != (_about(call.key) if "round" in request.match_info else signing.About()):
            raise signing.SignatureError("the request was signed for another job, round or ask than its path names")
        return call


def _about(key: Key) -> signing.About:
    return signing.About(key[0], key[1], ask_name(*key[1:]))
