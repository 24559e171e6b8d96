"""The federation as an algorithm sees it: verbs that ask parties, answered by a runtime.

`reduce` needs only the weighted sum of the replies, so the sum can be streamed, masked or encrypted. `gather` sees each
reply. `submit` and `next` are asynchronous. With `route` parties send to each other, not to the aggregator; `session`
is a route with many messages. Every verb yields an `Ask` to the driver and resumes with the answer; no event loop is
needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor, nn

from hansa.core.ask import VERBS, Arrival, Ask, Gathered, Reduced, Routed, Ticket, Verb, unsummable
from hansa.core.entries import refuses_payload
from hansa.core.mixing import Mixing, MixingRows
from hansa.core.op import Op, Payload, Reply, known_open_tensors
from hansa.core.post import LARGEST
from hansa.core.relay import message_size
from hansa.core.route_op import ROUTE, RouteOp
from hansa.core.session_op import SessionOp
from hansa.core.shapes import is_open
from hansa.core.trusted import Trusted
from hansa.core.wrapper import PackingOp, unwrap
from hansa.numerics import rng
from hansa.numerics.params import Params
from hansa.plumbing.errors import AlgorithmError


@dataclass(frozen=True)
class Finding:
    """A fusion's findings about the parties: their shares in the result, their scores, and the excluded parties.

    `scores` is None if the rule has none. A party is excluded if its share is close to 0.
    """

    rule: str
    parties: Sequence[int]
    shares: Sequence[float]
    scores: Sequence[float] | None
    excluded: Sequence[int]


@dataclass(frozen=True)
class Grouping:
    """Which parties trained which of several models in a round.

    `weights` are the total weights of the groups. `members` maps parties to groups; it is None where the aggregator
    knows the weights alone. `moved` has the previous and the new group of parties that changed theirs. `kept` says why
    the model of a group did not change although it had members.
    """

    weights: Sequence[float]
    members: Mapping[int, int] | None = None
    moved: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    kept: Mapping[int, str] = field(default_factory=dict)


class SumProtocol(Protocol):
    """A protocol that replaces `reduce`: it may make any asks, and must return the sum of the ask.

    If its attribute `answers_nobody` is true, it also has an answer when no party was selected (noise alone).
    """

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced: ...


class Federation:
    """The parties, as an algorithm sees them in one round. Payloads hold named tensors and plain values.

    `cohort` is the default of every verb. `available` are the parties that can be selected now. With `by_size` the
    cohort was drawn in proportion to the parties' samples, so a fusion must not weigh by samples again. `trusted` are
    the aggregator's own samples, if the task has any.
    """

    def __init__(self, parties: range, round: int, seed: int, cohort_size: int, verbs: Iterable[str] = VERBS,
                 protocol: SumProtocol | None = None, phase: str = "round",
                 busy: frozenset[int] = frozenset(), secret: bytes = b"") -> None:  # fmt: skip
        self.parties = parties
        self.round = round
        self.cohort_size = cohort_size
        self.cohort: Sequence[int] = self.parties
        self.available: Sequence[int] = self.parties  # the parties that can be asked in this round
        self.enough: int | None = None  # replies that suffice, if more parties were selected
        self.by_size = False  # whether the cohort was drawn in proportion to the parties' samples
        self.times: int | None = None  # the largest unverified party size, in medians of all sizes
        self.trusted: Trusted | None = None
        self.findings: list[Finding] = []  # of this round
        self.grouping: Grouping | None = None  # of this round, if groups of parties train different models
        self.layers: Sequence[tuple[str, int]] = ()  # the parameters in an update, with their lengths
        self.module: nn.Module | None = None  # the task's model; not to be changed
        self.memory: dict[str, Any] = {}  # what fusions remember of earlier rounds, by op; a slot of the state
        self.rejected: dict[int, str] = {}  # parties whose replies a protocol rejected, with the reasons
        self.metrics: dict[str, float] = {}  # from the sums of a protocol, or an algorithm's own of a round
        self.watch: Callable[[Gathered], None] | None = None  # is shown the updates of the round, if it is set
        self.pack: Callable[[Op, str], Op] | None = None  # how updates travel; gets the op and a label of the ask
        # How models travel to the parties: the payload with the model that they open, and its packed form.
        self.send: Callable[[Payload], tuple[Payload, Mapping[str, Any] | None]] | None = None
        self._busy = set(busy)
        self._seed, self._secret = seed, secret
        self._phase = phase
        self._verbs = frozenset(verbs)
        self._protocol = protocol
        self._index = 0
        self._work: Mapping[str, Any] = {}
        self._own_work: Callable[[int], Mapping[str, Any]] | None = None
        self._payloads: dict[Any, tuple[Payload, Payload]] = {}  # of `submit`, with their work
        self._measured: dict[tuple[str, str], tuple[float, int]] = {}  # (op, metric): sum over sums, and their weight

    def tell(self, work: Mapping[str, Any], own: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """Set fields of the local solver for all parties (`work`) and for single parties (`own`, which wins).

        They travel as `work` in the payload and override what the algorithm itself puts there.
        """
        self._work, self._own_work = work, own

    def rng(self, purpose: str) -> np.random.Generator:
        """The random stream of this round for a purpose."""
        return rng.generator(self._seed, purpose, self.round)

    def private_rng(self, purpose: str) -> np.random.Generator:
        """As `rng`, for draws that the parties must not guess, although they know the run's seed.

        In deployment the stream comes from a secret of the aggregator. In a simulation it is that of `rng`.
        """
        return rng.generator(self._secret.hex(), purpose, self.round) if self._secret else self.rng(purpose)

    def report(self, finding: Finding) -> None:
        """Add a fusion's findings to the round's record."""
        self.findings.append(finding)

    def reject(self, party: int, why: str) -> None:
        """Add to the round's record that a party's reply was rejected, with the reason."""
        self.rejected[party] = why

    def _trusted(self) -> Trusted:
        if self.trusted is None:
            raise AlgorithmError("the aggregator has no trusted samples; set task.trusted")
        return self.trusted

    def at_server(self, op: Op, payload: Payload) -> Reply:
        """The reply of a party that holds the aggregator's trusted samples."""
        payload, _ = self._with_work(op, payload, {}, ())
        return self._trusted().run(op, payload, self.round)

    def trusted_loss(self, params: Params, samples: int, purpose: str) -> Callable[[Tensor], float]:
        """A function: the loss of a model vector on trusted samples, which are drawn again in each round."""
        return self._trusted().loss(params, samples, self.rng(purpose))

    @property
    def busy(self) -> frozenset[int]:
        """Parties with an unanswered ticket."""
        return frozenset(self._busy)

    def _ask(self, verb: Verb, **fields: Any) -> Ask:
        if verb not in self._verbs:
            declared = ", ".join(sorted(self._verbs)) or "none"
            raise AlgorithmError(f"the algorithm used the verb {verb!r}, but declares only: {declared}")
        whole_cohort = fields.get("parties") == self.cohort and verb in ("reduce", "gather")
        if fields.get("enough") is None and fields.get("need") is None and whole_cohort:
            fields["enough"] = self.enough
        if self.pack is not None and verb not in ("next", "route"):
            fields["op"] = self.pack(fields["op"], f"{self._phase}.{self._index}")
        if self.send is not None and verb not in ("next", "route"):
            fields["payload"], fields["packed"] = self.send(fields["payload"])
        ask = Ask(verb=verb, round=self.round, phase=self._phase, index=self._index, **fields)
        _check_payload(ask)
        self._index += 1
        return ask

    def _with_work(self, op: Op, payload: Payload, each: Mapping[int, Payload],
                   parties: Iterable[int]) -> tuple[Payload, Mapping[int, Payload]]:  # fmt: skip
        """The shared payload and the parties' additions, with the `work` of each party."""
        if not (self._work or self._own_work) or not unwrap(op)[1].paced:
            return payload, each
        before = payload.get("work", {})
        if self._work:
            payload = {**payload, "work": {**before, **self._work}}
        additions = dict(each)
        for party in parties:
            asked = each.get(party, {}).get("work", {})
            own = self._own_work(party) if self._own_work is not None else {}
            if asked or own:
                additions[party] = {**each.get(party, {}), "work": {**before, **asked, **self._work, **own}}
        return payload, additions

    def _checked(self, parties: Iterable[int] | None) -> tuple[int, ...]:
        """The parties to ask, by default the cohort, in the order of their ids."""
        chosen = tuple(sorted(self.cohort if parties is None else parties))
        unknown = [party for party in chosen if party not in self.parties]
        if unknown or len(set(chosen)) != len(chosen):
            raise AlgorithmError(f"asked parties {unknown or chosen}: parties must exist and be distinct")
        return chosen

    async def reduce(self, op: Op, payload: Payload | None = None, *, parties: Iterable[int] | None = None,
                     each: Mapping[int, Payload] | None = None, uniform: bool = False,
                     need: Literal["all"] | None = None) -> Reduced:  # fmt: skip
        """The sum of weight times reply over the parties, by default the cohort; `uniform` sets all weights to 1.

        With `need="all"` the round is aborted unless every party replied; a secure sum is then not opened.

        The weights of sums over samples (`Op.per_sample`) are always 1. If somebody must see each update (`watch`), the
        replies are gathered and then summed.
        """
        if self.watch is not None and self._protocol is None and op.update is not None:
            reduced = (await self.gather(op, payload, parties=parties, each=each, need=need)).summed(uniform)
            self._join_metrics(op, reduced)
            return reduced
        asked = self._checked(parties)
        payload, each = self._with_work(op, payload or {}, each or {}, asked)
        uniform = uniform or bool(op.per_sample)
        ask = self._ask("reduce", op=op, payload=payload, parties=asked, each=each, uniform=uniform, need=need)
        _check_sizes(ask, op)  # a packed form may have open sizes: it is opened before it is summed
        if self._protocol is not None:
            reduced = await self._protocol.reduce(self._open(), ask)
            self._join_metrics(op, reduced)
            packing = ask.op
            while isinstance(packing, PackingOp):
                reduced = dataclasses.replace(reduced, sums=packing.opened_sums(ask.payload, dict(reduced.sums)))
                packing = packing.inner
            return reduced
        answer: Reduced = await ask
        return answer

    def _join_metrics(self, op: Op, reduced: Reduced) -> None:
        """Add the metrics of a protocol's sum to those of the round: means over all sums of the same op."""
        for name, value in reduced.metrics.items():
            before, weight = self._measured.get((op.name, name), (0.0, 0))
            joined = self._measured[op.name, name] = before + value * reduced.weight, weight + reduced.weight
            self.metrics[name] = joined[0] / joined[1] if weight else value

    async def gather(self, op: Op, payload: Payload | None = None, *, parties: Iterable[int] | None = None,
                     each: Mapping[int, Payload] | None = None, enough: int | None = None,
                     need: Literal["all"] | None = None) -> Gathered:  # fmt: skip
        """The reply of each party, in the order of their ids.

        With `need="all"` the round is aborted unless every party replied. For `enough` see `Ask`.
        """
        if need not in (None, "all") or (need is not None and enough is not None):
            raise AlgorithmError(f'gather: need must be "all" or left out, and excludes enough; got {need!r}')
        asked = self._checked(parties)
        payload, each = self._with_work(op, payload or {}, each or {}, asked)
        answer: Gathered = await self._ask(
            "gather", op=op, payload=payload, parties=asked, each=each, enough=enough, need=need
        )
        if self.watch is not None and op.update is not None:
            self.watch(answer)
        return answer

    async def submit(self, op: Op, payload: Payload, party: int) -> Ticket:
        """Ask one idle party without waiting for it."""
        if party in self._busy:
            raise AlgorithmError(f"party {party} already has an unanswered ticket")
        asked = self._checked([party])
        shared, each = self._with_work(op, payload, {}, asked)
        if each or shared is not payload:
            # Parties with equal work share one payload object, so that a checkpoint stores its model once.
            work = each.get(party, shared)["work"]
            key = (id(payload), tuple(sorted(work.items())))
            payload = self._payloads.setdefault(key, (payload, {**payload, "work": work}))[1]
        ticket: Ticket = await self._ask("submit", op=op, payload=payload, parties=asked)
        self._busy.add(party)
        return ticket

    async def next(self) -> Arrival:
        """Wait for the next answered ticket, of this round or an earlier one."""
        if not self._busy:
            raise AlgorithmError("next() was awaited, but no ticket is unanswered; submit one first")
        arrival: Arrival = await self._ask("next")
        self._busy.discard(arrival.ticket.party)
        return arrival

    async def route(self, op: RouteOp, payload: Payload | None = None, routes: Iterable[tuple[int, int]] = (), *,
                    parties: Iterable[int] | None = None,
                    each: Mapping[int, Payload] | None = None) -> Routed:  # fmt: skip
        """Each sender sends a message to each of its receivers. The aggregator sees which arrived, not their content.

        `routes` are (sender, receiver) pairs. `parties` are by default those of the routes; a party without any route
        runs `send` for no receivers and `receive` with an empty inbox. The message of a missing sender is missing in
        its receivers' inboxes. The quorum counts senders.
        """
        if not isinstance(op, RouteOp):
            raise AlgorithmError(f"route needs a RouteOp; {op.name!r} is not a RouteOp")
        pairs = self._pairs(payload or {}, each or {}, routes)
        named = {party for pair in pairs for party in pair}
        asked = self._checked(named if parties is None else parties)
        if not named <= set(asked):
            raise AlgorithmError(
                f"the routes name the parties {sorted(named - set(asked))}, which `parties` leaves out"
            )
        payload, each = self._with_work(op, payload or {}, each or {}, asked)
        ask = self._ask("route", op=op, payload=payload, parties=asked, each=each, routes=pairs)
        for sender, receiver in {sender: (sender, receiver) for sender, receiver in pairs}.values():
            for name, (sizes, _) in op.expects_message(ask.payload_of(sender), sender, receiver).items():
                if is_open(sizes):
                    raise AlgorithmError(
                        f"the tensor {name!r} of the messages of {op.name!r} has an open dimension, but a sealed "
                        "message has one known size; fill the tensor up to its bound, and send its true size beside it"
                    )
        answer: Routed = await ask
        return answer

    def _pairs(self, payload: Payload, each: Mapping[int, Payload],
               routes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:  # fmt: skip
        """The routes in ascending order; an AlgorithmError if they are invalid, or if the payload has routes itself."""
        if any(ROUTE in own for own in (payload, *each.values())):
            raise AlgorithmError(f"the payload of a route cannot have an entry {ROUTE!r}: the runtime adds one")
        pairs = tuple(sorted((int(sender), int(receiver)) for sender, receiver in routes))
        for sender, receiver in pairs:
            for party in (sender, receiver):
                if party not in self.parties:
                    raise AlgorithmError(f"the route {sender} -> {receiver}: there is no party {party} in this job")
            if sender == receiver:
                raise AlgorithmError(f"the route {sender} -> {receiver}: a party cannot send to itself")
        if len(set(pairs)) < len(pairs):
            raise AlgorithmError("routes must be distinct: a sender has one message for a receiver")
        return pairs

    async def session(self, op: SessionOp, payload: Payload | None = None, routes: Iterable[tuple[int, int]] = (), *,
                      each: Mapping[int, Payload] | None = None) -> Gathered:  # fmt: skip
        """The parties of the routes exchange many messages within one ask (`SessionOp.talk`); returns their replies.

        `routes` are the (sender, receiver) pairs that may have messages. The aggregator sees their sizes alone. The
        round is aborted unless all parties of the session reply: a session cannot go on without one of them.
        """
        if not isinstance(op, SessionOp):
            raise AlgorithmError(f"session needs a SessionOp; {op.name!r} is not a SessionOp")
        pairs = self._pairs(payload or {}, each or {}, routes)
        if not pairs:
            raise AlgorithmError("a session needs at least one route")
        asked = self._checked({party for pair in pairs for party in pair})
        ask = self._ask("route", op=op, payload=payload or {}, parties=asked, each=each or {}, routes=pairs)
        for sender, receiver in pairs:
            for shapes in op.expects_messages(ask.payload_of(sender), sender, receiver):
                if any(is_open(sizes) for sizes, _ in shapes.values()):
                    raise AlgorithmError(f"the messages of {op.name!r} have an open dimension; give it one known size")
                size = message_size(shapes)
                if size > LARGEST:
                    raise AlgorithmError(
                        f"a message of {op.name!r} has {size} bytes, and a session carries at most {LARGEST}; use "
                        "smaller batches or fewer activations"
                    )
        answer: Gathered = await ask
        return answer

    async def exchange(self, op: RouteOp, payload: Payload | None = None, *, mixing: Mixing | Tensor) -> Routed:
        """A route between neighbours: party i receives the message of party j if mixing[i, j] is not 0.

        `mixing` is sparse, or a matrix [K, K]. Each party gets its row of it as `mixing` in its payload (see
        `mixing_shares`). A missing party keeps its state. Each neighbour adds the missing party's weight to its own, so
        the mixing stays symmetric and doubly stochastic.
        """
        k = len(self.parties)
        size = (mixing.parties, mixing.parties) if isinstance(mixing, Mixing) else tuple(mixing.shape)
        if size != (k, k):
            raise AlgorithmError(f"the mixing matrix is {size}, expected {(k, k)}")
        sparse = mixing if isinstance(mixing, Mixing) else Mixing.of(mixing)
        return await self.route(op, payload, sparse.routes(), parties=self.parties, each=MixingRows(sparse))

    def _open(self) -> Federation:
        """This round's federation for a protocol: all verbs are allowed, and its asks are numbered under this ask."""
        inner = Federation.__new__(Federation)
        inner.__dict__ = {**self.__dict__, "_verbs": frozenset(VERBS), "_protocol": None, "pack": None}
        inner._phase = f"{self._phase}.{self._index - 1}"
        inner._index = 0
        return inner


def _check_payload(ask: Ask) -> None:
    """Raise an AlgorithmError for a payload that its op does not state, before a party refuses it."""
    if ask.op is not None and ask.parties:
        refused = refuses_payload(ask.op, ask.payload_of(ask.parties[0]), values=False)
        if refused is not None:
            raise AlgorithmError(refused)


def _check_sizes(ask: Ask, op: Op) -> None:
    """Raise an AlgorithmError for a sum over an op with open dimensions, before a party is asked."""
    if ask.parties:
        tensors = known_open_tensors(op, ask.payload_of(ask.parties[0]))
        if tensors:
            raise AlgorithmError(unsummable(op, tensors))
