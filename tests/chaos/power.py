"""`make power SEEDS=1000`: cut the power of an aggregator and a party repeatedly; no acknowledged data may be lost.

Each seed is a history of several lives. In each life the real ledger, blobs, registry, asks, job records, and a party's
store, memory and receipts go through a random sequence of actions of an aggregator and its parties. Then the power
fails after a random operation on the disk, and the next life begins with a state that a file system could show
(brownout.py says what is real and what is simulated). Each life begins with a check of everything that was promised,
and the log is audited as an outsider would, with the party's receipts. A seed gives the same history each time, except
for keys and times.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from brownout import Connection, Journal
from msgspec import structs

from hansa.net.aggregator import asks
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.job_records import JobFacts, JobRecords, discard, fix_facts, needed_blobs
from hansa.net.aggregator.jobs import JobRunner
from hansa.net.aggregator.ledger import Ledger, log_lines
from hansa.net.aggregator.registry import Denied, Registry
from hansa.net.audit import merkle
from hansa.net.audit import verify as audit
from hansa.net.audit.evidence import ENTRY, canonical, entry_line, make_statement
from hansa.net.audit.receipt_file import read_receipts
from hansa.net.party import store
from hansa.net.party.receipts import Receipts
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.transport import certificates, keys
from hansa.net.transport.tls import client_context
from hansa.net.transport.tokens import Token
from hansa.net.transport.wire import Answer, Blob, IssuedCertificate, Receipt, ask_name, pack, unpack
from hansa.plumbing import codec, disk

PARTIES = ("ann", "bob", "cid")
LIVES, STEPS = 4, 14
INITIAL = torch.zeros(10, dtype=torch.float64)  # the model at the start of jobs
RUNNING = "job IN (SELECT id FROM jobs WHERE status = 'running')"
OPERATOR = "operator.operator"
MESSAGE = "0" * 64  # the hash of the ask
KEYS = {name: keys.new_key() for name in PARTIES[1:]}  # folders of the machines that do not fail


class Lost(AssertionError):
    """Acknowledged data are missing."""


def need(true: Any, what: str) -> None:
    if not true:
        raise Lost(what)


@dataclass
class Promises:
    """Acknowledged data, each with the number of disk operations made before the acknowledgement."""

    receipts: dict[tuple[Any, ...], tuple[int, bytes]] = field(default_factory=dict)  # (ask, party): the answer
    kept: dict[tuple[str, bytes], tuple[int, None]] = field(default_factory=dict)  # (job, receipt), by the party
    closed: dict[tuple[Any, ...], tuple[int, str]] = field(default_factory=dict)
    facts: dict[str, tuple[int, JobFacts]] = field(default_factory=dict)
    rounds: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)  # the model's hash
    ended: dict[str, tuple[int, str]] = field(default_factory=dict)  # the model's blob
    heads: dict[int, tuple[int, str]] = field(default_factory=dict)  # the log's roots, by its size
    tokens: dict[str, tuple[int, str]] = field(default_factory=dict)
    revoked: dict[str, tuple[int, str]] = field(default_factory=dict)
    staged: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    forgotten: dict[tuple[str, str], tuple[int, None]] = field(default_factory=dict)  # from here on it may be gone
    enrolled: dict[str, tuple[int, None]] = field(default_factory=dict)

    def until(self, at: int) -> None:
        """Forget data that had not been acknowledged when the power failed."""
        for kind in vars(self).values():
            for name in [name for name, (when, _) in kind.items() if when > at]:
                del kind[name]
            for name, (_, value) in kind.items():
                kind[name] = (0, value)


class Nodes:
    """The nodes of the log's tree, as any reader reads them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def size(self) -> int:
        return int(self._ledger.all("SELECT count(*) FROM log")[0][0])

    def get(self, level: int, place: int) -> bytes:
        row = self._ledger.one("SELECT hash FROM nodes WHERE level = ? AND place = ?", level, place)
        need(row is not None, f"the node {place} of level {level} of the log's tree")
        assert row is not None
        return bytes(row["hash"])

    def put(self, level: int, place: int, node: bytes) -> None:
        raise AssertionError("the tree is only read here")


