"""The simulation runtime: answers asks in one process, deterministically, without an event loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from hansa.core.answering import report_spent
from hansa.core.ask import Arrival, Ask, Gathered, Reduced, Ticket
from hansa.core.budget import Accountant, Spending
from hansa.core.columns import ColumnHoldings
from hansa.core.data_op import DataOp
from hansa.core.op import Memory, Op, Payload, Replies, Reply
from hansa.core.round_record import Record
from hansa.core.runtime import Abort, Attend, Clock, Commit, Open, Plan, Request, Tickets, shortened
from hansa.core.session_op import SessionOp
from hansa.core.wrapper import PackingOp
from hansa.plumbing.errors import AlgorithmError, PartyError
from hansa.replies.partial_sums import PartialSum, unsuitable
from hansa.replies.placed import PlacedReply
from hansa.replies.replies import Outcomes, OutcomesOrSums, arrive, combine, single_replies
from hansa.replies.reply_checks import Rules, opener
from hansa.sim.engine import Failure, Outcome, PartyWork, ReferenceEngine, named
from hansa.sim.memories import Memories
from hansa.sim.relays import Relays, through_relays
from hansa.sim.routing import Routing
from hansa.sim.tickets import TimedFlight, Trained, outcome_of


class HostileParties(Protocol):
    """Hostile parties: they replace outcomes of an ask (`forge`), or the reply to a ticket (`forge_one`), and may train
    another op than they are asked (`training`)."""

    def training(self, party: int, op: Op, payload: Payload) -> tuple[Op, Payload]: ...
    def forge(self, ask: Ask, outcomes: Outcomes) -> Outcomes: ...
    def forge_one(self, ticket: Ticket, op: Op, payload: Payload, reply: Reply) -> Reply: ...


class Presence(Protocol):
    """Parties that join, leave or are away for a while, also outside the rounds."""

    def away(self, party: int) -> str | None: ...


class Simulation:
    """All parties in one process. `absent(party, round)` says which parties miss a round. A `band` of hostile parties
    changes the replies that are sent, not the parties' memory. With an `accountant`, parties keep to their privacy
    budgets, and the record has what they have spent. `presence` says which parties are there at all.

    Between the parties and the root may be a tree of `relays`. The parties' memory is stored in `folder`, where a
    checkpoint finds it; by default in a temporary file.
    """

    def __init__(self, engine: ReferenceEngine, rules: Rules, clock: Clock,
                 absent: Callable[[int, int], bool] | None = None, folder: Path | None = None,
                 band: HostileParties | None = None, accountant: Accountant | None = None,
                 presence: Presence | None = None, relays: Relays | None = None) -> None:  # fmt: skip
        self._paths = relays.paths(len(engine.holdings)) if relays is not None else None
        self.spending = Spending(accountant) if accountant is not None else None
        self.engine, self.rules, self.clock, self.absent, self.band = engine, rules, clock, absent, band
        self.presence = presence
        self.memories = Memories(len(engine.holdings), engine.objective.device, folder)
        self._folder = folder
        self.tickets: Tickets[TimedFlight] = Tickets(len(engine.holdings))
        self.staged: dict[int, Memory] = {}
        self.record = Record()

    def answer(self, request: Request) -> Any:
        """Answer an ask, or open, commit or abort a round."""
        if isinstance(request, Open):
            self.record, self.staged = request.record, {}
            return self.tickets.begin_round()
        if isinstance(request, Commit):
            self.memories.keep(self.staged)
            self.staged = {}
            return None
        if isinstance(request, Abort):
            self.staged = {}
            return None
        if isinstance(request, Attend):
            raise AlgorithmError("a simulation does not wait for parties to be present (Attend)")
        if request.verb == "submit":
            return self._submit(request)
        if request.verb == "next":
            return self._next()
        if isinstance(request.op, DataOp):
            return self._prepare(request)
        if isinstance(request.op, SessionOp):
            return Routing(self, request).session()
        if request.verb == "route":
            return Routing(self, request).route()
        self.record.count_ask(request)
        answer, memories = self.collect(request, self.plan(request))
        self.staged.update(memories)
        return self.record.timed(answer)

    def plan(self, ask: Ask) -> Plan:
        """The course of an ask in simulated time, which passes."""
        plan = self.clock.plan(ask)
        self.clock.now += plan.lasts
        self.record.seconds = plan.seconds
        return plan

    def collect(self, ask: Ask, plan: Plan, op: Op | None = None) -> tuple[Reduced | Gathered, dict[int, Memory]]:
        """The combined answer to an ask, and the new memories of the parties whose replies were fused.

        `op` describes the replies, if that of the ask does not.
        """
        memories: dict[int, Memory] = {}
        assert ask.op is not None
        run = ask if self.band is None else replace(ask, op=opener(ask.op))
        sums = self.engine.sums and self.band is None and self.record.each is None and self._paths is None
        sums = sums and unsuitable(ask, self.rules.of(ask)) is None

        # an engine that stores replies checks them too, by the payload of the ask
        places = self.engine.places and ask.verb == "gather" and self.band is None and self._paths is None
        places = places and op is None and ask.op.budget is None and not plan.steps

        def outcomes() -> Iterator[Replies | PartialSum | PlacedReply | tuple[int, Reply | str]]:
            for item in self._run(run, plan, sums, places):
                if isinstance(item, Replies):
                    if item.memory:
                        before = zip(item.parties, self.recall(item.parties), strict=True)
                        memories.update((p, {**memory, **item.remembered(k)}) for k, (p, memory) in enumerate(before))
                    yield item
                elif isinstance(item, PartialSum | PlacedReply):
                    memories.update((party, memory) for party, memory in item.memories.items() if memory)
                    yield item
                else:
                    party, outcome = item
                    if not isinstance(outcome, str) and outcome[1]:
                        memories[party] = outcome[1]
                    yield party, outcome if isinstance(outcome, str) else outcome[0]

        arriving: OutcomesOrSums = outcomes()
        if self.band is not None:  # attackers change an update before it is packed, and no engine sums
            arriving = self._packed(ask, self.band.forge(run, cast(Outcomes, arriving)), memories)
        judged = ask if op is None else replace(ask, op=op)
        if self._paths is not None and self.record.each is None and op is None and ask.enough is None:
            arriving = through_relays(ask, cast(Outcomes, arriving), self._paths, self.rules.of(ask))
        answer = self.combine(judged, arriving)
        return answer, {party: memory for party, memory in memories.items() if party in self.record.fused}

    def combine(self, ask: Ask, outcomes: OutcomesOrSums) -> Reduced | Gathered:
        """Check the outcomes of an ask, record them, and combine the replies."""
        return combine(ask, outcomes, self.rules, self.record, self._folder)

    def _packed(self, ask: Ask, outcomes: Outcomes, memories: dict[int, Memory]) -> Outcomes:
        """Pack replies that attackers may have changed, as the ask's op does; `memories` gets the parties' memories."""
        if not isinstance(ask.op, PackingOp):
            yield from outcomes
            return
        for party, outcome in single_replies(outcomes):
            if isinstance(outcome, Reply):
                kept = memories[party] if party in memories else self.memory(party)
                packed = self._pack(ask.op, party, ask.round, ask.payload_of(party), outcome, kept)
                outcome = packed if isinstance(packed, str) else packed[0]
                if not isinstance(packed, str) and packed[1]:
                    memories[party] = packed[1]
            yield party, outcome

    def _pack(self, op: Op, party: int, round: int, payload: Payload, reply: Reply, memory: Memory) -> Outcome:
        """A reply after the wrappers that pack it, and the party's memory; or the reason why the party declines."""
        if not isinstance(op, PackingOp):
            return reply, memory
        inner = self._pack(op.inner, party, round, payload, reply, memory)
        if isinstance(inner, str):
            return inner
        try:
            with named(op, party, round):
                return op.after(self.engine.party(party, round), payload, *inner)
        except PartyError as reason:
            if isinstance(reason, Failure):
                raise
            return str(reason)

    def memory(self, party: int) -> Memory:
        """A party's memory, including its staged changes of this round."""
        return self.recall([party])[0]

    def recall(self, parties: Sequence[int]) -> list[Memory]:
        """The memories of many parties, read at once."""
        stored = iter(self.memories.recall([p for p in parties if p not in self.staged]))
        return [self.staged[p] if p in self.staged else next(stored) for p in parties]

    def _run(self, ask: Ask, plan: Plan, sums: bool,
             places: bool) -> Iterator[Replies | PartialSum | PlacedReply | tuple[int, Outcome]]:  # fmt: skip
        """The parties' outcomes: first the reasons of absent and lost parties, then replies in the order of ids.

        With `sums` the engine may sum the replies itself, in any order; with `places` it may store them.
        """
        assert ask.op is not None
        here = self.here(ask, ask.parties, plan)
        for party in sorted(set(ask.parties) - set(here)):
            yield party, self.why_absent(party, plan)
        members = [
            PartyWork(p, plan.payload_of(ask, p), memory) for p, memory in zip(here, self.recall(here), strict=True)
        ]
        if sums:
            yield from self.engine.partial_sums(ask.op, members, ask.round, ask.uniform)
        elif places:
            yield from self.engine.placed(ask.op, members, ask.round, self.rules.of(ask))
        else:
            yield from self._train(ask.op, members, ask.round)

    def here(self, ask: Ask, parties: Sequence[int], plan: Plan) -> list[int]:
        """The parties that answer an ask."""
        absent = self.absent if ask.in_round else None
        here = [p for p in parties if p not in plan.lost and (absent is None or not absent(p, ask.round))]
        return here if self.presence is None else [p for p in here if self.presence.away(p) is None]

    def why_absent(self, party: int, plan: Plan) -> str:
        """Why a party does not answer an ask."""
        away = None if self.presence is None else self.presence.away(party)
        return away or plan.lost.get(party, "it did not answer")

    def _train(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        """Run an op at parties in the order of their ids. Hostile parties may run another op."""
        if self.band is None:
            yield from self._perform(op, members, round)
            return
        trained = [(own, replace(member, payload=payload)) for member in members
                   for own, payload in [self.band.training(member.party, op, member.payload)]]  # fmt: skip
        for own, group in itertools.groupby(trained, key=lambda pair: pair[0]):
            yield from self._perform(own, [member for _, member in group], round)

    def _perform(self, op: Op, members: list[PartyWork], round: int) -> Iterator[Replies | tuple[int, Outcome]]:
        """Charge the parties' privacy budgets, run the op with the engine, and report the spending: the sequence of
        `core.answering.answer`, for many parties. Parties that decline come first."""
        ready = []
        for member in members:
            try:
                self.charge(op, member)
                ready.append(member)
            except PartyError as reason:
                yield member.party, str(reason)
        spent = self.record.spent
        if op.budget is None:
            yield from self.engine.blocks(op, ready, round)
            return
        for item in self.engine.blocks(op, ready, round):
            if isinstance(item, Replies):
                report_spent(op, item, *(spent.get(party) for party in item.parties))
            elif not isinstance(item[1], str):
                report_spent(op, item[1][0], spent.get(item[0]))
            yield item

    def charge(self, op: Op, member: PartyWork) -> None:
        """Charge a party's privacy budget for its reply, also if the reply is lost later; a PartyError if the budget is
        exceeded."""
        if self.spending is None or op.budget is None:
            return
        spent = self.spending.charge(member.party, op, self.engine.holdings.train.size(member.party), member.payload)
        if spent is not None:
            self.record.spent[member.party] = spent

    def _prepare(self, ask: Ask) -> Any:
        """Transform the data of all parties."""
        assert isinstance(ask.op, DataOp)
        holdings = self.engine.holdings
        self.record.count_ask(ask)
        if isinstance(holdings, ColumnHoldings):
            return self.combine(ask, ((p, self._prepare_columns(ask, holdings, p)) for p in ask.parties))
        factors = ask.op.weigh(holdings.train.y, ask.payload)
        if factors is not None:
            models = [self.engine.objective] if holdings.models is None else [*holdings.models.objectives.values()]
            holdings.weigh(models, factors)
        shards = [holdings.train] + ([holdings.tests] if holdings.tests is not None else [])
        if holdings.tests is not None and holdings.tests.before is None:
            holdings.tests.before = holdings.tests.x
        for shard in shards:
            shard.transform(lambda x: ask.op.transform(x, ask.payload))
        if holdings.public is not None:
            holdings.public = holdings.public._replace(x=ask.op.transform(holdings.public.x, ask.payload))
        self.engine.data_changed()
        return self.combine(ask, ((p, Reply({})) for p in ask.parties))

    def _prepare_columns(self, ask: Ask, holdings: ColumnHoldings, id: int) -> Reply | str:
        """Transform the data of one party of vertical data, as a deployed party does."""
        assert isinstance(ask.op, DataOp)
        party = self.engine.party(id, ask.round)
        try:
            ask.op.apply(party, ask.payload_of(id))
        except PartyError as reason:
            return str(reason)
        holdings.replace(id, party.data)
        return Reply({})

    def _submit(self, ask: Ask) -> Ticket:
        (party,) = ask.parties
        assert ask.op is not None
        self.record.count_ask(ask)
        plan = self.clock.plan(ask)
        self.record.seconds |= plan.seconds
        arrives, steps, lost = self.clock.now + plan.lasts, plan.steps.get(party), plan.lost.get(party)
        return self.tickets.add(TimedFlight(self.tickets.issue(ask), ask.op, ask.payload, arrives, steps, lost))

    def _next(self) -> Arrival:
        self.tickets.check_next()
        flight = min(self.tickets.flights.values(), key=lambda f: (f.arrives, f.ticket.id))
        del self.tickets.flights[flight.ticket.id]
        self.clock.now = max(self.clock.now, flight.arrives)
        party, round = flight.ticket.party, flight.ticket.round
        outcome: Outcome = self._unanswered(flight) or self._trained(flight)
        if self.band is not None and not isinstance(outcome, str):
            forged = self.band.forge_one(flight.ticket, opener(flight.op), flight.payload, outcome[0])
            outcome = self._pack(flight.op, party, round, flight.payload, forged, outcome[1])
        reply = outcome if isinstance(outcome, str) else outcome[0]
        arrival = arrive(flight.ticket, flight.op, flight.payload, reply, self.rules, self.record)
        if arrival.reply is not None and not isinstance(outcome, str) and outcome[1]:
            self.staged[party] = outcome[1]
        return self.tickets.count(arrival)

    def _unanswered(self, flight: TimedFlight) -> str | None:
        """Why a ticket is not answered; None if it is."""
        party = flight.ticket.party
        away = None if self.presence is None else self.presence.away(party)
        absent = self.absent is not None and self.absent(party, flight.ticket.round)
        return away or flight.lost or ("it did not answer" if absent else None)

    def _task_of(self, flight: TimedFlight) -> tuple[Op, PartyWork]:
        """The op that a ticket's party runs, and its work. Hostile parties may run another op."""
        party, op, payload = flight.ticket.party, flight.op, shortened(flight.payload, flight.steps)
        if self.band is not None:
            op, payload = self.band.training(party, opener(op), payload)
        return op, PartyWork(party, payload, self.memory(party), flight.ticket.round)

    def _trained(self, flight: TimedFlight) -> Outcome:
        """Charge the budget of a ticket's party, and give the outcome of its training."""
        op, work = self._task_of(flight)
        try:
            self.charge(op, work)
        except PartyError as reason:
            return str(reason)
        others = (
            ()
            if self.presence is not None
            else (  # samples may change until the others arrive
                other for other in self.tickets.flights.values() if self._unanswered(other) is None
            )
        )
        outcome = outcome_of(self.engine, flight, self._task_of, others)
        if not isinstance(outcome, str):
            report_spent(op, outcome[0], self.record.spent.get(work.party))
        return outcome

    def snapshot(self) -> dict[str, Any]:
        """The state for a checkpoint at the end of a round: memories on disk, tickets, clock, privacy spending."""
        return {"memories": self.memories.snapshot(), **self.tickets.snapshot(), "now": self.clock.now,
                "spent": self.spending.tree() if self.spending is not None else None}  # fmt: skip

    def saved(self) -> None:
        """The checkpoint with the last snapshot is on disk."""
        self.memories.saved()

    def restore(self, tree: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self.memories.restore(tree["memories"])
        self.clock.now = tree["now"]
        if self.spending is not None and tree.get("spent") is not None:
            self.spending.restore(tree["spent"])
        self.tickets.restore(tree, lambda ticket, op, payload, saved: TimedFlight(
            ticket, op, payload, saved["arrives"], saved["steps"], saved["lost"],
            Trained.of_tree(saved["trained"]) if "trained" in saved else None))  # fmt: skip
