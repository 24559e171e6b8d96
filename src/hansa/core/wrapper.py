"""Ops around other ops. A wrapper changes the payload or the reply of its inner op, a packing op the reply's form."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hansa.core.budget import Budget, Release
from hansa.core.entries import Entries, Sizes
from hansa.core.metric_ranges import Range
from hansa.core.op import Memory, Op, Party, Payload, Replies, Reply
from hansa.core.sample_bounds import Bounds
from hansa.core.shapes import Shape
from hansa.plumbing.errors import AlgorithmError

Around = Generator[Payload, tuple[Reply, Memory], tuple[Reply, Memory]]  # the two halves of a wrapper


class Wrapper(Op):
    """An op around another op: it may change the payload and the reply of the inner op.

    A wrapper overrides `before`, `after` or both. If the second half needs what the first half computed, it overrides
    `around` instead. Engines can still stack the inner op over parties: an engine steps `around` to its `yield`, runs
    the inner op in its own way, then steps `around` to its end.
    """

    inner: Op

    @property
    def measures(self) -> frozenset[str] | None:  # type: ignore[override]
        return self.inner.measures

    @property
    def ranges(self) -> Mapping[str, Range]:  # type: ignore[override]
        return self.inner.ranges

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return self.inner.entries

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        self.inner.check_ask(payload, sizes)

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return self.inner.recalls

    @property
    def update(self) -> str | None:  # type: ignore[override]
        return self.inner.update

    @property
    def counts(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.counts

    @property
    def per_sample(self) -> Bounds:  # type: ignore[override]
        return self.inner.per_sample

    @property
    def vectors(self) -> tuple[str, ...]:
        return () if self.update is None else self.inner.vectors

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        """The payload for the inner op."""
        return payload

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        """The reply and the memory, from those of the inner op."""
        return reply, memory

    def after_stack(self, parties: Sequence[Party], replies: Replies,
                    memories: Sequence[Memory]) -> tuple[Replies, dict[str, Tensor]] | None:  # fmt: skip
        """As `after`, for a stack: the replies, and the changed entries of the memories as rows.

        The rows have the bits that `after` gives for each party. None if the op must be applied to each party.
        """
        return None

    def around(self, party: Party, payload: Payload, memory: Memory) -> Around:
        """Yield the payload for the inner op; get its reply and memory; return the wrapper's reply and memory."""
        reply, memory = yield self.before(party, payload, memory)
        return self.after(party, payload, reply, memory)

    def arounds(self, parties: Sequence[Party], payloads: Sequence[Payload],
                memories: Sequence[Memory]) -> list[Around]:  # fmt: skip
        """`around` for each of several parties, not yet begun. A wrapper that measures all at once overrides it."""
        return [self.around(*each) for each in zip(parties, payloads, memories, strict=True)]

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        around = self.around(party, payload, memory)
        return completed(around, *self.inner.run(party, next(around), memory))

    def refuses_request(self, message: Mapping[str, Any], memory: Memory, task: str) -> str | None:
        return self.inner.refuses_request(message, memory, task)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects(payload)

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        return self.inner.expects_maxima(payload)

    def beside(self, payload: Payload) -> frozenset[str]:
        return self.inner.beside(payload)

    def most(self, n: int, payload: Payload, longest: float | None) -> dict[str, float]:
        return self.inner.most(n, payload, longest)

    def stated_samples(self, reply: Reply, payload: Payload) -> int:
        return self.inner.stated_samples(reply, payload)

    def rescaled(self, tensors: Mapping[str, Tensor], samples: int, limit: int) -> dict[str, Tensor]:
        return self.inner.rescaled(tensors, samples, limit)

    def covered(self, party: Party, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.inner.covered(party, tensors)

    def most_stated(self, samples: int, payload: Payload) -> int:
        return self.inner.most_stated(samples, payload)

    def impossible_sum(self, sums: Mapping[str, Tensor], payload: Payload, samples: int) -> str | None:
        return self.inner.impossible_sum(sums, payload, samples)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return self.inner.demands(n, payload)

    @property
    def budget(self) -> Budget | None:
        return self.inner.budget

    def release(self, n: int, payload: Payload) -> Release:
        return self.inner.release(n, payload)


def completed(around: Around, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
    """The reply and the memory of a wrapper, from those of its inner op: the second half of `Wrapper.around`."""
    try:
        around.send((reply, memory))
    except StopIteration as done:
        outcome: tuple[Reply, Memory] = done.value
        return outcome
    around.close()
    raise AlgorithmError("Wrapper.around must yield once: the payload for the inner op")


def unwrap(op: Op) -> tuple[list[Wrapper], Op]:
    """The wrappers around an op, outermost first, and the innermost op."""
    layers: list[Wrapper] = []
    while isinstance(op, Wrapper):
        layers.append(op)
        op = op.inner
    return layers, op


class PackingOp(Wrapper):
    """An op whose replies travel in another form. The receiver opens them before it checks and fuses them.

    `expects` describes the reply as it is sent; `inner.expects` describes the opened reply.
    """

    def opened(self, payload: Payload, reply: Reply) -> Reply:
        """The reply of the inner op, from a reply with the expected names, shapes and types and finite numbers.

        Raise a DataError for other parts that no party could have packed.
        """
        raise TypeError(f"the op {self.name!r} does not define opened()")

    def opened_stack(self, payload: Payload, replies: Replies) -> Replies:
        """As `opened`, for a stack of replies; row k has the bits that `opened` gives for reply k."""
        raise TypeError(f"the op {self.name!r} does not define opened_stack()")

    def opened_sums(self, payload: Payload, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums of opened replies, from the sums of packed ones. Only for forms that commute with sums."""
        raise TypeError(f"the op {self.name!r} does not define opened_sums()")
