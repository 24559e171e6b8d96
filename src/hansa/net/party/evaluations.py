"""Limits on evaluations at a party: the table `[evaluate]` of `party.toml`.

Metrics of a model that the aggregator chooses answer questions about the samples that they are measured on: on a single
sample, one model per feature reads the sample; on many, enough questions tell them apart. So a party measures on a
least number of test samples, and answers a limited number of questions, in each job and over all jobs: the aggregator
names the jobs, so a limit per job alone would be none.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields

from hansa.core.errors import ConfigError, PartyError
from hansa.core.op import Memory, Op, Party, Payload, unwrap
from hansa.core.predictor import Evaluate, Predictor
from hansa.core.registry import build


def evaluates(op: Op) -> bool:
    """Whether an op, or the op inside it, measures a model on the party's test samples."""
    return isinstance(unwrap(op)[1], Evaluate)


def check_rows(op: Op, party: Party, payload: Payload, memory: Memory) -> None:
    """Refuse, by a PartyError, to measure a model that is another for each row of the samples: all rows but one could
    be given outputs that are known beforehand. The outputs for one sample and for two are looked at: numbers for each
    of many rows make more of one, or fit no two."""
    inner = unwrap(op)[1]
    name, samples = getattr(inner, "predictor", None), party.test if isinstance(inner, Evaluate) else party.train
    if name is None or samples is None or not len(samples[0]):
        return
    predictor: Predictor = build("predictor", name)
    own = predictor.own(party.objective, payload, memory)
    shapes = []
    for rows in (samples[0][:1], samples[0][:2]):
        with contextlib.suppress(RuntimeError):  # as of numbers for more rows than that
            shapes.append((len(rows), predictor.outputs(party.objective, own, rows).shape))
    if len(shapes) < 2 or any(shape != (rows, *shapes[0][1][1:]) for rows, shape in shapes):
        raise PartyError("the model that it is to measure has not one output for one sample")


@dataclass(frozen=True)
class Evaluations:
    """The table `[evaluate]`: the fewest test samples, and the most evaluations per job and over all jobs.

    What the party leaves out is `FLOORED` where it has a privacy floor, and unlimited where it has none: then the
    aggregator sees every update, which tells more than a metric does.
    """

    min_samples: int | None = None
    per_job: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 0:
                raise ConfigError(f"evaluate.{field.name} must not be negative, got {value}")

    def under(self, floor: bool) -> Evaluations:
        """The limits that hold, given whether the party has a privacy floor."""
        if not floor:
            return self
        return Evaluations(*(
            getattr(FLOORED if getattr(self, field.name) is None else self, field.name) for field in fields(self)
        ))  # fmt: skip

    def refuses(self, op: Op, party: Party) -> str | None:
        """Why a party does not evaluate on its test samples, or None."""
        if not evaluates(op) or self.min_samples is None or party.test is None:
            return None
        if 0 < len(party.test[0]) < self.min_samples:
            return (
                f"its policy measures models on {self.min_samples} test samples or more, and it has fewer; see "
                "evaluate.min_samples in party.toml"
            )
        return None


FLOORED = Evaluations(min_samples=20, per_job=100, total=1000)
