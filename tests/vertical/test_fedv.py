"""FedV: the centralised gradient, one message per party and batch, and keys for sums of enough rows alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from columns import HELPER, PEOPLE, SEED, centralised, furthest, joined, parts_of, task, trained

import hansa
from hansa.core.ask import Ask
from hansa.core.federation import Federation
from hansa.core.op import Party, Reply
from hansa.core.vault import Vault
from hansa.holdings.gateway import SampleGateway
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.sim.engine import ReferenceEngine

pytest.importorskip("rbcl")
from hansa import FedV
from hansa.vertical import fedv, fedv_ops, inner_products
from hansa.vertical.fedv_ops import (
    FEATURE_BITS,
    ROOT,
    SCORE_BITS,
    WEIGHT_BITS,
    FedVBatch,
    FedVKey,
    batch_secrets,
    label_offset,
    spread,
)

ROLES: dict[str, Any] = {"widths": {"0": 2, "1": 3}, "holder": 1, "helper": 2, "rows": 20}


@pytest.fixture(autouse=True)
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few people have small sums: a small table is made sooner."""
    monkeypatch.setattr(inner_products, "STEPS", 2**12)


def algorithm(**fields: Any) -> FedV:
    return FedV(**{"match": "same", "batch": PEOPLE, "lr": 0.3, "authority": HELPER, **fields})


def run(own: FedV, rounds: int = 1, **fields: Any) -> hansa.Result:
    settings = {"rounds": rounds, "seed": SEED, "progress": False, **fields}
    return hansa.simulate(own, settings.pop("task", None) or task(own.loss), **settings)


@pytest.mark.thin(1)
@pytest.mark.parametrize("loss", ["linear", "logistic", "svm"])
def test_the_gradient_is_the_centralised_one(loss: Any) -> None:
    """The support vector machine has the squared hinge loss: the aggregator sees scores and labels."""
    own = algorithm(loss=loss, l2=0.1, batch=20, least=3)
    result = run(own, 2)
    bits = (SCORE_BITS, FEATURE_BITS, WEIGHT_BITS)
    hinge = loss == "svm"
    assert furthest(trained(result), parts_of(centralised(own, 2, *bits, hinge=hinge))) < 1e-12
    exact = parts_of(centralised(own, 2, *bits[:2], rounded=False, hinge=hinge))
    # Rounding moves a residual by 2^-11 and a feature by 2^-9; residuals and features are below 8 here.
    assert furthest(trained(result), exact) < 4 * own.lr * 8 * (2.0**-11 + 2.0**-9)
    assert furthest(trained(result), exact) < 0.02 * furthest(exact, parts_of(np.zeros(7)))


def asked(monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """All asks of a simulation, with the op and the parties."""
    seen, plain = list[Ask](), Federation._ask

    def noted(self: Federation, verb: Any, **fields: Any) -> Ask:
        seen.append(plain(self, verb, **fields))
        return seen[-1]

    monkeypatch.setattr(Federation, "_ask", noted)
    return seen


def test_a_batch_is_one_message_per_party_and_parties_do_not_talk_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks = asked(monkeypatch)
    run(algorithm(batch=20))
    names = [(ask.verb, ask.op.name, ask.parties) for ask in asks if ask.op is not None]
    batch = [("gather", "fedv-batch", (0, 1, 2)), ("gather", "fedv-key", (3,)), ("gather", "fedv-key", (3,))]
    same = [("route", name, pair) for pair in ((0, 1), (1, 2)) for name in ("split-order", "split-same")]
    assert names == [*same, ("route", "fedv-secrets", (0, 1, 2, 3)), *batch * 2,
                     ("gather", "fedv-keep", (0, 1, 2))]  # fmt: skip
    secrets = next(ask for ask in asks if ask.op is not None and ask.op.name == "fedv-secrets")
    assert secrets.routes == ((3, 0), (3, 1), (3, 2))  # from the authority alone, once per run


def replies_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, Reply]]:
    seen, plain = list[tuple[int, Reply]](), ReferenceEngine.one

    def noted(self: ReferenceEngine, op: Any, job: Any, round: int) -> Any:
        outcome = plain(self, op, job, round)
        if op.name == name and isinstance(outcome, tuple):
            seen.append((job.party, outcome[0]))
        return outcome

    monkeypatch.setattr(ReferenceEngine, "one", noted)
    return seen


