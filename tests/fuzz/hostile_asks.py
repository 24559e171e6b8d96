"""Hostile asks: a party's worker is asked for every registered op, with fields and payloads that a liar may choose.

The bytes of an input choose a valid ask and changes to it: other fields, other ops, other tensors (shapes, types, NaN,
huge numbers), other tasks and preparations. The ask goes to two workers whose training samples differ in one record.
The answer must be a reply or one sentence. What may depend on that record, and how, follows from the party's policy:

- without a reading through the gateway, the answers are equal to the last bit;
- a party with a floor answers both alike (a reply, or the same sentence): a failure would reveal a bit, unless the
  vault counts it;
- a party that requires differential privacy charges a reading of training samples to its budget;
- a party that requires a secure sum replies to ops of a secure sum alone.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from every_op import exercise
from hansa.core.ask import op_config, op_of
from hansa.core.data_op import DataOp
from hansa.core.delivery import Deliver
from hansa.core.op import Memory, Op, Party, Payload, Reply, perform
from hansa.core.plain_data import field_types
from hansa.core.predictor import Evaluate
from hansa.core.registry import lookup, registered
from hansa.core.wrapper import unwrap
from hansa.data.prepare import ColumnMoments
from hansa.data.table import Table
from hansa.holdings.gateway import Purpose, SampleGateway, TableRows
from hansa.local import DPSGD, SGD
from hansa.local.finetune import FineTune
from hansa.net.party import sessions
from hansa.net.party import worker as workers
from hansa.net.party.gateway import OwnerGateway
from hansa.net.party.samples import PartySamples, preparer
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Worker
from hansa.net.transport import certificates, keys
from hansa.net.transport.wire import Blob, Work, printable
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, HansaError
from hansa.plumbing.stopping import Brake, Halted, braked
from hansa.secure.paillier import SMALLEST, PrivateKey
from hansa.secure.paillier_sum import PaillierEncrypt
from hansa.secure.primes import Stream
from hansa.sim.engine import Outcome

ROWS, TESTS, FEATURES = 24, 20, 30
SECONDS = 8.0  # of an ask
LIMITS = "[limits]\nepochs = 10\nsteps = 300\nseconds = 2.0\nparameters = 5000\nparticipants = 8\nmemory = 800000000\n"
POLICIES = {
    "open": "matches = 100\n[broadcast]\nreplays = true\n",
    "private": "[privacy]\nepsilon = 50.0\nsigma = 0.3\n[broadcast]\nnorm = 100.0\n",
    "secure": "[privacy]\nsecure = true\n[broadcast]\nloss = 3.0\n",
    "active": "[privacy]\nactive = true\ndp = true\n",
}
TASK: dict[str, Any] = {
    "model": "logistic", "dtype": "float64", "shape": [FEATURES], "outputs": 2, "loss": "cross_entropy", "classes": 2,
    "party_test": 0.0, "seed": 3, "bf16": False, "prepared": False,
}  # fmt: skip
LAYOUT = {"columns": [["age", "number"], ["city", "text"]], "missing": ["NA"], "labels": []}
NUMBERS = (0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan, 2**31, 2**53, -(2**63), 2**63,
           10**40, 5000, 1e-9)  # fmt: skip
TEXTS = ("", "x", "../../x", "os:system", "\ud800", "a" * 5000, "network", "own-model", "finetuned", "logistic", "sgd",
         "dp-sgd", "mse", "float32", "discrete", "float", "\x00", "loss")  # fmt: skip
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)
SIZES = (0, 1, 2, 3, 8, ROWS, FEATURES, 62, 300)


class Choices:
    """Choices from bytes; after their end, always the first."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """A number from 0 on, below a bound."""
        take = 1 if below <= 256 else 2
        piece = self._data[self._at : self._at + take]
        self._at += take
        return int.from_bytes(piece, "little") % below

    def one(self, values: Any) -> Any:
        return values[self.number(len(values))]


@dataclass(frozen=True)
class Seed:
    """A valid ask: an op's description and its payload, encoded."""

    op: dict[str, Any]
    payload: bytes


def ops() -> tuple[str, ...]:
    """The registered ops and local solvers of Hansa."""
    parts = {**registered("op"), **registered("local")}
    return tuple(name for name, part in parts.items() if part.__module__.startswith("hansa."))


