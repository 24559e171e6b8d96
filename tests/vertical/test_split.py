"""Split learning: every shape takes the steps of the unsplit network, and messages have what their receivers need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from columns import Messages
from torch import Tensor, nn

import hansa
from hansa import Split, register
from hansa.models.dense import Logistic, TwoNN
from hansa.models.model import Model
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, DataError
from hansa.report.display import rows_of
from hansa.testing import same_bits
from hansa.vertical import modules
from hansa.vertical.modules import fitted

PEOPLE, WIDTHS, HOLDER, SEED = 23, (2, 3, 1), 1, 4
BOTTOM, MIDDLE = TwoNN(hidden=5, outputs=3), TwoNN(hidden=4, outputs=6)
SHAPES: dict[str, dict[str, Any]] = {
    "vertical": {},
    "vanilla": {"columns": (0,)},
    "u": {"columns": (HOLDER,), "middle": MIDDLE, "middle_at": 2},
    "vertical u": {"middle": MIDDLE, "middle_at": 0},
    "several bottoms": {"bottoms": (BOTTOM, Logistic(outputs=2), TwoNN(hidden=2, outputs=1))},
}


def people(party: int, count: int = PEOPLE) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
    """A party's columns, the labels, and ids, in an order of the party's own."""
    draw = np.random.default_rng(7)
    x = draw.normal(size=(count, sum(WIDTHS)))
    y = (x.sum(1) + draw.normal(size=count) > 0).astype(np.int64)
    start = sum(WIDTHS[:party])
    order = np.random.default_rng(party).permutation(count)
    ids = np.array([f"person {k:02d}" for k in range(count)])
    columns = torch.from_numpy(x[:, start : start + WIDTHS[party]])
    return columns[order], torch.from_numpy(y)[order], ids[order]


def task(loss: str = "cross_entropy", tests: bool = False, count: int = PEOPLE) -> hansa.Task:
    parties = [people(party, count) for party in range(3)]
    pairs = [(x, _targets(y, loss) if party == HOLDER else None) for party, (x, y, _) in enumerate(parties)]
    ids = [own for _, _, own in parties]
    more: dict[str, Any] = {}
    if tests:
        more = {"party_tests": [(x[:9], None if y is None else y[:9]) for x, y in pairs],
                "test_ids": [np.array([f"test {k}" for k in range(9)])] * 3}  # fmt: skip
    return hansa.Task(None, loss, pairs, ids=ids, **more)


def _targets(y: Tensor, loss: str) -> Tensor:
    return y if loss == "cross_entropy" else y.double()


def algorithm(**fields: Any) -> Split:
    plain = {"bottoms": (BOTTOM,), "match": "same", "batch": 8, "dtype": "float64", "lr": 0.05}
    return Split(**{**plain, **fields})


def run(own: Split, rounds: int = 1, **fields: Any) -> hansa.Result:
    settings = {"rounds": rounds, "seed": SEED, **fields}
    return hansa.simulate(own, settings.pop("task", None) or task(), **settings)


class Whole(nn.Module):
    """The unsplit network: the pieces in one place, with the initial values that the parties draw."""

    def __init__(self, own: Split, outputs: int = 2) -> None:
        super().__init__()
        parties = list(own.columns) or [0, 1, 2]
        models = own.bottoms if len(own.bottoms) > 1 else own.bottoms * len(parties)
        made = {f"bottom {p}": fitted(model, (WIDTHS[p],)) for p, model in zip(parties, models, strict=True)}
        width = sum(model.outputs for model in made.values())
        if own.middle is not None:
            made["middle"], width = fitted(own.middle, (width,)), own.middle.outputs
        made["head"] = fitted(own.head, (width,), outputs)
        self.parties = parties
        self.objectives = {
            name: Objective(lambda model=model: model().double(), "mse", rng.key(SEED, "split", name))
            for name, model in made.items()
        }
        self.pieces = nn.ModuleDict({name: objective.network() for name, objective in self.objectives.items()})

    def forward(self, xs: Mapping[int, Tensor]) -> Tensor:
        joined = torch.cat([self.pieces[f"bottom {p}"](xs[p]) for p in self.parties], 1)
        if "middle" in self.pieces:
            joined = self.pieces["middle"](joined)
        output: Tensor = self.pieces["head"](joined)
        return output

    def vectors(self) -> dict[str, Tensor]:
        return {name: each.spec.flatten(self.pieces[name]).w for name, each in self.objectives.items()}

    def train_unsplit(self, own: Split, rounds: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Train with PyTorch's optimisers, on the batches that the parties draw."""
        sides = [[w for name, piece in self.pieces.items() if name.startswith("bottom") == first
                  for w in piece.parameters()] for first in (True, False)]  # fmt: skip
        kinds = (own.optimiser, own.top_optimiser or own.optimiser)
        rates = (own.lr, own.top_lr or own.lr)
        optimisers = [
            torch.optim.SGD(side, lr=rate, momentum=own.momentum) if kind == "sgd" else torch.optim.Adam(side, lr=rate)
            for side, kind, rate in zip(sides, kinds, rates, strict=True)
        ]
        sorted_rows = [np.argsort(people(party)[2]) for party in range(3)]
        xs = {party: people(party)[0][sorted_rows[party]] for party in range(3)}
        y = people(HOLDER)[1][sorted_rows[HOLDER]]
        for number in range(rounds):
            for epoch in range(own.epochs):
                order = torch.from_numpy(rng.shuffled(rng.key(SEED, "split batches", number, epoch), PEOPLE))
                for at in order.split(own.batch):
                    for each in optimisers:
                        each.zero_grad()
                    loss(self({party: x[at] for party, x in xs.items()}), y[at]).backward()
                    for each in optimisers:
                        each.step()


