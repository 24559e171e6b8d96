"""Parsers of untrusted bytes as functions of bytes: each returns, or refuses the input with a HansaError.

If the input was parsed, its invariants are checked: written and parsed again it is the same.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_asks
import msgspec
import torch

from hansa.core.ask import op_of
from hansa.core.op import Reply
from hansa.core.sums import StoredReply
from hansa.data.describe import Describe, Description
from hansa.experiment.config import parse
from hansa.local import SGD
from hansa.net.aggregator.federation import FederationFolder
from hansa.net.aggregator.order import check_order
from hansa.net.audit import merkle
from hansa.net.audit import proofs as proof
from hansa.net.audit import verify as audit
from hansa.net.audit.evidence import Notary, Statement, canonical, head_line, make_statement
from hansa.net.audit.receipt_file import read_receipts
from hansa.net.party.policy import Policy
from hansa.net.party.policy_template import TOML
from hansa.net.transport import certificates, keys, signing, wire
from hansa.net.transport.client import https_url
from hansa.net.transport.tokens import Token, new_token
from hansa.plumbing import codec
from hansa.plumbing.errors import HansaError
from hansa.replies.reply_checks import Rules, fault

KEY = keys.PrivateKey.from_private_bytes(bytes(range(32)))
LONGEST = 2000  # characters of the message about refused input, besides what it quotes


@dataclass(frozen=True)
class Target:
    """A parser under test, with valid inputs."""

    name: str
    read: Callable[[bytes], Any]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()  # with a meaning to the parser

    def run(self, data: bytes) -> bool:
        """Whether the parser accepts the bytes; anything but a clear refusal is raised."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.read(data)
        except HansaError as error:
            said = str(error)
            assert said and len(said) <= LONGEST + 2 * len(data), f"{len(said)} letters: {said[:200]}"
            said.encode()  # the message can be encoded
            return False
        return True


def _file(data: bytes, name: str) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


@functools.cache
def _folder() -> Path:
    shared = Path("/dev/shm")
    kept = tempfile.TemporaryDirectory(prefix="hansa-fuzz-", dir=shared if shared.is_dir() else None)
    _kept.append(kept)
    return Path(kept.name)


_kept: list[Any] = []  # until the process ends


# Messages


def decoded(data: bytes) -> None:
    once = codec.encode(codec.decode(data, 2**20))
    assert codec.encode(codec.decode(once)) == once
    mapped(data)  # a message in memory and in a file are the same


def mapped(data: bytes) -> None:
    tree, starts, memory = codec.mapped(_file(data, "mapped"))
    again = codec.decode(data)
    assert codec.encode(tree) == codec.encode(again)
    assert all(8 <= start <= len(memory) for start in starts.values())


def reply(data: bytes) -> None:
    """A reply as the aggregator takes it: read from its file and checked against the ask."""
    stored = StoredReply.read(_file(data, "reply"))
    none = torch.zeros(0)
    payload = {"model": {"w": torch.zeros(3), "stats": none, "counts": none}}
    for op in (SGD(), Describe(None)):
        reason = fault(stored, op, payload, Rules(max_norm=1e3))
        if reason is None and isinstance(op, Describe):
            Description.of(stored)


def ask(data: bytes) -> None:
    """A message as a party takes it, up to the op that it names."""
    tree = codec.decode(data, 2**20)
    if isinstance(tree, dict) and isinstance(tree.get("op"), dict):
        op_of(tree["op"], where="ask")


