"""The federation, as an algorithm sees it: verbs that ask parties for things. A runtime answers them.

`reduce` needs only the weighted sum of the replies, so it can be streamed, masked or encrypted; `gather` sees each
reply; `submit` and `next` are the asynchronous pair; `exchange` lets neighbours talk without the aggregator. Every
verb yields an `Ask` to the driver and resumes with the answer: there is no event loop in here and none is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hansa.core import codec, rng
from hansa.core.errors import AlgorithmError, ConfigError
from hansa.core.op import Op, Payload, Reply, unwrap
from hansa.core.params import Params
from hansa.core.registry import from_config, to_config
from hansa.core.rows import Rows
from hansa.core.trusted import Trusted

Verb = Literal["reduce", "gather", "submit", "next", "exchange"]
PIECE = 2**22  # numbers that are divided at once
VERBS: tuple[Verb, ...] = ("reduce", "gather", "submit", "next", "exchange")


@dataclass(frozen=True, eq=False)
class Ask:
    """One question to some parties, identified by (round, phase, index) and, for each party, by the party."""

    verb: Verb
    round: int
    phase: str
    index: int
    op: Op | None = None
    payload: Payload = field(default_factory=dict)
    parties: tuple[int, ...] = ()
    each: Mapping[int, Payload] = field(default_factory=dict)
    uniform: bool = False
    mixing: Tensor | None = None
    # The first so many replies will do, where more parties than that were asked; of so many the quorum is a fraction,
    # also where some of them have left in an exchange before.
    enough: int | None = None

    def __await__(self) -> Generator[Ask, Any, Any]:
        answer = yield self
        return answer

    @property
    def in_round(self) -> bool:
        """Whether the ask belongs to a round's work, which takes time, or to its evaluation."""
        return self.phase.startswith(("round", "select"))

    @property
    def selects(self) -> bool:
        """Whether the ask helps to choose the cohort: it has no quorum, and what it measures is not the round's."""
        return self.phase.startswith("select")

    def payload_of(self, party: int) -> Payload:
        """What one party is sent: the shared payload and its own part."""
        own = self.each.get(party)
        return {**self.payload, **own} if own else self.payload

    def message(self, party: int) -> dict[str, Any]:
        """The ask as the wire carries it to one party."""
        return {"op": op_config(self.op), "payload": self.payload_of(party), "round": self.round}

    def sizes(self) -> list[int]:
        """The bytes of the message to each party; parties told the same in plain values are reckoned once."""
        known: dict[str, int] = {}
        out = []
        for party in self.parties:
            own = self.each.get(party)
            name = repr(own) if not _holds_tensor(own) else f"party {party}"
            if name not in known:
                known[name] = codec.size(self.message(party))
            out.append(known[name])
        return out

    def digest(self) -> str:
        """A hash of everything that was asked; a replay must ask the same."""
        op = op_config(self.op) if self.op is not None else None
        body = {
            "verb": self.verb, "round": self.round, "phase": self.phase, "index": self.index, "op": op,
            "parties": list(self.parties), "payload": self.payload, "uniform": self.uniform, "mixing": self.mixing,
            "enough": self.enough,
            "each": {str(party): payload for party, payload in sorted(self.each.items())},
        }  # fmt: skip
        return codec.digest(body)


