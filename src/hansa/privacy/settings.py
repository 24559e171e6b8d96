"""The [privacy] table: how updates are hidden, and what noise they carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hansa.core.algorithm import Algorithm, Problem
from hansa.core.errors import ConfigError
from hansa.core.federation import SumProtocol
from hansa.core.registry import Part, from_config, to_config
from hansa.secure.channel import Channel


class Setting(Protocol):
    """What a check looks at of a run's settings."""

    @property
    def eval_parties(self) -> bool: ...
    @property
    def max_norm(self) -> float | None: ...


@dataclass(frozen=True)
class Privacy:
    """What the parties' updates are protected by: a secure sum, which hides each of them."""

    secure: Channel | None = None

    @property
    def protocol(self) -> SumProtocol | None:
        """What takes over `reduce`, if anything does."""
        return self.secure

    def check(self, algorithm: Algorithm, run: Setting, problem: Problem) -> None:
        """Refuse, with the reason, what cannot work together. Called before anything runs."""
        if self.secure is None:
            return
        self.secure.check(problem)
        if run.max_norm is not None:
            raise ConfigError("run.max_norm: the aggregator cannot see the norm of an update that is hidden in a sum")
        if problem.party_tests and run.eval_parties:
            raise ConfigError(
                "run.eval_parties: the parties' own evaluations would show the aggregator numbers of single parties, "
                "which the secure sum is to hide; set run.eval_parties = false"
            )

    def tree(self) -> dict[str, Any]:
        """As plain data, to record."""
        return {} if self.secure is None else {"secure": to_config(self.secure)}


def privacy(given: Any) -> Privacy:
    """The settings, from the table of an experiment, or as they are. Fields beside `secure` are those of the channel
    that it names."""
    if given is None or isinstance(given, Privacy):
        return given or Privacy()
    if not isinstance(given, Mapping):
        raise ConfigError(f"[privacy] must be a table, got {given!r}")
    fields = dict(given)
    secure = fields.pop("secure", None)
    if secure is None and fields:
        raise ConfigError(
            f"privacy.{next(iter(fields))} is a field of a secure sum; name one, as in secure = 'masking'"
        )
    if secure is None or isinstance(secure, Part):
        if fields:
            raise ConfigError(f"privacy.{next(iter(fields))}: the secure sum is made already; set its field there")
        return Privacy(secure)  # type: ignore[arg-type]
    table = {"name": secure} if isinstance(secure, str) else dict(secure)
    return Privacy(from_config("secure", {**fields, **table}, where="privacy"))
