"""Conformance checks for transforms.

    from hansa.testing import check_transform
    check_transform(MyTransform())

The checks pack and open vectors of several lengths, sizes and types, then run FedAvg with the transform.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hansa.algorithms import FedAvg
from hansa.core.op import Memory, Op, Party, Reply, Shape, like
from hansa.core.plain_data import from_config, to_config
from hansa.core.shapes import is_open
from hansa.core.wrapper import PackingOp
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD, Controlled
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.replies.reply_checks import Rules, message_fault, received
from hansa.testing.algorithms import check_engines, check_network, check_processes, check_replay
from hansa.testing.pools import NetworkPool, PartyPool
from hansa.transforms import Transform

LENGTHS = (0, 1, 7, 1000, 2500)
SIZES = (0.0, 1e-30, 1.0, 1e30)  # magnitudes of the numbers
PARTIES = 5
DTYPES = (torch.float32, torch.float64)
ROUNDING = 1e-9  # relative, of sums in float64


def check_transform(transform: Transform, pool: PartyPool | None = None, network: NetworkPool | None = None) -> None:
    """Raise AssertionError with the first promise that a transform breaks.

    `pool` has party processes in which it is checked too, `network` a federation on which a job is compared with its
    simulation.
    """
    suite = _Suite(transform)
    suite.config()
    for dtype in DTYPES:
        for length in LENGTHS:
            for size in SIZES:
                suite.vector(torch.randn(length, dtype=dtype, generator=_draws()) * size)
    suite.rows()
    suite.sums()
    suite.op()
    suite.hostile()
    suite.run(pool, network)


class _Suite:
    """The checks of one transform."""

    def __init__(self, transform: Transform) -> None:
        self.transform, self.name = transform, transform.name
        self.parties = [_party(number) for number in range(PARTIES)]

    def config(self) -> None:
        """The configuration of a transform gives an equal transform."""
        again = from_config("transform", to_config(self.transform), "check_transform")
        assert again == self.transform, f"{self.name}: its configuration gives another transform: {again}"

    def vector(self, value: Tensor) -> None:
        """Parts are as announced, depend only on party, name, vector and memory, and open to a finite vector."""
        shape, before, memory = like(value), value.clone(), None
        for round in range(1, 4):  # each round with the memory of the round before
            party = _party(1, round)
            parts, kept = self.transform.pack(party, "w", value, memory)
            with torch.random.fork_rng():
                torch.manual_seed(12345)
                again = self.transform.pack(party, "w", value, memory)
            assert torch.equal(value, before), f"{self.name}: pack changes the vector"
            same = codec.encode(_tree(parts, kept)) == codec.encode(_tree(*again))
            assert same, f"{self.name}: the same party, name and vector give other parts or another memory"
            assert kept is None or self.transform.remembers, f"{self.name}: it has a memory; set remembers = True"
            sent, expected = {name: like(part) for name, part in parts.items()}, self.transform.packed(shape)
            assert message_fault(parts, expected) is None, f"{self.name}: it packs {sent}, and announces {expected}"
            copies = {name: part.clone() for name, part in parts.items()}
            opened = self.transform.open(parts, shape)
            unchanged = all(torch.equal(parts[name], part) for name, part in copies.items())
            assert unchanged, f"{self.name}: open changes the parts"
            assert like(opened) == shape, f"{self.name}: it opens to {like(opened)}, expected {shape}"
            assert bool(torch.isfinite(opened).all()), f"{self.name}: a finite vector opens to values that are not"
            memory = kept
        if not bool(value.any()):
            zero = self.transform.open(self.transform.pack(_party(1), "w", value, None)[0], shape)
            assert not bool(zero.any()), f"{self.name}: a vector of zeros opens to other numbers"

    def rows(self) -> None:
        """Rows are packed and opened to the bits of single vectors."""
        for dtype in DTYPES:
            if any(is_open(sizes) for sizes, _ in self.transform.packed(((1500,), dtype)).values()):
                continue  # parts of unequal sizes form no rows
            values = torch.randn(PARTIES, 1500, dtype=dtype, generator=_draws())
            values[2] = 0.0
            singles = [self.transform.pack(p, "w", v, None) for p, v in zip(self.parties, values, strict=True)]
            parts, kept = self.transform.pack_rows(self.parties, "w", values, [None] * PARTIES)
            shape = like(values[0])
            opened = self.transform.open_rows(parts, shape)
            for k, (one, memory) in enumerate(singles):
                row = {name: rows[k] for name, rows in parts.items()}
                same = codec.encode(_tree(row, kept[k])) == codec.encode(_tree(one, memory))
                assert same, f"{self.name}: pack_rows and pack give other bits"
                assert torch.equal(opened[k], self.transform.open(one, shape)), (
                    f"{self.name}: open_rows and open give other bits"
                )

    def sums(self) -> None:
        """Where a transform says so, the sum of parts opens to the sum of opened vectors."""
        if not self.transform.adds:
            return
        values = torch.randn(PARTIES, 1500, dtype=torch.float64, generator=_draws())
        weights = range(1, PARTIES + 1)
        shape: Shape = like(values[0])
        each = [self.transform.pack(p, "w", v, None)[0] for p, v in zip(self.parties, values, strict=True)]
        floating = all(part.is_floating_point() for part in each[0].values())
        assert floating, f"{self.name}: parts that are not floating-point numbers cannot be added"
        expected = sum(weight * self.transform.open(parts, shape) for weight, parts in zip(weights, each, strict=True))
        total = {name: sum(w * parts[name] for w, parts in zip(weights, each, strict=True)) for name in each[0]}
        apart = float((self.transform.open(total, shape) - expected).abs().max())  # type: ignore[arg-type]
        assert apart <= ROUNDING * float(values.abs().sum()), (
            f"{self.name}: it says that parts may be added, but the sum of parts opens to another vector"
        )

    def op(self) -> None:
        """Around an op, the transform keeps the numbers beside the vectors, the weight, the metrics and the memory."""
        for solver in (SGD(), Controlled()):
            op, payload = self.transform.around(solver, "round.0"), _payload()
            sent = {name: torch.randn(40, generator=_draws()) for name in solver.sends}
            reply = Reply(dict(sent), 7, {"counts": torch.tensor([3])}, {"train_loss": 0.5})
            packed, memory = op.after(_party(1), payload, reply, {"other": torch.ones(2)})  # type: ignore[attr-defined]
            unlike = message_fault(packed.tensors, op.expects(payload))
            assert unlike is None, f"{self.name}: {op.name} does not send what it announces"
            assert torch.equal(memory["other"], torch.ones(2)), f"{self.name}: it loses entries of the party's memory"
            opened = op.opened(payload, packed) if isinstance(op, PackingOp) else packed
            assert set(opened.tensors) == set(sent), f"{self.name}: it opens to {sorted(opened.tensors)}"
            assert (opened.weight, opened.maxima, opened.metrics) == (7, reply.maxima, reply.metrics), (
                f"{self.name}: it changes the weight, the metrics or the counters of a reply"
            )
            assert codec.decode(codec.encode(memory)).keys() == memory.keys()

    def hostile(self) -> None:
        """Whatever parts a party sends, the reply is rejected with a reason or opens to finite numbers."""
        op, payload = self.transform.around(SGD(), "round.0"), _payload()
        honest, _ = _packed(op, payload)
        taken = received(honest, op, payload, Rules())
        assert isinstance(taken, Reply), f"{self.name}: an honest reply is rejected: {taken}"
        for forged, must_fail in _forgeries(honest):
            try:
                taken = received(forged, op, payload, Rules())
            except Exception as error:
                raise AssertionError(f"{self.name}: hostile parts raise {error!r} at the aggregator") from error
            if isinstance(taken, Reply):
                assert not must_fail, f"{self.name}: parts that are not finite, or of another form, are accepted"
                finite = all(bool(torch.isfinite(tensor).all()) for tensor in taken.tensors.values())
                assert finite, f"{self.name}: hostile parts open to numbers that are not finite"

    def run(self, pool: PartyPool | None, network: NetworkPool | None) -> None:
        """A run gives the same result in every engine, twice, after a resume and in separate processes."""
        settings = {"compress": to_config(self.transform)}
        reference = check_engines(FedAvg(), **settings)
        check_replay(FedAvg(), reference, **settings)
        if pool is not None:
            check_processes(FedAvg(), reference, pool, **settings)
        if network is not None:
            check_network(FedAvg(), network, **settings)


def _draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _party(number: int, round: int = 1) -> Party:
    """A party without samples: a transform needs its number, the round and the run's seed."""
    return Party(number, Objective(None, "mse", 0), SampleGateway((torch.zeros(0, 1), torch.zeros(0)), None), 3, round)