def unpacking(kind: type[Any]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        value = wire.unpack(data, kind)
        if kind is not wire.Order:  # whose tables may hold numbers that are not equal to themselves
            assert wire.unpack(wire.pack(value), kind) == value

    return read


def ordered(data: bytes) -> None:
    """An order as the aggregator takes it."""
    order = wire.unpack(data, wire.Order)
    check_order(order, ("my_models:net",), ["ann", "bob", "cid"])


def experiment(data: bytes) -> None:
    """An experiment's tables as JSON, which stays parseable after a mutation more often than TOML."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(tree, dict):
        parse(tree)


# Identities


def signature(data: bytes) -> None:
    """The headers of a signed request, one per line."""
    lines = (line.partition(": ") for line in data.decode("utf-8", "surrogateescape").split("\n"))
    signing.verify(KEY.public_key(), "POST", "/v1/x", b"body", {name: value for name, _, value in lines})


def token(data: bytes) -> None:
    found = Token.parse(data.decode("utf-8", "surrogateescape"))
    assert Token.parse(found.text()) == found


def url(data: bytes) -> None:
    found = https_url(data.decode("utf-8", "surrogateescape"))
    assert https_url(found) == found


def federation(data: bytes) -> None:
    FederationFolder.open(_file(data, "federation.toml"))


def policy(data: bytes) -> None:
    found = Policy.read(_file(data, "party.toml"))
    found.refuses_model("cnn")
    found.payload(SGD(), {})


# Evidence


def exported(data: bytes) -> None:
    """An exported log, as it is and with new hashes and signatures: the owner of the log's key can make them."""
    try:
        report = audit.verify(_file(data, "log.jsonl"))
        assert report.text().isprintable()
    except HansaError:
        audit.verify(_file(b"".join(_history()[0].signed(data.split(b"\n"))), "log.jsonl"))
        raise


def proved(data: bytes) -> None:
    assert proof.check(proof.read_proof(_file(data, "proof.json"))).text().isprintable()


def receipts(data: bytes) -> None:
    """A party's receipts, and their check against a log."""
    read_receipts(_file(data, "job-1.jsonl"))
    audit.verify_lines(_history()[1].splitlines(), receipts=[_file(data, "job-1.jsonl")])


@dataclass(frozen=True)
class Signer:
    """The signer of a log."""

    notary: Notary

    def signed(self, lines: Sequence[bytes]) -> list[bytes]:
        """Those of the lines that are entries, numbered, hashed and signed as a log; other lines unchanged."""
        tree, out = merkle.Frontier(), list[bytes]()
        for line in lines:
            try:
                entry = json.loads(line)
                if "head" in entry:
                    continue
                line = canonical({**entry, "seq": tree.size + 1})
            except (ValueError, TypeError, RecursionError):
                out.append(line + b"\n")
                continue
            tree.append(merkle.leaf_hash(line))
            out.append(line + b"\n")
            if entry.get("event") == "round closed" and isinstance(entry.get("detail"), dict):
                said = entry.get("job"), entry.get("round"), entry["detail"].get("model")
                out.append(self._head(tree, *said))
        return [*out, self._head(tree, None, None, None)]

    def _head(self, tree: merkle.Frontier, *said: Any) -> bytes:
        return head_line(json.dumps(msgspec.structs.asdict(self.notary.head(*said, tree.size, tree.root().hex()))))


@functools.cache
def _history() -> tuple[Signer, bytes, bytes]:
    """The signer of a log, the log of a job of one round, and the receipt for its one update."""
    authority, certificate = certificates.make_ca("league", 30)
    pems = [certificates.issue(authority, certificate, KEY.public_key(), name, role, "league", 20)
            for name, role in (("log", "log"), ("ann", "party"))]  # fmt: skip
    notary, mark, first, last = (
        Notary("league", KEY, pems[0], certificate),
        certificates.fingerprint(pems[1]),
        *("ab", "cd"),
    )
    said = Statement("league", "ann", "job-1", 0, "round", 0, first * 32, True, "0" * 64, "1" * 64, 7, False, None)
    signature = KEY.sign(said.signed_bytes()).hex()
    member = {"party": "ann", "index": 5, "update": "1" * 64}
    told: list[tuple[str, str | None, int | None, str | None, dict[str, Any]]] = [
        ("log begun", None, None, None, notary.beginning()),
        ("enrolled", None, None, "ann", {"certificate": mark, "pem": pems[1].decode()}),
        ("certificate in use", None, None, "ann", {"certificate": mark}),
        ("job submitted", "job-1", None, None, {}),
        ("job begun", "job-1", None, None, {"model": first * 32, "state": first * 32}),
        ("update accepted", "job-1", 0, "ann", said.detail(signature, mark)),
        ("round closed", "job-1", 1, None, {"members": [member], "before": first * 32, "model": last * 32,
                                            "state": last * 32, "empty": None,
                                            "missing": {"bob": "it did not answer"}}),
        ("job finished", "job-1", None, None, {"reason": "", "model": last * 32}),
        ("revoked", None, None, "ann", {"certificates": {mark: pems[1].decode()}}),
    ]  # fmt: skip
    names, signer = ("event", "job", "round", "party", "detail"), Signer(notary)
    lines = signer.signed([canonical({**dict(zip(names, one, strict=True)), "at": 1.5, "seq": 0}) for one in told])
    tree = merkle.Frontier()
    for line in lines[:6]:
        tree.append(merkle.leaf_hash(line[:-1]))
    receipt = notary.receipt(said, signature, "accepted", 5, 6, tree.root().hex())
    kept = {"receipt": msgspec.structs.asdict(receipt), "statement": msgspec.structs.asdict(said)}
    return signer, b"".join(lines), canonical(kept) + b"\n"


def _evidence() -> list[Target]:
    _, log, kept = _history()
    words = [*NUMBERS, b'"party"', b'"seq"', b'"job"', b'"round closed"', b"\\ud800", b"\\n\\u001b[2J", b'"members":[]']
    made = proof.prove(_file(log, "log.jsonl"), "job-1", "ann", 1)
    return [
        Target("audit.verify", exported, [log], words),
        Target("proof.check", proved, [msgspec.json.encode(made)], words),
        Target("receipts", receipts, [kept, kept * 2], words),
    ]


def parsers() -> dict[str, Target]:
    """The parsers of untrusted bytes, by name."""
    return {t.name: t for t in (*_messages(), *_envelopes(), *_identities(), *_files(), *_evidence())}


def party_asks() -> Target:
    """A party's worker. Its inputs come from simulations, which take seconds."""
    return Target("party.asks", hostile_asks.ask_both, list(hostile_asks.inputs())[::7])


def targets() -> dict[str, Target]:
    """All targets, by name."""
    return {**parsers(), "party.asks": party_asks()}


NUMBERS = [b"-1", b"0", b"1e999", b"NaN", b"9" * 20, b"9" * 5000, b"18446744073709551615", b"-9223372036854775808",
           b"0.5", b"true", b"null", b'"\\ud800"', b"[]", b"{}"]  # fmt: skip


def _messages() -> list[Target]:
    trees = [
        {"a": torch.arange(5.0), "b": [1, "x", None, True, 0.5], "c": {"d": torch.zeros(2, 2).bool()}},
        torch.arange(4),
        {"e": torch.zeros(0, 3), "f/g": torch.zeros(1, dtype=torch.bfloat16), "": {"h": torch.ones(1).to(torch.int8)}},
        {"text": "C:\\ud800 \U0001f600\x07", "deep": [[[[{}]]]]},
    ]
    replies = [
        Reply({"w": torch.arange(3.0)}, 7, {}, {"train_loss": 0.1}).tree(),
        Reply({"about": torch.tensor([1, 3, *[0] * 7, 2, 2, 0, 0])}, 5).tree(),
    ]
    asks = [
        {"op": {"kind": "local", "name": "sgd", "lr": 0.1, "batch": 4}, "payload": {"w": torch.zeros(3)}, "round": 1},
        {"op": {"kind": "op", "name": "describe", "loss": None}, "payload": {}, "round": 0},
        {"op": {"kind": "local", "name": "proximal", "mu": 0.1}, "payload": {}, "round": 2},
    ]
    words = [*NUMBERS, b'"F32"', b'"BOOL"', b'"I64"', b'"data_offsets"', b'"shape"', b'"dtype"', b'"$tensor"',
             b'"__metadata__"', b"\\u0000", b"\\\\", b'{\\"$tensor\\":\\"a\\"}']  # fmt: skip
    return [
        Target("codec.decode", decoded, [codec.encode(tree) for tree in trees], words),
        Target("codec.mapped", mapped, [codec.encode(tree) for tree in trees], words),
        Target("reply", reply, [codec.encode(tree) for tree in replies], words),
        Target("ask", ask, [codec.encode(tree) for tree in asks], words),
    ]


def _envelopes() -> list[Target]:
    blob = wire.Blob("ab" * 32, 7)
    answer = wire.Answer("0" * 64, "0" * 128, blob, 3, True)
    notary, statement = (
        Notary("league", KEY, b"", b""),
        make_statement("league", "ann", ("job-1", 1, "round", 0), answer),
    )
    samples: list[msgspec.Struct] = [
        blob,
        wire.Work("job-1", "job", 0, 1, "round", 0, blob, blob, None, "1/round/0", None, 2),
        answer,
        wire.Answer("0" * 64, "0" * 128, why="no", vault=wire.VaultMark("1" * 64, "2" * 128)),
        notary.receipt(statement, answer.signature, "accepted", 4, 5, "ef" * 32),
        notary.receipt(statement, answer.signature, "rejected", 4, 5, "ef" * 32, "no"),
        notary.receipt(statement, answer.signature, "late"),
        wire.Enrolment("s" * 43, b"request"),
        wire.IssuedCertificate("league", "ann", b"certificate"),
        wire.Order("job", TABLES[0], blob, 2, "mark"),
        wire.Trouble("because"),
    ]
    words = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05",
             b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xd6\xff" + bytes(4), b"\xc0",
             b"\x90", b"\x80", b"\xa0", b"\xc4\x00"]  # fmt: skip
    packed: dict[type[Any], list[bytes]] = {}
    for sample in samples:
        packed.setdefault(type(sample), []).append(wire.pack(sample))
    orders = [wire.pack(wire.Order("job", tree)) for tree in TABLES]
    return [
        *(Target(f"wire.{kind.__name__}", unpacking(kind), seeds, words) for kind, seeds in packed.items()),
        Target("order", ordered, orders, words),
        Target("experiment", experiment, [json.dumps(tree).encode() for tree in TABLES], NUMBERS),
    ]


