"""The manifest of a job: what its asks may be, so that a party's owner can approve the job before the first ask.

The aggregator writes it when the job starts, as canonical JSON. It is a promise of the aggregator, and no more: a party
that approved a manifest compares every ask with it. Nothing in it is trusted beyond what the party checks itself.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from hansa.net.transport.wire import Count, Digest, Name, Text
from hansa.plumbing.errors import DataError

TASK = ("model", "models", "dtype", "loss", "classes", "party_test", "seed", "bf16", "augment", "public", "other_model")
MANIFEST = 2**22  # bytes: the largest manifest, of a job with ten thousand parties and more
DEPTH = 40  # the most levels of tables in a manifest
Low = Annotated[float, Meta(ge=-1e300, le=1e300)] | None
Range = tuple[Low, Low]  # the least and the most; None for no limit


class AllowedOp(Struct, frozen=True, forbid_unknown_fields=True):
    """An op, a local solver or a transform that asks may name, with what its fields may be.

    Fields in `fixed` have that value, those in `ranges` lie in a range, and those in `open` may have any value. Fields
    that hold other ops are not listed: those ops have their own entries. No other field is allowed.
    """

    name: Text
    fixed: dict[str, Any] = {}
    ranges: dict[str, Range] = {}
    open: tuple[Text, ...] = ()


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the asks of a job may be.

    `task` has the fields `TASK` (`whole_task`). `ops` is None for a job whose ops are not known in advance. `protected`
    are the ops that surround every update, `work` the fields of a local solver that a message may set. A round asks to
    train at most `trainings` times, None for any number. `algorithm` and `privacy` say what the aggregator does with
    the replies, which no party can check. `parties` have the fingerprints of their certificates, None for a party that
    had not enrolled. `keep_replies` says that the aggregator stores replies after their rounds, readable; left out, it
    is false.
    """

    federation: Name
    job: Name
    name: Name
    task: dict[str, Any]
    ops: tuple[AllowedOp, ...] | None
    protected: tuple[Text, ...]
    work: dict[str, Range]
    rounds: Count
    trainings: Count | None
    min_cohort: Count
    algorithm: dict[str, Any]
    privacy: dict[str, Any]
    parties: tuple[tuple[Name, Digest | None], ...]
    keep_replies: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The parties of the job, in the order of their numbers."""
        return tuple(name for name, _ in self.parties)

    @property
    def whole_task(self) -> dict[str, Any]:
        """The task with all its fields: one that the aggregator left out is None, and no ask may set it."""
        return {**dict.fromkeys(TASK), "public": False, **self.task}


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as canonical JSON."""
    return json.dumps(msgspec.to_builtins(manifest), sort_keys=True, separators=(",", ":")).encode()


def decode_manifest(data: bytes) -> Manifest:
    """The manifest of a file; a DataError if it is invalid or too large."""
    if len(data) > MANIFEST:
        raise DataError(f"a manifest of {len(data)} bytes exceeds the limit of {MANIFEST}")
    try:
        tree = json.loads(data)
        if not _shallow(tree, DEPTH):
            raise ValueError("its tables are nested too deeply")
        manifest = msgspec.convert(tree, Manifest)
        _check_plain(manifest)
        return manifest
    except (ValueError, RecursionError) as error:  # of msgspec too: its errors are ValueErrors
        raise DataError(f"not a valid manifest: {str(error)[:200]}") from None


def _check_plain(manifest: Manifest) -> None:
    """Raise a ValueError for a manifest that can be read in two ways: rules and asks could differ in the reading."""
    for op in manifest.ops or ():
        listed = [*op.fixed, *op.ranges, *op.open]
        twice = next((name for name in listed if listed.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{op.name!r} lists the field {twice!r} twice")
    if len(set(manifest.names)) < len(manifest.names):
        raise ValueError("it lists a party twice")


def manifest_digest(data: bytes) -> str:
    """The SHA-256 of a manifest, by which it is approved."""
    return hashlib.sha256(data).hexdigest()


def _shallow(tree: Any, levels: int) -> bool:
    if isinstance(tree, dict):
        return levels > 0 and all(_shallow(value, levels - 1) for value in tree.values())
    if isinstance(tree, list):
        return levels > 0 and all(_shallow(value, levels - 1) for value in tree)
    return True
