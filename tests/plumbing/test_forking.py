"""Whether a process may fork others that compute gradients: PyTorch's threads, GPU drivers, systems without fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import needs_fork
from hansa.plumbing import forking
from hansa.plumbing.forking import CannotFork, check_fork, fork_obstacle

DEEP = 70  # PyTorch goes on in another thread where backward passes are nested more than 60 deep


class Nested(torch.autograd.Function):
    """The identity, whose backward pass computes another gradient, and so on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
        return gradients[0], None


def gradient_in_a_fork() -> bool:
    """Whether a forked process can compute a gradient."""
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, requires_grad=True).sum().backward()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def ask_before_and_after() -> None:
    torch.ones(2, requires_grad=True).sum().backward()
    assert fork_obstacle() is None and fork_obstacle(gpu=True) is None and gradient_in_a_fork()
    Nested.apply(torch.ones(1, requires_grad=True), DEEP).backward()  # starts a thread, as a machine with a GPU does
    assert not gradient_in_a_fork()
    for gpu in (False, True):
        assert str(fork_obstacle(gpu)).startswith("PyTorch has started threads for gradients")
    with pytest.raises(CannotFork, match=r"^here: PyTorch has .*; do that, or start Python again with CUDA_VISIBLE"):
        check_fork("here", "do that")
    with pytest.raises(CannotFork, match=r"; do that$"):
        check_fork("here", "do that", gpu=True)  # hiding the GPU would not help


def test_the_answer_is_that_of_a_forked_process() -> None:
    """In a new Python, which must not fork afterwards."""
    tests = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = f"import sys; sys.path += {tests}; import test_forking; test_forking.ask_before_and_after()"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_another_trial_follows_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_fork()
    trials = list[bool]()
    monkeypatch.setattr(forking, "_BUILT_FOR_GPU", False)
    monkeypatch.setattr(forking.os, "fork", lambda fork=os.fork: trials.append(True) or fork())
    assert fork_obstacle() is None and fork_obstacle() is None
    before = len(trials)
    assert before <= 1
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert fork_obstacle() is None and fork_obstacle() is None
    finally:
        end.set()
        thread.join()
    assert len(trials) == before + 1


def test_a_system_without_fork_is_named_and_a_restart_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(CannotFork, match=r"^here: this system has no fork; do that$"):
        check_fork("here", "do that")


@pytest.mark.parametrize(
    ("end", "said"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "(exit code -9)"), (lambda: time.sleep(1000), "not end in 0.5 s)")],
)
def test_a_trial_that_a_gpu_driver_aborts_or_blocks_is_an_obstacle(
    end: Callable[[], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "PATIENCE", 0.5)
    monkeypatch.setattr(forking, "_harmless", frozenset())
    monkeypatch.setattr(forking, "_trial", lambda gpu: end())
    obstacle = str(fork_obstacle())
    assert obstacle.startswith("a forked process could not compute a gradient") and said in obstacle


@pytest.mark.parametrize(("used", "gpu", "may"), [(True, False, False), (False, True, False), (False, False, True)])
def test_a_started_driver_matters_to_processes_that_use_it(
    used: bool, gpu: bool, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_fork()
    monkeypatch.setattr(forking, "_harmless", frozenset())
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "_initialized", used)
    assert (fork_obstacle(gpu) is None) == may