def trained(result: hansa.Result) -> dict[str, Tensor]:
    """The parameters of all pieces, from the memories of the parties."""
    found = {}
    for memory in result.memories.values():
        for name, value in memory.items():
            if name.startswith(modules.PREFIX) and name.endswith("/w"):
                found[name.removeprefix(modules.PREFIX).removesuffix("/w")] = value
    return found


def difference(own: Split, rounds: int, outputs: int = 2, **fields: Any) -> float:
    whole = Whole(own, outputs)
    loss = nn.functional.cross_entropy if outputs > 1 else lambda out, y: ((out[:, 0] - y) ** 2).mean()
    whole.train_unsplit(own, rounds, loss)
    pieces, expected = trained(run(own, rounds, **fields)), whole.vectors()
    assert set(pieces) == set(expected)
    return max(float((pieces[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_step_equals_that_of_the_unsplit_network(shape: str) -> None:
    own = algorithm(**{**SHAPES[shape], "batch": PEOPLE})
    assert difference(own, 1) < 1e-12
    start, after = Whole(own).vectors(), trained(run(own))
    assert all(not torch.equal(start[name], after[name]) for name in start)  # every piece was trained


@pytest.mark.thin(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9, "epochs": 2}, {"optimiser": "adam", "lr": 0.01}, {"top_optimiser": "adam", "top_lr": 0.01}],
)
def test_many_steps_equal_those_of_the_unsplit_network(shape: str, settings: dict[str, Any]) -> None:
    """The last batch is short, and the optimisers keep their state from round to round."""
    assert difference(algorithm(**SHAPES[shape], **settings), 3) < 1e-12


def test_regression_has_one_output() -> None:
    assert difference(algorithm(), 2, outputs=1, task=task("mse")) < 1e-12


def test_two_runs_have_the_same_bits_and_other_seeds_others() -> None:
    one, two, other = (run(algorithm(), 2, seed=seed) for seed in (1, 1, 2))
    assert same_bits(trained(one), trained(two)) and not same_bits(trained(one), trained(other))


def test_the_aggregator_gets_no_piece_and_the_loss_falls() -> None:
    result = run(algorithm(optimiser="adam", lr=0.02), 12)
    losses = [line["train_loss"] for line in result.history]
    assert losses[-1] < 0.8 * losses[0]
    assert not result.state.params.w.numel() and set(result.state.slots) == {"roles", "people"}


# Who is sent what


def test_no_labels_leave_in_the_u_shape(messages: Messages) -> None:
    run(algorithm(**SHAPES["u"], batch=PEOPLE))
    kinds = [(sender, receiver, *message) for sender, receiver, message in messages]
    assert kinds == [(1, 2, "activations"), (2, 1, "activations"), (1, 2, "gradient"), (2, 1, "gradient")]
    assert all(tensor.is_floating_point() for _, _, message in messages for tensor in message.values())
    x, y, _ = people(HOLDER)
    for _, _, message in messages:
        for tensor in message.values():
            for column in tensor.T:
                assert not torch.equal(column.round().sort().values, y.double().sort().values)
                assert not any(torch.equal(column.sort().values, own.sort().values) for own in x.T)


def test_bottoms_talk_to_the_label_holder_alone(messages: Messages) -> None:
    run(algorithm(batch=PEOPLE))
    assert len(messages) == 4 and {(sender, receiver, *message) for sender, receiver, message in messages} == {
        (0, 1, "activations"), (2, 1, "activations"), (1, 0, "gradient"), (1, 2, "gradient")
    }  # fmt: skip


def test_activations_are_clipped_and_noise_is_added(messages: Messages) -> None:
    def sent(**fields: Any) -> Tensor:
        messages.clear()
        run(algorithm(columns=(0,), batch=PEOPLE, **fields))
        return messages[0][2]["activations"]

    plain, clipped = sent(), sent(clip=0.01)
    assert plain.norm(dim=1).max() > 0.01 >= clipped.norm(dim=1).max() - 1e-9
    noisy = sent(clip=0.01, noise=5.0)
    assert 0.03 < float((noisy - clipped).std()) < 0.08
    assert difference(algorithm(clip=1e9), 2) < 1e-12  # a clip that cuts nothing changes nothing


def test_noise_differs_between_batches(messages: Messages) -> None:
    run(algorithm(columns=(0,), clip=1e-6, noise=1000.0, batch=8, lr=1e-9, epochs=2))
    sent = [m["activations"] for s, _, m in messages if s == 0]
    assert not any(torch.allclose(a[:4], b[:4], atol=1e-5, rtol=0) for k, a in enumerate(sent) for b in sent[:k])


# Evaluation


def test_the_parties_evaluate_the_network_together() -> None:
    own = algorithm(optimiser="adam", lr=0.02)
    result = run(own, 3, task=task(tests=True))
    whole = Whole(own)
    for name, vector in trained(result).items():
        objective = whole.objectives[name]
        objective.spec.load(whole.pieces[name], Params(vector, objective.initial.stats, objective.initial.counts))
    parties = [people(party) for party in range(3)]
    order = np.argsort([f"test {k}" for k in range(9)])
    with torch.no_grad():
        outputs = whole({party: x[:9][order] for party, (x, _, _) in enumerate(parties)})
    y = parties[HOLDER][1][:9][order]
    expected = float(nn.functional.cross_entropy(outputs, y))
    assert result.history[-1]["loss"] == pytest.approx(expected, abs=1e-12)
    assert result.history[-1]["accuracy"] == pytest.approx(float((outputs.argmax(1) == y).double().mean()))
    assert {("common people", str(PEOPLE)), ("common test people", "9")} <= set(rows_of(result.summary))


# Models of a user's own


@register("test-gated")
@dataclass(frozen=True)
class Gated(Model):
    """A bottom with dropout and batch normalisation."""

    inputs: tuple[int, ...] = (1,)
    outputs: int = 3

    def __call__(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.width_in, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, self.outputs)
        )


@register("test-too-wide")
@dataclass(frozen=True)
class TooWide(Gated):
    """A bottom that gives more outputs than it says."""

    def __call__(self) -> nn.Module:
        return nn.Linear(self.width_in, self.outputs + 1)


def test_buffers_and_dropout_belong_to_the_party_with_the_piece() -> None:
    one, two = (run(algorithm(bottoms=(Gated(),)), 2) for _ in range(2))
    assert same_bits(*({str(party): memory for party, memory in each.memories.items()} for each in (one, two)))
    stats = one.memories[0]["split/bottom 0/stats"]
    assert stats.numel() == 8 and not torch.equal(stats[:4], torch.zeros(4, dtype=stats.dtype))


def test_a_piece_with_other_outputs_than_announced_is_named() -> None:
    result = run(algorithm(bottoms=(TooWide(),)))
    assert "the bottom 0 of the network gives outputs of the shape (8, 4), expected (8, 3)" in str(result.history[0])


# Bad input


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"top_lr": -1.0}, "top_lr must be above 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"momentum": 0.5, "optimiser": "adam"}, "momentum is for the optimiser 'sgd'"),
        ({"middle": MIDDLE}, "middle and middle_at belong together"),
        ({"noise": 1.0}, "needs clip"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"bottoms": ()}, "one model for all parties"),
        ({"columns": (5,)}, "columns: there is no party 5 in this job"),
        ({"middle": MIDDLE, "middle_at": 7}, "middle_at: there is no party 7"),
        ({"middle": MIDDLE, "middle_at": HOLDER}, "the middle must be at another party"),
        ({"columns": (HOLDER,)}, "nothing is split"),
        ({"bottoms": (BOTTOM, BOTTOM)}, r"one per party with columns \(3\); got 2"),
    ],
)
def test_bad_settings_get_one_sentence(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(algorithm(**fields))


def test_exactly_one_party_must_have_labels() -> None:
    given = task()
    y = people(HOLDER)[1]
    two = replace(given, parties=[given.parties[0], given.parties[1], (given.parties[2][0], y)])  # type: ignore[index]
    with pytest.raises(ConfigError, match="needs one party with labels, and the parties 1, 2 have"):
        run(algorithm(), task=two)
    none = replace(given, parties=[(x, None) for x, _ in given.parties])  # type: ignore[union-attr]
    with pytest.raises(DataError, match="none of them has labels"):
        run(algorithm(), task=none)


def test_a_batch_larger_than_the_common_people_is_refused() -> None:
    with pytest.raises(DataError, match="hold 23 people, and the method needs at least 24"):
        run(algorithm(batch=24))


def test_parties_with_other_people_are_named() -> None:
    given = task()
    ids = [*given.ids[:2], np.array([f"other {k}" for k in range(PEOPLE)])]  # type: ignore[index]
    result = run(algorithm(), task=replace(given, ids=ids))
    assert 'party 2 holds other people; use match = "psi"' in str(result.history[0])
