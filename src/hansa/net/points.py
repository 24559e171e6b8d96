"""Named places at which a test may end the process, as a crash would. In production reaching one does nothing."""

from __future__ import annotations

from collections.abc import Callable

NAMES = (
    # Both sides: a private file (a key, who the party is).
    "private.fsync", "private.rename", "private.folder",
    # The aggregator.
    "blob.written", "blob.fsync", "blob.shelf", "blob.rename", "blob.folder", "blob.discarded", "upload.chunk",
    "ledger.execute", "ledger.commit", "job.submitted", "message.rename", "reply.stored", "reply.written",
    "reply.acknowledged",
    "ask.opened", "ask.closed", "ticket.taken", "round.fused", "model.save", "model.saved", "round.closed",
    "job.model", "job.finished",
    # A party.
    "party.fetched", "party.forgot", "party.trained", "memory.fsync", "memory.rename", "party.remembered",
    "upload.sent", "receipts.folder", "receipt.fsync", "receipt.kept", "party.received",
    "rotation.certified", "rotation.key", "rotation.certificate", "rotation.settled",
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
