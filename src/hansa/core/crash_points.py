"""Named places at which a test may end the process, as a crash would. In production reaching one does nothing."""

from __future__ import annotations

from collections.abc import Callable

NAMES = (
    # Both sides: a private file (a key, who the party is).
    "private.fsync", "private.rename", "private.folder",
    # The aggregator.
    "blob.written", "blob.fsync", "blob.shelf", "blob.rename", "blob.folder", "blob.discarded", "upload.chunk",
    "ledger.created", "mark.fsync", "mark.rename", "mark.folder", "ledger.execute", "ledger.commit",
    "job.submitted", "message.rename", "reply.stored", "reply.written",
    "reply.acknowledged",
    "ask.opened", "ask.closed", "ticket.taken", "round.fused", "model.save", "model.saved", "round.closed",
    "job.model", "job.finished",
    # A party.
    "party.fetched", "party.forgot", "party.trained", "memory.fsync", "memory.rename", "memory.folder",
    "upload.sent", "receipts.folder", "receipt.fsync", "receipt.kept", "party.received",
    "rotation.certified", "rotation.key", "rotation.kept", "rotation.certificate", "rotation.settled",
)  # fmt: skip

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Have `hook` called with the name of every point that is reached; None for nobody."""
    global _hook
    _hook = hook


def steps(name: str) -> Callable[[str], None]:
    """The points of a durable write, after its fsync, its rename and its folder's fsync: NAME.fsync and so on."""
    return lambda step: reach(f"{name}.{step}")


def reach(name: str) -> None:
    """Say that this point was reached."""
    if _hook is not None:
        _hook(name)
