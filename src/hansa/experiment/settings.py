"""The settings of a run, which belong neither to the task nor to the algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from hansa.core.applies import Applies, Unless, check_applies
from hansa.core.fields import Advice
from hansa.core.plain_data import check_numbers, convert
from hansa.core.quantities import Amount, AnyCount, Count, Fraction, Norm, Seconds, Share
from hansa.core.registry import registered
from hansa.core.task import Holdings
from hansa.drift.detector import Detector
from hansa.experiment.baselines import Baseline
from hansa.local.finetune import FineTuning
from hansa.metrics import names
from hansa.metrics.function import distinct
from hansa.metrics.metric import Metric
from hansa.numerics.params import ParamSpec
from hansa.plumbing.errors import ConfigError, nearest
from hansa.replies.buffer_checks import variances
from hansa.replies.reply_checks import Rules
from hansa.schedule import Fixed, Pace
from hansa.select import Selector, Uniform
from hansa.sim.clock import VirtualClock
from hansa.sim.devices import Devices
from hansa.sim.engine import Engine
from hansa.sim.engines import Auto
from hansa.transforms import Transform


@dataclass(frozen=True)
class Run:
    """The [run] table of an experiment, and the keywords of `hansa.simulate`.

    `cohort` is the fraction C of the K parties that a round selects, max(floor(C * K), 1); `cohort_size` is a count
    instead. `pace` sets the amount of local work per round; `own` sets lr, batch, epochs or steps of single parties, by
    name or number. `quorum` is the number of replies that a round needs, as a count or as a fraction of the parties
    asked; no sum has fewer than `min_cohort` parties. A running mean or standard deviation v of the model (BatchNorm)
    may change by at most `max_stats` times 1 + |v|. `over_select` is the share of parties asked beyond the cohort; the
    round uses the first replies. A run stops after `rounds`, when `metric` reaches `target`, when it has not improved
    in `patience` evaluations, or when the byte or time budget is spent. An improvement is one of more than `min_delta`.
    With `keep` = "best" the model of the best evaluation is the result, not the last one. `precision` is the precision
    of matrix products (parameters keep the model's own type); `compile` says whether the steps of stacked parties on a
    GPU are compiled, which takes seconds and pays in long runs. Updates that a fusion needs one by one are stored on
    disk if they take more than `reply_memory` bytes. `devices` describes the parties' machines and networks in
    simulated time; an ask that trains may take `deadline` simulated seconds. A party that cannot finish in time counts
    with the steps that it has done (`late = "partial"`) or is missing (`"drop"`). `compress` is the transform by which
    parties pack their updates, `compress_down` that by which the aggregator packs the models that it sends; by default
    none. `sums` says how replies are summed: "ordered" as float64 numbers in the order of the parties, "exact" as whole
    numbers, so that every grouping of the parties gives the same bits. `finetune` lets every party train the final
    model further, on its own samples alone, after the last round. `metrics` are measured in each evaluation, beside the
    loss and the accuracy: names, tables, or functions of your own; by default AUC, or errors of numbers. One that
    `metric` names is measured too. `baselines` train the same model in a simulation for comparison, after the last
    round: "local-only" by each party alone, "centralised" on all samples in one place. `detect` watches the loss of
    each party on its own test samples, and gives an alarm if it has risen against the party's own past.
    """

    rounds: Count = 10
    cohort: Annotated[Share, Advice("for a count, set cohort_size")] = 1.0
    cohort_size: Count | None = None
    seed: int = 0
    select: Selector = Uniform()
    pace: Pace = Fixed()
    own: dict = field(default_factory=dict)  # type: ignore[type-arg]
    engine: Engine = Auto()
    device: str = "cpu"
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    compile: Literal["auto", "on", "off"] = "auto"
    eval_every: Count = 1
    eval_parties: bool = True
    metrics: tuple[Metric, ...] = ()
    target: float | None = None
    metric: str | None = None
    patience: Count | None = None
    min_delta: Amount = 0.0
    keep: Literal["last", "best"] = "last"
    byte_budget: Count | None = None
    time_budget: Seconds | None = None
    quorum: AnyCount | Annotated[Fraction, Advice("a whole number is a count")] = 1
    min_cohort: Count = 1
    over_select: Annotated[Amount, Advice("try 0.3")] = 0.0
    max_norm: Norm | None = None
    max_weight: Count | None = None
    max_stats: Annotated[float, Meta(gt=0)] | None = None
    reply_memory: Count = 2**30
    devices: Devices = Devices()
    deadline: Seconds | None = None
    late: Literal["drop", "partial"] = "partial"
    compress: Transform | None = None
    compress_down: Transform | None = None
    sums: Literal["ordered", "exact"] = "ordered"
    finetune: FineTuning = FineTuning()
    baselines: tuple[Baseline, ...] = ()
    detect: Detector | None = None
    checkpoint_seconds: Annotated[float, Meta(ge=0, le=10)] = 5.0
    applies: ClassVar[Applies] = {"cohort": Unless("cohort_size")}

    def __post_init__(self) -> None:
        check_numbers(self)
        check_applies(self)
        for party, table in self.own.items():
            if not isinstance(table, Mapping):
                raise ConfigError(f"own.{party}: expected a table of lr, batch, epochs or steps, got {table!r}")
        object.__setattr__(self, "own", {str(party): dict(table) for party, table in self.own.items()})
        object.__setattr__(self, "metrics", measured(self.metrics, self.metric))
        if self.late != "partial" and self.deadline is None and not self.devices.stragglers:
            raise ConfigError(
                f"late = {self.late!r} has no effect without parties that are late; set deadline or devices.stragglers "
                "too, or leave it out"
            )
        if self.min_delta and self.patience is None and self.keep == "last":
            raise ConfigError("min_delta applies to patience and keep; set one of them, or leave it out")

    def size(self, parties: int) -> int:
        """How many parties a round selects: max(floor(C * K), 1), or `cohort_size`."""
        if self.cohort_size is not None:
            if self.cohort_size > parties:
                raise ConfigError(f"cohort_size is {self.cohort_size}, but there are {parties} parties")
            return self.cohort_size
        return max(math.floor(self.cohort * parties + 1e-9), 1)

    def asked(self, parties: int) -> int:
        """How many parties a round asks: the cohort, and the share of `over_select` beyond it."""
        return min(parties, math.ceil(self.size(parties) * (1 + self.over_select) - 1e-9))

    def clock(self, holdings: Holdings) -> VirtualClock:
        """The simulated clock of a run, at its start."""
        return VirtualClock(self.seed, holdings.train, self.devices, self.deadline, self.late)

    def rules(self, spec: ParamSpec | None = None) -> Rules:
        """The rules that replies must keep; with a model's `spec`, also for its buffers."""
        return Rules(self.quorum, self.min_cohort, self.max_norm, self.max_weight, self.reply_memory, self.max_stats,
                     () if spec is None else variances(spec), exact=self.sums == "exact")  # fmt: skip


def measured(metrics: Any, metric: str | None, where: str = "") -> tuple[Metric, ...]:
    """The metrics that a run measures by choice: those listed, and the one that it compares or stops by.

    `where` is the table with both settings, for error messages.
    """
    listed: tuple[Metric, ...] = convert(metrics, tuple[Metric, ...], f"{where}metrics")
    distinct(listed, f"{where}metrics")
    names.describe(listed)
    if metric is None or metric in names.known_metrics(listed):
        return listed
    parts = {part.key: part for part in _plain_metrics()}
    names.describe(parts.values())
    known = names.known_metrics((*listed, *parts.values()))
    if metric not in known:
        hint = nearest(metric, known)
        if "did you mean" not in hint:  # the list without the four numbers over parties of each metric
            plain = [name for name in known if not name.startswith("party_")]
            hint = f"{nearest(metric, plain)}; and of most of them party_NAME_mean, _spread, _variance, _worst_tenth"
        raise ConfigError(f"{where}metric: unknown metric {metric!r}{hint}")
    return (*listed, parts[names.plain_metric(metric)])


def _plain_metrics() -> list[Metric]:
    """The registered metrics that are single numbers and need no settings."""
    classes: list[Any] = [cls for name, cls in registered("metric").items() if name != "function"]
    return [cls() for cls in classes if cls.scalar]
