"""Reload a running party's policy on SIGHUP, and record which policy was in force when.

The new policy counts from the next ask on: an ask under way finishes under the policy with which it began. A file that
cannot be read, or has a mistake, changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import operator
import time
from typing import Any

from hansa.net.party.policy import Policy
from hansa.net.party.store import PartyStore
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError

log = logging.getLogger("hansa.net")
FILE = "policy.log"  # in the party's folder: one JSON object per line
FIXED = ("device", "limits.memory", "trust.attestation", "data")  # settings that count at the start alone


class PolicyReloader:
    """Reads `party.toml` again when it is told to, and writes `policy.log`."""

    def __init__(self, store: PartyStore) -> None:
        self._store, self._path = store, store.folder / "party.toml"
        self._lines = disk.LineLog(store.folder / FILE)
        self._lines.read()  # completes a line that a crash truncated
        self._note("policy in force", self._digest())

    def reload(self) -> None:
        """Take the policy of the file from the next ask on; a bad file is refused, and the old policy stays."""
        before = self._store.next_policy or self._store.policy
        try:
            if not self._path.exists():  # reading would write a new one, which allows everything
                raise ConfigError(f"there is no file {self._path}")
            digest, new = self._digest(), Policy.read(self._path)
            if digest != self._digest():
                raise ConfigError(f"{self._path} changed while it was read; send the signal again")
        except (ConfigError, OSError) as error:
            log.error("policy not reloaded, the old one stays: %s", error)
            self._note("policy refused", None, why=str(error))
            return
        running = self._store.policy
        new = new if new.data is not None else dataclasses.replace(new, data=running.data)
        fixed = [name for name in FIXED if operator.attrgetter(name)(new) != operator.attrgetter(name)(running)]
        limits = dataclasses.replace(new.limits, memory=running.limits.memory)
        new = dataclasses.replace(new, device=running.device, limits=limits, trust=running.trust,
                                  data=running.data)  # fmt: skip
        changed = sorted(name for name in _settings(new) if _settings(new)[name] != _settings(before)[name])
        self._store.next_policy = new
        log.info("policy reloaded: it counts from the next ask on", extra={"detail": {"changed": changed}})
        if fixed:
            log.warning(
                "%s: cannot change while the party runs; restart it for the new value (as for its data, its keys and "
                "the aggregator's address, which are not in party.toml)", ", ".join(fixed),
            )  # fmt: skip
        self._note("policy reloaded", digest, changed=changed, at_restart=fixed)

    def _digest(self) -> str:
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    def _note(self, event: str, digest: str | None, **more: Any) -> None:
        line = {"at": time.time(), "event": event, "sha256": digest, **more}
        try:
            self._lines.add(json.dumps({name: value for name, value in line.items() if value is not None}).encode())
        except OSError as error:
            log.error("cannot write %s: %s", FILE, error)


def _settings(policy: Policy) -> dict[str, Any]:
    """All settings of a policy by name, those of its tables as `table.name`."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if dataclasses.is_dataclass(value):
            out |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in dataclasses.fields(value)}
        else:
            out[field.name] = value
    return out
