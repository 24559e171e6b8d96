"""The announcement of a masked sum: what the aggregator will ask each party for, told to all before they share secrets.

It has all fields of the op, and hashes of what the payload contains. The hash of the announcement is part of the
transcript, so parties that were told different things have different masks and cannot open each other's envelopes. When
the party is asked for its masked numbers, it compares the ask with what was announced. So an aggregator that wants all
masks to cancel must ask all parties for the same: it cannot have the updates of all parties but one rounded to zero, or
give the others a model to which it knows their replies.

In a sum with signatures nothing may differ from party to party, except which parties begin a model of their own
(`begin`, FedMD). The amount of local work (`work`) may not: the aggregator chooses the op and the model, so training
may diverge, and then the update of a party with more steps, or a larger learning rate, drowns those of the others. A
party's own settings (`own` in `party.toml`) are not announced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hansa.core.ask import Ask
from hansa.core.op import Op, Payload
from hansa.plumbing import codec
from hansa.plumbing.errors import PartyError

WORK = "work"  # the entry of a payload that sets the local work
DIFFER = frozenset({WORK, "begin"})  # entries that an ask may have for single parties in a sum with signatures
ENVELOPES = "secure"  # the entry of the masked sum itself, for one party
LARGEST = 2**24  # bytes of an announcement
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
    """Why the parties are asked for different things, which a sum with signatures does not allow, or None."""
    each, hint = announcement["each"], "; or set privacy.active = false, which protects against a curious aggregator"
    others = sorted({name for own in each.values() for name in own} - DIFFER)
    if others:
        return (
            f"a secure sum with signatures asks all parties for the same, and {others[0]!r} differs from party to "
            f"party{hint}"
        )
    common = announcement["payload"].get(WORK)
    if len({_text({WORK: each.get(str(id), {}).get(WORK, common)}) for id in ids}) > 1:
        return (
            "a secure sum with signatures asks all parties for the same work: training that diverges makes the update "
            f"of a party with more work drown all others; change run.pace or run.own{hint}"
        )
    return None


def _request(message: Mapping[str, Any]) -> dict[str, Any]:
    packed = message.get("packed")
    payload = {name: value for name, value in message["payload"].items() if name != ENVELOPES}
    return {"op": message["op"], "payload": _entries(payload), "packed": None if packed is None else _hash(packed)}


def _entries(payload: Payload) -> dict[str, str]:
    """Hashes of the entries of a payload."""
    return {name: _hash(value) for name, value in payload.items()}


def _hash(value: Any) -> str:
    return codec.digest({"value": value})


def _text(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
