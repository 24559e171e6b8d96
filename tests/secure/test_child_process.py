"""Arithmetic in a child process: the same results and errors, also if the process dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from test_threshold import DEALING, KEY, SHARES, TEXTS, parts_of

from hansa.plumbing.errors import DataError, RuntimeFailure
from hansa.secure import child_process, functional_sum
from hansa.secure.byte_tensors import as_tensor, to_rows
from hansa.secure.paillier_sum import added, made_key
from hansa.secure.primes import Stream
from hansa.secure.threshold_sum import opened, received


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def pid() -> int:
    """The process id of this thread's child, which its first call starts."""
    found: int = child_process._own.child._process.pid
    return found


def gone(process: int) -> bool:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:
            with open(f"/proc/{process}/stat") as file:
                if file.read().split()[2] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


SENT = {share.index: KEY.rows(TEXTS).numpy() for share in SHARES[:2]}
GIVEN = {"key": KEY.tensor(), "owners": torch.tensor(DEALING.owners), "checks": DEALING.rows()}
CALLS: list[tuple[Any, ...]] = [
    (made_key, KEY.tensor(), KEY.bits),
    (added, KEY, SENT),
    (added, KEY, {**SENT, 7: np.zeros_like(SENT[1])}),
    (added, KEY, {}),
    (received, GIVEN, KEY.bits, DEALING.needed, DEALING.name),
    (received, GIVEN, KEY.bits, DEALING.needed),
]


@pytest.fixture(scope="module")
def opening() -> list[tuple[Any, ...]]:
    """Two more calls: with right partial decryptions, and with a proof of another one."""
    parts = {k: to_rows(parts_of(share), KEY.size).numpy() for k, share in zip(DEALING.owners, SHARES, strict=True)}
    proofs = {
        k: as_tensor(share.prove(TEXTS, parts_of(share), b"secret")).numpy()
        for k, share in zip(DEALING.owners, SHARES, strict=True)
    }
    wrong = {**proofs, DEALING.owners[0]: proofs[DEALING.owners[1]]}
    return [(opened, DEALING, KEY.rows(TEXTS), parts, each) for each in (proofs, wrong)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(type(a) is type(b) and a == b)


@pytest.mark.slow
def test_a_child_gives_what_the_function_itself_gives(opening: list[tuple[Any, ...]]) -> None:
    calls = [*CALLS, *opening]
    found, who = in_a_thread(lambda: ([child_process.run(*call) for call in calls], pid()))
    for call, there in zip(calls, found, strict=True):
        assert same(call[0](*call[1:]), there), call[0].__name__
    assert who != os.getpid()


def test_a_simulation_computes_where_it_is() -> None:
    key = child_process.run(made_key, KEY.tensor(), KEY.bits)
    assert key == KEY
    assert getattr(child_process._own, "child", None) is None


@pytest.mark.slow
def test_the_thread_of_a_job_keeps_its_child_and_the_child_ends_with_it() -> None:
    def work() -> tuple[int, int]:
        child_process.run(*CALLS[0])
        first = pid()
        child_process.run(*CALLS[1])
        return first, pid()

    first, second = in_a_thread(work)
    assert first == second
    assert gone(first)


@pytest.mark.slow
def test_a_child_ends_with_an_aggregator_that_is_killed() -> None:
    code = (
        "import threading, time\n"
        "from hansa.secure import child_process\n"
        "from hansa.secure.functional_sum import opened\n"
        "def work():\n"
        "    child_process.run(opened, {}, 1, b'', 1)\n"
        "    print(child_process._own.child._process.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "threading.Thread(target=work).start()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(child)


def test_errors_of_the_project_are_raised_where_they_are_waited_for() -> None:
    def work() -> Any:
        with pytest.raises(DataError, match=r"the key has 1024 bits, expected 2048") as found:
            child_process.run(made_key, KEY.tensor(), 2048)
        assert type(found.value) is DataError
        return child_process.run(*CALLS[0])

    assert in_a_thread(work) == KEY


def test_a_child_runs_no_other_function() -> None:
    def work() -> None:
        with pytest.raises(TypeError, match=r"posix.system is not one of the functions"):
            child_process.run(os.system, "true")

    in_a_thread(work)
    with pytest.raises(TypeError, match=r"posix.system is not one of the functions"):
        child_process._function("posix.system")


def test_every_function_that_a_child_may_run_is_there() -> None:
    for name in child_process.FUNCTIONS:
        assert callable(child_process._function(name))


@pytest.mark.slow
def test_a_child_that_is_killed_is_replaced_and_one_that_keeps_ending_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> Any:
        child_process.run(*CALLS[0])
        before = pid()
        os.kill(before, 9)
        assert child_process.run(*CALLS[0]) == KEY
        after = pid()
        monkeypatch.setattr(child_process, "COMMAND", [sys.executable, "-c", "raise SystemExit(1)"])
        os.kill(after, 9)
        with pytest.raises(RuntimeFailure, match="ended twice"):
            child_process.run(*CALLS[0])
        monkeypatch.undo()
        child_process.run(*CALLS[0])
        return before, after, pid()

    assert len(set(in_a_thread(work))) == 3


@pytest.mark.slow
def test_other_threads_go_on_while_a_large_power_is_computed() -> None:
    """One power of large numbers holds Python's lock until it is done. Here it takes seconds; other threads
    continue."""
    exponent = Stream(b"x").bits(2**18)

    def work(begun: threading.Event, done: threading.Event) -> None:
        child_process.run(*CALLS[0])  # the child is there
        begun.set()
        try:
            with pytest.raises(DataError, match="the key is for other weights"):
                child_process.run(functional_sum.opened, {0: to_rows([1], 256).numpy()}, exponent, b"label", 1)
        finally:
            done.set()

    def looks() -> int:
        """How often another thread runs meanwhile."""
        begun, done = threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(work, begun, done)
            begun.wait()
            count = sum(1 for _ in iter(lambda: done.wait(0.005), True))
            doing.result()
        return count

    assert any(looks() > 20 for _ in range(3))  # a busy machine may stop this process alone for a while
