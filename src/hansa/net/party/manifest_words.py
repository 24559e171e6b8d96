"""A manifest in words, for the owner of a party, and what has changed since another one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from hansa.net.party.manifest_checks import range_words, shown
from hansa.net.transport.manifest import AllowedOp, Manifest
from hansa.net.transport.wire import printable

CHECKED = "This party compares every ask with the following:"
CLAIMED = "The aggregator says, and this party cannot check:"


def manifest_lines(manifest: Manifest) -> list[str]:
    """The manifest as lines of text. Its names are the aggregator's choice, so they are made safe to print."""
    return [printable(line) for line in _lines(manifest)]


def changed_lines(before: Manifest, now: Manifest) -> list[str]:
    """The lines that differ: "- " before those of the first manifest, "+ " before those of the second."""
    lines = difflib.ndiff(manifest_lines(before), manifest_lines(now))
    return [line for line in lines if line[:2] in ("- ", "+ ")]


def _lines(manifest: Manifest) -> Iterator[str]:
    yield f"job {manifest.job} of the federation {manifest.federation}"
    yield CHECKED
    yield f"  rounds: at most {manifest.rounds}"
    yield f"  smallest cohort: {manifest.min_cohort}{'' if manifest.min_cohort > 1 else ' (no lower limit)'}"
    times = manifest.trainings
    often = "any number of times" if times is None else "at most once" if times == 1 else f"at most {times} times"
    yield f"  training: {often} per round"
    yield from (f"  {line}" for line in _protection(manifest))
    for name, value in manifest.whole_task.items():
        if name == "other_model":
            yield f"  messages may describe another model than the task's: {'yes' if value else 'no'}"
        elif value not in (None, {}, [], False):
            yield f"  task {name}: {shown(value)}"
        elif name in ("loss", "classes"):
            yield f"  task {name}: any, as the parties' data decide"
    for field, span in manifest.work.items():
        yield f"  messages may set {field}: {range_words(span)}"
    yield from _ops(manifest)
    for party, fingerprint in manifest.parties:
        yield f"  party {party}: {fingerprint or 'not enrolled yet, so with any certificate of the federation'}"
    yield CLAIMED
    yield f"  algorithm: {_table(manifest.algorithm)}"
    if manifest.keep_replies:
        yield ("  it KEEPS every reply after the job, in readable form, to attack it and measure what it reveals "
               "([audit] keep_replies)")  # fmt: skip
    yield f"  privacy: {_table(manifest.privacy) if manifest.privacy else 'no secure sum, no differential privacy'}"


def _protection(manifest: Manifest) -> Iterator[str]:
    hidden = [name for name in manifest.protected if name.startswith("secure-")]
    yield f"replies: {f'hidden in a secure sum ({hidden[0]})' if hidden else 'the aggregator sees each one'}"
    limited = [name for name in manifest.protected if name not in hidden]
    if limited:
        yield f"updates: only inside {', '.join(limited)}"


def _ops(manifest: Manifest) -> Iterator[str]:
    if manifest.ops is None:
        yield "  ops: ANY op that your policy allows, with any settings (the job's ops are not known in advance)"
        return
    for op in manifest.ops:
        yield f"  op {op.name}{_fields(op)}"


def _fields(op: AllowedOp) -> str:
    texts = [f"{name} = {shown(value)}" for name, value in op.fixed.items()]
    texts += [f"{name} {range_words(span)}" for name, span in op.ranges.items()]
    if op.open:
        texts.append(f"any {', '.join(op.open)}")
    return f": {', '.join(texts)}" if texts else ""


def _table(tree: dict[str, Any]) -> str:
    """A table in one line, its name first."""
    rest = [f"{name} = {_value(value)}" for name, value in tree.items() if name != "name"]
    name = [str(tree["name"])] if "name" in tree else []
    return " ".join([*name, f"({', '.join(rest)})"] if rest else name)


def _value(value: Any) -> str:
    return _table(value) if isinstance(value, dict) else shown(value)
