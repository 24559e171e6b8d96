"""Named places at which a test may end the process, as a crash would. In production reaching one does nothing."""

from __future__ import annotations

from collections.abc import Callable

NAMES = (
    "blob.written", "blob.fsync", "blob.rename", "blob.folder", "upload.chunk",
    "ledger.execute", "ledger.commit", "reply.stored", "reply.acknowledged",
    "ask.opened", "ask.closed", "ticket.taken", "round.fused", "model.save", "model.saved", "round.closed",
    "job.finished",
    "party.fetched", "party.trained", "party.remembered", "party.sent",
)  # fmt: skip

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Have `hook` called with the name of every point that is reached; None for nobody."""
    global _hook
    _hook = hook


def reach(name: str) -> None:
    """Say that this point was reached."""
    if _hook is not None:
        _hook(name)
