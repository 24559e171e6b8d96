"""The [privacy] table: secure sum, differential privacy, and the bound on the length of updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hansa.core.algorithm import Algorithm, Problem
from hansa.core.ask import Ask, Reduced
from hansa.core.federation import Federation, SumProtocol
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

    def guard(self, algorithm: Algorithm, run: RunSettings, problem: Problem) -> Guard | None:
        """The private sums of a run; None without differential privacy."""
        return None if self.dp is None else Guard.of(self.dp, algorithm, run, problem, self.secure)

    def check(self, algorithm: Algorithm, run: RunSettings, problem: Problem, prepares: bool = False) -> None:
        """Refuse, with the reason, settings that cannot be combined. Called before the run starts."""
        self._check_local(algorithm, run)
        if run.max_weight is not None and (self.secure is not None or self.dp is not None):
            setting = "privacy.max_weight" if self.dp is None else "privacy.dp.weight_cap"
            raise ConfigError(
                f"run.max_weight: the aggregator does not see the weight of a party whose update is protected; set "
                f"{setting}, which each party applies itself"
            )
        if prepares:
            self.check_sums(algorithm, "standardise")
        if self.dp is not None:
            self.dp.check(algorithm, run, problem, self.secure)
        if self.bound is not None:
            self._check_bound(algorithm, problem)
            if run.select.sees:
                raise ConfigError(
                    f"privacy.bound: the selector {run.select.name!r} needs each update by itself, and bounded updates "
                    "are only summed; use another selector, or run.max_norm"
                )
        if self.secure is None:
            return
        self.secure.check(problem)
        least = self.secure.least(problem.cohort_size)
        if run.min_cohort > least:
            raise ConfigError(
                f"run.min_cohort is {run.min_cohort}, but a secure sum of {least} of {problem.cohort_size} parties "
                f"could be opened; {self.secure.hint_for(run.min_cohort, problem.cohort_size)}"
            )
        if not run.select.blind:
            raise ConfigError(
                f"run.select: {run.select.name!r} depends on what the aggregator learns about single parties (losses, "
                "numbers of samples, speed), which a secure sum hides; use 'uniform' or 'poisson'"
            )
        if run.max_norm is not None:
            raise ConfigError(
                "run.max_norm: the aggregator cannot see the norm of an update that is hidden in a sum; have each "
                "party bound its own by privacy.bound"
            )
        if run.metric is not None and run.metric.startswith("party_"):
            raise ConfigError(
                f"run.metric: {run.metric!r} depends on the metrics of single parties, which a secure sum hides; use "
                f"{run.metric.split('_')[1]!r}, the mean over all test samples"
            )

    def check_sums(self, algorithm: Algorithm, columns: str) -> None:
        """Refuse sums without noise over the parties' data, from which a preparation learns, under a guarantee.

        `columns` names the preparation, or the columns of a table that need such sums.
        """
        private = algorithm.budget is not None
        if private or self.dp is not None:
            local = algorithm.parts().local or algorithm
            guarantee = f"the epsilon of {local.name!r}" if private else "central differential privacy"
            raise ConfigError(
                f"task.prepare: it computes sums without noise over the parties' data ({columns}), which {guarantee} "
                "does not cover; use prepare = 'table' with bounds for numbers and categories for texts, which needs "
                "no sums, or leave task.prepare out"
            )

    @staticmethod
    def _check_local(algorithm: Algorithm, run: RunSettings) -> None:
        """Refuse settings that the epsilon of a private local solver would not cover."""
        if algorithm.budget is None:
            return
        local = algorithm.parts().local or algorithm
        if run.pace.watches:
            raise ConfigError(
                f"run.pace: {run.pace.name!r} depends on the parties' training loss, which {local.name!r} does not "
                "release; use 'fixed'"
            )

    def _check_bound(self, algorithm: Algorithm, problem: Problem) -> None:
        if not algorithm.trains or algorithm.verbs != {"reduce"}:
            raise ConfigError(
                f"privacy.bound: parties bound updates that are summed, and {algorithm.name} does something else with "
                "the replies; leave privacy.bound out (run.max_norm rejects updates that the aggregator sees)"
            )
        if algorithm.whole_updates:
            raise ConfigError(
                f"privacy.bound: {algorithm.name} adds up the changes of what each party keeps, so what a bound cuts "
                "off would be missing from its sum for good; use ditto or another algorithm that averages updates"
            )
        if problem.spec.stats:
            raise ConfigError(
                "privacy.bound: the model has running statistics (BatchNorm), which are not part of the update and "
                "cannot be bounded; use a model without them, such as one with GroupNorm"
            )

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
