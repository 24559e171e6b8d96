"""Compare an ask with the manifest that the party's owner approved.

The aggregator writes the manifest and the asks. So each part of an ask that the manifest limits is read from the ask
itself, and an ask beyond a limit is refused with the difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hansa.core.ask import op_of
from hansa.core.data_op import DataOp
from hansa.core.delivery import Deliver
from hansa.core.op import Op
from hansa.core.other_model import described
from hansa.core.plain_data import field_types, to_config
from hansa.core.registry import Part
from hansa.core.wrapper import unwrap
from hansa.local.finetune import FineTune
from hansa.local.solver import LocalSolver
from hansa.net.party.op_parts import PACKED, parts
from hansa.net.party.vault import JobVault, PartyVault
from hansa.net.transport import certificates
from hansa.net.transport.manifest import AllowedOp, Manifest, Range
from hansa.net.transport.wire import Work
from hansa.plumbing.errors import PartyError
from hansa.transforms import Transform
from hansa.transforms.downlink import transform_of

KINDS = (Op, Transform)
DECIDED_LATER = ("loss", "classes")  # parts of the task that the parties' data decide, if the job does not
LONG = 120  # most characters of a value in a sentence


def refuses_ask(manifest: Manifest, party: str, work: Work, op: Op, message: Mapping[str, Any],
                settings: Mapping[str, Any], preparations: list[Any]) -> str | None:  # fmt: skip
    """Why an ask is not what the manifest allows, or None. `settings` are the task, with the party's model chosen."""
    differs = _differs_about(manifest, party, work, op, message)
    if differs is None and manifest.ops is not None:
        asked = [op, *([transform_of(message["packed"])] if "packed" in message else [])]
        asked += [op_of(step["op"], where="task") for step in preparations]
        differs = next((why for each in asked for part in parts(each) if (why := _differs_op(manifest, part))), None)
    differs = differs or _differs_work(manifest, message["payload"].get("work")) or _differs_hidden(manifest, op)
    differs = differs or (_differs_task(manifest, settings) if settings else None)
    if differs is None and any(True for _ in described(message["payload"])) and not manifest.task.get("other_model"):
        differs = "the task's own model, and the ask describes another one"
    return None if differs is None else f"the approved manifest allows {differs}"


def trains(op: Op) -> bool:
    """Whether an op sends an update of the model, openly or hidden in a sum, or what a local solver has trained."""
    layers, inner = unwrap(op)
    silent = any(isinstance(layer, FineTune) or layer.name == "probe" for layer in layers)  # their replies are empty
    trained = any(isinstance(part, LocalSolver) for part in parts(inner))
    return (inner.update is not None or trained) and not silent


def check_number(manifest: Manifest, vault: PartyVault, op: Op, work: Work) -> None:
    """Count an ask to train; a PartyError if its round has asked for more than the manifest allows."""
    if manifest.trainings is not None and trains(op):
        vault.train(work.job, work.round, work.message.digest, manifest.trainings)


class ApprovedVault(JobVault):
    """A job's part of the vault, which knows the parties of the approved manifest alone."""

    def __init__(self, vault: PartyVault, job: str, task: str, manifest: Manifest) -> None:
        super().__init__(vault, job, task)
        self._parties = dict(manifest.parties)

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        name, key = super().known(certificate)
        if name not in self._parties:
            raise PartyError(f"the approved manifest does not list the party {name}, and the ask has its certificate")
        listed, sent = self._parties[name], certificates.fingerprint(certificate)
        if listed not in (None, sent):
            raise PartyError(
                f"the approved manifest lists {name} with the certificate {listed}, and the ask has {sent}"
            )
        return name, key


def _differs_about(manifest: Manifest, party: str, work: Work, op: Op, message: Mapping[str, Any]) -> str | None:
    """How the ask as a whole differs: name, party, cohort, round."""
    if work.name != manifest.name:
        return f"the job {manifest.name!r}, and the ask is of {work.name!r}"
    names = manifest.names
    if work.party >= len(names) or names[work.party] != party:
        at = names.index(party) if party in names else "no number"
        return f"this party {at} as its number, and the ask has {work.party}"
    if work.min_cohort < manifest.min_cohort:
        return f"cohorts of at least {manifest.min_cohort}, and the ask has {work.min_cohort}"
    if work.keeps and not manifest.keep_replies:
        return "replies that are deleted after their round, and the aggregator keeps that of the ask"
    if message["round"] != work.round:
        return f"one round per ask, and the ask has {work.round} and {message['round']}"
    last = manifest.rounds - 1 if trains(op) else manifest.rounds  # the model is evaluated after the last round
    if work.round > last:
        return f"{manifest.rounds} rounds, and the ask is of round {work.round + 1}"
    return None


