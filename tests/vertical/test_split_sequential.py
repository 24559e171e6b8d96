"""Sequential split learning: the steps of one network that sees the samples of one client after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa import SequentialSplit
from hansa.models.dense import TwoNN
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError
from hansa.sim import routing
from hansa.vertical.modules import PREFIX, fitted

SIZES, SERVER, SEED, WIDTH = (9, 5, 12, 7), 1, 4, 3


def samples(party: int, late: bool = False) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(10 * party + late)
    x = draw.normal(size=(SIZES[party], WIDTH))
    return torch.from_numpy(x), torch.from_numpy((x.sum(1) > 0).astype(np.int64))


def algorithm(**fields: Any) -> SequentialSplit:
    plain = {"bottom": TwoNN(hidden=5, outputs=4), "middle": TwoNN(hidden=4, outputs=3), "server": SERVER, "batch": 4,
             "dtype": "float64", "lr": 0.05}  # fmt: skip
    return SequentialSplit(**{**plain, **fields})


def run(own: SequentialSplit, rounds: int, parties: int = 4, **fields: Any) -> hansa.Result:
    pairs, tests = ([samples(party, late) for party in range(parties)] for late in (False, True))
    task = hansa.Task(None, "cross_entropy", pairs, party_tests=tests)
    return hansa.simulate(own, task, **{"rounds": rounds, "seed": SEED, **fields})


class Whole(nn.Module):
    """The unsplit network, with the initial values of the pieces."""

    def __init__(self, own: SequentialSplit) -> None:
        super().__init__()
        made = {"bottom": fitted(own.bottom, (WIDTH,)), "middle": fitted(own.middle, (own.bottom.outputs,)),
                "head": fitted(own.head, (own.middle.outputs,), 2)}  # fmt: skip
        self.objectives = {
            name: Objective(lambda model=model: model().double(), "mse", rng.key(SEED, "split", name))
            for name, model in made.items()
        }
        self.pieces = nn.ModuleDict({name: objective.network() for name, objective in self.objectives.items()})

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.pieces["head"](self.pieces["middle"](self.pieces["bottom"](x)))
        return output

    def train_unsplit(self, own: SequentialSplit, rounds: int, parties: int = 4) -> dict[str, Tensor]:
        kinds = {"middle": (own.top_optimiser or own.optimiser, own.top_lr or own.lr)}
        optimisers = []
        for name, piece in self.pieces.items():
            kind, rate = kinds.get(name, (own.optimiser, own.lr))
            sgd = torch.optim.SGD(piece.parameters(), lr=rate, momentum=own.momentum)
            optimisers.append(sgd if kind == "sgd" else torch.optim.Adam(piece.parameters(), lr=rate))
        for number in range(rounds):
            for client in (party for party in range(parties) if party != own.server):
                x, y = samples(client)
                for epoch in range(own.epochs):
                    order = rng.shuffled(rng.key(SEED, "split batches", number, epoch, client), len(x))
                    for at in torch.split(torch.from_numpy(order), own.batch):
                        for each in optimisers:
                            each.zero_grad()
                        nn.functional.cross_entropy(self(x[at]), y[at]).backward()
                        for each in optimisers:
                            each.step()
        return {name: each.spec.flatten(self.pieces[name]).w for name, each in self.objectives.items()}


def trained(result: hansa.Result) -> dict[str, Tensor]:
    """The pieces: the middle at the server, the others at the first client."""
    places = {"middle": SERVER, "bottom": 0, "head": 0}
    return {name: result.memories[party][f"{PREFIX}{name}/w"] for name, party in places.items()}


@pytest.mark.parametrize(
    ("settings", "rounds", "parties"),
    [
        ({"batch": 100}, 1, 2),  # one client, one step
        ({}, 1, 4),
        ({"momentum": 0.9, "epochs": 2}, 3, 4),
        ({"optimiser": "adam", "lr": 0.01}, 2, 4),
        ({"top_optimiser": "adam", "top_lr": 0.01}, 2, 4),
    ],
)
def test_the_steps_are_those_of_the_unsplit_network(settings: dict[str, Any], rounds: int, parties: int) -> None:
    own = algorithm(**settings)
    expected = Whole(own).train_unsplit(own, rounds, parties)
    pieces = trained(run(own, rounds, parties))
    assert max(float((pieces[name] - expected[name]).abs().max()) for name in expected) < 1e-12


def test_clients_hand_their_pieces_on_and_send_the_server_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, tuple[str, ...]]] = []
    plain = routing.converse

    def watched(talks: Any, check: Any) -> Any:
        def noted(sender: int, receiver: int, number: int, message: Any) -> Any:
            assert all(tensor.is_floating_point() or not tensor.numel() for tensor in message.values())
            seen.append((sender, receiver, tuple(name.split("/")[0] for name in message)[:1]))
            return check(sender, receiver, number, message)

        return plain(talks, noted)

    monkeypatch.setattr(routing, "converse", watched)
    run(algorithm(batch=100), 1, eval_every=5)
    handed = [(a, b) for a, b, kind in seen if kind == ("split",)]
    assert handed[:3] == [(0, 2), (2, 3), (3, 0)]
    assert {kind for a, b, kind in seen if SERVER in (a, b)} == {("activations",), ("gradient",)}


def test_the_clients_evaluate_with_the_server() -> None:
    own = algorithm(optimiser="adam", lr=0.02)
    result, whole = run(own, 3), Whole(own)
    for name, vector in trained(result).items():
        each = whole.objectives[name]
        each.spec.load(whole.pieces[name], Params(vector, each.initial.stats, each.initial.counts))
    tests = [samples(party, True) for party in (0, 2, 3)]
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(whole(x), y)) for x, y in tests]
    weights = [len(x) for x, _ in tests]
    expected = sum(loss * n for loss, n in zip(losses, weights, strict=True)) / sum(weights)
    assert result.history[-1]["loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"server": 9}, "server: there is no party 9; the job has 4 parties"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"momentum": 0.5, "optimiser": "adam"}, "momentum is for the optimiser 'sgd'"),
    ],
)
def test_bad_settings_get_one_sentence(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(algorithm(**fields), 1)