@functools.cache
def seeds() -> list[Seed]:
    """Asks of simulations, up to three per op (and inner op), and one with default fields for every other op."""
    found: dict[str, list[Seed]] = {}

    def note(op: Op, party: Party, payload: Payload, memory: Memory) -> Outcome:
        layers, inner = unwrap(op)
        kept = found.setdefault("/".join(part.name for part in (*layers, inner)), [])
        if len(kept) < 3:
            kept.append(Seed(op_config(op), codec.encode(dict(payload))))
        return perform(op, party, payload, memory)

    exercise(note)
    model = {"w": torch.zeros(62, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
    key = PrivateKey.generate(SMALLEST, Stream(b"holder")).public.tensor()
    for inner in (SGD(steps=1), DPSGD(steps=1, sigma=1.0), Evaluate(), ColumnMoments()):
        hidden = PaillierEncrypt(inner, range=4096.0, parties=3, key_bits=SMALLEST)
        payload = {"model": model, "secure": key, "centre": torch.zeros(FEATURES, dtype=torch.float64)}
        found[f"paillier/{inner.name}"] = [Seed(op_config(hidden), codec.encode(payload))]
    for name in ops():
        if name not in found:
            found[name] = [Seed(_default(name), codec.encode({"model": model}))]
    return [seed for kept in found.values() for seed in kept]


def _default(name: str) -> dict[str, Any]:
    """The description of an op with default fields; of its name alone, if it has fields without a default."""
    kind = "op" if name in registered("op") else "local"
    try:
        return op_config(lookup(kind, name)())  # type: ignore[arg-type]
    except (TypeError, ConfigError):
        fields = field_types(lookup(kind, name))
        return {"kind": kind, "name": name, **({"inner": op_config(SGD(steps=1))} if "inner" in fields else {})}


@functools.cache
def _names() -> tuple[str, ...]:
    """The names in all payloads."""
    names = {name for seed in seeds() for name in codec.decode(seed.payload)}
    return tuple(sorted(names | {"work", "architecture", "route"}))


@functools.cache
def _wrappers() -> tuple[str, ...]:
    return tuple(name for name in ops() if "inner" in _default(name))


def value(choose: Choices, depth: int = 0) -> Any:
    """A hostile value."""
    match choose.number(9):
        case 0 | 1 | 2 | 3:
            return tensor(choose)
        case 4 | 5:
            return choose.one(NUMBERS)
        case 6:
            return choose.one(TEXTS)
        case 7 if depth < 3:
            return [value(choose, depth + 1) for _ in range(choose.number(4))]
        case 8 if depth < 3:
            return {choose.one(_names()): value(choose, depth + 1) for _ in range(choose.number(4))}
        case _:
            return choose.one((None, True, False, [], {}, [[]], {"": {}}))


def tensor(choose: Choices) -> Tensor:
    """A tensor of any type and of a small shape, filled with one number, or with numbers that rise."""
    shape = [choose.one(SIZES) for _ in range(choose.number(4))]
    while math.prod(shape) > 50_000:
        shape.pop()
    dtype = choose.one(TYPES)
    if choose.number(2):
        return torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    number = float(choose.one(NUMBERS[:13]))
    whole = not dtype.is_floating_point
    if whole:
        number = int(number) if abs(number) < 100 else 0
    return torch.full(shape, number, dtype=torch.float64).to(dtype)


def changed(tree: Any, choose: Choices) -> Any:
    """A tree with a change at one place: a value replaced, removed, added, or a tensor distorted."""
    if isinstance(tree, Mapping) and tree and choose.number(4):
        name = choose.one(sorted(map(str, tree)))
        match choose.number(8):
            case 0:
                return {key: item for key, item in tree.items() if key != name}
            case 1:
                return {**tree, choose.one(_names()): value(choose)}
            case 2:
                return {**tree, name: value(choose)}
            case _:
                return {**tree, name: changed(tree.get(name), choose)}
    if isinstance(tree, list) and tree and choose.number(4):
        at = choose.number(len(tree))
        return [*tree[:at], changed(tree[at], choose), *tree[at + 1 :]]
    if isinstance(tree, Tensor) and choose.number(4):
        return distorted(tree, choose)
    return value(choose)


def distorted(tensor: Tensor, choose: Choices) -> Tensor:
    """A tensor with other numbers, another type or another shape."""
    match choose.number(7):
        case 0 if tensor.is_floating_point() and tensor.numel():
            out = tensor.clone()
            number = torch.tensor(float(choose.one(NUMBERS[:13])), dtype=torch.float64)
            out.view(-1)[choose.number(out.numel())] = number.to(out.dtype)
            return out
        case 1:
            return tensor.to(choose.one(TYPES))
        case 2:
            return tensor.unsqueeze(0)
        case 3:
            return tensor.flatten()[:-1]
        case 4:
            return torch.cat([tensor.flatten(), tensor.flatten()[:1]])
        case 5:
            return tensor.expand(choose.one((1, 2, ROWS)), *tensor.shape).contiguous()
        case _:
            return tensor * choose.one((0, -1, 2)) if tensor.dtype != torch.bool else ~tensor


def described(op: dict[str, Any], choose: Choices) -> dict[str, Any]:
    """An op's description, changed: another op, an op around it, or another field."""
    match choose.number(7):
        case 0:
            return _default(choose.one(ops()))
        case 1:
            return {**_default(choose.one(_wrappers())), "inner": op}
        case 2:
            private = op_config(DPSGD(steps=2, batch=8, sigma=1.0))
            return {**op, "inner": private} if "inner" in op else private
        case 3:
            return {**_default("secure-masked"), "inner": op}
        case _:
            out = changed(op, choose)
            return {**out, "kind": op.get("kind", "op")} if isinstance(out, dict) else {"kind": "op", "name": out}


@dataclass(frozen=True)
class HostileAsk:
    """An ask and its task, as a liar sends them; `policy` is that of the party."""

    policy: str
    message: dict[str, Any]
    task: dict[str, Any]
    round: int

    @classmethod
    def of(cls, data: bytes) -> HostileAsk:
        """The ask that the bytes choose."""
        choose = Choices(data)
        seed: Seed = seeds()[choose.number(65536) % len(seeds())]
        policy = choose.one(list(POLICIES))
        op, payload = seed.op, codec.decode(seed.payload)
        fields = {**TASK, "table": LAYOUT, "model": None} if str(op["name"]).startswith("table-") else dict(TASK)
        task: dict[str, Any] = {"task": fields, "preparations": []}
        round = 0
        for _ in range(choose.number(5)):
            match choose.number(8):
                case 0 | 1:
                    op = described(op, choose)
                case 2 | 3 | 4:
                    out = changed(payload, choose)
                    payload = out if isinstance(out, dict) else {"model": out}
                case 5:
                    other: Seed = choose.one(seeds())
                    payload = {**payload, **codec.decode(other.payload)}
                case 6:
                    round = choose.one((0, 1, 5, 2**40, -1, 2**53))
                case _:
                    task = cls._task(task, choose)
        message: dict[str, Any] = {"op": op, "payload": payload, "round": round}
        if choose.number(16) == 15:
            message = changed(message, choose)
        return cls(policy, message if isinstance(message, dict) else {}, task, round)

    @staticmethod
    def _task(task: dict[str, Any], choose: Choices) -> dict[str, Any]:
        preparations = [seed for seed in seeds() if seed.op["name"] in PREPARING]
        match choose.number(6):
            case 0:
                return {**task, "task": choose.one(({}, {**TASK, "shapes": [[FEATURES]]}, {**TASK, "table": LAYOUT}))}
            case 1 | 2:
                step: Seed = choose.one(preparations)
                payload = codec.decode(step.payload)
                payload = changed(payload, choose) if choose.number(2) else payload
                return {**task, "preparations": [*task["preparations"], {"op": step.op, "payload": payload}]}
            case 3:
                fields = task["task"]
                return {**task, "task": {**fields, choose.one(sorted(TASK)): value(choose)}}
            case _:
                out = changed(task["task"], choose)
                return {**task, "task": out if isinstance(out, dict) else {}}


PREPARING = ("apply-standardise", "standardise-own", "keep-features", "weigh-classes", "apply-table")


@functools.cache
def _samples() -> tuple[PartySamples, PartySamples]:
    """Samples that differ in one training record, which changes neither the shape nor the set of classes."""
    draws = np.random.default_rng(0)
    x, test = (
        torch.from_numpy(draws.normal(size=(ROWS, FEATURES))),
        torch.from_numpy(draws.normal(size=(TESTS, FEATURES))),
    )
    y, held = torch.arange(ROWS) % 2, torch.arange(TESTS) % 2
    other, flipped = x.clone(), y.clone()
    other[0], flipped[0] = 50 * torch.arange(FEATURES).double() - 100, 1 - y[0]
    names, more = (np.array([f"{kind}{k}" for k in range(count)]) for kind, count in (("p", ROWS), ("t", TESTS)))
    tests = TableRows(test, held, more)
    return PartySamples(TableRows(x, y, names), tests), PartySamples(TableRows(other, flipped, names), tests)


@functools.cache
def _tables() -> tuple[PartySamples, PartySamples]:
    """The same as tables with a column of numbers and one of texts."""

    def table(x: Any) -> Table:
        texts = [("red", "green", "blue")[int(k) % 3] for k in x[:, 1].abs()]
        return Table.of({"age": x[:, 0].tolist(), "city": texts})

    return tuple(  # type: ignore[return-value]
        PartySamples(rows.train[:2], rows.test[:2], ("sick", "age", "city"),
                     (table(rows.train[0]), table(rows.test[0])), ("number", "text"))
        for rows in _samples() if rows.test is not None
    )  # fmt: skip


_kept: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends


@functools.cache
def _home() -> Path:
    """The folder of an enrolled party, without a policy."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    _kept.append(tempfile.TemporaryDirectory(prefix="hansa-asks-", dir=shared))
    folder = Path(_kept[-1].name) / "enrolled"
    folder.mkdir()
    key = keys.PrivateKey.from_private_bytes(bytes(range(32)))
    authority, certificate = certificates.make_ca("league", 30)
    own = certificates.issue(authority, certificate, key.public_key(), "ann", "party", "league", 20)
    for name, data in (("ca.pem", certificate), ("cert.pem", own), ("key.pem", keys.key_bytes(key)),
                       ("party.json", b'{"party":"ann","federation":"league","url":"https://x","instance":"i"}'),
                       ("secret", bytes(range(32)))):  # fmt: skip
        keys.write_private(folder / name, data)
    return folder


class Watched(OwnerGateway):
    """Notes the readings of an ask."""

    readings: list[Purpose] = []  # noqa: RUF012 (emptied before each ask)

    def admit(self, purpose: Purpose) -> None:
        super().admit(purpose)
        self.readings.append(purpose)


@dataclass(frozen=True)
class Answered:
    """A worker's answer, with what it read and recorded."""

    answer: Reply | str
    readings: frozenset[Purpose]
    charged: bool
    counted: bool  # a decline or a refusal, which may depend on the samples

    @property
    def bytes(self) -> bytes:
        return codec.encode(self.answer.tree()) if isinstance(self.answer, Reply) else self.answer.encode()


def answered(ask: HostileAsk, samples: PartySamples) -> Answered:
    """Ask a new worker with these samples."""
    folder = Path(tempfile.mkdtemp(prefix="home-", dir=_home().parent))
    try:
        for path in _home().iterdir():
            shutil.copy(path, folder)
        (folder / "party.toml").write_text(POLICIES[ask.policy] + LIMITS)
        store = PartyStore(folder)
        try:
            return _answered(ask, Worker(store, preparer(samples, store.policy.limits.parameters)))
        finally:
            store.close()
    finally:
        shutil.rmtree(folder)


def _answered(ask: HostileAsk, worker: Worker) -> Answered:
    Watched.readings.clear()
    blobs = []
    for tree in (ask.message, ask.task):
        try:
            data = codec.encode(tree)
        except (HansaError, TypeError, ValueError, OverflowError, UnicodeError):
            raise DataError("such a message cannot be sent") from None
        blobs.append(Blob(hashlib.sha256(data).hexdigest(), len(data)))
    work = Work("job-1", "job", 0, max(ask.round, 0), "round", 0, blobs[0], blobs[1], None, None, None, 3)
    message, task = (codec.decode(codec.encode(tree)) for tree in (ask.message, ask.task))
    start = time.thread_time()
    try:
        with braked(Brake(2.0)):
            answer, _ = worker.answer(work, message, task)
    except Halted:
        raise AssertionError("an ask was halted without a reason") from None
    taken = time.thread_time() - start
    assert taken < SECONDS, f"an ask took {taken:.1f} s"
    if isinstance(answer, str):
        said = printable(answer[:4096])
        assert said == answer and len(answer) < 4096, f"not one sentence: {answer[:200]!r}"
    else:
        Reply.of_tree(codec.decode(codec.encode(answer.tree())))
    contents = worker.vault.contents
    return Answered(answer, frozenset(Watched.readings), bool(contents.spent),
                    bool(contents.declines.total() or contents.refusals.total()))  # fmt: skip


def ask_both(data: bytes) -> None:
    """Send an ask to two workers; a DataError if they refuse it, an AssertionError for a fault."""
    ask = HostileAsk.of(data)
    with _quiet(), _same_digest():
        tables = "table" in ask.task["task"]
        first, second = (answered(ask, samples) for samples in (_tables() if tables else _samples()))
    check(ask, first, second)
    if isinstance(first.answer, str):
        raise DataError(first.answer)


def check(ask: HostileAsk, first: Answered, second: Answered) -> None:
    """Compare the answers of two parties whose training samples differ in one record."""
    about = f"{ask.policy}: {str(ask.message.get('op'))[:300]}"
    alike = [one.answer if isinstance(one.answer, str) else None for one in (first, second)]
    if any("(limits.seconds in party.toml), and this one takes longer" in str(text) for text in alike):
        return  # the load of this machine decides which of the two takes too long
    readings: frozenset[str] = first.readings | second.readings
    steps = [step["op"].get("name") for step in ask.task["preparations"]] if readings else []
    training = (readings - {"evaluate"}) | ({"statistics"} if "standardise-own" in steps else set())
    if not training and "ckks" not in about:  # whose keys are drawn by a library, from the operating system
        assert first.bytes == second.bytes, f"{about}: without a reading, the answer depends on a sample: {alike}"
    if not training:
        return
    if ask.policy == "open" or training == {"describe"}:
        return
    if alike[0] != alike[1]:
        assert first.counted or second.counted, f"{about}: a sample decides about the answer: {alike}"
    if not isinstance(first.answer, Reply):
        return
    name = ask.message["op"]["name"]
    quiet = isinstance(_op(ask), (DataOp, FineTune, Deliver))
    if ask.policy in ("secure", "active") and not quiet:
        assert name.startswith("secure-"), f"{about}: a reply outside a secure sum"
    if ask.policy in ("private", "active") and not quiet:
        assert first.charged and second.charged, f"{about}: training samples were read and nothing was charged"


def _op(ask: HostileAsk) -> Any:
    return op_of(ask.message["op"], where="ask")


class _quiet:
    """Log nothing: the log of a party quotes the errors of hostile asks."""

    def __enter__(self) -> None:
        logging.disable(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        logging.disable(logging.NOTSET)


class _same_digest:
    """Give both parties the same draws, which depend on a hash of the data: they would hide other differences.

    The secrets of their sessions, which are random, are the same too.
    """

    def __enter__(self) -> None:
        self._digest, SampleGateway.digest = SampleGateway.digest, lambda self: "0" * 64  # type: ignore[method-assign]
        self._secrets, sessions.secrets = sessions.secrets, SimpleNamespace(token_bytes=bytes)  # type: ignore[assignment]
        workers.OwnerGateway = Watched  # type: ignore[misc]

    def __exit__(self, *_: object) -> None:
        SampleGateway.digest = self._digest  # type: ignore[method-assign]
        sessions.secrets = self._secrets
        workers.OwnerGateway = OwnerGateway  # type: ignore[misc]


def inputs() -> Iterator[bytes]:
    """Every valid ask, to a party of each policy, without changes."""
    for number in range(len(seeds())):
        for policy in range(len(POLICIES)):
            yield number.to_bytes(2, "little") + bytes([policy, 0])
