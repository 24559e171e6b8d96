"""What a party stores, and how the aggregator treats answers that are not replies."""

from typing import Any

import pytest
import torch

import hansa
from hansa.core.op import Reply
from hansa.core.round_record import Malformed
from hansa.privacy import spent
from hansa.testing import experiment_for
from hansa.testing.party_process import StdioParty, load
from hansa.testing.processes import _outcome


def agent() -> StdioParty:
    agent = StdioParty(load, spent)
    tree = experiment_for(hansa.DecentralizedSGD()).tree
    assert agent.handle({"type": "task", "experiment": tree, "folder": ".", "party": 0}) == {"ready": True}
    return agent


LAYOUT = {"dim": 62, "stats": 0, "counts": 0, "dtype": "float64", "stats_dtype": "float64"}
NOBODY = torch.zeros(0, dtype=torch.int64)


def gossip(agent: StdioParty, name: str, drop: list[str]) -> torch.Tensor:
    """A route in which the party has no neighbours; returns the model with which it began."""

    def ask(part: str, op: dict[str, Any], payload: dict[str, Any], drop: list[str]) -> Any:
        message = {"type": "ask", "id": f"{name}.{part}", "op": {"kind": "op", **op}, "payload": payload, "round": 0}
        return agent.handle({**message, "drop": drop})["reply"]["tensors"]

    inner = {"name": "gossip", "inner": {"name": "sgd", "steps": 1, "batch": None}}
    payload = {**LAYOUT, "mixing": {"ids": torch.zeros(1, dtype=torch.int64), "weights": torch.ones(1).double()}}
    model: torch.Tensor = ask("own", {"name": "own-model"}, LAYOUT, drop)["w"]
    sending = {"sender": 0, "receivers": NOBODY, "receives": True}
    ask("send", {"name": "route-send", "inner": inner}, {**payload, "route": sending}, [])
    ask("receive", {"name": "route-receive", "inner": inner}, {**payload, "route": {"senders": NOBODY}}, [])
    return model


def asks(name: str) -> list[str]:
    return [f"{name}.{part}" for part in ("own", "send", "receive")]


def test_a_party_keeps_what_it_staged_only_when_told_to() -> None:
    party = agent()
    start = gossip(party, "0/round/0", [])
    party.handle({"type": "settle", "keep": [], "drop": asks("0/round/0")})
    assert party.memory == {}
    assert torch.equal(gossip(party, "1/round/0", []), start)
    party.handle({"type": "settle", "keep": asks("1/round/0"), "drop": []})
    assert not torch.equal(gossip(party, "2/round/0", []), start)


def test_a_party_does_not_build_on_a_reply_that_was_rejected() -> None:
    party = agent()
    start = gossip(party, "0/round/0", [])
    assert torch.equal(gossip(party, "0/round/1", asks("0/round/0")), start)


def test_an_op_that_is_not_registered_is_refused() -> None:
    party = agent()
    message = {
        "type": "ask",
        "id": "0",
        "op": {"kind": "op", "name": "os.system"},
        "payload": {},
        "round": 0,
        "drop": [],
    }
    with pytest.raises(hansa.ConfigError, match=r"unknown op 'os\.system'"):
        party.handle(message)


@pytest.mark.parametrize(
    "answer",
    [
        {"reply": []},
        {"reply": {"tensors": {}}},
        {"reply": {**Reply({}).tree(), "weight": torch.tensor(float("nan"))}},
        {"reply": {**Reply({}).tree(), "weight": torch.tensor(2.9)}},
        {"reply": {**Reply({}).tree(), "weight": 3}},
        {"reply": {**Reply({}).tree(), "tensors": [1, 2]}},
        {"reply": {**Reply({}).tree(), "tensors": {"w": "text"}}},
        {"reply": {**Reply({}).tree(), "metrics": {"loss": torch.zeros(2)}}},
        {"malformed": "not a message"},
    ],
)
def test_an_answer_that_is_no_reply_is_a_rejection_and_not_a_crash(answer: Any) -> None:
    assert isinstance(_outcome(answer), Malformed)
