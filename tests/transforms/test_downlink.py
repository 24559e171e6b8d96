"""Models that travel packed: fewer bytes down, the aggregator's own error feedback, hostile aggregators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_compressed_runs import LOCAL, Protocol, run, task

import hansa
from hansa.core.registry import register
from hansa.local import Controlled
from hansa.plumbing.errors import ConfigError, DataError
from hansa.testing import PartyPool, check_engines, check_processes, check_replay
from hansa.testing.transforms import _party as party
from hansa.transforms import QSGD, ErrorFeedback, IdentityTransform, Int8, Transform
from hansa.transforms.downlink import opened_payload, packed_form, transform_of

METHODS = [hansa.FedAvg(local=LOCAL), hansa.Scaffold(local=Controlled(lr=0.1, steps=3)), hansa.FedYogi(local=LOCAL),
           hansa.FedAvg(local=LOCAL, fusion="median"), hansa.FedBuff(local=LOCAL, buffer=2),  # type: ignore[arg-type]
           hansa.FedPer(local=LOCAL), hansa.FSVRG()]  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda part: part.name)
def test_a_lossless_transform_of_models_changes_no_bit(algorithm: hansa.Algorithm) -> None:
    plain, same = (run(algorithm, compress_down=c) for c in (None, "identity"))
    assert torch.equal(plain.state.params.w, same.state.params.w)


@pytest.mark.thin(2)
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda part: part.name)
def test_every_engine_gives_the_same_model_with_fewer_bytes_down(algorithm: hansa.Algorithm) -> None:
    settings: dict[str, Any] = {"compress_down": ErrorFeedback(Int8()), "compress": ErrorFeedback(QSGD(8))}
    reference, stacked = (run(algorithm, engine=engine, **settings) for engine in ("reference", "stacked"))
    torch.testing.assert_close(reference.state.params.w, stacked.state.params.w, rtol=0, atol=1e-9)
    plain, up = run(algorithm), run(algorithm, compress=settings["compress"])
    for packed, before, same in zip(reference.history, plain.history, up.history, strict=True):
        assert packed["bytes_up"] == same["bytes_up"]
        assert packed["bytes_down"] < before["bytes_down"] * (0.95 if algorithm.name == "fsvrg" else 0.85)
    assert not torch.equal(reference.state.params.w, up.state.params.w)


DOWN: dict[str, Any] = {"compress_down": {"name": "error-feedback", "inner": "int8"}}


def test_a_resumed_run_has_the_same_bits() -> None:
    check_replay(hansa.FedAvg(), check_engines(hansa.FedAvg(), **DOWN), **DOWN)


@pytest.mark.slow
@pytest.mark.slow
def test_separate_processes_have_the_same_bits() -> None:
    pool = PartyPool()
    try:
        for algorithm in (hansa.FedAvg(), hansa.FedBuff(buffer=2)):
            reference = check_engines(algorithm, **DOWN)
            check_replay(algorithm, reference, **DOWN)
            check_processes(algorithm, reference, pool, **DOWN)
    finally:
        pool.close()


SENT: list[torch.Tensor] = []


@register("test-watching")
class Watching(hansa.SGD):
    """Notes the models that a party gets."""

    def run(self, party: Any, payload: Any, memory: Any) -> Any:
        SENT.append(payload["model"]["w"].clone())
        return super().run(party, payload, memory)


def test_error_feedback_sends_later_what_was_left_out_of_a_model() -> None:
    still = Watching(lr=1e-12, steps=1)  # the model does not change, so that the mean of what is sent shows the error
    coarse, errors = {"name": "qsgd", "bits": 4, "bucket": 16}, {}
    for name, down in (("feedback", {"name": "error-feedback", "inner": coarse}), ("plain", coarse)):
        SENT.clear()
        done = run(hansa.FedAvg(local=still), task(parties=1), rounds=40, compress_down=down)
        errors[name] = float((torch.stack(SENT).mean(0) - done.state.params.w).norm())
        assert len(SENT) == 40
    assert errors["feedback"] < 0.5 * errors["plain"]


def test_an_aborted_round_keeps_the_aggregators_error() -> None:
    settings: dict[str, Any] = {"compress_down": ErrorFeedback(Int8(block=16)), "rounds": 3}
    empty = run(max_norm=1e-9, **settings)
    assert all("empty" in line for line in empty.history)
    assert empty.history[0]["bytes_down"] == empty.history[2]["bytes_down"]


def test_a_secure_sum_and_a_protocol_of_ones_own_get_the_packed_model() -> None:
    private = {"secure": "masking", "range": 8.0}
    hidden, clear, plain = (
        run(compress_down=c, privacy=p) for c, p in (("int8", private), ("int8", {}), (None, private))
    )
    torch.testing.assert_close(hidden.state.params.w, clear.state.params.w, rtol=0, atol=1e-4)
    assert all(a["bytes_down"] < b["bytes_down"] for a, b in zip(hidden.history, plain.history, strict=True))
    assert torch.equal(run(compress_down="int8", protocol=Protocol()).state.params.w, clear.state.params.w)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: run(compress_down="top-k"), "run.compress_down: 'top-k' leaves most numbers out"),
        (lambda: run(compress_down="error-feedback"), "run.compress_down: 'error-feedback' leaves most numbers out"),
        (lambda: run(compress_down={"*": "rand-k"}), "run.compress_down: 'by-layer' leaves most numbers out"),
        (lambda: run(compress_down="clip"), "run.compress_down: 'clip' keeps the form of an update"),
        (lambda: run(compress_down={"conv": "int8"}), "run.compress_down: no pattern matches the parameter '0.weight'"),
        (lambda: run(hansa.DecentralizedSGD(), compress_down="int8"), "run.compress_down: d-psgd sends no model"),
        (lambda: run(hansa.GaussianNB(), compress_down="int8"), "run.compress_down: naive-bayes sends no model"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


# The aggregator is not trusted.


def message(rule: Transform | None = None, **changes: Any) -> dict[str, Any]:
    rule = rule or Int8()
    parts, _ = rule.pack(party(0), "w", torch.ones(40), None)
    form = {**packed_form(rule, parts, 40), **changes}
    return {"payload": {"model": {"stats": torch.zeros(0)}}, "packed": form}


def test_a_party_opens_a_packed_model() -> None:
    assert torch.equal(opened_payload(message(), 40, torch.float32)["model"]["w"], torch.ones(40))
    plain = {"payload": {"model": {"w": torch.ones(3)}}}
    assert opened_payload(plain, 1, torch.float32) is plain["payload"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"length": 10**15}, "the packed model has 1000000000000000 numbers, and the party's model has 40"),
        ({"length": -1}, "the packed model has -1 numbers"),
        ({"length": True}, "the packed model has True numbers"),
        ({"length": 39}, "w|codes has the shape"),
        ({"parts": {}}, "it has the tensors"),
        ({"parts": [1]}, "are not tensors"),
        ({"parts": {"codes": torch.zeros(40, dtype=torch.int8), "scales": torch.tensor([torch.nan])}}, "not finite"),
        ({"transform": "int8"}, "its model names no transform"),
        ({"transform": {"name": "int9"}}, "unknown transform 'int9'"),
    ],
)
def test_a_party_declines_a_packed_model_of_another_form(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises((DataError, ConfigError), match=reason):
        opened_payload(message(**changes), 40, torch.float32)
    with pytest.raises(DataError, match="it has a packed vector and no model"):
        opened_payload({**message(), "payload": {}}, 40, torch.float32)
    assert transform_of(message(IdentityTransform())["packed"]) == IdentityTransform()