class Line:
    """A party's connection to the aggregator, without a network."""

    def __init__(self, life: Life) -> None:
        self.life = life

    async def call(self, method: str, path: str, body: bytes = b"", about: Any = None,
                   limit: int = 0) -> tuple[dict[str, str], bytes]:  # fmt: skip
        life = self.life
        if path == "/v1/log/certificate":
            return {}, life.ledger.notary.certificate
        name, pem = life.ledger.now(life.registry.rotate(life.store.identity(), body))
        return {}, pack(IssuedCertificate("league", name, pem))


def at_once(work: Any) -> None:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


class Life:
    """An aggregator and a party, from their start to the power failure."""

    def __init__(self, root: Path, chance: random.Random, promises: Promises, synchronous: str) -> None:
        self.chance, self.promises, self.journal = chance, promises, Journal(root)
        self.folder, self.synchronous = root / "aggregator", synchronous
        disk.observe(self.journal)
        self.serve()
        # As `hansa join` does.
        self.store = PartyStore(root / "party" / "home")
        self.store.install_new_keys()
        self.memory = PartyMemory(self.store.folder / "memory")
        self.receipts = Receipts(self.store.folder)

    def serve(self) -> None:
        """Start the aggregator as `hansa serve` does."""
        opened: list[Connection] = []

        def connect(path: Path) -> Connection:
            opened.append(opened[0] if opened else Connection(self.journal, path, self.synchronous))
            return opened[0]

        state = self.folder / "state"
        self.federation = FederationFolder.open(self.folder)
        disk.make_folder(state)
        self.federation.renew_server()
        self.ledger = Ledger(state / "hansa.db", self.federation.notary(), connect=connect)
        self.blobs = Blobs(state)
        self.registry = Registry(self.federation, self.ledger)
        self.blobs.sweep(self.ledger.now(lambda db: (db.log("started"), needed_blobs(db))[1]))

    def restart(self) -> None:
        """Shut the aggregator down cleanly and start it again."""
        self.ledger.close()
        self.serve()

    def end(self) -> None:
        disk.observe(None)
        self.ledger.close()
        self.store.close()

    def promise(self, kind: str, name: Any, value: Any) -> None:
        getattr(self.promises, kind)[name] = (len(self.journal.events), value)
        nodes = Nodes(self.ledger)
        self.promises.heads[nodes.size] = (len(self.journal.events), merkle.root(nodes, nodes.size).hex())

    # Actions

    def step(self) -> None:
        doing = self.chance.choices(
            (self.submit, self.open, self.answer, self.answer, self.answer, self.close, self.close_round, self.finish,
             self.certificate, self.invite, self.revoke, self.forget, self.leave_upload, self.restart),
            (2, 3, 3, 3, 3, 2, 4, 1, 2, 1, 0.2, 1, 1, 0.7),
        )[0]  # fmt: skip
        doing()

    def _any(self, sql: str, *values: Any) -> Any:
        rows = self.ledger.all(sql, *values)
        return self.chance.choice(rows) if rows else None

    def _data(self, most: int = 6000) -> bytes:
        return self.chance.randbytes(self.chance.choice((1, 511, 512, 700, most)))

    def _job(self) -> str | None:
        row = self._any("SELECT id FROM jobs WHERE status = 'running'")
        return row["id"] if row is not None else None

    def _closed(self, job: str) -> int:
        """The number of closed rounds of a job; new asks belong to the round of that number."""
        row = self.ledger.one("SELECT coalesce(max(round), 0) AS n FROM rounds WHERE job = ?", job)
        assert row is not None
        return int(row["n"])

    def _open_ask(self) -> Any:
        return self._any(f"SELECT * FROM asks WHERE phase IN ('round', 'describe') AND closed IS NULL AND {RUNNING}")

    def upload(self, owner: str, data: bytes) -> Blob:
        digest, at = hashlib.sha256(data).hexdigest(), self.blobs.received(owner, hashlib.sha256(data).hexdigest())
        while at < len(data):
            piece = data[at : at + self.chance.choice((300, 1024, 4096))]
            at = self.blobs.append(owner, digest, at, piece, 2**20)
        return Blob(digest, len(data))

    def submit(self) -> None:
        central = self._data()
        blob = self.upload(OPERATOR, central)
        self.blobs.finish(OPERATOR, blob.digest, blob.size)
        row = self.ledger.one("SELECT count(*) AS n FROM jobs")
        assert row is not None
        id = f"job-{row['n'] + 1}"

        def change(db: Any) -> None:
            db.run("INSERT INTO jobs (id, name, submitted, status, order_, central) VALUES (?, 'job', 0, 'running', "
                   "?, ?)", id, b"order", blob.digest)  # fmt: skip
            db.log("job submitted", id)

        self.ledger.now(change)
        self.promise("closed", (id, 0, "submitted", 0), None)
        self.promise("facts", id, self.ledger.now(fix_facts(id, PARTIES)))

    def open(self) -> None:
        if (job := self._job()) is not None:
            self.records(job, begin=True)
            key = (job, self._closed(job), self.chance.choice(("round", "describe")), self.chance.randrange(2))
            self.ledger.now(asks.open_ask(key, "digest", [0, 1, 2], 0.0))

    def answer(self) -> None:
        """A party answers, possibly again, and stores the receipt."""
        # Late answers are given too.
        ask = self._open_ask() if self.chance.random() < 0.9 else self._any(
            f"SELECT * FROM asks WHERE phase IN ('round', 'describe') AND {RUNNING}")  # fmt: skip
        if ask is None:
            self.open()
            return
        key, party, staged = (ask["job"], ask["round"], ask["phase"], ask["number"]), self.chance.randrange(3), False
        try:
            key_of_party, certificate = self.signer(PARTIES[party])
        except Denied:
            need(self._revoked(PARTIES[party]), f"{PARTIES[party]} is denied, and was not revoked")
            return
        # The same ask usually gets the same answer, as after a crash.
        data = random.Random(str((key, party))).randbytes(900) if self.chance.random() < 0.8 else self._data()
        if party == 0 and data[0] < 180:
            number = self.chance.random()
            # The old memory may be deleted from the first operation on; the new one is promised once the call returns.
            name = (key[0], ask_name(*key[1:]))
            self.promises.staged.pop(name, None)
            self.promises.forgotten.pop(name, None)
            self.memory.stage(*name, {"m": torch.full((150,), number, dtype=torch.float64)})
            self.promise("staged", name, number)
            staged = True
        blob = self.upload(f"party.{PARTIES[party]}", b"shared" if data[0] < 25 else data)
        answer = Answer(MESSAGE, "", blob, 1, staged, model=self.records(key[0], begin=True).runtime.models[key[1]])
        said = make_statement("league", PARTIES[party], key, answer)
        answer = structs.replace(answer, signature=key_of_party.sign(said.signed_bytes()).hex())
        sent = asks.Sent(party, PARTIES[party], answer, 0.0, said, certificates.fingerprint(certificate))
        if party == 0:
            at_once(self.receipts.expect(Line(self), "league"))  # type: ignore[arg-type]
        try:
            receipt = self._receipt(key, sent, blob)
        except asks.Conflict:
            need(self.ledger.one("SELECT 1 FROM replies WHERE party = ?", party), "a conflict with nothing")
            return
        except Gap:
            raise Lost("an upload was whole, and is not there") from None
        if party == 0:
            asyncio.run(self.receipts.keep(receipt, said, answer.signature))
            self.promise("kept", (key[0], pack(receipt)), None)

    def _receipt(self, key: tuple[str, int, str, int], sent: asks.Sent, blob: Blob) -> Receipt:
        """The aggregator's answer; a repeated request gets the same one."""
        before = self.promises.receipts.get((*key, sent.party))
        receipt = asks.earlier_receipt(self.ledger, key, sent, self.ledger.notary)
        if receipt is None:
            path = self.blobs.finish(f"party.{sent.name}", blob.digest, blob.size)
            receipt = self.ledger.now(asks.store_answer(key, sent, path))
        if receipt.status == "accepted":
            need(before is None or before[1] == pack(receipt), f"{sent.name} got another receipt for {key} than before")
            self.promise("receipts", (*key, sent.party), pack(receipt))
            assert receipt.size is not None and receipt.root is not None
            self.promises.heads[receipt.size] = (len(self.journal.events), receipt.root)
        else:
            discard(self.ledger, self.blobs, [blob.digest])
        return receipt

    def signer(self, name: str) -> tuple[keys.PrivateKey, bytes]:
        """A party's key and certificate, in use."""
        if name == PARTIES[0]:
            if not self.store.enrolled:
                self.certificate()
            key, pem = keys.read_key(self.store.folder / "key.pem"), (self.store.folder / "cert.pem").read_bytes()
        else:
            key, token = KEYS[name], Token.parse((self.folder / "tokens" / f"{name}.token").read_text())
            _, pem = self.ledger.now(self.registry.enrol(token.secret, certificates.make_request(key, name)))
        self.registry.reload()
        if (used := self.registry.used(certificates.identity_of_pem(pem))) is not None:
            self.ledger.now(used)
        return key, pem

    def _revoked(self, name: str) -> bool:
        self.ledger.now(lambda db: None)  # a denied request is answered before the writer has ended
        return self.ledger.one("SELECT 1 FROM log WHERE event = 'revoked' AND party = ?", name) is not None

    def close(self) -> None:
        if (ask := self._open_ask()) is not None:
            key = (ask["job"], ask["round"], ask["phase"], ask["number"])
            self.promise("closed", key, self.ledger.now(asks.close_ask(key, None, {})).text())

    def records(self, job: str, begin: bool = False) -> JobRecords:
        network: Any = SimpleNamespace(parties=PARTIES, flights=[], used=[], models={})
        records = JobRecords(job, self.ledger, self.blobs, network)
        if begin:
            records.begin({"params": INITIAL, "slots": {}})
        return records

    def close_round(self) -> None:
        if (job := self._job()) is None:
            self.submit()
            return
        records, number = self.records(job, begin=True), self._closed(job) + 1
        rows = self.ledger.all("SELECT * FROM replies WHERE job = ? AND phase = 'round' AND spent = 0", job)
        records.runtime.used = [((job, row["round"], "round", row["number"]), row["party"]) for row in rows]
        before = self.ledger.one("SELECT checkpoint FROM jobs WHERE id = ?", job)
        assert before is not None
        params = torch.full((self.chance.choice((10, 300)),), self.chance.random(), dtype=torch.float64)
        line: dict[str, Any] = {"round": number}
        if not rows:  # a round that fused nothing changes nothing
            kept = before["checkpoint"]
            params = codec.decode(self.blobs.read(kept))["state"]["params"] if kept is not None else INITIAL
            line["empty"] = "nobody answered"
        records.append(line)
        records.checkpoint({"round": number, "state": {"params": params, "slots": {}}})
        self.promise("rounds", (job, number), codec.digest(params))

    def finish(self) -> None:
        if (job := self._job()) is not None:
            self.records(job, begin=True)
            model, _ = self.blobs.put([self._data()])
            runner: Any = SimpleNamespace(ledger=self.ledger, blobs=self.blobs)
            JobRunner.end(runner, job, "finished", "all rounds", model, {})
            self.promise("ended", job, model)

    def certificate(self) -> None:
        """Enrol the party, or renew its certificate and use it."""
        if not self.store.enrolled:
            token = Token.parse((self.folder / "tokens" / "ann.token").read_text())

            async def enrol(url: str, token: Token, request: bytes) -> tuple[bytes, IssuedCertificate]:
                name, pem = self.ledger.now(self.registry.enrol(token.secret, request))
                return self.federation.read("ca.pem"), IssuedCertificate("league", name, pem)

            with mock.patch.object(store, "enrol", enrol):
                at_once(self.store.enrol("https://localhost:1", token))
            self.promise("enrolled", "ann", None)
        else:
            at_once(self.store.rotate(Line(self)))  # type: ignore[arg-type]
        self.registry.reload()
        used = self.registry.used(self.store.identity())
        if used is not None and self.chance.random() < 0.7:
            self.ledger.now(used)
            self.registry.reload()

    def invite(self) -> None:
        token, change = self.registry.invite("dan")
        self.ledger.now(change)
        self.promise("tokens", token.digest(), "dan")

    def revoke(self) -> None:
        self.ledger.now(self.registry.revoke("cid"))
        self.promise("revoked", "cid", "")

    def forget(self) -> None:
        names = list(self.promises.staged)
        if names:
            job, keep = self.chance.choice(names)
            for name in names:
                if name[0] == job and name[1] != keep:
                    self.promises.forgotten.setdefault(name, (len(self.journal.events), None))
            self.memory.recall(job, keep)

    def leave_upload(self) -> None:
        """An interrupted upload."""
        data = self._data()
        self.blobs.append("party.bob", hashlib.sha256(data).hexdigest(), 0, data[: len(data) // 2 + 1], 2**20)

    # Invariants

    def check(self) -> None:
        ledger, promises = self.ledger, self.promises
        need(ledger.all("PRAGMA integrity_check")[0][0] == "ok", "the database is damaged")
        for (*key, party), (_, given) in promises.receipts.items():
            row = ledger.one(f"SELECT blob, receipt FROM replies WHERE {asks.WHERE} AND party = ?", *key, party)
            same = row is not None and (row["receipt"], row["blob"]) == (given, unpack(given, Receipt).digest)
            need(same, f"the answer of {PARTIES[party]} to {key}")
        for key, (_, text) in promises.closed.items():
            if text is None:
                need(ledger.one("SELECT 1 FROM jobs WHERE id = ?", key[0]), f"the job {key[0]}")
                continue
            row = ledger.one(f"SELECT closed FROM asks WHERE {asks.WHERE}", *key)
            need(row is not None and row["closed"] == text, f"how {key} was closed")
        for job, (_, facts) in promises.facts.items():
            need(ledger.now(fix_facts(job, ())) == facts, f"the parties and the secret of {job}")
        for (job, number), (_, model) in promises.rounds.items():
            row = ledger.one("SELECT model FROM rounds WHERE job = ? AND round = ?", job, number)
            need(row is not None and row["model"] == model, f"the round {number} of {job}")
        for job, (_, model) in promises.ended.items():
            row = ledger.one("SELECT status, model FROM jobs WHERE id = ?", job)
            need(row is not None and (row["status"], row["model"]) == ("finished", model), f"the end of {job}")
        for digest, (_, party) in promises.tokens.items():
            row = ledger.one("SELECT party FROM tokens WHERE digest = ?", digest)
            need(row is not None and row["party"] == party, "a token")
        for name in promises.revoked:
            sql = "SELECT 1 FROM tokens WHERE party = ? AND void = 0 AND certificate IS NULL"
            need(not ledger.one(sql, name), f"{name} is not revoked any more")
        self._check_log()
        self._check_blobs()
        self._check_party()

    def _check_log(self) -> None:
        """The tree is that of the entries, and every promised root is the root of a prefix."""
        nodes, tree, roots = Nodes(self.ledger), merkle.Frontier(), dict[int, str]()
        for row in self.ledger.all("SELECT * FROM log ORDER BY seq"):
            tree.append(merkle.leaf_hash(entry_line(*(row[name] for name in ENTRY))))
            roots[tree.size] = tree.root().hex()
            need(merkle.root(nodes, tree.size) == tree.root(), f"the log's tree at {tree.size} entries")
        for size, (_, root) in self.promises.heads.items():
            need(roots.get(size) == root, f"the log's first {size} entries")

    def audit(self) -> None:
        """Audit the exported log as an outsider would, with the party's receipts."""
        size = Nodes(self.ledger).size
        last = structs.asdict(self.ledger.now(lambda db: db.head(size)))
        lines = [line.rstrip(b"\n") for line in log_lines(self.ledger, 0, size)] + [canonical({"head": last})]
        kept = [self.store.folder] if any(self.receipts.folder.glob("*.jsonl")) else []
        audit.verify_lines(lines, self.federation.read("ca.pem"), kept)

    def _check_blobs(self) -> None:
        for digest in needed_blobs(self.ledger):
            need(digest in self.blobs, f"the blob {digest}")
            self.blobs.verified(digest)
        need(set(self.blobs) == needed_blobs(self.ledger), "a blob that nothing needs stayed")
        for row in self.ledger.all("SELECT id FROM jobs WHERE status = 'running' AND checkpoint IS NOT NULL"):
            tree = self.records(row["id"]).restore()
            need(tree is not None and tree["round"] == self._closed(row["id"]), f"the checkpoint of {row['id']}")

    def _check_party(self) -> None:
        for (job, ask), (_, number) in self.promises.staged.items():
            if (job, ask) not in self.promises.forgotten:
                memory = self.memory.recall(job, ask, [name for of, name in self.promises.staged if of == job])
                need(memory is not None and memory["m"][7] == number, f"the memory of {job} {ask}")
        held = {
            (path.stem, pack(kept.receipt))
            for path in self.receipts.folder.glob("*.jsonl")
            for kept in read_receipts(path)
        }
        for job, receipt in self.promises.kept:
            need((job, receipt) in held, f"a receipt of the job {job}")
        need(self.store.enrolled or not self.promises.enrolled, "who the party is")
        if self.store.enrolled:
            folder, who = self.store.folder, self.store.identity()
            client_context(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")  # they are deleted together
            need(self.registry.admits(who), "the party's certificate is not valid")


def history(seed: int, template: Path, folder: Path, lives: int = LIVES, steps: int = STEPS,
            synchronous: str = "FULL") -> int:  # fmt: skip
    """Run one seed: `lives` lives, each ended by a power failure; returns the number of disk operations."""
    chance, promises, made = random.Random(seed), Promises(), 0
    root = folder / "0"
    shutil.copytree(template, root)
    for number in range(lives + 1):
        life = Life(root, chance, promises, synchronous)
        try:
            life.check()
            life.audit()
            if number == lives:
                return made
            for _ in range(chance.randint(1, steps)):
                life.step()
        finally:
            life.end()
        made += len(life.journal.events)
        at = life.journal.moment(chance)
        spared = chance.choice((frozenset(), frozenset(), frozenset({"party"}), frozenset({"aggregator"})))
        promises.until(at)
        life.journal.fail(at, folder / str(number + 1), chance, spared)
        shutil.rmtree(root)
        root = folder / str(number + 1)
    raise AssertionError


def template(folder: Path) -> Path:
    """A federation's folder and a folder for a party, as they are before the first start."""
    (folder / "template" / "party").mkdir(parents=True)
    init(folder / "template" / "aggregator", "league", PARTIES, ["127.0.0.1"], 1)
    return folder / "template"


def fast() -> str | None:
    """A folder in memory, where the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def campaign(seeds: range, tell: Callable[[str], None] = lambda line: None, **given: Any) -> tuple[int, int]:
    """Run many seeds; returns the number of power failures and of disk operations. A failure names its seed."""
    failures = made = 0
    with tempfile.TemporaryDirectory(dir=fast(), prefix="hansa-power-") as place:
        folder = Path(place)
        first = template(folder)
        for count, seed in enumerate(seeds):
            (folder / f"seed-{seed}").mkdir()
            try:
                made += history(seed, first, folder / f"seed-{seed}", **given)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            shutil.rmtree(folder / f"seed-{seed}")
            failures += given.get("lives", LIVES)
            if count % 100 == 99:
                tell(f"{count + 1} seeds")
    return failures, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed: with --seeds 1, to repeat one")
    given = parser.parse_args()
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    try:
        failures, made = campaign(range(given.first, given.first + given.seeds), tell)
    except Exception as error:
        seed = next((note for note in error.__notes__ if note.startswith("seed ")), "seed ?").removeprefix("seed ")
        print(
            f"lost: {error} (repeat, more than once, for keys and threads differ: "
            f"python tests/chaos/power.py --first {seed} --seeds 1)",
            file=sys.stderr,
        )
        raise SystemExit(1) from error
    tell(f"{given.seeds} seeds, {failures} power failures among {made} operations: nothing acknowledged was lost")


if __name__ == "__main__":
    main()
