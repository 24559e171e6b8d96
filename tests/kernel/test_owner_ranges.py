"""Every number that a request can choose has an owner-set range, another bound, or a reason why it needs none."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from hansa.core.fields import REQUESTED, Owner, owner_of, stated_types
from hansa.core.op import Op
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.holdings.gateway import SampleGateway
from hansa.kernel.gateway import GuardedGateway
from hansa.kernel.ranges import Ranges
from hansa.local import DPSGD, SGD, Personal
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.secure.masking_ops import SecureMasked
from hansa.transforms import ClippedUpdate, Packed, TopK

SOURCE = Path(hansa.__file__).parent
SHAPED = "a tensor or text that the op compares with its samples, its model or its own list"
MODEL = "the model or what travels with it; the task's model and limits.parameters fix its size"
SEALED = "keys, shares and ciphertexts of a secure sum, of a checked length"
LENGTH = "a length that must equal that of the party's own model"
GOSSIP = "the form and the prior of a belief, and the number of parties, which the ops themselves check"
SWITCH = "it says whether or where to begin"
TREES = "trees, nodes and cut points, checked by the op; limits.memory bounds the reply"
PREDICTS = "read by a predictor, whose metrics [evaluate] and [budget] bound"
# The entries of payloads that ops read by name: how each is bounded.
PAYLOAD = {
    **dict.fromkeys(("alpha", "rate", "work"), "a number with a range, or the work, whose fields have ranges"),
    **dict.fromkeys(("model", "start", "w", "stats", "counts", "c", "gradient", "frequency", "mask", "x", "inner",
                     "payload", "layers", "stats_dtype", "dtype", "used_places", "probe_places"), MODEL),
    **dict.fromkeys(("asked", "boxes", "certificates", "ids", "keys", "label", "owners", "receivers", "sealed",
                     "secure", "secure_dealing", "secure_share", "senders", "session", "signatures", "signers",
                     "survivors", "name", "peers", "salt"), SEALED),
    **dict.fromkeys(("centre", "mean", "std", "scale", "low", "high", "weights", "scores", "mixing", "column",
                     "prefix", "data", "domain", "feature", "features", "edges", "child",
                     "sizes", "shape", "shapes", "outputs", "server",
                     "people", "batch", "columns", "step", "sums", "widths"), SHAPED),
    **dict.fromkeys(("bins", "trees", "slots", "points", "before", "history", "base"), TREES),
    "agreed": "where an evaluation cuts its counts; with scores of its own choice a model cuts them anywhere",
    **dict.fromkeys(("classes", "facts", "grid", "loss", "usual", "variance"), PREDICTS),
    **dict.fromkeys(("dim", "size"), LENGTH),
    **dict.fromkeys(("begin", "place", "reports"), SWITCH),
    **dict.fromkeys(("form", "parties", "prior"), GOSSIP),
}  # fmt: skip
ASIDE = ("net", "sim", "experiment", "run", "testing", "artifacts")  # packages without ops of their own


def chosen() -> Iterator[tuple[str, Owner]]:
    """The numeric fields of all parts that a request is made of, with what they say about the owner's range."""
    for kind in REQUESTED:
        for part in registered(kind).values():
            if part.__module__.startswith("hansa."):
                yield from ((name, owner) for name, hint in stated_types(part).items() if (owner := owner_of(hint)))


