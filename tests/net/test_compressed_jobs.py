"""Jobs whose parties pack their updates: the bits of the simulation over mutual TLS, and each party's policy."""

from __future__ import annotations

from typing import Any

import pytest
from league import PARTIES, League, samples

import hansa
from hansa.core.op import Op
from hansa.kernel.ranges import Ranges
from hansa.local import DPSGD
from hansa.net.party.floor import Floor
from hansa.net.party.policy import Policy
from hansa.testing import NetworkPool, check_network
from hansa.transforms import ByLayer, Clip, ClippedUpdate, ErrorFeedback, IdentityTransform, Int8, Packed, TopK

FEEDBACK = {"name": "error-feedback", "inner": {"name": "top-k", "share": 0.4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "compress"),
    [
        (hansa.FedAvg(), "int8"),
        (hansa.FedAvg(), {"name": "clip", "clip": 0.1}),
        (hansa.FedAvg(fusion="median"), {"name": "int8", "block": 8}),  # type: ignore[arg-type]
        (hansa.FedAvg(fusion="legato"), "int8"),  # type: ignore[arg-type]
        (hansa.FedBuff(buffer=2), "int8"),
        (hansa.Scaffold(), "int8"),
        (hansa.FSVRG(), "int8"),
        (hansa.FedAvg(), FEEDBACK),
        (hansa.FedBuff(buffer=2), FEEDBACK),
        (hansa.FedAvg(fusion="median"), {"name": "qsgd", "bits": 2, "elias": True}),  # type: ignore[arg-type]
        (hansa.Scaffold(), {"name": "qsgd", "bits": 3, "bucket": 5}),
        (hansa.FedYogi(), {"name": "rand-k", "share": 0.5, "shared": True}),
        (hansa.FedAvg(), {"*bias": "stochastic-rounding", "*": {"name": "error-feedback", "inner": "sign"}}),
    ],
    ids=lambda part: part.name if isinstance(part, hansa.Algorithm) else str(part),
)
def test_a_job_that_packs_updates_gives_the_reference_s_bits(
    algorithm: hansa.Algorithm, compress: Any, network: NetworkPool
) -> None:
    check_network(algorithm, network, compress=compress)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "down"),
    [
        (hansa.FedAvg(), {"name": "error-feedback", "inner": "int8"}),
        (hansa.FedBuff(buffer=2), {"name": "qsgd", "bits": 8, "bucket": 8}),
        (hansa.FedPer(layers=0), {"*bias": "identity", "*": "stochastic-rounding"}),
    ],
    ids=str,
)
def test_a_job_that_packs_models_gives_the_reference_s_bits(
    algorithm: hansa.Algorithm, down: Any, network: NetworkPool
) -> None:
    check_network(algorithm, network, compress_down=down, compress="int8")


def test_a_party_whose_policy_does_not_list_the_transform_of_models_declines(league: League) -> None:
    for number, name in enumerate(PARTIES):
        ops = '["describe", "sgd", "evaluate"]' if name == "bob" else '["describe", "sgd", "evaluate", "int8"]'
        league.join(name, samples(number), policy=f"ops = {ops}\n")
    tables = tree(None)
    job = league.submit({**tables, "run": {**tables["run"], "compress_down": "int8"}})
    for line in league.ended(job)["rounds"]:
        assert line["missing"] == {"bob": "its policy does not accept the transform 'int8'"} and line["replies"] == 2


def tree(compress: Any, **tables: Any) -> dict[str, Any]:
    return {
        "task": {"parties": ["x"], "model": "logistic", "dtype": "float64"},
        "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.1}},
        "run": {"rounds": 2, "seed": 3, **({} if compress is None else {"compress": compress})}, **tables,
    }  # fmt: skip


@pytest.mark.slow
def test_a_party_whose_policy_does_not_list_the_transform_declines_and_says_so(league: League) -> None:
    for number, name in enumerate(PARTIES):
        ops = '["describe", "sgd", "evaluate"]' if name == "bob" else '["describe", "sgd", "evaluate", "int8"]'
        league.join(name, samples(number), policy=f"ops = {ops}\n")
    jobs = [league.submit(tree(compress)) for compress in ("int8", None)]
    packed, plain = (league.ended(job) for job in jobs)
    for line in packed["rounds"]:
        assert line["missing"] == {"bob": "its policy does not accept the transform 'int8'"} and line["replies"] == 2
    assert all(line["replies"] == 3 for line in plain["rounds"])


@pytest.mark.parametrize(
    ("op", "names"),
    [(Packed(hansa.SGD(), Int8()), ["sgd", "int8"]), (ClippedUpdate(hansa.SGD(), 1.0), ["sgd", "clip"]),
     (Clip(1.0).around(hansa.SGD()), ["sgd", "clip"]),
     (ErrorFeedback(TopK()).around(hansa.SGD()), ["sgd", "error-feedback", "top-k"]),
     (ByLayer(("a", "*"), (Int8(), IdentityTransform())).around(hansa.SGD()), ["sgd", "by-layer", "int8", "identity"])],
    ids=["int8", "privacy.bound", "clip", "error-feedback", "by-layer"],
)  # fmt: skip
def test_a_policy_names_the_transform_and_the_op_inside(op: Op, names: list[str]) -> None:
    assert Policy(ops=tuple(names)).refuses_op(op) is None
    for name in names:
        rest = tuple(other for other in names if other != name)
        assert name in str(Policy(ops=rest).refuses_op(op))


@pytest.mark.slow
def test_a_private_party_accepts_a_transform_after_private_training_only() -> None:
    payload: dict[str, Any] = {}
    private, plain = Packed(DPSGD(sigma=1.0, epsilon=5.0), Int8()), Packed(hansa.SGD(), Int8())
    floor = Floor(dp=True)
    assert floor.refuses(private, 100, payload) is None
    assert "requires differential privacy" in str(floor.refuses(plain, 100, payload))
    assert "requires a sigma of at least 2" in str(Floor(sigma=2.0).refuses(private, 100, payload))
    narrow = Ranges.read({"clip": [5.0, 6.0]}, "ranges")
    assert "clip" in str(narrow.refuses(private, 100, payload)) and Ranges().refuses(private, 100, payload) is None
    assert "requires a secure sum" in str(Floor(secure=True).refuses(plain, 100, payload))
