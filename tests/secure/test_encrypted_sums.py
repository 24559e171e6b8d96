"""Encrypted sums equal plain sums, whichever party is missing, and reveal no single party's numbers."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from test_paillier import P, Q
from torch import Tensor, nn

import hansa
from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Reduced, op_of
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, perform
from hansa.core.plain_data import build
from hansa.core.registry import register
from hansa.core.round_record import Record
from hansa.core.vault import Vault
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, PartyError, RoundAborted
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules
from hansa.secure import envelopes, threshold, threshold_sum
from hansa.secure.byte_tensors import as_bytes
from hansa.secure.channel import Channel
from hansa.secure.masking_ops import SecureKeys

NUMBERS = {k: [1.5 * k - 2.25, 0.125, -3.0] for k in range(5)}
COUNTS = {k: [7 * k, 10_000 - k] for k in range(5)}

PUBLIC = [f"secure.threshold.{name}" for name in ("modulus", "checks", "owners", "needed")]  # public values

has_tenseal = importlib.util.find_spec("tenseal") is not None
FIELDS: dict[str, dict[str, Any]] = {
    "paillier": {"key_bits": 1024},
    "threshold-paillier": {"key_bits": 1024},
    "functional": {"max_weight": 128, "statistics": 2.0**20},
    "ckks": {},
}


def channels(*slow: str) -> Any:
    """Every channel; tests of the `slow` ones are slow."""
    without = pytest.mark.skipif(not has_tenseal, reason="no tenseal")
    marks = {name: [pytest.mark.slow] * (name in slow) + [without] * (name == "ckks") for name in FIELDS}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


every_channel = channels()


@pytest.fixture(autouse=True)
def _primes_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing a key begins with a search for safe primes, which `test_paillier` tests."""
    found = itertools.cycle([P, Q])
    monkeypatch.setattr(threshold, "safe_prime", lambda draws, bits: next(found))


@register("test-say")
@dataclass(frozen=True)
class Say(Op):
    """A party's numbers, as an update or as counts."""

    update = "w"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if payload.get("mute") == party.id:
            raise PartyError("it has nothing to say")
        return Reply({"w": torch.tensor(NUMBERS[party.id])}, party.id + 1), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"w": ((3,), torch.float32)}


