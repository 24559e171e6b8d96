"""Twins of a deployed party: two workers whose samples differ in one record; and the fellow parties of a masked sum."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hansa.core.ask import Ask, Reduced
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, perform
from hansa.core.round_record import Record
from hansa.core.runtime import complete
from hansa.core.vault import Vault
from hansa.data.table import Table
from hansa.holdings.gateway import TableRows
from hansa.net.party.data_statement import proposed, stated
from hansa.net.party.peers import Peers
from hansa.net.party.samples import PartySamples, preparer
from hansa.net.party.store import PartyStore
from hansa.net.party.vault_lines import DECLINED, PREFIXES
from hansa.net.party.worker import Worker
from hansa.net.transport import certificates, keys
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import HansaError, RoundAborted
from hansa.plumbing.stopping import Brake, Halted, braked
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules
from hansa.secure.masking import Masking
from hansa.secure.masking_ops import SecureMasked

ROWS, TESTS, FEATURES = 24, 22, 30
OPEN = "matches = 100000\nscores = true\nfuzzy = true\n"
LIMITS = "[limits]\nepochs = 10\nsteps = 60\nseconds = 4.0\nparameters = 5000\nparticipants = 8\nmemory = 3000000000\n"
FLOORS = {
    "dp": "[privacy]\nepsilon = 1e9\nsigma = 0.3\n",
    "secure": "[privacy]\nsecure = true\ndeclines = 1000000\n",
    "active": "[privacy]\nactive = true\nsecure = true\ndeclines = 1000000\n",
    "budget": "[budget]\nqueries = 1e9\n",
}
TASK: dict[str, Any] = {
    "model": "logistic", "dtype": "float64", "shape": [FEATURES], "outputs": 2, "loss": "cross_entropy", "classes": 2,
    "party_test": 0.0, "seed": 3, "bf16": False, "prepared": False,
}  # fmt: skip
LAYOUT = {"columns": [["age", "number"], ["city", "text"]], "missing": ["NA"], "labels": []}
KINDS: dict[str, dict[str, Any]] = {  # of samples: the fields of their task
    "two": {},
    "rare": {"classes": 8, "outputs": 8},  # eight classes, of which the party has two
    "numbers": {"outputs": 1, "loss": "mse", "classes": None},
    "table": {"model": None, "table": LAYOUT},
    "columns": {"shapes": [[FEATURES]] * 3},
}
# What differs in the changed record: all features, one feature, its target, id, weight or text; or a test sample.
VARIANTS = ("x0", "x3", "x1e3", "x1e10", "x1e30", "x1e100", "x1e155", "x1e200", "x1e300", "one1e8", "one1e160",
            "one1e305", "label", "label", "newclass", "id", "weight", "text", "t1e3", "t1e200", "ulabel")  # fmt: skip
RECORD, TEST_RECORD = ROWS - 1, 3
COLOURS = ("red", "green", "blue")


def samples(kind: str, variant: str = "", changed: bool = False) -> PartySamples:
    """A party's samples; with `changed`, one record is other than without (or absent: the variant "removed")."""
    draws = np.random.default_rng(0)
    x, t = (torch.from_numpy(draws.normal(size=(rows, FEATURES))) for rows in (ROWS, TESTS))
    y, u = torch.arange(ROWS) % 2, torch.arange(TESTS) % 2
    if kind == "numbers":
        y, u = (torch.from_numpy(draws.normal(size=rows)) for rows in (ROWS, TESTS))
    ids, more = np.array([f"p{k}" for k in range(ROWS)]), np.array([f"t{k}" for k in range(TESTS)])
    texts, held = ([COLOURS[k % 3] for k in range(rows)] for rows in (ROWS, TESTS))
    weights = torch.ones(ROWS, dtype=torch.float64) if variant == "weight" else None
    if changed:
        if variant[0] == "x":
            x[RECORD] = float(variant[1:]) * torch.sign(x[RECORD])
        elif variant.startswith("one"):
            x[RECORD, 7] = float(variant[3:])
        elif variant == "label":
            y[RECORD] = 1e6 if kind == "numbers" else 1 - y[RECORD]
        elif variant == "newclass":
            y[RECORD] = 1e200 if kind == "numbers" else 7
        elif variant == "id":
            ids[RECORD] = "q9"
        elif variant == "text":
            texts[RECORD] = "rare"
        elif weights is not None:
            weights[RECORD] = 1e4
        elif variant == "ulabel":
            u[TEST_RECORD] = 1 - u[TEST_RECORD]
        elif variant == "removed":
            x, y, ids, texts = x[:RECORD], y[:RECORD], ids[:RECORD], texts[:RECORD]
        else:
            t[TEST_RECORD] = float(variant[1:]) * torch.sign(t[TEST_RECORD])
    if kind == "table":
        tables = (Table.of({"age": x[:, 0].tolist(), "city": texts}), Table.of({"age": t[:, 0].tolist(), "city": held}))
        return PartySamples((x[:, :2], y), (t[:, :2], u), ("sick", "age", "city"), tables, ("number", "text"))
    if weights is not None:
        return PartySamples(TableRows(x, y, None, weights), TableRows(t, u))
    return PartySamples(TableRows(x, y, ids), TableRows(t, u, more))


