"""Encrypted linear models: the centralised gradient, and messages that are encrypted or masked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from columns import (
    HELPER,
    HOLDER,
    PEOPLE,
    SEED,
    TESTS,
    Messages,
    centralised,
    furthest,
    joined,
    parts_of,
    task,
    trained,
)

import hansa
from hansa import VerticalLinear
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.secure.additive import AdditivePrivateKey, _generator
from hansa.secure.byte_tensors import from_rows
from hansa.sim.engine import ReferenceEngine
from hansa.testing import same_bits
from hansa.vertical import linear_model
from hansa.vertical.linear_ops import FEATURE_BITS, KEY, SCORE_BITS

LOSSES = ("linear", "logistic", "svm")


def algorithm(**fields: Any) -> VerticalLinear:
    plain = {"match": "same", "batch": PEOPLE, "lr": 0.3, "key_bits": 1024, "coordinator": HELPER}
    return VerticalLinear(**{**plain, **fields})


def run(own: VerticalLinear, rounds: int = 1, **fields: Any) -> hansa.Result:
    settings = {"rounds": rounds, "seed": SEED, "progress": False, **fields}
    return hansa.simulate(own, settings.pop("task", None) or task(own.loss), **settings)


# The same model as in one place


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_the_centralised_one_of_the_same_objective(loss: Any) -> None:
    """Two steps, so that the second begins at weights other than 0."""
    own = algorithm(loss=loss, l2=0.1)
    parts = trained(run(own, 2))
    assert furthest(parts, parts_of(centralised(own, 2, SCORE_BITS, FEATURE_BITS))) < 1e-13
    # Rounding moves a residual by 2^-24 and a feature by 2^-17; residuals and features are below 8 here.
    tolerance = 2 * own.lr * 8 * (2.0**-24 * 4 + 2.0**-17)
    exact = parts_of(centralised(own, 2, SCORE_BITS, FEATURE_BITS, rounded=False))
    assert furthest(parts, exact) < tolerance < 0.01 * furthest(exact, parts_of(np.zeros(7)))


def test_batches_and_epochs_are_those_of_the_seed() -> None:
    own = algorithm(batch=13, epochs=2)
    parts = trained(run(own, 2))
    assert furthest(parts, parts_of(centralised(own, 2, SCORE_BITS, FEATURE_BITS))) < 1e-13
    assert furthest(parts, trained(run(algorithm(epochs=2), 2))) > 1e-3


@pytest.mark.slow
def test_linear_regression_ends_at_the_least_squares_solution() -> None:
    own = algorithm(loss="linear", epochs=60, lr=0.4)
    x, _ = joined()
    z = np.concatenate([x[:, :6], np.ones((PEOPLE, 1))], 1)
    targets = x @ np.linspace(-1, 1, x.shape[1]) + 0.5
    solution = np.linalg.lstsq(z, targets, rcond=None)[0]
    assert furthest(trained(run(own, 2)), parts_of(solution)) < 1e-3


def test_the_result_does_not_depend_on_keys_or_masks() -> None:
    one, two = (trained(run(algorithm(key_bits=bits))) for bits in (1024, 1032))
    assert same_bits(*({str(k): torch.from_numpy(v) for k, v in each.items()} for each in (one, two)))


@pytest.mark.slow
def test_the_taylor_polynomial_is_close_to_the_logistic_loss() -> None:
    z = np.linspace(-1, 1, 201)
    assert float(abs(np.log1p(np.exp(-z)) - (np.log(2) - z / 2 + z**2 / 8)).max()) == pytest.approx(0.0049, abs=1e-4)


def test_the_parties_test_the_model_and_score_people_together() -> None:
    own = algorithm(lr=1.0)
    result = run(own, 2, task=task(tests=True))
    w = np.zeros(7)
    for party, places in ((0, [0, 1]), (1, [2, 3, 4, 6]), (2, [5])):
        w[places] = trained(result)[party]
    x, _ = joined()
    rows = {party: np.random.default_rng(party).permutation(PEOPLE)[:TESTS] for party in range(3)}
    score = x[rows[0]][:, :2] @ w[:2] + x[rows[1]][:, 2:5] @ w[2:5] + x[rows[2]][:, 5] * w[5] + w[6]
    y = joined()[1][rows[1]]
    assert result.history[-1]["accuracy"] == pytest.approx(float(((score > 0) == y).mean()))
    assert result.history[-1]["loss"] == pytest.approx(float(np.log1p(np.exp(-(2 * y - 1) * score)).mean()), abs=1e-8)
    outputs = result.predict(ids=["person 03", "nobody", "TEST 4"])
    assert float(outputs[0, 1] - outputs[0, 0]) == pytest.approx(float(x[3, :6] @ w[:6] + w[6]), abs=1e-8)
    assert torch.isnan(outputs[1]).all() and float(outputs[2, 1]) == pytest.approx(float(score[4]), abs=1e-8)


# Who is sent what


def test_a_batch_has_the_messages_of_the_protocol(messages: Messages) -> None:
    """With K parties that have columns: K - 1 scores, K - 1 residuals, K masked gradients, K decrypted ones."""
    run(algorithm(batch=20))
    keys, batches = messages[:3], messages[3:]
    assert [(sender, *message) for sender, _, message in keys] == [(HELPER, "key")] * 3
    kinds = sorted((sender, receiver, *message) for sender, receiver, message in batches)
    step = [(0, 1, "scores"), (2, 1, "scores"), (1, 0, "residuals"), (1, 2, "residuals")]
    step += [pair for party in range(3) for pair in ((party, 3, "gradient"), (3, party, "gradient"))]
    assert kinds == sorted(step * 2) and len(step) == 4 * 3 - 2


def test_messages_are_ciphertexts_or_masked(messages: Messages) -> None:
    result = run(algorithm(epochs=2))
    key = AdditivePrivateKey.of_tensor(result.memories[HELPER][KEY])
    x, y = joined()
    secrets = [y.astype(np.float64), 2.0 * y - 1, *x.T, *trained(result).values()]
    for _, _, message in messages:
        for tensor in message.values():
            assert tensor.dtype == torch.uint8
            assert not any(secret[:3].tobytes() in tensor.numpy().tobytes() for secret in secrets)
    sent = [message["residuals"] for sender, _, message in messages if "residuals" in message and sender == HOLDER]
    residuals = key.decrypt(key.public.ciphertexts(sent[0]), 2**40)
    assert sorted(residuals) == sorted(((-2 * (2 * y - 1)) * 2**SCORE_BITS).tolist())  # at the weights 0, D = -2 y
    for place in (0, 2):  # of the first batch and of the second: what the coordinator decrypts
        first, second = (
            from_rows(m["gradient"])[0] for s, r, m in messages if (s, r) == (HELPER, place) and "gradient" in m
        )
        assert min(first.bit_length(), second.bit_length(), abs(first - second).bit_length()) > 64 + 50


def test_the_coordinator_cannot_tell_two_gradients_apart_by_their_length(messages: Messages) -> None:
    """The masked number of a tiny gradient is as long as that of a large one."""
    lengths = []
    for scale in (1e-5, 100.0):
        messages.clear()
        given = task()
        pairs = [(x * scale, y) for x, y in given.parties]  # type: ignore[union-attr]
        run(algorithm(), task=hansa.Task(None, "cross_entropy", pairs, ids=given.ids))
        lengths.append([from_rows(m["gradient"])[0].bit_length() for s, _, m in messages
                        if s == HELPER and "gradient" in m])  # fmt: skip
    assert max(abs(a - b) for a, b in zip(*lengths, strict=True)) <= 24


def test_residuals_are_encrypted_afresh(messages: Messages) -> None:
    """Without fresh randomness a party divides residuals by scores that it sent, and reads scores and labels."""
    given = task()
    two = hansa.Task(None, "cross_entropy", [*given.parties[:2], given.parties[3]], ids=[*given.ids[:2], given.ids[3]])  # type: ignore[index]
    result = run(algorithm(coordinator=2), task=two)
    key = AdditivePrivateKey.of_tensor(result.memories[2][KEY]).public
    scores, residuals = (
        next(key.ciphertexts(m[name]) for _, _, m in messages if name in m) for name in ("scores", "residuals")
    )
    g = _generator(key.n)
    plain = {pow(g, number, key.n) for number in (-(2 ** (SCORE_BITS + 1)), 2 ** (SCORE_BITS + 1))}
    assert not any(int(key.minus(d, u)) in plain for d, u in zip(residuals, scores, strict=True))


def test_the_ring_of_scores_is_masked(messages: Messages) -> None:
    run(algorithm(lr=1.0), 1, task=task(tests=True))
    ring = {(s, r): m["sums"] for s, r, m in messages if "sums" in m}
    assert set(ring) == {(1, 0), (0, 2), (2, 1)}
    assert all(float(sums.abs().double().median()) > 2**58 for sums in ring.values())
    assert not torch.equal(ring[1, 0], ring[0, 2])


class Closed(SampleGateway):
    """Refuses readings for one purpose."""

    closed: Any

    def admit(self, purpose: Any) -> None:
        if purpose == self.closed:
            raise PartyError("the owner refuses")


@pytest.mark.parametrize(("shut", "purpose"), [(0, "train"), (HOLDER, "train"), (2, "evaluate"), (HELPER, "train")])
def test_a_session_ends_where_the_gateway_refuses(shut: int, purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator reads no samples, so nothing can be refused there."""
    plain = ReferenceEngine.party

    def party(self: ReferenceEngine, number: int, round: int) -> Party:
        here = plain(self, number, round)
        if number != shut:
            return here
        data = Closed(here.data._train, here.data._test)
        data.closed = purpose
        return replace(here, data=data)

    monkeypatch.setattr(ReferenceEngine, "party", party)
    line = run(algorithm(), task=task(tests=True)).history[-1]
    if shut == HELPER:
        assert "empty" not in line and "loss" in line
    elif purpose == "train":
        assert "empty" in line and line["missing"][str(shut)] == "the owner refuses"
    else:
        assert "empty" not in line and f"{shut}: the owner refuses" in line["unmeasured"]