def test_replies_are_points_that_differ_for_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of two values, and scores that are all 0 before the first step: no two ciphertexts are equal."""
    replies = replies_of(monkeypatch, "fedv-batch")
    run(algorithm(epochs=2), engine="reference")
    assert Counter(party for party, _ in replies) == {0: 2, 1: 2, 2: 2}
    points = [bytes(row) for _, reply in replies for tensor in reply.tensors.values()
              for row in tensor.reshape(-1, 32).numpy()]  # fmt: skip
    assert len(set(points)) == len(points) == 2 * PEOPLE * (3 + 6)


def test_the_aggregator_does_not_know_the_order_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees residuals, and so labels at the weights 0, but in an order that changes with every batch."""
    seen, orders = list[list[int]](), list[list[int]]()
    plain, drawn = fedv.residual_weights, fedv_ops.secret_order

    def noted(*arguments: Any) -> list[int]:
        seen.append(plain(*arguments))
        return seen[-1]

    def noted_order(secret: bytes, count: int) -> torch.Tensor:
        order = drawn(secret, count)
        orders.append(order.tolist())
        return order

    monkeypatch.setattr(fedv, "residual_weights", noted)
    monkeypatch.setattr(fedv_ops, "secret_order", noted_order)
    run(algorithm(lr=1e-9), 3)
    labels = -(2 * joined()[1] - 1) * 2 ** (WEIGHT_BITS - 1)
    public = [labels[rng.shuffled(rng.key(SEED, "linear", number, 0), PEOPLE)].tolist() for number in range(3)]
    assert all(sorted(own) == sorted(known) and own != known for own, known in zip(seen, public, strict=True))
    by_batch = [orders[at : at + 3] for at in range(0, 9, 3)]
    assert all(own == others[0] for others in by_batch for own in others)  # the same at all parties
    assert len({tuple(others[0]) for others in by_batch}) == 3


# The key authority prevents inferences


class Once(Vault):
    """A vault that remembers, as that of a deployed party."""

    def __init__(self) -> None:
        self.answers = dict[str, str]()

    def once(self, name: str, digest: str) -> None:
        if self.answers.setdefault(name, digest) != digest:
            raise PartyError("answered before")


def authority(**fields: Any) -> Party:
    rows = torch.zeros(0, 1), torch.zeros(0)
    return Party(2, Objective(None, "mse", 0), SampleGateway(rows), 0, vault=Once(), **fields)


MEMORY = {f"{ROOT}.{party}": torch.full((32,), party, dtype=torch.uint8) for party in (0, 1)}
ASK = {**ROLES, "step": 0, "batch": 20}


@pytest.mark.parametrize(
    "weights",
    [[0] * 20, [1] + [0] * 19, [1] * 7 + [0] * 13, [1000] + [1] * 19, [2**k for k in range(20)], [-1] * 7 + [0] * 13],
)
def test_weights_that_would_reveal_single_rows_get_no_key(weights: list[int]) -> None:
    with pytest.raises(PartyError, match="spread over fewer than 8 rows"):
        FedVKey(8).run(authority(), {**ASK, "weights": torch.tensor(weights)}, MEMORY)


def test_weights_of_enough_rows_get_one_key() -> None:
    party, ask = authority(), {**ASK, "weights": torch.tensor([1] * 8 + [0] * 12)}
    reply, _ = FedVKey(8).run(party, ask, MEMORY)
    assert tuple(reply.tensors["keys"].shape) == (2, 32)
    assert torch.equal(FedVKey(8).run(party, ask, MEMORY)[0].tensors["keys"], reply.tensors["keys"])
    with pytest.raises(PartyError, match="answered before"):
        FedVKey(8).run(party, {**ask, "weights": torch.tensor([1] * 9 + [0] * 11)}, MEMORY)
    with pytest.raises(PartyError, match="spread over fewer than 12 rows"):
        FedVKey(8).run(authority(min_rows=12), ask, MEMORY)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"widths": {"0": 2, "1": 3, "3": 1}}, "only for sums over all parties"),
        ({"step": -1}, "malformed"),
        ({"batch": 21}, "malformed"),
        ({"weights": torch.ones(19, dtype=torch.int64)}, "a weight for each of 20 rows"),
        ({"weights": torch.ones(20)}, "a weight for each of 20 rows"),
    ],
)
def test_malformed_asks_for_keys_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(PartyError, match=reason):
        FedVKey(8).run(authority(), {**ASK, **change}, MEMORY)