@register("test-count")
@dataclass(frozen=True)
class Count(Op):
    """A party's counts."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"n": torch.tensor(COUNTS[party.id])}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"n": ((2,), torch.int64)}


class NoModel:
    """An objective that nothing asks for."""


class Notes(Vault):
    """A vault that remembers, like that of a deployed party."""

    def __init__(self) -> None:
        self.noted: dict[str, str] = {}

    def once(self, name: str, digest: str) -> None:
        if self.noted.setdefault(name, digest) != digest:
            raise PartyError("it has answered this about something else")


@dataclass
class World:
    """Parties behind a wire; the aggregator records every message."""

    channel: Channel
    gone: Callable[[str, int], bool] = lambda op, party: False
    memories: dict[int, Memory] = field(default_factory=lambda: {k: {} for k in range(5)})
    vaults: dict[int, Notes] = field(default_factory=lambda: {k: Notes() for k in range(5)})
    transcript: list[bytes] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)  # by the last sum
    round: int = 0
    rules: Rules = Rules(quorum=3, min_cohort=2)  # the rules of the summed op do not apply to ops that serve it

    def party(self, k: int) -> Party:
        empty = SampleGateway((torch.empty(0), torch.empty(0)))
        return Party(k, NoModel(), empty, 0, self.round, vault=self.vaults[k])  # type: ignore[arg-type]

    def at(self, k: int, op: Op, payload: Payload) -> Reply | str:
        """The reply of a party, encoded and decoded as on the wire."""
        done = perform(op, self.party(k), codec.decode(codec.encode(dict(payload))), self.memories[k])
        if isinstance(done, str):
            return done
        reply, self.memories[k] = done
        return reply

    def answer(self, ask: Ask) -> Any:
        assert ask.op is not None
        self.asked.append(ask.op.name)
        outcomes: list[tuple[int, Reply | str]] = []
        for k in ask.parties:
            message = ask.message(k)
            self.transcript.append(codec.encode(message))
            self.sent.append(codec.decode(self.transcript[-1]))
            op = op_of(self.sent[-1]["op"], where="test")
            outcomes.append((k, "gone" if self.gone(ask.op.name, k) else self.at(k, op, message["payload"])))
            if isinstance(reply := outcomes[-1][1], Reply):
                self.transcript.append(codec.encode(reply.tree()))
        return combine(ask, outcomes, self.rules, Record())

    def reduce(self, op: Op, payload: Payload | None = None, parties: range = range(5), **given: Any) -> Reduced:
        fed = Federation(range(5), self.round, 0, 5, protocol=self.channel)
        self.rejected = fed.rejected
        self.round += 1
        steps = drive(fed.reduce(op, payload or {}, parties=parties, **given), "test")
        try:
            ask = next(steps)
            while True:
                try:
                    reply = self.answer(ask)
                except RoundAborted as stop:
                    ask = steps.throw(stop)
                else:
                    ask = steps.send(reply)
        except StopIteration as done:
            reduced: Reduced = done.value
            return reduced


def world(name: str, **fields: Any) -> World:
    return World(build("secure", name, **{**FIELDS[name], **fields}))


def encrypting(name: str) -> str:
    """The op by which parties encrypt."""
    return "secure-" + name.removesuffix("-paillier")


def plain(parties: list[int]) -> Tensor:
    """The weighted sum, in exact numbers."""
    return torch.tensor([sum((k + 1) * NUMBERS[k][j] for k in parties) for j in range(3)], dtype=torch.float64)


@pytest.mark.thin(3)
@every_channel
def test_the_sum_is_exact_for_updates_and_for_counts(name: str) -> None:
    here = world(name)
    total = here.reduce(Say())
    assert torch.equal(total.sums["w"], plain([0, 1, 2, 3, 4]))
    assert (total.weight, total.count) == (15, 5)
    counts = here.reduce(Count())
    assert counts.sums["n"].tolist() == [sum(COUNTS[k][j] for k in range(5)) for j in range(2)]
    assert (counts.weight, counts.count) == (5, 5)


@pytest.mark.thin(3)
@every_channel
def test_a_party_that_is_missing_or_declines_is_left_out_of_the_sum(name: str) -> None:
    here = world(name)
    here.gone = lambda op, party: party == 3
    assert torch.equal(here.reduce(Say()).sums["w"], plain([0, 1, 2, 4]))
    here.gone = lambda op, party: False
    total = here.reduce(Say(), {"mute": 2})
    assert torch.equal(total.sums["w"], plain([0, 1, 3, 4]))
    assert (total.weight, total.count) == (1 + 2 + 4 + 5, 4)


@pytest.mark.thin(2)
@every_channel
def test_a_party_that_sends_no_ciphertexts_is_left_out_of_the_sum(name: str) -> None:
    here = world(name)
    honest = here.at

    def forged(k: int, op: Op, payload: Payload) -> Reply | str:
        reply = honest(k, op, payload)
        if k == 3 and isinstance(reply, Reply) and "sealed" in reply.tensors:
            reply = Reply({"sealed": torch.zeros_like(reply.tensors["sealed"])})
        return reply

    here.at = forged  # type: ignore[method-assign]
    assert torch.equal(here.reduce(Say()).sums["w"], plain([0, 1, 2, 4]))


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("paillier", "party 0, which holds the key, is missing"),
        ("functional", "party 0, which is the key authority, is missing"),
        pytest.param("ckks", "party 0, which holds the key, is missing",
                     marks=pytest.mark.skipif(not has_tenseal, reason="no tenseal")),
    ],
)  # fmt: skip
def test_without_the_party_that_has_the_key_the_round_comes_to_nothing(name: str, role: str) -> None:
    here = world(name)
    here.gone = lambda op, party: party == 0
    with pytest.raises(RoundAborted, match=role):
        here.reduce(Say())
    here.gone = lambda op, party: party == 0 and op.endswith(("open", "key")) and encrypting(name) in here.asked
    with pytest.raises(RoundAborted, match=role):
        here.reduce(Say())


@pytest.mark.parametrize("name", ["paillier", "functional"])
def test_the_party_that_has_the_key_can_be_chosen_and_need_not_take_part(name: str) -> None:
    field = "authority" if name == "functional" else "holder"
    here = world(name, **{field: 4})
    here.gone = lambda op, party: party == 0
    assert torch.equal(here.reduce(Say(), parties=range(4)).sums["w"], plain([1, 2, 3]))


@every_channel
def test_no_sum_of_a_single_party_is_opened(name: str) -> None:
    here = world(name)
    here.rules = Rules()
    here.gone = lambda op, party: op == encrypting(name) and party != 0
    with pytest.raises(RoundAborted, match="1 of 5 parties sent their numbers"):
        here.reduce(Say())
    assert not any(op.endswith(("-open", "functional-key")) for op in here.asked)


def test_functional_counts_take_no_more_bits_than_they_need() -> None:
    here = world("functional")  # counts of at most 2^20
    here.reduce(Count())
    assert next(m for m in here.sent if m["op"]["name"] == "secure-functional")["op"]["bits"] == 22


def test_functional_keys_are_for_as_many_parties_as_the_run_says() -> None:
    here = world("functional", min_parties=4)
    here.gone = lambda op, party: party in (1, 2)
    with pytest.raises(RoundAborted, match=r"3 of 5 parties .* opens no sum of fewer than 4"):
        here.reduce(Say())
    here.gone = lambda op, party: party == 1
    assert torch.equal(here.reduce(Say()).sums["w"], plain([0, 2, 3, 4]))


READY, RECALL, DEAL = "secure-threshold-ready", "secure-threshold-recall", "secure-threshold-deal"
SEND, OPEN = "secure-threshold", "secure-threshold-open"


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ({READY: [0, 1]}, [0, 1, 2, 3, 4]),  # too late for a share, but in time for the sum
        ({READY: [0, 1], SEND: [0, 1]}, [2, 3, 4]),
        ({SEND: [0, 4]}, [1, 2, 3]),
        ({OPEN: [1, 2]}, [0, 1, 2, 3, 4]),
        ({SEND: [3], OPEN: [0]}, [0, 1, 2, 4]),
        ({READY: [0, 1, 2]}, None),
        ({SEND: [0, 1, 2]}, None),
        ({OPEN: [0, 1, 2]}, None),
        ({SEND: [0], OPEN: [1, 2]}, None),
        ({DEAL: [0]}, None),
    ],
)
def test_threshold_sums_stand_dropouts_at_every_exchange(gone: dict[str, list[int]], left: list[int] | None) -> None:
    here = world("threshold-paillier", threshold=0.6)  # three of five
    here.rules = Rules()
    here.gone = lambda op, party: party in gone.get(op, [])
    if left is None:
        with pytest.raises(RoundAborted, match=r"3 are needed|fewer than 3|party 0, which deals the key"):
            here.reduce(Say())
    else:
        assert torch.equal(here.reduce(Say()).sums["w"], plain(left))


@pytest.mark.slow
def test_a_dealt_key_is_kept_until_too_few_of_those_asked_hold_it() -> None:
    here = world("threshold-paillier", threshold=0.6)
    here.reduce(Say(), parties=range(4))
    assert here.asked == [READY, DEAL, SEND, OPEN]
    here.asked.clear()
    here.gone = lambda op, party: party == 0
    assert torch.equal(here.reduce(Say()).sums["w"], plain([1, 2, 3, 4]))  # party 4 holds no share
    assert here.asked == [READY, RECALL, SEND, OPEN]
    here.asked.clear()
    here.gone = lambda op, party: party in (0, 1)
    assert torch.equal(here.reduce(Say()).sums["w"], plain([2, 3, 4]))
    assert here.asked == [READY, DEAL, SEND, OPEN]


@pytest.mark.slow
def test_fewer_shares_than_needed_and_the_transcript_do_not_open_a_sum() -> None:
    here = world("threshold-paillier", threshold=0.6)
    here.reduce(Say())
    held = [threshold_sum._held(here.memories[k], 1024) for k in (0, 1)]
    assert held[0] is not None
    assert held[0] == held[1]
    text = held[0].key.encrypt(5, threshold.Stream(b"x"))
    values = [int.from_bytes(as_bytes(here.memories[k]["secure.threshold.share"]), "little") for k in (0, 1)]
    parts = {k + 1: threshold.Share(held[0], k + 1, value).partial(text) for k, value in enumerate(values)}
    with pytest.raises(DataError, match="partial decryptions are inconsistent"):
        threshold.combine(dataclasses.replace(held[0], needed=2), text, parts)
    assert not any(name.endswith(("private", "paillier")) for memory in here.memories.values() for name in memory)


@pytest.mark.thin(2)
@every_channel
def test_the_aggregator_sees_no_partys_numbers_and_no_secret(name: str) -> None:
    here = world(name)
    here.reduce(Say())
    seen = b"".join(here.transcript)
    op = next(op_of(m["op"], where="test") for m in here.sent if m["op"]["name"] == encrypting(name))
    hidden: dict[str, bytes] = {}
    for k in range(5):
        reply, _ = Say().run(here.party(k), {}, {})
        numbers = op.numbers(here.party(k), {}, reply)  # type: ignore[attr-defined]
        hidden[f"update of {k}"] = reply.tensors["w"].numpy().tobytes()
        hidden[f"numbers of {k}"] = numbers[1:].astype(np.int64).tobytes()
        hidden[f"first number of {k}"] = numbers[1:2].astype(np.int64).tobytes()
        if hasattr(op, "packing"):
            hidden[f"message of {k}"] = (op.packing({}).pack(numbers)[0] % 2**512).to_bytes(64, "little")
        for what, secret in here.memories[k].items():
            if what not in (*PUBLIC, "secure.ckks"):
                size = len(as_bytes(secret)) // (3 if name == "paillier" else 1)
                for at in range(0, len(as_bytes(secret)), size):
                    hidden[f"{what} of {k} at {at}"] = as_bytes(secret)[at : at + size].rstrip(b"\0")
    for what, data in hidden.items():
        assert data not in seen, what
    if name == "functional":
        for k in range(5):
            assert as_bytes(here.memories[k]["secure.functional.box"]) not in seen
            assert (
                envelopes.public(as_bytes(here.memories[k]["secure.functional.box"])) in seen
            )  # the search can find matches


@every_channel
def test_no_party_opens_a_second_vector_for_a_sum(name: str) -> None:
    here = world(name)
    here.reduce(Say())
    opening = [m for m in here.sent if m["op"]["name"].endswith(("-open", "functional-key"))][-1]
    op, payload = op_of(opening["op"], where="test"), opening["payload"]
    here.round -= 1
    k = 0
    assert isinstance(here.at(k, op, payload), Reply)  # the same message gets the same answer
    if name == "functional":
        other = {**payload, "weights": [1, 1, 1, 1, 0]}
    else:
        single = next(m["payload"] for m in here.sent if m["op"]["name"].endswith("-open"))
        other = {**single, "sealed": single["sealed"].flip(0) if len(single["sealed"]) > 1 else single["sealed"] ^ 1}
    assert here.at(k, op, other) == "it has answered this about something else"


def test_a_functional_secret_encrypts_one_vector() -> None:
    """Two vectors under one secret would reveal their difference."""
    here = world("functional")
    here.reduce(Say())
    sent = next(m for m in here.sent if m["op"]["name"] == "secure-functional")
    op = op_of(sent["op"], where="test")
    here.round -= 1
    assert isinstance(here.at(0, op, sent["payload"]), Reply)
    assert here.at(0, op, {**sent["payload"], "model": 1}) == "it has answered this about something else"


def test_the_functional_authority_gives_no_key_that_would_show_one_party() -> None:
    here = world("functional")
    here.reduce(Say())
    wanted = next(m for m in here.sent if m["op"]["name"] == "secure-functional-key")
    for weights, least, why in (
        ([0, 1, 0, 0, 0], 2, "no key for a sum of 1 parties"),
        ([0, 1, 0, 0, 0], 1, "no key for a sum of 1 parties"),  # whatever the aggregator claims
        ([2, 1, 1, 1, 1], 2, "with weights 0 or 1"),
        ([1, 1, 1, 1], 2, "4 weights do not match 5 parties"),
    ):
        here.vaults[0].noted.clear()
        op = op_of({**wanted["op"], "least": least}, where="test")
        assert why in str(here.at(0, op, {**wanted["payload"], "weights": weights}))
    twice = wanted["payload"]["boxes"].clone()
    twice[1] = twice[2]
    assert "different parties" in str(here.at(0, op, {**wanted["payload"], "boxes": twice}))


def test_a_weight_that_has_no_room_counts_as_the_largest(caplog: pytest.LogCaptureFixture) -> None:
    total = world("paillier", max_weight=4).reduce(Say())
    assert torch.equal(total.sums["w"], plain([0, 1, 2, 3]) + 4 * torch.tensor(NUMBERS[4], dtype=torch.float64))
    assert (total.weight, total.count) == (14, 5) and "raise privacy.max_weight" in caplog.text


def linear() -> hansa.Task:
    make = torch.Generator().manual_seed(0)
    sizes = (40, 60, 30, 90)
    data = [(torch.randn(n, 2, generator=make).double(), torch.randint(2, (n,), generator=make)) for n in sizes]
    return hansa.Task(lambda: nn.Linear(2, 2, bias=False).double(), "cross_entropy", data)


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@every_channel
def test_fedavg_is_what_it_is_without_to_the_precision_of_the_numbers(name: str, engine: str) -> None:
    algorithm = hansa.FedAvg(local=SGD(lr=0.5, epochs=2))
    open_sum = hansa.simulate(algorithm, linear(), rounds=2, engine=engine)
    hidden = hansa.simulate(algorithm, linear(), rounds=2, engine=engine, privacy={"secure": name, **FIELDS[name]})
    difference = float((open_sum.state.params.w - hidden.state.params.w).abs().max())
    step = 16.0 / 2 ** (15 if name == "functional" else 31)
    assert 0 < difference < 4 * step
    assert [line["replies"] for line in hidden.history] == [4, 4]
    assert [line["asked"] for line in hidden.history] == [4, 4]
    for ours, theirs in zip(hidden.history, open_sum.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=4 * step)


def rows() -> hansa.Task:
    make = np.random.default_rng(1)
    given = [(make.integers(0, 2, (9, 1)).astype(float), make.integers(0, 2, 9)) for _ in range(3)]
    return hansa.Task(None, "cross_entropy", given, classes=2)


@pytest.mark.thin(2)
@channels("functional")
def test_naive_bayes_is_what_it_is_without_at_a_scale_whose_squares_are_tiny(name: str) -> None:
    task = hansa.Task(None, "cross_entropy", [(x * 1e-12, y) for x, y in rows().parties[:2]], classes=2)
    model = hansa.simulate(hansa.GaussianNB(), task, rounds=1).state.slots
    privacy = {"secure": name, **FIELDS[name]}
    hidden = hansa.simulate(hansa.GaussianNB(), task, rounds=1, privacy=privacy).state.slots
    assert torch.equal(hidden["prior"], model["prior"])
    for what in ("mean", "var"):
        assert torch.allclose(hidden[what], model[what], rtol=1e-9, atol=0)


@pytest.mark.thin(2)
@every_channel
def test_a_tree_is_what_it_is_without(name: str) -> None:
    if name == "functional":
        pytest.skip("its counts on a grid take half a minute; counts are tested above")
    tree = hansa.simulate(hansa.ID3(max_depth=1), rows(), rounds=1).state.slots["tree"]
    privacy = {"secure": name, **FIELDS[name]}
    hidden = hansa.simulate(hansa.ID3(max_depth=1), rows(), rounds=1, privacy=privacy).state.slots["tree"]
    assert torch.equal(hidden["counts"], tree["counts"])
    assert torch.equal(hidden["feature"], tree["feature"])


def test_a_run_says_why_a_round_was_empty() -> None:
    done = hansa.simulate(hansa.FedAvg(), linear(), rounds=2, privacy={"secure": "paillier", "key_bits": 1024},
                          absent=lambda party, round: party == 0 and round == 0)  # fmt: skip
    assert "party 0, which holds the key, is missing" in done.history[0]["empty"]
    assert "empty" not in done.history[1]


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("paillier", {"key_bits": 512}, "key_bits must be at least 1024 and at most 4096 and a multiple of 256"),
        ("paillier", {"key_bits": 2000}, "key_bits must be at least 1024 and at most 4096 and a multiple of 256"),
        ("paillier", {"holder": 4}, "holder must be one of the 4 parties"),
        ("paillier", {"bits": 53}, "could overflow"),
        ("threshold-paillier", {"threshold": 0.0}, "threshold must be above 0 and at most 1"),
        ("threshold-paillier", {"threshold": 1.5}, "threshold must be above 0 and at most 1"),
        ("paillier", {"min_parties": 1}, "min_parties must be at least 2"),
        ("functional", {"min_parties": 5}, "needs at least 5 parties, and a round asks 4"),
        ("functional", {"authority": 9}, "authority must be one of the 4 parties"),
    ],
)
def test_what_cannot_work_is_refused_beforehand(name: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        hansa.simulate(hansa.FedAvg(), linear(), rounds=1, privacy={"secure": name, **fields})


@every_channel
def test_a_cohort_of_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 2 parties, and a round asks 1; a sum of one party hides nothing"):
        hansa.simulate(hansa.FedAvg(), linear(), rounds=1, cohort=0.25, privacy={"secure": name})


def test_ckks_without_its_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hansa\[ckks\]'"):
        hansa.simulate(hansa.FedAvg(), linear(), rounds=1, privacy={"secure": "ckks"})


def test_long_work_and_short_keys_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def problem(width: int) -> Problem:
        objective = Objective(lambda: nn.Linear(width, 2), "cross_entropy", 0)
        return Problem(objective.spec, objective.initial, 4, (width,), 2, 4)

    build("secure", "functional").warn(problem(10).spec.dim)
    build("secure", "paillier").check(problem(10))
    assert caplog.text == ""
    build("secure", "functional").warn(problem(4000).spec.dim)
    assert "a party will take about 80 s per round for 8002 values" in caplog.text
    build("secure", "threshold-paillier", key_bits=1024).check(problem(10))
    assert "below 2048 bits are for tests only" in caplog.text


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "session", [None, 5, "", "x" * 101, "x" * 10**7], ids=["none", "number", "empty", "long", "huge"]
)
def test_a_sum_without_a_short_name_is_neither_opened_nor_written_down(session: Any) -> None:
    """A party stores session names for good: in 0.1.0 an aggregator could fill its disk with long names."""
    here = world("paillier")
    here.reduce(Say())
    opened = next(sent for sent in here.sent if sent["op"]["name"] == "secure-paillier-open")
    said = here.at(0, op_of(opened["op"], "test"), {**opened["payload"], "session": session})
    assert "no session name of 1 to 100 characters" in str(said)
    assert "no session name of 1 to 100 characters" in str(here.at(0, SecureKeys(), {"session": session}))
