"""The owner's limits on the models that the aggregator sends: the table `[broadcast]` of `party.toml`."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.core.plain_data import check_numbers
from hansa.core.quantities import AnyCount, Multiple, Norm
from hansa.plumbing.errors import ConfigError

REFUSALS = 20


@dataclass(frozen=True)
class Broadcasts:
    """The table `[broadcast]`: what a party checks of a model before it trains it. By default, the round alone.

    `rounds` refuses to train for an earlier round than before in the job. `replays` refuses a model that the party saw
    earlier in the job, other than the last one; small models may return to earlier values by themselves. `norm` is the
    largest norm of the change since the last model that the party saw in the job. `factor` bounds the change by a
    multiple of the median of the changes before. `loss` bounds the loss on the party's training samples by a multiple
    of the median of the losses before. A refusal because of the loss reveals a bit about the samples: after `refusals`
    of them, over all jobs, the party trains no further model.
    """

    rounds: bool = True
    replays: bool = False
    norm: Norm | None = None
    factor: Multiple | None = None
    loss: Multiple | None = None
    refusals: AnyCount = REFUSALS

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.refusals != REFUSALS and self.loss is None:
            raise ConfigError(
                "broadcast.refusals counts models that are refused for their loss; set broadcast.loss too"
            )

    @property
    def compares(self) -> bool:
        """Whether the change of the model is measured, which needs the last model."""
        return self.norm is not None or self.factor is not None

    @property
    def needs_model(self) -> bool:
        return self.compares or self.replays or self.loss is not None
