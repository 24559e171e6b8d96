"""Arithmetic in a process of its own: the same results and errors, whatever becomes of the process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hansa.core.errors import DataError, RuntimeFailure
from hansa.secure import apart
from hansa.secure.numbers import Stream, is_prime
from hansa.secure.threshold import check_numbers


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_simulation_computes_where_it_is() -> None:
    assert apart.run(os.getpid) == os.getpid()


def test_the_thread_of_a_job_computes_in_a_child_that_it_keeps_and_that_ends_with_it() -> None:
    first, second, power = in_a_thread(lambda: (apart.run(os.getpid), apart.run(os.getpid), apart.run(pow, 3, 5)))
    assert first == second != os.getpid()
    assert power == 243
    for _ in range(100):
        if not os.path.exists(f"/proc/{first}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{first}")


def test_errors_of_the_project_are_raised_where_they_are_waited_for() -> None:
    def work() -> Any:
        with pytest.raises(DataError, match="a key cannot have 2 shares, 5 of them needed"):
            apart.run(check_numbers, 5, (0, 1))
        return apart.run(is_prime, 97)

    assert in_a_thread(work)


def test_a_child_that_is_killed_is_replaced_and_one_that_keeps_ending_is_reported() -> None:
    def work() -> Any:
        before = apart.run(os.getpid)
        os.kill(before, 9)
        after = apart.run(os.getpid)
        with pytest.raises(RuntimeFailure, match="ended twice"):
            apart.run(os._exit, 1)
        return before, after, apart.run(os.getpid)

    assert len(set(in_a_thread(work))) == 3


def test_other_threads_go_on_while_a_large_power_is_computed() -> None:
    """One power of large numbers holds Python's lock to its end. Here it takes seconds; the others count on."""
    exponent, done = Stream(b"x").bits(2**18), threading.Event()
    modulus = Stream(b"y").bits(2**13) | 1

    def work() -> int:
        apart.run(os.getpid)  # the child is there
        begun.set()
        try:
            return apart.run(pow, 3, exponent, modulus)
        finally:
            done.set()

    begun, longest = threading.Event(), 0.0
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(work)
        begun.wait()
        last = start = time.monotonic()
        while not done.wait(0.005):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        whole = time.monotonic() - start
        assert 0 < doing.result() < modulus
    assert longest < whole / 2
