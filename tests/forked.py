"""`hansa` commands as processes that are forked from a process that has imported everything: they start at once.

That process sees no GPU, so it may compute gradients and still be forked (`hansa.plumbing.forking`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from hansa.plumbing.forking import check_fork

processes = multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Start the process from which the others are forked. It finds its modules by PYTHONPATH alone."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""):
        processes.set_forkserver_preload(["warm"])
        forkserver.ensure_running()


def needs_fork() -> None:
    """Have a test run in a process of its own (conftest.py) if this one must not fork."""
    check_fork("this test needs forked processes", "run it alone")


def run_command(words: Sequence[str], log: Path, before: str | None = None,
                variables: Mapping[str, str] | None = None) -> None:  # fmt: skip
    """Run `hansa WORDS` in this process, with its output in a file; first call the function `before` (MODULE:NAME)."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(variables or {})
    if before is not None:
        module, _, function = before.partition(":")
        getattr(importlib.import_module(module), function)()
    sys.argv = ["hansa", *words]
    from hansa.cli import main

    main()


class Forked:
    """A forked `hansa` command, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, words: Sequence[str], log: Path, before: str | None = None,
                 variables: Mapping[str, str] | None = None) -> None:  # fmt: skip
        warm_up()
        self._process = processes.Process(target=run_command, args=(words, log, before, variables), daemon=True)
        self._process.start()
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("hansa", timeout or 0.0)
        return self.returncode
