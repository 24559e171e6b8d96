"""The operator's commands: submit, show and stop jobs, fetch models, invite and revoke parties."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from hansa.artifacts.run_folder import beside, write_json
from hansa.experiment.config import Experiment
from hansa.experiment.deployed import own_samples, replaced
from hansa.net.aggregator.federation import FederationFolder
from hansa.net.audit.evidence import head_line
from hansa.net.transport import keys
from hansa.net.transport.client import PAGE, Client, Unreachable
from hansa.net.transport.names import valid_name
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import Blob, Order, pack
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError

T = TypeVar("T")
ENDED = ("finished", "failed", "stopped")
AWAY = 3600.0  # seconds without an answer after which waiting for an aggregator ends
PAUSE = 0.3  # seconds between two requests for a job's state


class Operator:
    """Commands to the aggregator of a federation; each opens its own connection."""

    def __init__(self, federation: FederationFolder) -> None:
        self.federation = federation

    def _do(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        folder = self.federation.folder
        key = self.federation.private("operator.key")
        tls = client_context(folder / "ca.pem", folder / "operator.pem", key)

        async def main() -> T:
            async with Client(self.federation.url, tls, keys.load_key(keys.read_private(key)), patience=2) as client:
                return await work(client)

        return asyncio.run(main())

    def wait_until_served(self, seconds: float = 300.0, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the aggregator answers. `check` is called between attempts, and may raise an error to end the
        wait."""
        end = time.monotonic() + seconds
        while True:
            check()
            try:
                self.parties()
            except Unreachable:
                if time.monotonic() > end:
                    raise
            else:
                return

    def _get(self, path: str) -> Any:
        return self._do(lambda client: client.json("GET", path))

    def _post(self, path: str) -> Any:
        return self._do(lambda client: client.json("POST", path, b"", About()))

    def submit(self, experiment: Experiment, name: str, min_parties: int | None = None) -> tuple[str, list[str]]:
        """Start a job; returns its id, and notes on where the job differs from a simulation of the experiment."""
        experiment.check(deployed=True, networked=True)
        central, notes = own_samples(experiment)
        data = codec.encode(central)
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        tree = {**experiment.tree, "task": {k: v for k, v in experiment.tree["task"].items() if k != "data_dir"}}
        order = Order(valid_name(name), tree, blob, min_parties, secrets.token_hex(16))

        async def send(client: Client) -> str:
            response = await client.upload_and_post(
                "/v1/uploads", blob, memoryview(data), "/v1/jobs", pack(order), About()
            )
            return str(json.loads(response)["job"])

        return self._do(send), notes + replaced(experiment) + self._relay_notes(experiment)

    def _relay_notes(self, experiment: Experiment) -> list[str]:
        """Why relays, if there are any, pass every reply of a round on and do not sum them."""
        run = experiment.run
        if not self.federation.relays or (run.sums == "exact" and run.max_weight is not None):
            return []
        return ["relays pass on each reply by itself; they add them up with run.sums = 'exact' and run.max_weight"]

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, in the order of submission."""
        jobs: list[dict[str, Any]] = self._get("/v1/jobs")
        return jobs

    def job(self, id: str, after: int = 0) -> dict[str, Any]:
        """One job with its rounds after number `after`, and its summary once it has ended."""
        job: dict[str, Any] = self._get(f"{_path(id)}?after={after}")
        return job

    def wait(self, id: str, on_round: Callable[[dict[str, Any]], None] | None = None,
             check: Callable[[], None] = lambda: None, known: bool = False,
             on_news: Callable[[str], None] = lambda news: None) -> dict[str, Any]:  # fmt: skip
        """Wait until a job has ended; returns the job. `on_round` is called with the metrics line of each closed round.
        `check` is called regularly, and may raise an error to end the wait. An aggregator that has answered before
        (`known`: before this call) may restart meanwhile; `on_news` is told when it is away and when it is back."""
        after, lost = 0, None
        while True:
            check()
            try:
                job = self.job(id, after)
            except Unreachable as error:
                now = time.monotonic()
                if not known:
                    raise
                if lost is None:
                    lost = now
                    on_news(f"{error}; trying again")
                elif now - lost > AWAY:
                    again = f"`hansa wait {self.federation.folder} {id}`"
                    raise Unreachable(f"{error}; once the aggregator is back, wait on with {again}") from None
                time.sleep(PAUSE)
                continue
            if lost is not None:
                on_news("the aggregator answers again")
            known, lost = True, None
            for line in job["rounds"]:
                after = line["round"]
                if on_round is not None:
                    on_round(line)
            if job["status"] in ENDED:
                return job
            time.sleep(PAUSE)

    def stop(self, id: str) -> bool:
        """Stop a job; False if it had already ended."""
        return bool(self._post(f"{_path(id)}/stop")["stopped"])

    def forget(self, id: str) -> int:
        """Delete the replies that a job kept; returns their number."""
        return int(self._post(f"{_path(id)}/forget")["replies"])

    def pull(self, id: str, out: Path) -> Path:
        """Download the model of a finished job in chunks. A file beside it has what `hansa.load` needs to predict."""
        _refuse_folder(out)
        if beside(out) == out:
            raise ConfigError(f"--out: {out} ends with .json; name a model file, for example model.safetensors")
        job = self.job(id)
        if job["model"] is None:
            raise ConfigError(f"the job {id} has no model yet: it is {job['status']}{_because(job)}")
        part = out.with_name(out.name + ".part")
        part.unlink(missing_ok=True)

        async def fetch(client: Client) -> Path:
            headers, _ = await client.call("GET", f"{_path(id)}/model", headers={"Range": "bytes=0-0"})
            size = int(headers["Content-Range"].rpartition("/")[2])
            return await client.fetch(f"{_path(id)}/model", Blob(job["model"], size), part)

        serving = (job["summary"] or {}).get("serving")
        try:
            path = self._do(fetch).replace(out)
            if serving is not None:  # None for a job that version 0.1.0 finished
                write_json(beside(out), serving)
            return path
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from None
        except DataError:
            raise DataError(f"the model of {id} is damaged at the aggregator: it does not have the hash {job['model']}"
                            ) from None  # fmt: skip

    def log(self, job: str | None = None) -> list[dict[str, Any]]:
        """The aggregator's log: all entries, or those of one job."""
        out: list[dict[str, Any]] = []
        while True:
            entries = self._get(f"/v1/log?after={out[-1]['seq'] if out else 0}")
            if not entries:
                return [entry for entry in out if job is None or entry["job"] == job]
            out += entries

    def export(self, out: Path) -> int:
        """Export the whole log, as it is now, to a file; returns the number of entries."""
        _refuse_folder(out)
        part = out.with_name(out.name + ".part")

        async def fetch(client: Client) -> int:
            head = await client.json("GET", "/v1/log/head")
            after, size = 0, int(head["size"])
            with open(part, "wb") as file:
                while after < size:
                    page = f"/v1/log/lines?after={after}&to={size}"
                    headers, lines = await client.call("GET", page, limit=PAGE)
                    at = headers.get("Hansa-At", "")
                    if not re.fullmatch("[0-9]{1,15}", at) or not after < int(at) <= size:
                        raise DataError(f"invalid response of the aggregator: a page of the log ends at {at[:80]!r}")
                    file.write(lines)
                    after = int(at)
                file.write(head_line(json.dumps(head)))
            return size

        try:
            count = self._do(fetch)
            part.replace(out)
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from None
        return count

    def parties(self) -> list[dict[str, Any]]:
        """The parties, and whether each is enrolled and connected."""
        parties: list[dict[str, Any]] = self._get("/v1/parties")
        return parties

    def invite(self, party: str) -> Path:
        """Make a new token for a party; returns its file, which is private."""
        token = self._post(f"/v1/parties/{valid_name(party)}/invite")["token"]
        path = self.federation.folder / "tokens" / f"{party}.token"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        keys.write_private(path, token.encode() + b"\n")
        return path

    def revoke(self, party: str) -> int:
        """Revoke a party's certificates; returns their number."""
        return int(self._post(f"/v1/parties/{valid_name(party)}/revoke")["certificates"])


def _path(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='+')}"


def _because(job: dict[str, Any]) -> str:
    return f" ({job['reason']})" if job["reason"] else ""


def _refuse_folder(out: Path) -> None:
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; expected the name of a file")
