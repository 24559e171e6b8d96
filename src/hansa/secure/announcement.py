"""The announcement of a masked sum: what the aggregator will ask each party for, told to all before they share secrets.

It has all fields of the op, and hashes of what the payload contains. The hash of the announcement is part of the
transcript, so parties that were told different things have different masks and cannot open each other's envelopes. When
the party is asked for its masked numbers, it compares the ask with what was announced. So an aggregator that wants all
masks to cancel must ask all parties for the same: it cannot have the updates of all parties but one rounded to zero, or
give the others a model to which it knows their replies.

The amount of local work (`work`) may differ from party to party, and is announced in full. In a sum with signatures
nothing else may differ, except which parties begin a model of their own (`begin`, FedMD). No party may go more than
`SPREAD` times as far as another: an update of many large steps would drown those of the others. A party's own settings
(`own` in `party.toml`) are not announced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hansa.core import codec
from hansa.core.ask import Ask
from hansa.core.errors import PartyError
from hansa.core.op import Op, Payload

WORK = "work"  # the entry of a payload that sets the local work
DIFFER = frozenset({WORK, "begin"})  # entries that may differ from party to party in a sum with signatures
ENVELOPES = "secure"  # the entry of the masked sum itself, for one party
LARGEST = 2**24  # bytes of an announcement
SPREAD = 10.0  # how many times as far as another party one may go
Announcement = Mapping[str, Any]


def announce(ask: Ask, op: Op, members: Sequence[int]) -> dict[str, Any]:
    """The announcement of an ask for `op` to these parties."""
    common = dataclasses.replace(ask, op=op, each={}).message(members[0])
    each = {str(party): _entries(ask.each[party]) for party in members if ask.each.get(party)}
    return {**_request(common), "each": each}


def digest(announcement: Announcement) -> bytes:
    """The hash of an announcement."""
    return hashlib.sha256(_text(announcement)).digest()


def expected(announcement: Announcement, party: int) -> bytes:
    """What one party will be asked for, by the announcement."""
    own = announcement["each"].get(str(party), {})
    packed = announcement["packed"] if "model" not in own else None  # a party's own model is not packed
    request = {"op": announcement["op"], "payload": {**announcement["payload"], **own}, "packed": packed}
    return _text(request)


def difference(message: Mapping[str, Any], promised: bytes) -> str | None:
    """What in a message to a party is not what was announced to all, or None."""
    asked, told = _request(message), json.loads(promised)
    if _text(asked) == promised:
        return None
    for name in ("op", "payload"):
        parts = sorted({*asked[name], *told[name]})
        differs = next((part for part in parts if not _same(asked[name], told[name], part)), None)
        if differs is not None:
            return f"another {differs!r} in the {name}"
    return "another model"


def _same(asked: Mapping[str, Any], told: Mapping[str, Any], part: str) -> bool:
    return part in asked and part in told and _text({part: asked[part]}) == _text({part: told[part]})


def check(announcement: Any, ids: Sequence[int], parties: int, active: bool) -> Announcement:
    """The announcement in a payload, checked; a PartyError if it is malformed, or with `active` uneven."""
    malformed = PartyError(
        "the aggregator did not announce what it will ask all parties of the secure sum for; it and the parties need "
        "the same version of hansa"
    )
    if not isinstance(announcement, Mapping) or set(announcement) != {"op", "payload", "packed", "each"}:
        raise malformed
    op, each = announcement["op"], announcement["each"]
    if not all(isinstance(announcement[name], Mapping) for name in ("op", "payload", "each")):
        raise malformed
    if len(_text(announcement)) > LARGEST:  # the party stores its part
        raise PartyError(f"the aggregator announced a request of more than {LARGEST} bytes to the parties of the sum")
    if not {*each} <= {str(id) for id in ids} or not all(isinstance(own, Mapping) for own in each.values()):
        raise malformed
    if (op.get("name"), op.get("parties")) != ("secure-masked", parties):
        raise PartyError(f"the aggregator announced no masked numbers of {parties} parties")
    why = uneven(announcement, ids) if active else None
    if why is not None:
        raise PartyError(why)
    return announcement


def uneven(announcement: Announcement, ids: Sequence[int]) -> str | None:
    """Why the parties are asked for things that are too different for a sum with signatures, or None."""
    each, hint = announcement["each"], "; or set privacy.active = false, which protects against a curious aggregator"
    others = sorted({name for own in each.values() for name in own} - DIFFER)
    if others:
        return (
            f"a secure sum with signatures asks all parties for the same, and {others[0]!r} differs from party to "
            f"party{hint}"
        )
    common = announcement["payload"].get(WORK)
    if not any(WORK in own for own in each.values()):
        return None
    works = [each.get(str(id), {}).get(WORK, common) or {} for id in ids]
    if not all(isinstance(work, Mapping) for work in works):
        return "the aggregator announced malformed work"
    units, reaches = zip(*(_reach(announcement["op"], work) for work in works), strict=True)
    if len({*units}) > 1 or None in reaches or any(max(far) > SPREAD * min(far) for far in zip(*reaches, strict=True)):
        return (
            f"in a secure sum with signatures no party may go more than {SPREAD:g} times as far as another (learning "
            "rate times steps, or times epochs, also if divided by the batch size), and all count either steps or "
            f"epochs; change run.pace or run.own{hint}"
        )
    return None


def _reach(op: Mapping[str, Any], work: Mapping[str, Any]) -> tuple[str, tuple[float, ...] | None]:
    """How far a party may go in its local training: a unit, and numbers in it; None if these are not positive.

    An epoch has one step per batch, and one step at a party with fewer samples than a batch. So epochs are compared
    as such and divided by the batch: a huge batch does not excuse a huge learning rate.
    """
    rate, steps, epochs, batch = (
        work[name] if name in work else _field(op, name) for name in ("lr", "steps", "epochs", "batch")
    )
    rate = 1.0 if rate is None else rate
    unit = "steps" if steps is not None else "epochs of all samples" if batch is None else "epochs"
    factors = [rate, steps] if steps is not None else [rate, 1 if epochs is None else epochs]
    if not all(isinstance(f, (int, float)) and 0 < f < 1e300 for f in [*factors, *([] if batch is None else [batch])]):
        return unit, None
    reach = float(factors[0]) * float(factors[1])
    return unit, ((reach, reach / batch) if unit == "epochs" else (reach,))


def _field(config: Mapping[str, Any], name: str) -> Any:
    """A field of an op, or of the first op inside it that has the field."""
    holder = _holder(config, name)
    return None if holder is None else holder[name]


def _holder(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    if name in config:
        return config
    inner = (_holder(value, name) for value in config.values() if isinstance(value, Mapping))
    return next((holder for holder in inner if holder is not None), None)


def _request(message: Mapping[str, Any]) -> dict[str, Any]:
    packed = message.get("packed")
    payload = {name: value for name, value in message["payload"].items() if name != ENVELOPES}
    return {"op": message["op"], "payload": _entries(payload), "packed": None if packed is None else _hash(packed)}


def _entries(payload: Payload) -> dict[str, Any]:
    """The work of a payload in full, and hashes of its other entries."""
    return {name: value if name == WORK and _plain(value) else _hash(value) for name, value in payload.items()}


def _plain(work: Any) -> bool:
    return isinstance(work, Mapping) and all(
        value is None or isinstance(value, (int, float)) for value in work.values()
    )


def _hash(value: Any) -> str:
    return codec.digest({"value": value})


def _text(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
