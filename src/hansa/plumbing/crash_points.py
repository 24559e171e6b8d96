"""Named points at which a test may crash the process. In production they do nothing."""

from __future__ import annotations

from collections.abc import Callable

NAMES = (
    # Aggregator and party: a private file (a key, the party's identity).
    "private.fsync", "private.rename", "private.folder",
    # The aggregator.
    "blob.written", "blob.fsync", "blob.shelf", "blob.rename", "blob.folder", "blob.discarded", "upload.chunk",
    "ledger.created", "mark.fsync", "mark.rename", "mark.folder", "ledger.execute", "ledger.commit",
    "job.submitted", "message.rename", "reply.stored", "reply.written",
    "reply.acknowledged",
    "ask.opened", "ask.closed", "ticket.taken", "round.fused", "model.save", "model.saved", "round.closed",
    "job.model", "job.finished",
    # A relay, which is an aggregator and a party as well.
    "relay.decided", "relay.summed", "relay.received", "relay.finished",
    # A party.
    "party.fetched", "party.forgot", "party.trained", "memory.fsync", "memory.rename", "memory.folder",
    "upload.sent", "receipts.folder", "receipt.fsync", "receipt.kept", "party.received",
    "rotation.certified", "rotation.key", "rotation.kept", "rotation.certificate", "rotation.settled",
)  # fmt: skip

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every point that is reached; None removes the hook."""
    global _hook
    _hook = hook


def steps(name: str) -> Callable[[str], None]:
    """A function that reaches NAME.fsync, NAME.rename or NAME.folder: the steps of a durable write."""
    return lambda step: reach(f"{name}.{step}")


def reach(name: str) -> None:
    """Call the hook, if there is one, with the name of this point."""
    if _hook is not None:
        _hook(name)
