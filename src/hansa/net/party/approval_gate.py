"""Fetch the manifests of jobs, and hold back asks of jobs that the party's owner has not approved yet."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from hansa.net.party.approvals import Approvals, Verdict
from hansa.net.party.store import PartyStore
from hansa.net.transport.client import Client
from hansa.net.transport.manifest import MANIFEST, manifest_digest
from hansa.net.transport.wire import WAITING, Work
from hansa.plumbing.errors import DataError

log = logging.getLogger("hansa.net")
POLL = 5.0  # most seconds of a poll while a job waits for the owner's approval


class ApprovalGate:
    """Decides for each ask whether its job is approved, and knows the jobs that wait for the owner."""

    def __init__(self, store: PartyStore, client: Client, approvals: Approvals) -> None:
        self._store, self._client, self._approvals = store, client, approvals
        self._waiting: dict[str, None] = {}  # in order

    async def poll(self, seconds: float) -> tuple[float, dict[str, str]]:
        """The seconds of the next poll, and what its query says of the jobs that wait for the owner's approval."""
        waiting = await asyncio.to_thread(self._still_waiting) if self._waiting else []
        return (min(seconds, POLL), {"unapproved": ",".join(waiting)}) if waiting else (seconds, {})

    def _still_waiting(self) -> list[str]:
        approve = (self._store.next_policy or self._store.policy).approve
        for job in list(self._waiting):
            if not approve.needed or self._approvals.review(job, approve).status != "waiting":
                del self._waiting[job]
        return list(self._waiting)

    async def check(self, path: str, work: Work) -> Verdict:
        """Whether the job of an ask is approved. Its manifest is fetched first, unless it is stored."""
        if work.manifest is None:
            return Verdict("refused", "its policy requires a manifest to approve, and the aggregator announces none")
        if work.manifest.size > MANIFEST:
            return Verdict("refused", f"it reads manifests of at most {MANIFEST} bytes, and that of the job is larger")
        stored = await asyncio.to_thread(self._approvals.announced, work.job)
        if stored is None or manifest_digest(stored) != work.manifest.digest:
            with tempfile.TemporaryDirectory(dir=self._store.folder, prefix="fetch-") as folder:
                into = Path(folder) / "manifest"
                await self._client.fetch(f"{path}/manifest", work.manifest, into)
                try:
                    await asyncio.to_thread(lambda: self._approvals.announce(work.job, into.read_bytes()))
                except DataError as error:
                    return Verdict("refused", str(error))
        verdict = await asyncio.to_thread(self._approvals.review, work.job, self._store.policy.approve)
        if verdict.status != "waiting":
            return verdict
        if work.job not in self._waiting:
            log.warning("the job waits for the owner's approval: run `hansa approve %s --state %s`", work.job,
                        self._store.folder, extra={"job": work.job, "detail": {"why": verdict.why}})  # fmt: skip
        self._waiting[work.job] = None
        for job in list(self._waiting)[:-WAITING]:
            del self._waiting[job]
        return Verdict("waiting", waits(work.job))


def waits(job: str) -> str:
    """The answer of a party whose owner has not decided about a job."""
    return f"it waits for its owner's approval; the owner runs `hansa approve {job}`"
