"""Ports for servers that start later: nobody else gets them meanwhile."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hansa.net import local
from hansa.net.local import free_port

HELD = 64


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ports of other tests stay held."""
    monkeypatch.setattr(local, "_held", deque[int]())
    monkeypatch.setattr(local, "HELD", HELD)
    yield
    for descriptor in local._held:
        os.close(descriptor)


def test_a_held_port_is_given_to_nobody_who_asks_for_any_port() -> None:
    held = [free_port() for _ in range(4 * HELD)]
    assert all(len(set(held[at : at + HELD])) == HELD for at in range(3 * HELD))
    with ExitStack() as stack:
        given = set()
        for _ in range(1000):
            other = stack.enter_context(socket.socket())
            other.bind(("127.0.0.1", 0))
            given.add(other.getsockname()[1])
    assert not set(held[-HELD:]) & given


def test_a_held_port_is_held_at_all_addresses() -> None:
    """A connection from another address would keep a server from listening on all addresses."""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.2", free_port()))


def test_a_server_can_listen_at_a_held_port_and_again_after_a_restart() -> None:
    port = free_port()
    for _ in range(2):
        with socket.create_server(("", port)), socket.create_connection(("127.0.0.1", port), timeout=600):
            pass
