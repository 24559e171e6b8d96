"""Whether this process may fork processes that compute gradients.

At the first backward pass of a process, PyTorch starts one thread per GPU of the machine, even if the pass runs on the
CPU; deeply nested passes start more threads. A forked process lacks these threads, and PyTorch refuses every backward
pass in it (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork). The driver of a GPU does not work in a forked
process either, once the parent has started it. PyTorch does not say which of this has happened, so a forked process
tries a backward pass. A PyTorch that supports no GPU needs no further trial before there is another thread.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import warnings

import torch

from hansa.plumbing.errors import ConfigError

PATIENCE = 60.0  # seconds for the trial; a process whose GPU driver is stuck never ends
SETTLE = 0.1  # seconds after which a thread that calls a broken driver has ended its process
RESTART = ", or start Python again with CUDA_VISIBLE_DEVICES='' in its environment, which hides the GPU"

_NO_FORK = "this system has no fork"
_THREADS = (
    "PyTorch has started threads for gradients (on a machine with a GPU the first backward pass does), and a forked "
    "process would lack them"
)
_DRIVER = "the GPU was used in it, and the GPU's driver does not work in a forked process"
_FAILED = "a forked process could not compute a gradient ({}), as where the GPU's driver was started before the fork"
_FOUND = {0: None, 1: _THREADS, 2: _DRIVER}  # by the exit code of the trial


_BUILT_FOR_GPU = any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
_harmless: frozenset[str] = frozenset()  # threads of this process at the last successful trial


class CannotFork(ConfigError):
    """This process must not fork processes that compute gradients."""


def fork_obstacle(gpu: bool = False) -> str | None:
    """Why this process must not fork processes that compute gradients, as a clause; None if it may.

    With `gpu`, the forked processes use a GPU, otherwise `hide_gpus`.
    """
    global _harmless
    if not hasattr(os, "fork"):
        return _NO_FORK
    threads = frozenset(os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["unknown"])
    if not _BUILT_FOR_GPU and threads <= _harmless:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the trial uses one thread only
        child = os.fork()
    if child == 0:
        try:
            os._exit(_trial(gpu))
        finally:
            os._exit(3)
    until = time.monotonic() + PATIENCE
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            _harmless = threads if code == 0 and "unknown" not in threads else frozenset()
            return _FOUND[code] if code in _FOUND else _FAILED.format(f"exit code {code}")
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return _FAILED.format(f"it did not end in {PATIENCE:g} s")
        time.sleep(0.0005)


def check_fork(doing: str, remedy: str, gpu: bool = False) -> None:
    """Raise a CannotFork unless this process may fork processes that compute gradients."""
    reason = fork_obstacle(gpu)
    if reason is not None:
        restart = "" if reason == _NO_FORK or gpu else RESTART
        raise CannotFork(f"{doing}: {reason}; {remedy}{restart}")


def hide_gpus() -> None:
    """Hide the GPUs from a process that only uses the CPU; its first backward pass would start their driver.

    It has no effect on a driver that was started before.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _trial(gpu: bool) -> int:
    """Compute a gradient in a forked process; return the exit code."""
    import resource  # not on Windows, where nothing is forked

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where PyTorch reports an abort
    started = torch.cuda._is_in_bad_fork()
    if started and (gpu or torch.cuda._initialized):
        return 2
    hide_gpus()
    try:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return 1 if "fork" in str(error) else 3
    if started:
        time.sleep(SETTLE)
    return 0
