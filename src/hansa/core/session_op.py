"""Ops of a session: within one ask, parties exchange many messages that the aggregator cannot read.

A route (`core.route_op`) delivers one message per pair of parties, and each of its steps is on disk before the next. A
session is one ask in which every party runs a generator: it yields messages to send and waits for messages of other
parties. Only the replies at the end are durable. Split learning exchanges activations and gradients in this way, batch
after batch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.post import AHEAD
from hansa.core.route_op import Message
from hansa.plumbing.errors import AlgorithmError


@dataclass(frozen=True, eq=False)
class Send:
    """Yielded by `SessionOp.talk`: send a message to a party."""

    to: int
    message: Message


@dataclass(frozen=True)
class Receive:
    """Yielded by `SessionOp.talk`: wait for the next message of a party, which `yield` returns."""

    sender: int


Talk = Generator[Send | Receive, Message | None, tuple[Reply, Memory]]
Outcome = tuple[Reply, Memory] | str  # of a party: its reply and memory, or the reason why there is none
Continue = Callable[[Message | None], Send | Receive | Outcome]
Check = Callable[[int, int, int, Message], str | None]


class SessionOp(Op):
    """An op of a session: `talk` runs at all parties of the ask at the same time.

    A receiver checks each message against `expects_messages`, with its own payload. A message that does not fit, or a
    party that stops, ends the session for all parties. A sender can be at most `core.post.AHEAD` messages ahead of a
    receiver; then it waits.
    """

    def talk(self, party: Party, payload: Payload, memory: Memory) -> Talk:
        """A generator of `Send` and `Receive`; returns the reply to the aggregator and the party's new memory.

        It must be deterministic in its arguments and in the messages, and must not write into messages.
        """
        raise TypeError(f"the op {self.name!r} does not define talk()")

    def expects_messages(self, payload: Payload, sender: int, receiver: int) -> Sequence[Mapping[str, Shape]]:
        """Names, shapes and types of the tensors of all messages from one party to another, in their order."""
        raise TypeError(f"the op {self.name!r} does not say what its messages look like; define expects_messages()")


def converse(
    talks: Mapping[int, Continue], check: Callable[[int, int, int, Message], str | None]
) -> dict[int, Outcome]:
    """Run the generators of a session in turn, in one process: the reference for all other ways to run them.

    `talks` continues the generator of a party with a message (None after a `Send`, and at first); a text is the reason
    why the party declines. `check` gives the reason why a message is not as the op announces (sender, receiver, number,
    message), or None. The result is the outcome of each party. If one declines, no party has a reply.
    """
    boxes: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    at: dict[int, Send | Receive | tuple[Reply, Memory] | None] = dict.fromkeys(talks)
    moved = True
    while moved:
        moved = False
        for party in sorted(talks):
            while not isinstance(step := at[party], tuple):
                message, reason = None, None
                if isinstance(step, Receive):
                    if not boxes[step.sender, party]:
                        break
                    message = boxes[step.sender, party].popleft()
                elif isinstance(step, Send):
                    pair = party, step.to
                    if step.to not in talks or step.to == party:
                        raise AlgorithmError(f"party {party} sends to party {step.to}, which is not in the session")
                    if len(boxes[pair]) >= AHEAD:
                        break
                    reason = check(*pair, counts[pair], step.message)
                    boxes[pair].append(step.message)
                    counts[pair] += 1
                after = talks[party](message) if reason is None else reason
                if isinstance(after, str):
                    return {other: after if other == party else left(party) for other in talks}
                at[party], moved = after, True
    unread = sum(bool(box) for box in boxes.values())
    outcomes = {party: step for party, step in at.items() if isinstance(step, tuple)}
    if len(outcomes) < len(talks) or unread:
        raise AlgorithmError(
            f"the session does not end: the parties {sorted(set(talks) - set(outcomes))} wait for each other, and "
            f"{unread} pairs of parties have messages that nobody reads"
        )
    return dict(outcomes)


def left(party: int) -> str:
    """The reason of a party whose session ended because another one left it."""
    return f"party {party} left the session"
