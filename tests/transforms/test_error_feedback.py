"""Error feedback: nothing is lost for good, and a party's memory moves only with a fused reply."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_transforms import Halves
from test_compressed_runs import run, task
from torch import Tensor

import hansa
from hansa.core.op import like
from hansa.local import SGD
from hansa.plumbing.errors import ConfigError
from hansa.testing.transforms import _party as party
from hansa.transforms import (
    QSGD,
    Clip,
    ErrorFeedback,
    IdentityTransform,
    Int8,
    RandK,
    Sign,
    StochasticRounding,
    TopK,
    Transform,
)

CONTRACTIONS = [TopK(k=3), RandK(k=3, scaled=False), RandK(k=3, scaled=False, shared=True), Sign(), QSGD(4, 16),
                Int8(), IdentityTransform()]  # fmt: skip


def updates(rounds: int, d: int = 40) -> Tensor:
    return torch.randn(rounds, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("inner", CONTRACTIONS, ids=str)
def test_all_that_is_sent_and_the_last_error_are_all_updates(inner: Transform) -> None:
    rule, memory, sent = ErrorFeedback(inner), None, torch.zeros(40, dtype=torch.float64)
    rounds = updates(60)
    for number, update in enumerate(rounds):
        drawn = rule.in_round(number)
        parts, memory = drawn.pack(party(1, number), "w", update, memory)
        sent += drawn.open(parts, like(update))
    assert isinstance(memory, Tensor)
    torch.testing.assert_close(sent + memory, rounds.sum(0), rtol=0, atol=1e-12)
    longest = float(rounds.norm(dim=1).max())
    share = 1 - 3 / 40 if inner.sparse else 0.9
    assert float(memory.norm()) <= math.sqrt(share) / (1 - math.sqrt(share)) * longest
    assert (float(memory.norm()) == 0) == isinstance(inner, IdentityTransform)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_error_feedback_around_the_identity_is_no_compression(engine: str) -> None:
    plain, same = (run(compress=c, engine=engine) for c in (None, ErrorFeedback(IdentityTransform())))
    assert torch.equal(plain.state.params.w, same.state.params.w)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (RandK(), "error-feedback: the error of rand-k can exceed the vector"),
        (QSGD(4, 512), "use a contraction: top-k, rand-k with scaled = false"),
        (StochasticRounding(), "error-feedback: the error of stochastic-rounding"),
        (Halves(), "error-feedback: the error of test-halves"),
        (Clip(), "error-feedback: clip keeps the form of a reply"),
        (ErrorFeedback(), "would count each error twice"),
    ],
    ids=str,
)
def test_only_contractions_take_error_feedback(inner: Transform, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ErrorFeedback(inner)


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_parties_that_are_not_asked_keep_their_errors_in_every_engine(engine: str) -> None:
    settings: dict[str, Any] = {"compress": ErrorFeedback(TopK(share=0.1)), "cohort_size": 3, "seed": 1, "rounds": 4}
    done, reference = run(engine=engine, **settings), run(**settings)
    assert {str(p) for p in done.memories} == {name for line in done.history for name in line["cohort"]}
    torch.testing.assert_close(done.state.params.w, reference.state.params.w, rtol=0, atol=1e-9)
    for number, memory in done.memories.items():
        assert set(memory) == {"error-feedback/sgd/w"}
        torch.testing.assert_close(memory["error-feedback/sgd/w"],
                                   reference.memories[number]["error-feedback/sgd/w"], rtol=0, atol=1e-9)  # fmt: skip


def test_a_rejected_reply_changes_no_error() -> None:
    settings: dict[str, Any] = {"compress": ErrorFeedback(TopK(share=0.1)), "rounds": 2}
    done = run(max_norm=1e-6, **settings)
    assert all(len(line["rejected"]) == 6 for line in done.history) and len(done.memories) == 0


@pytest.mark.slow
def test_error_feedback_reaches_the_model_that_top_k_alone_does_not() -> None:
    local, one = SGD(lr=0.1, steps=5, batch=None), task(parties=3)

    def distance(compress: Any) -> float:
        done = run(hansa.FedAvg(local=local), one, rounds=40, compress=compress)
        return float((done.state.params.w - plain.state.params.w).norm())

    plain = run(hansa.FedAvg(local=local), one, rounds=40)
    assert distance(ErrorFeedback(TopK(share=0.05))) < 0.5 * distance(TopK(share=0.05))


SETTINGS: dict[str, Callable[[], Any]] = {
    "table": lambda: {"name": "error-feedback", "inner": {"name": "top-k", "share": 0.1}},
    "part": lambda: ErrorFeedback(TopK(share=0.1)),
}


def test_a_table_and_a_part_are_the_same_setting() -> None:
    runs = [run(compress=make(), rounds=1) for make in SETTINGS.values()]
    assert torch.equal(runs[0].state.params.w, runs[1].state.params.w)
    with pytest.raises(ConfigError, match="the error of rand-k"):
        run(compress={"name": "error-feedback", "inner": "rand-k"})
