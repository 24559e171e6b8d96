"""Control of jobs on the live page: with the admin token a browser may start and stop jobs."""

from __future__ import annotations

import hmac
import logging
import tomllib

from hansa.core.plain_data import from_config
from hansa.experiment.config import parse
from hansa.experiment.deployed import own_samples, replaced
from hansa.net.aggregator.blobs import Gap
from hansa.net.aggregator.federation import ADMIN_TOKEN
from hansa.net.aggregator.jobs import JobRunner
from hansa.net.aggregator.order import NOT_LISTED
from hansa.net.transport import keys
from hansa.net.transport.names import valid_name
from hansa.net.transport.wire import Blob, Order
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError
from hansa.plumbing.functions import only, reference_of

log = logging.getLogger("hansa.net")
ADMIN = "admin's token"  # who submitted or stopped a job, as the log says it


class AdminControl:
    """Control of an aggregator's jobs (`hansa.ui.page.Control`). The token file is read for every request: a new token
    is valid at once, and without the file nothing is allowed."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner, self._path = runner, runner.registry.federation.folder / ADMIN_TOKEN

    @property
    def usable(self) -> bool:
        """Whether the token file exists."""
        return self._path.is_file()

    def admits(self, token: str) -> bool:
        """Whether this is the admin token; compared in constant time."""
        try:
            right = keys.read_private(self._path).strip()
        except ConfigError as error:
            log.warning("cannot read the admin token: %s", error)
            return False
        return len(right) >= 16 and hmac.compare_digest(right, token.encode(errors="replace"))

    def start(self, experiment: str, name: str) -> tuple[str, list[str]]:
        """Submit the text of an experiment, as `hansa submit` does. The text comes from a browser, so it may name no
        files and no functions of the aggregator's machine."""
        try:
            tree = tomllib.loads(experiment)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the experiment is not valid TOML: {error}") from None
        with only(self._runner.functions, NOT_LISTED):
            read = parse(tree)
        table = read.task
        if table.test is not None or isinstance(table.trusted, str) or isinstance(table.public, str):
            raise ConfigError(
                "task.test, task.trusted and task.public may not name files or functions here; use `hansa submit` on "
                "their machine"
            )
        if reference_of(table.dataset) is not None:
            raise ConfigError("task.dataset may not name a function here; use `hansa submit` on its machine")
        if hasattr(
            from_config("dataset", table.dataset, "task.dataset") if table.dataset is not None else None, "file"
        ):
            raise ConfigError("task.dataset may not name a file here; use `hansa submit` on its machine")
        if table.data_dir is not None:
            raise ConfigError("task.data_dir may not name a folder here; leave it out, or use `hansa submit`")
        read.check(deployed=True, networked=True)
        central, notes = own_samples(read)
        runner, job_name, job = self._runner, valid_name(name or "job"), None
        while job is None:
            blob = Blob(*runner.blobs.put(codec.pieces(central)))
            try:
                job = runner.submit(Order(job_name, dict(tree), blob), ADMIN)
            except Gap:  # a job with the same samples has just ended, and they were deleted with it
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
        log.info("job stopped on the admin port", extra={"job": job})
        return self._runner.stop(job, ADMIN)

    def report(self) -> bytes | None:
        """None: an aggregator has no report."""
        return None
