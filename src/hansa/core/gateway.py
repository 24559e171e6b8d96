"""The gateway to a party's samples: an op reaches them only through this object, and names its purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from hansa.core import codec
from hansa.core.errors import PartyError

Samples = tuple[Tensor, Tensor]  # features and targets, one row per sample
Purpose = Literal["train", "statistics", "evaluate", "describe"]


class SampleGateway:
    """A party's training and test samples.

    `train`, `statistics` and `describe` read training samples: to train a model, to answer with sums or losses, to
    describe the data. `evaluate` reads the party's own test samples. `admit` is called before every reading. This class
    admits all of them: it is the gateway of a simulated party. A deployed party has `net.party.gateway.OwnerGateway`.
    `header` has the names of the columns: the target, then the features.
    """

    def __init__(self, train: Samples, test: Samples | None = None, header: tuple[str, ...] = ()) -> None:
        self._train, self._test, self.header = train, test, header

    @property
    def n(self) -> int:
        """The number of training samples."""
        return len(self._train[0])

    @property
    def tests(self) -> int | None:
        """The number of test samples; None if the party has no test set."""
        return None if self._test is None else len(self._test[0])

    def admit(self, purpose: Purpose) -> None:
        """Raise a PartyError if the samples may not be read for this purpose."""

    def train(self, purpose: Purpose) -> Samples:
        """The training samples."""
        self.admit(purpose)
        return self._train

    def test(self, purpose: Purpose) -> Samples:
        """The test samples; a PartyError if there are none."""
        if not self.tests:
            raise PartyError("it has no test samples")
        self.admit(purpose)
        assert self._test is not None
        return self._test

    def transform(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the features of all samples by transformed ones (a preparation of the data).

        A PartyError if the function changes the shape of a sample: with numbers for each row, the sender of the
        preparation could pick out single samples.
        """
        sample = self._train[0][:1]
        if function(sample).shape != sample.shape:
            raise PartyError("the preparation has numbers of another shape than its samples have")
        self._train = (function(self._train[0]), self._train[1])
        if self._test is not None:
            self._test = (function(self._test[0]), self._test[1])

    def digest(self) -> str:
        """A hash of the training samples, which never leaves the party."""
        return codec.digest({"x": self._train[0], "y": self._train[1]})
