"""The [privacy] table: secure sum, differential privacy, and the bound on the length of updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hansa.core.algorithm import Algorithm
from hansa.core.ask import Ask, Reduced
from hansa.core.federation import Federation, SumProtocol
from hansa.core.op import Shape
from hansa.core.plain_data import check_numbers, convert, from_config, to_config
from hansa.core.quantities import Norm
from hansa.core.registry import Part
from hansa.plumbing.errors import ConfigError
from hansa.privacy.central import CentralDP, RunSettings
from hansa.privacy.guard import Guard
from hansa.secure.channel import Channel
from hansa.transforms import ClippedUpdate, Packed


@dataclass(frozen=True)
class BoundedSum:
    """Sums of updates that each party clips to the length `bound`, by another protocol or in the clear.

    Numbers beside the update are not clipped.
    """

    bound: float
    inner: SumProtocol | None

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
        op = ask.op
        if isinstance(op, Packed):  # the bound is on the update, not on its packed form
            ask = dataclasses.replace(ask, op=dataclasses.replace(op, inner=ClippedUpdate(op.inner, self.bound)))
        elif op is not None and op.update is not None:
            ask = dataclasses.replace(ask, op=ClippedUpdate(op, self.bound))
        if self.inner is not None:
            return await self.inner.reduce(fed, ask)
        reduced: Reduced = await ask
        return reduced


@dataclass(frozen=True)
class Privacy:
    """The protection of the parties' updates.

    `secure` is the secure sum that hides single updates, `dp` the differential privacy of the sum, and `bound` the
    length to which each party clips its update, with or without a secure sum.
    """

    secure: Channel | None = None
    dp: CentralDP | None = None
    bound: Norm | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.bound is not None and self.dp is not None:
            raise ConfigError(
                "privacy.bound: differential privacy already bounds the updates by dp.clip; leave one out"
            )

    @property
    def protocol(self) -> SumProtocol | None:
        """The protocol that replaces `reduce`, if any. Under differential privacy `guard` wraps the secure sum."""
        return self.secure if self.bound is None else BoundedSum(self.bound, self.secure)

    def guard(self, algorithm: Algorithm, run: RunSettings, parties: int, cohort: int,
              vector: Shape = ((0,), torch.float32)) -> Guard | None:  # fmt: skip
        """The private sums of a run; None without differential privacy. `vector` is the shape of an update."""
        return None if self.dp is None else Guard.of(self.dp, algorithm, run, parties, cohort, vector, self.secure)

    def tree(self) -> dict[str, Any]:
        """The settings as plain data, for the records of a run."""
        parts = {name: to_config(part) for name in ("secure", "dp") if (part := getattr(self, name)) is not None}
        return parts | ({} if self.bound is None else {"bound": self.bound})


def privacy(settings: Any) -> Privacy:
    """The settings from an experiment's table; a `Privacy` is returned unchanged.

    Fields beside `secure`, `dp` and `bound` belong to the secure sum that `secure` names.
    """
    if settings is None or isinstance(settings, Privacy):
        return settings or Privacy()
    if not isinstance(settings, Mapping):
        raise ConfigError(f"[privacy] must be a table, got {settings!r}")
    fields = dict(settings)
    dp = _dp(fields.pop("dp", None))
    bound = convert(fields.pop("bound", None), Norm | None, "privacy.bound")
    secure = fields.pop("secure", None)
    if secure is None and fields:
        raise ConfigError(
            f"privacy.{next(iter(fields))} is a field of a secure sum; name one, as in secure = 'masking'"
        )
    if secure is None or isinstance(secure, Part):
        if fields:
            raise ConfigError(
                f"privacy.{next(iter(fields))}: `secure` is an object, not a name; set the field on that object"
            )
        return Privacy(secure, dp, bound)  # type: ignore[arg-type]
    if not isinstance(secure, (str, Mapping)):
        raise ConfigError(f"privacy.secure: expected a secure sum by name or as a table, got {secure!r}")
    table = {"name": secure} if isinstance(secure, str) else dict(secure)
    return Privacy(from_config("secure", {**fields, **table}, where="privacy"), dp, bound)


def _dp(settings: Any) -> CentralDP | None:
    """Differential privacy from a part, a name, or a table whose `kind` is the name."""
    if settings is None:
        return None
    if isinstance(settings, Mapping):
        settings = {"name" if field == "kind" else field: value for field, value in settings.items()}
    part: CentralDP = from_config("dp", settings, where="privacy.dp")
    return part
