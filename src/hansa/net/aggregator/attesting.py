"""The aggregator's evidence of its trusted execution environment, made by a command of the platform."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence

import msgspec

from hansa.net.attestation.verifier import LIMIT, Evidence
from hansa.net.transport.http import Refused

SECONDS = 30.0  # that the command may take
RETRY = 5.0  # seconds after which a party may ask again


class EvidenceCommand:
    """Runs `serve.evidence` with the report data in hex as its last argument, one at a time.

    The command prints a JSON object: `kind`, `report` (base64), and where the kind needs them `certificates` (base64
    of PEM) and `collateral` (text). Its output is passed on; the parties verify it.
    """

    def __init__(self, command: Sequence[str], seconds: float = SECONDS) -> None:
        self._command, self._seconds, self._lock = tuple(command), seconds, asyncio.Lock()

    async def evidence(self, data: bytes) -> Evidence:
        """Evidence with this report data; Refused if there is none."""
        if not self._command:
            raise Refused(404, "this aggregator has no attestation evidence (serve.evidence in federation.toml)")
        async with self._lock:
            text = await asyncio.to_thread(self._run, data.hex())
        try:
            return msgspec.json.decode(text, type=Evidence)
        except ValueError as error:  # of msgspec too
            raise Refused(503, f"the aggregator's evidence is invalid: {str(error)[:200]}", RETRY) from None

    def _run(self, data: str) -> bytes:
        """The output of the command, which is ended if it takes too long or prints too much."""
        try:
            process = subprocess.Popen([*self._command, data], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       start_new_session=True)  # fmt: skip
        except OSError as error:
            raise Refused(503, f"the aggregator cannot run serve.evidence: {error.strerror}", RETRY) from None
        late = threading.Event()

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def overdue() -> None:
            late.set()
            end()

        timer = threading.Timer(self._seconds, overdue)
        timer.start()
        with process:
            assert process.stdout is not None
            text = process.stdout.read(LIMIT + 1)
            if len(text) > LIMIT:
                end()
            status = process.wait()
        timer.cancel()
        if late.is_set():
            raise Refused(503, f"serve.evidence took more than {self._seconds:g} s", RETRY)
        if len(text) > LIMIT:
            raise Refused(503, f"serve.evidence printed more than {LIMIT} bytes", RETRY)
        if status:
            raise Refused(503, f"serve.evidence ended with status {status}", RETRY)
        return text
