"""Simulated time: how long an ask takes, which parties are late and which drop out; the same in every replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from hansa.core.ask import Ask
from hansa.core.op import Op
from hansa.core.relay import session_bytes
from hansa.core.route_op import RouteOp
from hansa.core.runtime import Plan
from hansa.core.session_op import SessionOp
from hansa.core.task import PartyShards
from hansa.core.wrapper import unwrap
from hansa.local.solver import LocalSolver
from hansa.numerics import rng
from hansa.replies.replies import expected_size
from hansa.sim.devices import Devices
from hansa.sim.distributions import Array, Constant, keys_of

DRAWS = 2**22  # step times drawn at a time


@dataclass
class VirtualClock:
    """A clock that advances when parties have answered, by the times of the run's devices.

    `shards` are the parties' training samples; their sizes give the numbers of steps. `deadline` bounds the seconds of
    an ask that trains. `late` says what happens to parties that cannot finish.
    """

    seed: int
    shards: PartyShards
    devices: Devices = field(default_factory=Devices)
    deadline: float | None = None
    late: Literal["drop", "partial"] = "partial"
    now: float = 0.0

    def __post_init__(self) -> None:
        self.devices.check(len(self.shards))
        self._absent: Array | None = None  # one flag per party; None if all are available
        relays = self.devices.relays
        self._relayed = None if relays is None else relays.seconds(len(self.shards))  # of each party

    def available(self, round: int) -> Sequence[int]:
        """The parties available at the start of a round; others cannot answer in it."""
        present = self.devices.availability.present(self.seed, len(self.shards), round, self.now)
        self._absent = None
        if len(present) < len(self.shards):
            self._absent = np.ones(len(self.shards), dtype=bool)
            self._absent[np.asarray(present, dtype=np.int64)] = False
        return present

    def wait(self) -> None:
        """No party was available: advance to the time when one may be."""
        self.now += self.devices.availability.wait(self.seed, len(self.shards), self.now)

    def plan(self, ask: Ask) -> Plan:
        """Plan the timing of an ask before it is answered. Only asks within a round take simulated time."""
        if not ask.in_round or not ask.parties or ask.op is None:
            return Plan()
        parties = np.asarray(ask.parties)
        layers, op = unwrap(ask.op)
        overlaps = any(part.overlaps for part in (*layers, op))
        selects = ask.phase.startswith("select")  # selection takes time, but loses no party
        counts, units = self._amounts(ask, op, parties)
        works = isinstance(op, LocalSolver) or bool(counts.any())  # an op of a method's own may take steps too
        trains = works and not selects
        deadline = self.deadline if trains else None
        talk = self._talk(ask, parties)
        budget = np.full(len(parties), np.inf)
        if deadline is not None:
            budget = np.where(talk > deadline, -1.0, deadline if overlaps else deadline - talk)
        share = op.share(ask.payload) if isinstance(op, LocalSolver) else 1.0
        compute, fit = self._compute(ask, parties, counts, budget, share)
        outcome = AskTiming(parties, np.maximum(talk, compute) if overlaps else talk + compute, counts)
        if trains:
            drops = self.late == "drop" and ask.verb != "submit"  # a ticket belongs to no round, so it cannot be late
            divides = not drops and isinstance(op, LocalSolver) and op.paced and op.has("steps")
            slow = self._stragglers(ask, parties)
            if drops:
                outcome.lose(slow, "it was a straggler, and late = 'drop' leaves stragglers out", deadline or 0.0)
            elif divides and slow.any():
                share = 1 + np.floor(self._chance(ask, parties, "share of a straggler") * (units - 1))
                outcome.steps[slow] = (counts // units * share.astype(np.int64))[slow]
            if deadline is not None:
                outcome.end((fit < counts) | (talk > deadline), deadline, fit if divides else None)
        if self.devices.dropout > 0 and not selects:
            gone = self._chance(ask, parties, "dropout") < self.devices.dropout
            part = self._chance(ask, parties, "part before dropout")
            outcome.lose(gone, "it dropped out in the middle of the round", part * outcome.seconds, seen=False)
        if self._absent is not None:
            outcome.lose(self._absent[parties], "it was not available", 0.0, seen=False)
        if ask.enough is not None:
            outcome.first(ask.enough)
        return outcome.plan(works)

    def _talk(self, ask: Ask, parties: Array) -> Array:
        """Seconds of communication per party."""
        devices = self.devices
        keys = keys_of(self.seed, parties, "latency", ask.round, ask.phase, ask.index)
        talk = devices.latency.draw(keys, parties)
        if self._relayed is not None:
            talk = talk + self._relayed[parties]
        if devices.bandwidth is not None:
            talk = talk + traffic(ask) / devices.bandwidth.draw(keys_of(self.seed, parties, "bandwidth"), parties)
        return talk

    def _amounts(self, ask: Ask, op: Op, parties: Array) -> tuple[Array, Array]:
        """The number of steps per party, and the number of equal units (epochs, or steps) they form.

        The steps of an op that is no local solver are those of its `demands`.
        """
        none = np.zeros(len(parties), dtype=np.int64)
        idle = self.devices.compute == Constant(0.0) and not self.devices.stragglers and self.deadline is None
        if idle:
            return none, none + 1
        known: dict[Any, tuple[int, int]] = {}
        amounts = []
        receive_only = set(ask.parties) - set(ask.senders) if ask.routes else set()
        for party, n in zip(ask.parties, self.shards.sizes(parties).tolist(), strict=True):
            n = 0 if party in receive_only else n
            payload = ask.payload_of(party)
            if not isinstance(op, LocalSolver):
                amounts.append((op.demands(n, payload).get("steps", 0), 1))
                continue
            work = payload.get("work", {})
            name = (n, *work.items())
            if name not in known:
                known[name] = amount(op.at(work), n)
            amounts.append(known[name])
        counts, units = np.array(amounts).T
        return counts, units

    def _compute(self, ask: Ask, parties: Array, counts: Array, budget: Array,
                 share: float) -> tuple[Array, Array]:  # fmt: skip
        """Seconds of computation per party, and the number of steps that fit its time budget.

        A step takes the fraction `share` of the device's time for a step.
        """
        total, fit = np.zeros(len(parties)), np.where(budget >= 0, counts, 0)
        if self.devices.compute == Constant(0.0) or not counts.any():
            return total, fit
        speed = share * self.devices.speed.draw(keys_of(self.seed, parties, "speed"), parties)
        keys = keys_of(self.seed, parties, "compute", ask.round, ask.phase, ask.index)
        most = int(counts.max())
        rows = max(1, DRAWS // most)
        for at in range(0, len(parties), rows):
            block = slice(at, at + rows)
            each = self.devices.compute.draw(rng.keys_of_steps(keys[block], most), parties[block])
            passed = np.cumsum(each, axis=1) * speed[block, None]  # a running sum does not depend on later steps
            within = (passed <= budget[block, None]).sum(1)
            last = np.take_along_axis(passed, np.maximum(counts[block, None] - 1, 0), 1)[:, 0]
            total[block] = np.where(counts[block] > 0, last, 0.0)
            fit[block] = np.minimum(within, counts[block])
        return total, fit

    def _stragglers(self, ask: Ask, parties: Array) -> Array:
        """Which parties are stragglers: a fixed share of the asked parties; tickets are drawn one by one."""
        share, m = self.devices.stragglers, len(parties)
        if share == 0:
            return np.zeros(m, dtype=bool)
        chance = self._chance(ask, parties, "straggler")
        if ask.verb == "submit":
            return np.asarray(chance < share)
        slow = np.zeros(m, dtype=bool)
        slow[np.argsort(chance, kind="stable")[: m - round(m * (1 - share))]] = True
        return slow

    def _chance(self, ask: Ask, parties: Array, purpose: str) -> Array:
        """One uniform number per party, the same in all asks of a round; a ticket has its own."""
        ticket = (ask.index,) if ask.verb == "submit" else ()
        numbers: Array = rng.uniform(keys_of(self.seed, parties, purpose, ask.round, *ticket), ()).numpy()
        return numbers


class AskTiming:
    """The timing and the fate of each party of an ask, while the clock computes them."""

    def __init__(self, parties: Array, seconds: Array, counts: Array) -> None:
        self.parties, self.counts, self.seconds = parties, counts, seconds
        self.until = seconds.copy()  # how long the aggregator waits for each party
        self.steps = counts.copy()
        self.lost: dict[int, str] = {}
        self.unseen: set[int] = set()  # parties whose time the aggregator does not learn

    def lose(self, mask: Array, reason: str, until: Array | float, seen: bool = True) -> None:
        """Drop the replies of some parties; the aggregator waits for them until `until`."""
        if mask.any():
            self.until = np.where(mask, until, self.until)
            parties = self.parties[mask].tolist()
            self.lost.update(dict.fromkeys(parties, reason))
            if not seen:
                self.unseen.update(parties)

    def end(self, over: Array, deadline: float, fit: Array | None) -> None:
        """End the work of parties that are not done at the deadline.

        `fit` has the number of steps that fit before the deadline: such a party counts with these steps. A party
        without a step, and every party if `fit` is None, is lost.
        """
        self.seconds[over] = self.until[over] = deadline
        if fit is None:
            self.lose(over, f"it was not done before the deadline of {deadline:g} s", deadline)
        else:
            self.steps = np.minimum(self.steps, fit)
            self.lose(over & (fit < 1), f"it could not do one step before the deadline of {deadline:g} s", deadline)

    def first(self, count: int) -> None:
        """Keep only the first `count` replies; nobody waits for the others."""
        here = np.array([party not in self.lost for party in self.parties.tolist()])
        order = np.argsort(np.where(here, self.until, np.inf), kind="stable")[: here.sum()]
        if len(order) > count:
            late = np.zeros(len(self.parties), dtype=bool)
            late[order[count:]] = True
            done = self.until[order[count - 1]]
            self.until = np.minimum(self.until, done)
            self.lose(late, "the cohort was complete before it answered", done, seen=False)

    def plan(self, trains: bool) -> Plan:
        """The plan for the runtime; with seconds per party if they train."""
        seconds = dict(zip(self.parties.tolist(), self.seconds.tolist(), strict=True)) if trains else {}
        for party in self.unseen:
            seconds.pop(party, None)
        partial = self.steps < self.counts
        steps = zip(self.parties[partial].tolist(), self.steps[partial].tolist(), strict=True)
        return Plan(
            float(self.until.max()), seconds, {party: s for party, s in steps if party not in self.lost}, self.lost
        )


def amount(solver: LocalSolver, n: int) -> tuple[int, int]:
    """The steps of a party with n samples, and the number of units (epochs, or single steps) they form."""
    if n == 0:
        return 0, 1
    epochs, steps, *_ = solver.plan
    count = solver.count(n)
    return count, 1 if solver.sampler == "full" else epochs if steps is None else count


def traffic(ask: Ask) -> Array:
    """The bytes on the wire that each party of an ask receives and sends.

    A reply whose size is open counts with its largest size: the clock plans before the party answers.
    """
    op = ask.op
    assert op is not None
    total: Array = np.array(ask.sizes(), dtype=np.float64)
    if not isinstance(op, RouteOp):
        total += np.array(ask.measured(lambda party: expected_size(op, ask.payload_of(party))), dtype=np.float64)
    at, uploads = {party: place for place, party in enumerate(ask.parties)}, dict[Any, int]()
    if isinstance(op, SessionOp):
        for sender, receiver in ask.routes:
            size = session_bytes(replace(ask, routes=((sender, receiver),)))
            total[[at[sender], at[receiver]]] += size
    if not isinstance(op, RouteOp):
        return total
    for sender, receiver in ask.routes:
        shapes = op.expects_message(ask.payload_of(sender), sender, receiver)
        size = uploads[sender if op.broadcast else (sender, receiver)] = expected_size(op, ask.payload, shapes)
        total[at[receiver]] += size
    for link, size in uploads.items():
        total[at[link if op.broadcast else link[0]]] += size
    return total
