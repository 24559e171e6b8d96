"""What may be done on an aggregator's live page with the admin's token: start and stop jobs, as the operator does."""

from __future__ import annotations

import hmac
import logging
import tomllib

from hansa.core import codec
from hansa.core.errors import ConfigError
from hansa.core.functions import is_function
from hansa.experiment.config import parse
from hansa.experiment.deployed import own_samples, replaced
from hansa.net.aggregator.blobs import Gap
from hansa.net.aggregator.federation import ADMIN_TOKEN
from hansa.net.aggregator.jobs import JobRunner
from hansa.net.transport import keys
from hansa.net.transport.names import valid_name
from hansa.net.transport.wire import Blob, Order

log = logging.getLogger("hansa.net")
ADMIN = "admin's token"  # by whom, as the log has it


class AdminControl:
    """The jobs of an aggregator (`hansa.ui.page.Control`). The token is read each time it is needed: a new one counts
    at once, and where there is none nothing can be done."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner, self._path = runner, runner.registry.federation.folder / ADMIN_TOKEN

    @property
    def usable(self) -> bool:
        """Whether there is a token."""
        return self._path.is_file()

    def admits(self, token: str) -> bool:
        """Whether this is the token; the comparison takes as long for a wrong one."""
        try:
            right = keys.read_private(self._path).strip()
        except ConfigError as error:
            log.warning("the admin's token cannot be used: %s", error)
            return False
        return len(right) >= 16 and hmac.compare_digest(right, token.encode(errors="replace"))

    def start(self, experiment: str, name: str) -> tuple[str, list[str]]:
        """Submit an experiment's text, as `hansa submit` does. It comes from a browser, so it may name neither files
        nor functions of the aggregator's machine."""
        try:
            tree = tomllib.loads(experiment)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the experiment is no TOML: {error}") from None
        read = parse(tree)
        table = read.task
        if table.test is not None or isinstance(table.trusted, str):
            raise ConfigError("task.test, task.trusted: a file cannot be named here; use `hansa submit` where it lies")
        if is_function(table.dataset):
            raise ConfigError("task.dataset: a function cannot be named here; use `hansa submit` where it is")
        if table.data_dir is not None:
            raise ConfigError("task.data_dir: a folder cannot be named here; leave it out, or use `hansa submit`")
        read.check_networked()
        central, notes = own_samples(read)
        runner, called, job = self._runner, valid_name(name or "job"), None
        while job is None:
            blob = Blob(*runner.blobs.put(codec.pieces(central)))
            try:
                job = runner.submit(Order(called, dict(tree), blob), ADMIN)
            except Gap:  # a job that had the same samples has just ended, and they went with it
                continue
            except BaseException:
                runner.discard([blob.digest])
                raise
        log.info("job started on the admin port", extra={"job": job})
        return job, notes + replaced(read)

    def stop(self, job: str) -> bool:
        """Stop a job, as `hansa stop` does."""
        if self._runner.ledger.one("SELECT 1 FROM jobs WHERE id = ?", job) is None:
            raise ConfigError(f"there is no job {job[:80]!r}")
        log.info("stop asked for on the admin port", extra={"job": job})
        return self._runner.stop(job, ADMIN)

    def report(self) -> bytes | None:
        """An aggregator makes none."""
        return None