TABLES: list[dict[str, Any]] = [
    {"task": {"parties": ["a.npz", "b.npz"], "model": "logistic"}, "algorithm": {"name": "fedavg"},
     "run": {"rounds": 2}},
    {
        "task": {"parties": ["a.csv"], "model": {"name": "2nn", "hidden": 4}, "prepare": "standardise",
                 "party_test": 0.25},
        "algorithm": {"name": "fedavg", "local": {"name": "proximal", "mu": 0.1, "lr": 0.1, "batch": 4},
                      "fusion": {"name": "trimmed-mean", "beta": 0.1}, "server": {"name": "yogi", "lr": 0.01}},
        "run": {"rounds": 5, "seed": 3, "cohort_size": 2, "quorum": 0.5, "deadline": 60, "max_norm": 10.0,
                "eval_every": 2},
    },
    {"task": {"dataset": "digits", "model": "logistic"}, "partition": {"name": "dirichlet", "parties": 3, "alpha": 0.5},
     "algorithm": {"name": "scaffold", "local": {"lr": 0.1}}, "adversary": {"name": "sign-flip", "fraction": 0.3},
     "run": {"rounds": 1, "engine": "reference"}},
]  # fmt: skip


def _identities() -> list[Target]:
    authority, certificate = certificates.make_ca("league", 30)
    party = certificates.issue(authority, certificate, KEY.public_key(), "ann", "party", "league", 20)
    server = certificates.issue(
        authority, certificate, KEY.public_key(), "agg", "server", "league", 20, ["localhost", "::1"]
    )
    pems = [certificate, party, server]
    headers = signing.sign(KEY, "POST", "/v1/x", b"body", signing.About("job-1", 3, "3/round/0"))
    lines = "\n".join(f"{name}: {value}" for name, value in headers.items()).encode()
    edges = [b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n", b"\x30\x84\xff\xff\xff\xff", b"\x30\x80"]
    invitation = new_token("ann", certificate).text().encode()
    return [
        Target("keys.identity", certificates.identity_of_der, [_der(pem) for pem in pems], edges),
        Target("keys.identity_of", certificates.identity_of_pem, pems, edges),
        Target("keys.fingerprint", certificates.fingerprint, pems, edges),
        Target("keys.read_request", certificates.read_request, [certificates.make_request(KEY, "ann")], edges),
        Target("keys.key_of", keys.load_key, [keys.key_bytes(KEY)], edges),
        Target("keys.Token.of", token, [invitation], [b"hansa-1.", b"=", b"-", b"_"]),
        Target("signing.verify", signature, [lines], [b"-1", b"9" * 18, b"Hansa-Round: ", b"\n", b"\x00", b"\xff"]),
        Target(
            "client.https_url", url, [b"https://a.example:8443/", b"https://[::1]:1"], [b"@", b"%", b"[", b"\\", b"#"]
        ),
    ]


def _der(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(pem.splitlines()[1:-1]))


def _files() -> list[Target]:
    words = [b"nan", b"inf", b"-inf", b"9" * 5000, b"1979-05-27", b"[[", b"]]", b"[serve]", b"[own]", b"{}", b'"""',
             b"\\uD800", b"0x7fffffffffffffffff", b"= [" + b"[" * 500]  # fmt: skip
    folder = (
        b'name = "league"\nparties = ["ann", "bob"]\nurl = "https://localhost:8443"\n[serve]\nport = 8443\nlease = 60\n'
    )
    own = re.sub(r"(?m)^# (?=\S+ = |\[own)", "", TOML).encode()
    given = b'jobs = ["heart-*"]\nops = ["sgd"]\nfunctions = ["m:f"]\nmin_cohort = 2\n[own]\nlr = 0.1\nsteps = 3\n'
    return [
        Target("federation.toml", federation, [folder], words),
        Target("party.toml", policy, [given, own], words),
    ]