def owned(kind: str, variant: str = "", changed: bool = False) -> PartySamples:
    """The same, with what their owner states about them, which is the same for both twins."""
    statement = proposed(samples(kind, variant))
    if kind == "rare":
        statement = dataclasses.replace(statement, classes=KINDS["rare"]["classes"], unit=False)
    return stated(samples(kind, variant, changed), statement)


_kept: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends


@functools.cache
def _authority() -> tuple[Path, Any, bytes]:
    """A folder for all parties, and the key and certificate of their federation."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    _kept.append(tempfile.TemporaryDirectory(prefix="hansa-twins-", dir=shared))
    return Path(_kept[-1].name), *certificates.make_ca("league", 30)


@functools.cache
def enrolled(name: str) -> Path:
    """The folder of an enrolled party, without a policy."""
    base, authority, certificate = _authority()
    folder, key = base / name, keys.PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
    folder.mkdir()
    own = certificates.issue(authority, certificate, key.public_key(), name, "party", "league", 20)
    about = json.dumps({"party": name, "federation": "league", "url": "https://x", "instance": "i"}).encode()
    for file, data in (("ca.pem", certificate), ("cert.pem", own), ("key.pem", keys.key_bytes(key)),
                       ("party.json", about), ("secret", bytes(range(32)))):  # fmt: skip
        keys.write_private(folder / file, data)
    return folder


@dataclass(frozen=True)
class Answered:
    """A worker's answer to one ask to an op, the lines that it added to its vault, and the processor time."""

    op: str
    message: str  # its SHA-256
    answer: Reply | str
    lines: tuple[dict[str, Any], ...]
    seconds: float

    @property
    def replied(self) -> bool:
        return isinstance(self.answer, Reply)

    @property
    def bytes(self) -> bytes:
        return self.answer.encode() if isinstance(self.answer, str) else codec.encode(self.answer.tree())

    @property
    def form(self) -> str:
        """The words of a refusal; the names, shapes and types of a reply."""
        if isinstance(self.answer, str):
            return self.answer
        groups = {"tensors": self.answer.tensors, "maxima": self.answer.maxima}
        forms = {kind: {name: [list(value.shape), str(value.dtype)] for name, value in sorted(group.items())}
                 for kind, group in groups.items()}  # fmt: skip
        return json.dumps({**forms, "metrics": sorted(self.answer.metrics)})

    @property
    def readings(self) -> frozenset[str]:
        """The purposes of the readings that were booked."""
        names = [line.get("name", "") for line in self.lines]
        return frozenset(kind for kind, prefix in PREFIXES.items() if any(name.startswith(prefix) for name in names))

    @property
    def declined(self) -> bool:
        """Whether a decline was booked."""
        return any(line.get("name", "").startswith(DECLINED) for line in self.lines)

    @property
    def booked(self) -> list[tuple[Any, ...]]:
        """The readings and releases that were booked."""
        booked = []
        for line in self.lines:
            kind = next((kind for kind, prefix in PREFIXES.items() if line.get("name", "").startswith(prefix)), "")
            if kind or line.get("ask"):
                booked.append((kind, line.get("rate"), line.get("sigma"), line.get("steps")))
        return sorted(booked, key=repr)


class Twin:
    """A worker in a folder of its own, with the policy of a floor."""

    def __init__(self, floor: str, kind: str, variant: str = "", changed: bool = False, name: str = "ann") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="home-", dir=_authority()[0]))
        shutil.copytree(enrolled(name), self.folder, dirs_exist_ok=True)
        (self.folder / "party.toml").write_text(OPEN + FLOORS[floor] + LIMITS)
        self.store = PartyStore(self.folder)
        self.worker = Worker(self.store, preparer(owned(kind, variant, changed), self.store.policy.limits.parameters))

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, message: Mapping[str, Any], task: Mapping[str, Any], job: str, phase: str = "round", number: int = 0,
            tip: str | None = None, party: int = 0) -> tuple[Answered, Work]:  # fmt: skip
        """Send an ask as bytes; an exception that leaves the worker is the answer "raised ..."."""
        sent = [codec.encode(tree) for tree in (message, task)]
        blobs = [Blob(hashlib.sha256(data).hexdigest(), len(data)) for data in sent]
        round = message.get("round", 0)
        work = Work(job, "job", party, round, phase, number, *blobs, None, tip, None, 3)
        path = self.folder / "vault.jsonl"
        before, start = path.stat().st_size, time.thread_time()
        answer: Reply | str
        try:
            with braked(Brake(4.0)):
                answer, _ = self.worker.answer(work, *(codec.decode(data) for data in sent))
        except Halted:
            answer = "raised Halted"
        except Exception as error:
            answer = f"raised {type(error).__name__}: {error}"[:300]
        taken = time.thread_time() - start
        with path.open("rb") as file:
            file.seek(before)
            lines = tuple(json.loads(line) for line in file.read().splitlines())
        return Answered(str(message["op"]), blobs[0].digest, answer, lines, taken), work