def _differs_op(manifest: Manifest, part: Part) -> str | None:
    """How an op, a solver or a transform differs from the manifest."""
    if part.name == PACKED:  # it only applies a transform, which is compared
        return None
    allowed = [each for each in manifest.ops or () if each.name == part.name]
    if not allowed:
        names = sorted({each.name for each in manifest.ops or ()})
        return f"the ops {', '.join(names)}, and the ask has {part.name!r}"[:400]
    config = json.loads(json.dumps(to_config(part)))
    found = [_differences(each, part, config) for each in allowed]
    nearest = min(found, key=len)
    return nearest[0] if nearest else None


def _differences(allowed: AllowedOp, part: Part, config: Mapping[str, Any]) -> list[str]:
    out = []
    for name in field_types(type(part)):
        value = config[name]
        if _nested(getattr(part, name)) or name in allowed.open:
            continue
        if name in allowed.ranges:
            if not within(value, allowed.ranges[name]):
                out.append(f"{part.name}.{name} {range_words(allowed.ranges[name])}, and the ask has {shown(value)}")
        elif name not in allowed.fixed:
            out.append(f"no {part.name}.{name}, and the ask has {shown(value)}")
        elif value != allowed.fixed[name]:
            out.append(f"{part.name}.{name} = {shown(allowed.fixed[name])}, and the ask has {shown(value)}")
    return out


def _nested(value: Any) -> bool:
    """Whether a field holds other ops, which are compared by themselves."""
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, KINDS) for each in values)


def _differs_work(manifest: Manifest, work: Any) -> str | None:
    """How the fields of the local solver that the message sets differ."""
    for name, value in work.items() if isinstance(work, Mapping) else ():
        if name == "steps" and value is None and "epochs" in manifest.work:
            continue  # epochs replace steps
        if name not in manifest.work:
            return f"no message to set {name}, and the ask sets it to {shown(value)}"
        if not within(value, manifest.work[name]):
            return f"{name} {range_words(manifest.work[name])}, and the ask sets {shown(value)}"
    return None


def _differs_hidden(manifest: Manifest, op: Op) -> str | None:
    """How the protection of a reply differs."""
    around = [layer.name for layer in unwrap(op)[0]]
    if trains(op):
        lacking = next((name for name in manifest.protected if name not in around), None)
        if lacking is not None:
            return f"updates inside {lacking!r} alone, and the ask has {op.name!r} without it"
    secure = any(name.startswith("secure-") for name in manifest.protected)
    silent = op.name == "describe" or isinstance(op, (DataOp, FineTune, Deliver))
    if secure and not silent and not op.name.startswith("secure-"):
        return f"replies in a secure sum alone, and {op.name!r} would reveal its reply"
    return None


def _differs_task(manifest: Manifest, settings: Mapping[str, Any]) -> str | None:
    """How the task differs. Before the columns of a table are known, there is a task without a model."""
    approved = manifest.whole_task
    plain = json.loads(json.dumps({name: settings.get(name) for name in approved}))
    several = approved.get("models") is not None and plain["models"] is not None
    for name, value in approved.items():
        sent = plain[name]
        if name == "other_model":
            continue
        if name == "public":
            sent = sent is not None
            if value and not sent:  # the samples follow when the model is known
                continue
        if name in ("model", "models", "augment", "bf16") and sent is None:
            continue
        if (name == "model" and several) or (name in DECIDED_LATER and value is None):
            continue
        if sent != value:
            return f"task.{name} = {shown(value)}, and the ask has {shown(sent)}"
    return None


def within(value: Any, range: Range) -> bool:
    """Whether a value is a number in a range; None only where the range has no upper limit."""
    low, high = range
    if value is None:
        return high is None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def range_words(range: Range) -> str:
    """A range in words."""
    low, high = range
    if low is None and high is None:
        return "of any value"
    if high is None:
        return f"of at least {low:g}"
    return f"of at most {high:g}" if low is None else f"{low:g} to {high:g}" if low != high else f"of {low:g}"


def shown(value: Any) -> str:
    """A value in a sentence."""
    text = json.dumps(value)
    return text if len(text) <= LONG else f"{text[:LONG]}..."
