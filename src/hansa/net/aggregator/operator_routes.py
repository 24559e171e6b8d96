"""HTTPS handlers for the operator: parties, jobs, models and the log."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from typing import Any

import msgspec
from aiohttp import web

from hansa.net.aggregator.asks import whole
from hansa.net.aggregator.blobs import Gap
from hansa.net.aggregator.files import served
from hansa.net.aggregator.ledger import LINES, log_lines
from hansa.net.aggregator.routes import Call, Endpoints, Route, owner
from hansa.net.transport.http import Refused
from hansa.net.transport.wire import CHUNK, Order, unpack
from hansa.plumbing.errors import ConfigError

ORDER = 2**18  # most bytes of an order: its tables may take much more memory than its bytes
PAGE = 2**23  # a page of the exported log ends after the entry that reaches this many bytes
CENTRAL = 2**34  # most bytes of the aggregator's own samples


class OperatorRoutes(Endpoints):
    """The routes of the operator."""

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/uploads/{digest}", "operator", False, self.received),
            Route("PUT", "/v1/uploads/{digest}", "operator", True, self.upload, CHUNK),
            Route("GET", "/v1/parties", "operator", False, self.parties),
            Route("POST", "/v1/parties/{party}/invite", "operator", True, self.invite),
            Route("POST", "/v1/parties/{party}/revoke", "operator", True, self.revoke),
            Route("GET", "/v1/jobs", "operator", False, self.list_jobs),
            Route("POST", "/v1/jobs", "operator", True, self.submit, ORDER),
            Route("GET", "/v1/jobs/{job}", "operator", False, self.show_job),
            Route("POST", "/v1/jobs/{job}/stop", "operator", True, self.stop),
            Route("POST", "/v1/jobs/{job}/forget", "operator", True, self.forget),
            Route("GET", "/v1/jobs/{job}/model", "operator", False, self.model),
            Route("GET", "/v1/log", "operator", False, self.log),
            Route("GET", "/v1/log/head", "operator", False, self.log_head),
            Route("GET", "/v1/log/lines", "operator", False, self.log_lines),
        ]

    async def upload(self, call: Call) -> web.Response:
        return await self.append(call, CENTRAL)

    async def parties(self, call: Call) -> web.Response:
        here, above = set(self.queue.present(self.registry.numbers.values())), self.registry.relay_of
        rows = self.ledger.all("SELECT number, name, joined FROM parties ORDER BY number")
        valid = {r["name"] for r in self.ledger.all("SELECT DISTINCT name FROM certificates WHERE role = 'party' AND "
                                                    "state IN ('new', 'valid')")}  # fmt: skip
        return web.json_response([
            {"number": r["number"], "name": r["name"], "enrolled": above.get(r["name"], r["name"]) in valid,
             "connected": r["number"] in here, "relay": above.get(r["name"])}
            for r in rows
        ])  # fmt: skip

    async def invite(self, call: Call) -> web.Response:
        token, change = self.registry.invite(call.part("party"))
        await self.written(change)
        self.registry.reload_of(token.party)
        return web.json_response({"party": token.party, "token": token.text()})

    async def revoke(self, call: Call) -> web.Response:
        name = call.part("party")
        count = await self.written(self.registry.revoke(name))
        self.registry.reload_of(name)
        self.queue.gone(self.registry.number(name))
        return web.json_response({"party": name, "certificates": count})

    async def submit(self, call: Call) -> web.Response:
        order = unpack(call.body, Order)
        if order.central is not None:
            try:
                await asyncio.to_thread(self.blobs.finish, owner(call), order.central.digest, order.central.size)
            except Gap:
                if order.central.digest not in self.blobs:  # the same order may have been sent before
                    before = await asyncio.to_thread(self.jobs.submitted, order)
                    if before is None:
                        raise
                    return web.json_response({"job": before})
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

    async def forget(self, call: Call) -> web.Response:
        """Delete the replies that a job kept."""
        row = self._job(call)
        return web.json_response({"job": row["id"], "replies": await asyncio.to_thread(self.jobs.forget, row["id"])})

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
        head = await self.written(lambda db: db.head(db.size()))
        return web.json_response(msgspec.structs.asdict(head))

    async def log_lines(self, call: Call) -> web.Response:
        """A page of the exported log: entries, and the signed heads of the rounds that they close. `Hansa-At` is the
        number of the last entry. A page ends after `LINES` entries or `PAGE` bytes."""
        after, size = (whole(call.query(name, "0"), f"{name}: expected an entry's number") for name in ("after", "to"))
        size, page = min(size, after + LINES), bytearray()
        while after < size and len(page) < PAGE and (lines := log_lines(self.ledger, after, after + 1)):
            page += b"".join(lines)
            after += 1
        return web.Response(body=bytes(page), headers={"Hansa-At": str(after)})


def _job_tree(row: sqlite3.Row) -> dict[str, Any]:
    return {"job": row["id"], "name": row["name"], "status": row["status"], "reason": row["reason"],
            "submitted": row["submitted"], "model": row["model"]}  # fmt: skip