class FellowVault(Vault):
    """The vault of an honest party of a masked sum, which signs with its own certificate."""

    def __init__(self, name: str, job: str, task: str) -> None:
        self._peers, self._job, self._task = Peers(enrolled(name), {}), job, task

    def begin_session(self, kind: str, name: str) -> bytes:
        return hashlib.sha256(f"{self._peers.federation} {kind} {name}".encode() + self.sign(b"")[1]).digest()

    session = begin_session  # type: ignore[assignment]

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        return self._peers.sign(data)

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        return self._peers.known(certificate)

    @property
    def scope(self) -> tuple[str, ...]:
        return self._peers.federation, self._job

    @property
    def task(self) -> str:
        return self._task


@functools.lru_cache(maxsize=64)
def _fellow_party(name: str, number: int, kind: str) -> Party:
    return preparer(owned(kind))(number, {**TASK, **KINDS[kind]}, "cpu")


class Fellow:
    """An honest party beside the twin in a masked sum."""

    def __init__(self, name: str, number: int, kind: str, job: str, task: str) -> None:
        party, vault = _fellow_party(name, number, kind), FellowVault(name, job, task)
        self.party = Party(number, party.objective, party.data, party.seed, vault=vault)
        self.memory: Memory = {}

    def answer(self, op: Op, payload: Payload, message: Mapping[str, Any]) -> Reply | str:
        refused = op.refuses_request(message, self.memory, self.party.vault.task)
        if refused is not None:
            return refused
        try:
            outcome = perform(op, self.party, payload, self.memory)
        except Exception as error:
            return str(error)[:200]
        if isinstance(outcome, str):
            return outcome
        reply, self.memory = outcome
        return reply


Meddle = Callable[[Mapping[str, Any]], list[Mapping[str, Any]]]  # the message with the op that hides -> what is sent


def masked_sum(twin: Twin, op: Op, payload: Payload, task: Mapping[str, Any], kind: str, channel: Masking, job: str,
               uniform: bool, meddle: Meddle | None = None,
               other: Callable[[Op], Op] = lambda op: op) -> tuple[list[Answered], Reduced | None]:  # fmt: skip
    """Run a masked sum of the twin and two fellows, as an aggregator does: the twin's answers, and the sum if any.

    `meddle` gives the messages that the twin is sent in place of the one that asks for its masked numbers; the fellows
    are asked for the op that `other` makes of its op.
    """
    digest = hashlib.sha256(codec.encode(task)).hexdigest()
    fellows = {k: Fellow(name, k, kind, job, digest) for k, name in ((1, "bob"), (2, "cid"))}
    said: list[Answered] = []
    tip: list[str | None] = [None]

    def hides(ask: Ask) -> bool:
        return isinstance(ask.op, SecureMasked)

    def of_twin(ask: Ask) -> Reply | str:
        message = ask.message(0)
        first: Answered | None = None
        staged = tip[0]
        for turn, each in enumerate(meddle(message) if meddle and hides(ask) else [message]):
            answered, work = twin.ask(each, task, job, ask.phase, ask.index + 100 * turn, staged)
            said.append(answered)
            if first is None:
                first = answered
                tip[0] = work.ask if answered.replied else staged
        assert first is not None
        return first.answer

    def answer(ask: Any) -> Any:
        assert isinstance(ask, Ask) and ask.op is not None
        outcomes: list[tuple[int, Reply | str]] = []
        for party in ask.parties:
            op = other(ask.op) if hides(ask) else ask.op
            message = dataclasses.replace(ask, op=op).message(party)
            one = fellows[party].answer(op, ask.payload_of(party), message) if party else of_twin(ask)
            outcomes.append((party, one))
        return combine(ask, outcomes, Rules(), Record())

    federation = Federation(range(3), 0, 0, 3, protocol=channel)
    try:
        return said, complete(drive(federation.reduce(op, payload, parties=(0, 1, 2), uniform=uniform), "sum"), answer)
    except (HansaError, RoundAborted):  # the sum was aborted, which only ends it
        return said, None