def test_a_party_encrypts_one_set_of_numbers_per_batch() -> None:
    """Other weights for the same batch would reveal the difference of scores."""
    given = task()
    vault, memory = Once(), {ROOT: torch.zeros(32, dtype=torch.uint8), "fedv/order": torch.ones(32, dtype=torch.uint8),
                             "rows": torch.arange(20)}  # fmt: skip
    x = given.parties[0][0][:20]  # type: ignore[index]
    party = Party(0, Objective(None, "cross_entropy", 0), SampleGateway((x, torch.zeros(20))), 0, vault=vault)
    ask = {**ROLES, "step": 0, "columns": 2, "w": torch.zeros(2, dtype=torch.float64)}
    op = FedVBatch(batch=20)
    assert torch.equal(*(op.run(party, ask, memory)[0].tensors["scores"] for _ in range(2)))
    for w in (1.0, 1e-300):  # these would give the same numbers, which depends on the columns
        with pytest.raises(PartyError, match="answered before"):
            op.run(party, {**ask, "w": torch.full((2,), w, dtype=torch.float64)}, memory)
    for change in ({"step": 1}, {"columns": 3}, {"w": torch.ones(3)}, {"w": torch.full((2,), torch.nan).double()}):
        with pytest.raises(PartyError, match="malformed"):
            op.run(party, {**ask, **change}, memory)


def test_a_batch_of_too_few_residuals_is_skipped() -> None:
    assert spread([1] * 8, 8) and not spread([1] * 7, 8) and not spread([], 2) and not spread([0] * 9, 2)
    given = task("linear")
    pairs = [(x, None if y is None else torch.zeros(PEOPLE)) for x, y in given.parties]  # type: ignore[union-attr]
    result = run(algorithm(loss="linear"), task=hansa.Task(None, "mse", pairs, ids=given.ids))
    assert result.history[0]["skipped"] == 1.0 and furthest(trained(result), parts_of(np.zeros(7))) == 0.0


@pytest.mark.thin(1)
@pytest.mark.parametrize("scale, range", [(1e6, 64.0), (1.0, 2.0**-12)])
def test_numbers_beyond_the_fixed_point_are_clamped(scale: float, range: float) -> None:
    """The job chooses `range`: whether a party answers must not tell which targets are over it."""
    given = task("linear")
    pairs = [(x, None if y is None else y * scale) for x, y in given.parties]  # type: ignore[union-attr]
    result = run(algorithm(loss="linear", range=range), task=hansa.Task(None, "mse", pairs, ids=given.ids))
    assert "missing" not in result.history[0] and "empty" not in result.history[0]


# Bad input


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ("invalid", "not elements of ristretto255"),
        ("short", "(39, 32)"),
        ("others", "a decrypted sum is over 1310725,"),
    ],
)
def test_wrong_ciphertexts_are_refused_and_nothing_is_lost(
    points: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid points of other rows give a sum that no scores have: the search for it ends at the largest one."""
    honest, plain = trained(run(algorithm())), FedVBatch.run

    def lying(self: FedVBatch, party: Party, payload: Any, memory: Any) -> Any:
        reply, memory = plain(self, party, payload, memory)
        if party.id == 2 and party.round == 0:
            scores = reply.tensors["scores"]
            lies = {"invalid": torch.full_like(scores, 255), "short": scores[:-1], "others": scores.roll(1, 0)}
            reply.tensors["scores"] = lies[points]
        return reply, memory

    monkeypatch.setattr(FedVBatch, "run", lying)
    result = run(algorithm(), 2)
    assert "empty" in result.history[0] and reason in str(result.history[0])
    assert furthest(trained(result), honest) < 1e-12


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"least": 1}, "least must be at least 2"),
        ({"least": 99}, r"least must be at most batch \(40\)"),
        ({"range": 5000.0}, "range must be above 0 and at most 1024"),
        ({"authority": 1}, "party 1 has the labels"),
        ({"lr": 0.0}, "lr must be above 0"),
    ],
)
def test_bad_settings_get_one_sentence(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(algorithm(**fields))


def test_every_batch_has_secrets_of_its_own() -> None:
    """The key of one batch must not decrypt another one."""
    root = b"r" * 32
    seen = [secret for round in range(2) for step in range(2) for own, rows in [batch_secrets(root, round, step, 3)]
            for secret in (own, *rows)]  # fmt: skip
    assert len(set(seen)) == len(seen) == 16


@pytest.mark.parametrize("parties", [2, 3])
def test_scores_and_labels_of_the_hinge_are_told_apart_up_to_the_range(parties: int) -> None:
    largest = parties * 64
    for y in (-1, 1):
        for z in (-largest, -2, 0, 2, largest):
            total = z * 2**SCORE_BITS + y * label_offset(parties, 64.0)
            expected = (z - y) * 2**WEIGHT_BITS if y * z < 1 else 0
            assert fedv.residual_weights("svm", [total], parties, 64.0) == [expected]
