"""Everything that a simulated run sends and remembers, number by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import hansa
from hansa.core.federation import Federation
from hansa.sim.engine import ReferenceEngine
from hansa.testing.experiments import leaves


def numbers(tree: Any) -> set[float]:
    """All floating-point numbers of a tree of tensors."""
    return {number for leaf in leaves(tree) if leaf.is_floating_point() for number in leaf.flatten().tolist()}


def sent_and_remembered(algorithm: hansa.Algorithm, task: hansa.Task, names: Sequence[str],
                        **run: Any) -> tuple[set[float], set[float]]:  # fmt: skip
    """The numbers of all asks and replies of a run, and those that parties remembered under `names` after any round."""
    sent: set[float] = set()
    remembered: set[float] = set()
    ask, one = Federation._ask, ReferenceEngine.one

    def asked(self: Federation, verb: Any, **fields: Any) -> Any:
        message = ask(self, verb, **fields)
        sent.update(*(numbers(message.message(party)) for party in message.parties))
        return message

    def answered(self: ReferenceEngine, *args: Any) -> Any:
        outcome: Any = one(self, *args)
        assert not isinstance(outcome, str), outcome
        reply, memory = outcome
        sent.update(numbers(reply.tree()))
        remembered.update(*(numbers(memory[name]) for name in names if name in memory))
        return outcome

    with mock.patch.object(Federation, "_ask", asked), mock.patch.object(ReferenceEngine, "one", answered):
        hansa.simulate(algorithm, task, engine="reference", **run)
    return sent, remembered