def _holds_tensor(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(_holds_tensor(value) for value in tree.values())
    return isinstance(tree, Tensor)


def op_config(op: Op | None) -> dict[str, Any]:
    """An op by kind, name and fields."""
    if op is None:
        raise AlgorithmError("this ask has no op")
    try:
        return {**_config(op)}
    except TypeError:  # an op with a field that cannot be hashed
        return {"kind": op.kind, **to_config(op)}


@functools.lru_cache(maxsize=64)
def _config(op: Op) -> dict[str, Any]:
    return {"kind": op.kind, **to_config(op)}


def op_of(config: Mapping[str, Any], where: str) -> Op:
    """The op that `op_config` described; a name that is not registered here is a ConfigError."""
    fields = dict(config)
    op = from_config(str(fields.pop("kind", "op")), fields, where=where)
    if not isinstance(op, Op):
        raise ConfigError(f"{where}: the {op.kind} {op.name!r} is nothing that a party could be asked to do")
    return op


@dataclass(frozen=True)
class Reduced:
    """The weighted sum of the replies, and nothing about any single one."""

    sums: dict[str, Tensor]
    weight: int
    count: int
    maxima: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The weighted mean: the sum divided once by the whole weight."""
        total = self.sums[name]
        if dtype is None:
            return total.to(torch.float64) / self.weight
        out = torch.empty(total.shape, dtype=dtype, device=total.device)
        for part, some in zip(torch.split(out.view(-1), PIECE), torch.split(total.reshape(-1), PIECE), strict=True):
            part.copy_(some.to(torch.float64) / self.weight)  # in pieces: a float64 copy of a large model is spared
        return out


@dataclass(frozen=True)
class Gathered:
    """The replies one by one, in the order of the parties' ids.

    `seconds` says how long each of them took, where the runtime has a clock.
    """

    parties: tuple[int, ...]
    replies: tuple[Reply, ...]
    seconds: tuple[float, ...] = ()
    matrices: Mapping[str, Rows] = field(default_factory=dict)  # of tensors that were put side by side as they came

    def matrix(self, name: str) -> Rows:
        """One tensor of all replies as the rows of a matrix, which may lie on disk."""
        return self.matrices[name] if name in self.matrices else Rows(self.rows(name).reshape(len(self.replies), -1))

    def rows(self, name: str) -> Tensor:
        """One tensor of all replies, stacked to [replies, ...]."""
        return torch.stack([reply.tensors[name] for reply in self.replies])

    @property
    def weights(self) -> Tensor:
        return torch.tensor([reply.weight for reply in self.replies], dtype=torch.int64)


@dataclass(frozen=True)
class Finding:
    """What a fusion found about the parties whose updates it saw: the share of each in the result, its score where the
    rule has one, and who had next to no part in it."""

    rule: str
    parties: Sequence[int]
    shares: Sequence[float]
    scores: Sequence[float] | None
    excluded: Sequence[int]


@dataclass(frozen=True)
class Ticket:
    """An ask under way: it outlives the round it was submitted in."""

    id: int
    party: int
    round: int


@dataclass(frozen=True)
class Arrival:
    """A ticket that came back; `reply` is None where the party was lost or its reply was rejected."""

    ticket: Ticket
    reply: Reply | None


class SumProtocol(Protocol):
    """Takes over `reduce`: it may run any exchange it likes, as long as it returns the sum the ask is for.

    One with an attribute `answers_nobody` that is true has an answer also where no party was drawn (noise alone).
    """

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced: ...


class Federation:
    """One round's view of the parties. Payloads hold named tensors and plain values.

    `available` are the parties that can be selected now; `by_size` says that the cohort was drawn in proportion to the
    parties' samples, so that a fusion need not weigh by them again. `trusted` are samples of the server's own, where
    the task has any.
    """

    def __init__(self, parties: range, round: int, seed: int, cohort_size: int, verbs: Iterable[str] = VERBS,
                 protocol: SumProtocol | None = None, phase: str = "round",
                 busy: frozenset[int] = frozenset(), secret: bytes = b"") -> None:  # fmt: skip
        self.parties = parties
        self.round = round
        self.cohort_size = cohort_size
        self.cohort: Sequence[int] = self.parties
        self.available: Sequence[int] = self.parties  # who can be asked in this round
        self.enough: int | None = None  # how many of the cohort will do, where more were selected than that
        self.by_size = False  # whether the cohort was drawn in proportion to the parties' samples
        self.times: int | None = None  # cap on an unverified party size, in medians of all sizes
        self.trusted: Trusted | None = None
        self.findings: list[Finding] = []  # of this round
        self.rejected: dict[int, str] = {}  # whose replies a protocol found to be wrong, and why
        self.metrics: dict[str, float] = {}  # that came out of sums which a protocol made
        self._busy = set(busy)
        self._seed, self._secret = seed, secret
        self._phase = phase
        self._verbs = frozenset(verbs)
        self._protocol = protocol
        self._index = 0
        self._work: Mapping[str, Any] = {}
        self._own_work: Callable[[int], Mapping[str, Any]] | None = None
        self._told: dict[Any, tuple[Payload, Payload]] = {}

    def tell(self, work: Mapping[str, Any], own: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """Have all parties that train told how to: fields of their local solver, `own` going before what all are told.

        It travels as `work` in the payload, laid over what an algorithm itself says there.
        """
        self._work, self._own_work = work, own

    def rng(self, purpose: str) -> np.random.Generator:
        """A random stream for this round, named by its purpose."""
        return rng.generator(self._seed, purpose, self.round)

    def private_rng(self, purpose: str) -> np.random.Generator:
        """The same for what the parties, who know the run's seed, must not guess: in deployment the stream is drawn
        from a secret of the aggregator's. In a simulation there is none."""
        return rng.generator(self._secret.hex(), purpose, self.round) if self._secret else self.rng(purpose)

    def report(self, finding: Finding) -> None:
        """Have the round's record say what was found about single parties."""
        self.findings.append(finding)

    def reject(self, party: int, why: str) -> None:
        """Have the round's record say that a party's reply is not used, and why."""
        self.rejected[party] = why

    def _own(self) -> Trusted:
        if self.trusted is None:
            raise AlgorithmError("the server has no trusted samples")
        return self.trusted

    def at_server(self, op: Op, payload: Payload) -> Reply:
        """What a party with the server's trusted samples would reply."""
        payload, _ = self._with_work(op, payload, {}, ())
        return self._own().run(op, payload, self.round)

    def trusted_loss(self, params: Params, samples: int, purpose: str) -> Callable[[Tensor], float]:
        """The loss of a model vector on some of the server's trusted samples, drawn anew each round."""
        return self._own().loss(params, samples, self.rng(purpose))

    @property
    def busy(self) -> frozenset[int]:
        """Parties with a ticket under way."""
        return frozenset(self._busy)

    def _ask(self, verb: Verb, **given: Any) -> Ask:
        if verb not in self._verbs:
            declared = ", ".join(sorted(self._verbs)) or "none"
            raise AlgorithmError(f"the algorithm used the verb {verb!r}, but declares only: {declared}")
        if given.get("enough") is None and given.get("parties") == self.cohort and verb in ("reduce", "gather"):
            given["enough"] = self.enough
        ask = Ask(verb=verb, round=self.round, phase=self._phase, index=self._index, **given)
        self._index += 1
        return ask

    def _with_work(self, op: Op, payload: Payload, each: Mapping[int, Payload],
                   parties: Iterable[int]) -> tuple[Payload, Mapping[int, Payload]]:  # fmt: skip
        """What all are sent and what single parties are, with the work they are told to do."""
        if not (self._work or self._own_work) or not unwrap(op)[1].paced:
            return payload, each
        before = payload.get("work", {})
        if self._work:
            payload = {**payload, "work": {**before, **self._work}}
        told = dict(each)
        for party in parties:
            said = each.get(party, {}).get("work", {})
            own = self._own_work(party) if self._own_work is not None else {}
            if said or own:
                told[party] = {**each.get(party, {}), "work": {**before, **said, **self._work, **own}}
        return payload, told

    def _some(self, parties: Iterable[int] | None) -> tuple[int, ...]:
        chosen = tuple(sorted(self.cohort if parties is None else parties))
        unknown = [party for party in chosen if party not in self.parties]
        if unknown or len(set(chosen)) != len(chosen):
            raise AlgorithmError(f"asked parties {unknown or chosen}: they must be distinct and known")
        return chosen

    async def reduce(self, op: Op, payload: Payload | None = None, *, parties: Iterable[int] | None = None,
                     each: Mapping[int, Payload] | None = None, uniform: bool = False) -> Reduced:  # fmt: skip
        """The sum of weight times reply over the parties, by default the cohort; `uniform` weighs all as one."""
        asked = self._some(parties)
        payload, each = self._with_work(op, payload or {}, each or {}, asked)
        ask = self._ask("reduce", op=op, payload=payload, parties=asked, each=each, uniform=uniform)
        if self._protocol is not None:
            reduced = await self._protocol.reduce(self._open(), ask)
            self.metrics |= reduced.metrics
            return reduced
        answer: Reduced = await ask
        return answer

    async def gather(self, op: Op, payload: Payload | None = None, *, parties: Iterable[int] | None = None,
                     each: Mapping[int, Payload] | None = None, enough: int | None = None) -> Gathered:  # fmt: skip
        """Each party's reply, in the order of their ids; see `Ask.enough`."""
        asked = self._some(parties)
        payload, each = self._with_work(op, payload or {}, each or {}, asked)
        answer: Gathered = await self._ask("gather", op=op, payload=payload, parties=asked, each=each, enough=enough)
        return answer

    async def submit(self, op: Op, payload: Payload, party: int) -> Ticket:
        """Ask one idle party without waiting for it."""
        if party in self._busy:
            raise AlgorithmError(f"party {party} already has a ticket under way")
        asked = self._some([party])
        shared, each = self._with_work(op, payload, {}, asked)
        if each or shared is not payload:
            # Parties told the same are sent one object, so that a checkpoint keeps its model once.
            work = each.get(party, shared)["work"]
            key = (id(payload), tuple(sorted(work.items())))
            payload = self._told.setdefault(key, (payload, {**payload, "work": work}))[1]
        ticket: Ticket = await self._ask("submit", op=op, payload=payload, parties=asked)
        self._busy.add(party)
        return ticket

    async def next(self) -> Arrival:
        """The next ticket to come back, whichever round it was submitted in."""
        if not self._busy:
            raise AlgorithmError("next() was awaited with no ticket under way")
        arrival: Arrival = await self._ask("next")
        self._busy.discard(arrival.ticket.party)
        return arrival

    async def exchange(self, op: Op, payload: Payload | None = None, *, mixing: Tensor) -> None:
        """Each party sends its reply to its neighbours: party i receives party j's with weight mixing[i, j].

        A party that is missing keeps its state, and its weight at each neighbour goes to that neighbour itself: the
        mixing stays symmetric and doubly stochastic.
        """
        k = len(self.parties)
        if tuple(mixing.shape) != (k, k):
            raise AlgorithmError(f"the mixing matrix is {tuple(mixing.shape)}, expected {(k, k)}")
        everyone = tuple(self.parties)
        payload, each = self._with_work(op, payload or {}, {}, everyone)
        await self._ask("exchange", op=op, payload=payload, parties=everyone, each=each, mixing=mixing)

    def _open(self) -> Federation:
        """This round's federation for a protocol that has taken over a verb: all verbs, sharing the count of asks."""
        inner = Federation.__new__(Federation)
        inner.__dict__ = {**self.__dict__, "_verbs": frozenset(VERBS), "_protocol": None}
        inner._phase = f"{self._phase}.{self._index - 1}"
        inner._index = 0
        return inner