def payload_entries(tree: ast.AST) -> Iterator[Any]:
    """The names in `payload["name"]`, `payload.get("name")` and `function(payload, "name")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "payload":
            yield getattr(node.slice, "value", None)
        if isinstance(node, ast.Call):
            own = getattr(getattr(node.func, "value", None), "id", "")
            first = getattr(node.args[0], "id", "") if node.args else ""
            if own == "payload" and getattr(node.func, "attr", "") == "get":
                yield getattr(node.args[0], "value", None)
            elif first == "payload" and len(node.args) > 1:
                yield getattr(node.args[1], "value", None)


def test_a_number_of_a_request_that_says_nothing_cannot_be_used() -> None:
    @dataclass(frozen=True)
    class Bare(Op):
        lr: float = 0.1

    with pytest.raises(ConfigError, match=r"Bare.lr is a bare float: say what it is by its type"):
        Bare()


def test_fractions_end_at_one_and_counts_begin_at_one_or_none() -> None:
    ranges = {name: (owner.least, owner.most) for name, owner in chosen() if not owner.harmless}
    fractions = {"momentum", "held_out", "fixed", "delta", "threshold", "sample", "held", "share"}
    assert {name for name, (_, high) in ranges.items() if high <= 1} == fractions
    assert all(ranges[name] == (0, 1) for name in fractions)
    one = {"batch", "microbatch", "cap", "max_weight", "needed", "least", "k", "components", "bits", "block", "bucket",
           "size", "rounds", "repeats", "iterations", "log"}  # fmt: skip
    assert {name for name, (low, _) in ranges.items() if low == 1} == one
    lows = {"clip": 1e-9, "range": 2.0**-20, "statistics": 2.0**-20, "key_bits": 1024, "power": -1100}
    assert {name: low for name, (low, _) in ranges.items() if low not in (0, 1)} == lows
    assert all(low <= high <= 2.0**100 for low, high in ranges.values())  # products of them do not overflow


def test_every_entry_of_a_payload_is_known() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in ASIDE:
            found |= {name for name in payload_entries(ast.parse(path.read_text())) if isinstance(name, str)}
    assert found == set(PAYLOAD)


def test_the_defaults_admit_the_defaults_of_all_solvers() -> None:
    """The ops of all algorithms are in tests/holdings/test_gateway.py: their gateways open."""
    for name, part in registered("local").items():
        if part.__module__.startswith("hansa."):
            assert Ranges().refuses(build("local", name), 100, {}) is None, name


@pytest.mark.parametrize(("own", "op", "why"), [
    ({"clip": (0.1, 10)}, DPSGD(clip=0.05), "requires a clip of 0.1 to 10, and the job has 0.05 in 'dp-sgd'"),
    ({"clip": (0.1, 10)}, Personal(inner=DPSGD(clip=20.0)), "and the job has 20"),
    ({"clip": (0.1, 10)}, build("op", "gossip", inner=DPSGD(clip=20.0)), "and the job has 20"),
    ({"clip": (0.1, 10)}, DPSGD(clip=10.0), None),
    ({"clip": (0.1, 10)}, ClippedUpdate(SGD(), 20.0), "in 'clip'"),
    ({"dp-sgd.clip": (0.1, 10)}, ClippedUpdate(SGD(), 20.0), None),
    ({"dp-sgd.clip": (0.1, 10)}, DPSGD(clip=20.0), r"see ranges.dp-sgd.clip in party.toml"),
    ({"clip": (0.1, 10), "dp-sgd.clip": (0.1, 50)}, DPSGD(clip=20.0), None),
    ({"share": (0.6, 1)}, Packed(SGD(), TopK(share=0.5)), "and the job has 0.5 in 'top-k'"),
    ({"sigma": (1, 9)}, SecureMasked(DPSGD(sigma=0.5)), "requires a sigma of 1 to 9, and the job has 0.5"),
    ({"decay": (0.5, 1)}, SGD(schedule={"name": "exponential", "decay": 0.1}), "in 'exponential'"),  # type: ignore[arg-type]
    ({"grid": (0.2, 0.8)}, build("local", "mapper", grid=(0.1, 0.5)), "and the job has 0.1"),
    ({}, SGD(lr=1e7), "requires a lr of 0 to 1e"),
    ({"lr": (0, 1e9)}, SGD(lr=1e7), None),
    ({}, build("op", "convex-sums", gamma=1e10), "requires a gamma of 0 to 1e+09"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused_wherever_they_are(own: Any, op: Op, why: str | None) -> None:
    refused = Ranges(own).refuses(op, 100, {})
    assert (refused is None) if why is None else (refused is not None and why in refused)


def test_a_batch_is_compared_as_it_is_at_the_party() -> None:
    few = Ranges({"batch": (32, 1000)})
    for batch, n, fits in ((32, 100, True), (31, 100, False), (None, 100, True), (5, 4, True), (3, 4, False),
                           (None, 4, True), (None, 2000, False), (2000, 500, True)):  # fmt: skip
        assert (few.refuses(SGD(batch=batch, drop_last=batch is not None), n, {}) is None) == fits, (batch, n)
    for work, fits in (({"batch": 8}, False), ({"batch": 64}, True), ({"batch": None}, True), ({"lr": 1e9}, False)):
        assert (few.refuses(SGD(drop_last=True), 100, {"work": work}) is None) == fits, work
        assert (few.refuses(Personal(inner=SGD(drop_last=True)), 100, {"work": work}) is None) == fits, work


def test_the_last_batch_of_an_epoch_is_compared_too() -> None:
    """With 33 samples, the second step was about a single one."""
    few = Ranges({"batch": (32, 1000)})
    for op, fits in ((SGD(batch=32, steps=1), True), (SGD(batch=32, steps=2), False), (SGD(batch=32), False),
                     (SGD(batch=32, epochs=3, drop_last=True), True), (SGD(batch=None), True)):  # fmt: skip
        refused = few.refuses(op, 33, {})
        assert (refused is None) == fits, op
        assert fits or "the job has 1 in 'sgd'" in str(refused)
    assert few.refuses(SGD(batch=None), 33, {"work": {"batch": 32}}) is not None
    assert Ranges().refuses(SGD(batch=32), 33, {}) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 10**400])
def test_numbers_that_are_none_are_out_of_range(value: float) -> None:
    op = build("local", "elastic")
    refused = Ranges().refuses(op, 10, {"alpha": value})
    assert refused is not None and "requires a alpha" in refused
    assert Ranges().refuses(op, 10, {"alpha": 0.5}) is None


def test_nothing_is_read_by_a_request_out_of_range() -> None:
    samples = SampleGateway((torch.ones(5, 2), torch.zeros(5)))
    guarded = GuardedGateway(samples, None, SGD(lr=1e9), {})  # type: ignore[arg-type]
    with pytest.raises(PartyError, match="requires a lr"):
        guarded.open("ask")
    with pytest.raises(PartyError, match="may not read"):
        guarded.train("train")


@pytest.mark.parametrize(("table", "why"), [
    ({"clips": [1, 2]}, "no part of a request has a number 'clips'; did you mean 'clip'"),
    ({"dpsgd.clip": [1, 2]}, "no part of a request has a number 'dpsgd.clip'; did you mean 'dp-sgd.clip'"),
    ({"mechanism": [1, 2]}, "has a number 'mechanism'"),
    ({"clip": [2, 1]}, "expected a range of two numbers"), ({"clip": 1}, "expected a range of two numbers"),
    ({"clip": [1, 2, 3]}, "expected a range"), ({"clip": [1, True]}, "expected a range"),
    ({"clip": [math.nan, 1]}, "expected a range"),
])  # fmt: skip
def test_a_malformed_table_of_ranges_is_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Ranges.read(table, "party.toml: ranges")
    assert why in str(caught.value)


def test_a_table_of_ranges_is_read() -> None:
    table = {"lr": [0, 1], "rate": [0, 2], "sigma": [2, 2], "dp-sgd.clip": [0.1, 10.0], "my_module:Net.depth": [1, 2]}
    assert Ranges.read(table, "ranges") == Ranges({name: (low, high) for name, (low, high) in table.items()})