# Bad input


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"l2": -1.0}, "l2 must be at least 0"),
        ({"range": 0.0}, "range must be above 0"),
        ({"key_bits": 100}, "key_bits must be at least 1024 and at most 4096 and a multiple of 8"),
        ({"coordinator": 9}, "coordinator: there is no party 9"),
        ({"coordinator": HOLDER}, "party 1 has the labels, and would see what encryption hides"),
        ({"batch": 4}, "batch is 4, and a party has 4 weights: its gradient would reveal the residual"),
        ({"people": ("a",)}, "of_job and people belong together"),
        ({"loss": "linear", "task": task()}, 'loss = "linear" predicts a number, and the task has classes'),
        ({"loss": "svm", "task": task("linear")}, 'loss = "svm" is for two classes, and the task has numbers'),
    ],
)
def test_bad_settings_get_one_sentence(fields: dict[str, Any], reason: str) -> None:
    fields = dict(fields)
    given = {"task": fields.pop("task")} if "task" in fields else {}
    with pytest.raises(ConfigError, match=reason):
        run(algorithm(**fields), **given)


def test_two_parties_cannot_have_a_coordinator() -> None:
    given = task()
    two = hansa.Task(None, "cross_entropy", list(given.parties[:2]), ids=given.ids[:2])  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"needs at least three parties: two with columns, and one without"):
        run(algorithm(coordinator=None), task=two)


