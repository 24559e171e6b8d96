"""A simulated joint network scores people by their ids, as the unsplit network does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_split import SHAPES, Whole, algorithm, people, run, task, trained

import hansa
from hansa.core.op import Party
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.sim import runtime
from hansa.vertical.split_ops import PLACES
from hansa.vertical.split_scores import SplitScores

IDS = ["Person  03", "person 17", "nobody"]


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_the_outputs_of_the_unsplit_network(shape: str) -> None:
    own = algorithm(**SHAPES[shape])
    result, whole = run(own), Whole(own)
    for name, vector in trained(result).items():
        torch.nn.utils.vector_to_parameters(vector, whole.pieces[name].parameters())
    xs = {p: torch.stack([people(p)[0][people(p)[2].tolist().index(f"person {k}")] for k in ("03", "17")])
          for p in range(3)}  # fmt: skip
    scores = result.predict(ids=IDS)
    assert (scores[:2] - whole(xs)).abs().max() < 1e-12
    assert torch.isnan(scores[2]).all()


def test_asking_changes_nothing_and_can_be_repeated() -> None:
    result = run(algorithm())
    before = {party: dict(memory) for party, memory in result.memories.items()}
    first, second = result.predict(ids=IDS[:2]), result.predict(ids=IDS[:2])
    assert torch.equal(first, second)
    assert all(torch.equal(before[p][name], memory[name]) for p, memory in result.memories.items() for name in memory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": ["a", "A "]}, "the id 'a' is there twice"),
        ({"ids": []}, "there is no id"),
        ({"ids": ["a", " "]}, "the id number 2 is empty"),
        ({"ids": ["a"], "party": 1}, "either samples, or ids="),
        ({}, "either samples, or ids="),
    ],
)
def test_bad_asks_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        run(algorithm()).predict(**arguments)


def test_a_model_in_one_place_is_not_asked_by_ids() -> None:
    x = torch.ones(4, 2)
    own = hansa.Task(hansa.models.Logistic((2,), 2), parties=[(x, torch.tensor([0, 1, 0, 1]))] * 2)
    with pytest.raises(ConfigError, match="fedavg does not score people by their ids"):
        hansa.simulate(hansa.FedAvg(), own, rounds=1).predict(ids=["a"])


def test_of_job_is_for_federations() -> None:
    with pytest.raises(ConfigError, match=r"ask a simulated network with result.predict\(ids=...\)"):
        run(algorithm(of_job="split-1", people=("a",)))
    with pytest.raises(ConfigError, match="of_job and people belong together"):
        algorithm(of_job="split-1")
    with pytest.raises(ConfigError, match="a hash is there twice"):
        algorithm(of_job="split-1", people=("a", "a"))


def _talk(result: hansa.Result, party: int, change: dict[str, Any], memory: dict[str, Any] | None = None) -> None:
    own: Any = result.training.algorithm
    payload = {**result.state.slots["roles"], "rows": 1, "people": ["a"], "salt": "", **change}
    engine = result.training.runtime.engine  # type: ignore[attr-defined]
    here: Party = engine.party(party, 0)
    kept = dict(result.memories[party]) if memory is None else memory
    next(SplitScores(own.bottoms, own.middle, own.head, own.dtype).talk(here, payload, kept))


def test_a_party_sends_activations_only_to_the_party_that_joined_them_in_training() -> None:
    result = run(algorithm())
    _talk(result, 0, {})
    with pytest.raises(PartyError, match="other parties joined it"):
        _talk(result, 0, {"joins": 2})
    with pytest.raises(PartyError, match="other parties joined it"):
        _talk(result, 0, {"holder": 2})
    with pytest.raises(PartyError, match="no trained piece"):
        _talk(result, 0, {}, {PLACES: result.memories[0][PLACES]})


@pytest.mark.parametrize("change", [{"people": ["a", "a"], "rows": 2}, {"people": ["a", "b"]}, {"people": [1]},
                                    {"people": "a"}, {"salt": 3}])  # fmt: skip
def test_a_malformed_ask_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PartyError, match="malformed ask: expected a salt, and one hash per person"):
        _talk(run(algorithm()), 0, change)


def test_the_parties_tell_each_other_whom_they_hold_and_the_aggregator_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {}
    combine = runtime.combine

    def watch(ask: Any, outcomes: Any, *more: Any) -> Any:
        listed = list(outcomes)
        replies.update({party: set(reply.tensors) for party, reply in listed if not isinstance(reply, str)})
        return combine(ask, iter(listed), *more)

    few = task()
    assert few.ids is not None
    few = replace(few, ids=[few.ids[0], few.ids[1], [f"other {k}" for k in range(len(few.ids[2]))]])
    result = run(algorithm(columns=(0, 1)), task=few)
    monkeypatch.setattr(runtime, "combine", watch)
    result.predict(ids=IDS)
    assert replies[0] == {"unknown"} and replies[1] == {"unknown", "scored", "scores"}
