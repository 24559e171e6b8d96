"""Fixtures of the tests over columns."""

from __future__ import annotations

from typing import Any

import pytest
from columns import Messages

from hansa.sim import routing


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    """All messages of the sessions of a simulation."""
    seen: Messages = []
    plain = routing.converse

    def watched(talks: Any, check: Any) -> Any:
        def noted(sender: int, receiver: int, number: int, message: Any) -> Any:
            seen.append((sender, receiver, dict(message)))
            return check(sender, receiver, number, message)

        return plain(talks, noted)

    monkeypatch.setattr(routing, "converse", watched)
    return seen