@pytest.mark.parametrize(
    ("scale", "lr", "where"), [(1e6, 10.0, "a column of party 0"), (300.0, 10.0, "a score or target of party 0"),
                               (1.0, 1e300, "a score or target of party 0")]
)  # fmt: skip
def test_numbers_beyond_the_fixed_point_are_clamped_and_named_in_the_log(
    scale: float, lr: float, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal would tell the others that a value is over a limit, which the job chooses."""
    linear_model._warn.cache_clear()
    given = task()
    pairs = [(x * (scale if party == 0 else 1.0), y) for party, (x, y) in enumerate(given.parties)]  # type: ignore[arg-type]
    result = run(algorithm(lr=lr), 2, task=hansa.Task(None, "cross_entropy", pairs, ids=given.ids))
    assert not any("missing" in line or "empty" in line for line in result.history)
    assert all(np.isfinite(own).all() for own in trained(result).values())
    assert f"{where} has values over" in caplog.text


def test_a_range_does_not_bisect_the_largest_target() -> None:
    """The job chooses `range`: whether a party answers must not tell which targets are over it."""
    given = task("linear")
    for most in (2.0**-20, 1.0, 64.0):
        result = run(algorithm(loss="linear", range=most), 1, task=given)
        assert "missing" not in result.history[0] and "empty" not in result.history[0]


def test_a_run_whose_first_round_is_empty_gives_the_reason_and_not_a_missing_metric() -> None:
    given = task(tests=True)
    ids = [np.array([f"{party} {text}" for text in own]) for party, own in enumerate(given.ids)]  # type: ignore[arg-type]
    other = hansa.Task(None, "cross_entropy", given.parties, ids=ids, party_tests=given.party_tests,
                       test_ids=given.test_ids)  # fmt: skip
    result = run(algorithm(match="same"), 2, task=other, metric="auc", patience=1)
    assert result.summary["empty_rounds"] == 2 and "party 0 holds other people" in result.summary["problem"]