def _payload() -> dict[str, Any]:
    empty = torch.zeros(0, dtype=torch.int64)
    return {"model": {"w": torch.zeros(40), "stats": torch.zeros(0), "counts": empty}}


def _packed(op: Op, payload: dict[str, Any]) -> tuple[Reply, Memory]:
    sent = Reply({"w": torch.randn(40, generator=_draws())}, 7, {}, {"train_loss": 0.5})
    found: tuple[Reply, Memory] = op.after(_party(1), payload, sent, {})  # type: ignore[attr-defined]
    return found


def _tree(parts: dict[str, Tensor], kept: Any) -> dict[str, Any]:
    return {"parts": parts, "kept": kept}


def _forgeries(honest: Reply) -> Iterator[tuple[Reply, bool]]:
    """Replies of a liar, and whether each must be rejected."""
    for name, part in honest.tensors.items():
        for value, must_fail in _values(part):
            yield Reply({**honest.tensors, name: value}, 7), must_fail
        others = {other: tensor for other, tensor in honest.tensors.items() if other != name}
        yield Reply(others, 7), True
    yield Reply({**honest.tensors, "more": torch.zeros(1)}, 7), True


def _values(part: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """What a liar sends in the place of a part."""
    floating = part.is_floating_point()
    for bad in (torch.nan, torch.inf, -torch.inf) if floating else ():
        yield torch.full_like(part, bad), True
        one = part.clone()
        one.view(-1)[:1] = bad
        yield one, True
    limits = torch.finfo(part.dtype) if floating else torch.iinfo(part.dtype)
    for extreme in (limits.min, limits.max, -1, 0, 1):
        yield torch.full_like(part, extreme), False
        one = part.clone()
        one.view(-1)[:1] = extreme
        yield one, False
    yield part.flatten()[:0], True
    yield torch.cat([part.flatten(), part.flatten()]), True
    yield part.to(torch.int32 if part.dtype != torch.int32 else torch.int64), True
