"""Masked sums with a lying aggregator, and with a lying party: each lie is refused or named, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Stage, experiment, samples
from liars import answer, rewrite

from hansa.net.party.vault_lines import read_vault
from hansa.secure import key_agreement

pytestmark = pytest.mark.slow

NAMES = ("ann", "bob", "cid", "dan")
PARTIES = {name: samples(seed=seed) for seed, name in enumerate(NAMES)}
FLOOR = "[privacy]\nsecure = true\nactive = true\n"
ANN, DAN = 0, 3


def lie_to_ann() -> None:
    """Tell party 0 something else than the others; in each round another lie."""
    before: dict[int, Any] = {}

    def change(party: int, message: dict[str, Any]) -> dict[str, Any]:
        name, round, payload = message["op"]["name"], message["round"], dict(message["payload"])
        if party != ANN:
            return message
        without_dan = {"survivors": torch.tensor([0, 1, 2])}
        if round == 0 and name in ("secure-consistent", "secure-unmask"):  # a split view of who survived
            payload |= without_dan
        if round == 1 and name == "secure-unmask":  # dan was said to have survived, and is now said to be gone
            payload |= without_dan
        if round == 2 and name == "secure-shares":  # a key of the aggregator's own in place of dan's
            payload["keys"] = payload["keys"].clone()
            payload["keys"][DAN, :32] = torch.tensor(list(key_agreement.public(b"a" * 32)), dtype=torch.uint8)
        if name == "secure-masked" and "secure" in payload:  # it is asked, and not announced
            before[round] = payload["secure"]
            if round == 3:  # the shares of an earlier sum
                payload["secure"] = {**before[2 if 2 in before else 1]}
        return {**message, "payload": payload}

    rewrite(change)


def test_an_aggregator_that_lies_to_one_party_gets_nothing_from_it(tmp_path: Path) -> None:
    lies = {"aggregator": "test_lying_masks:lie_to_ann"}
    with Stage(tmp_path, PARTIES, dict.fromkeys(NAMES, FLOOR), lies) as stage:
        job = stage.run(experiment(run={"rounds": 5}, privacy={"secure": "masking"}))
        answered = [name.split()[0] for _, name in read_vault(stage.home("ann")).answered]
    assert job["status"] == "finished", job["reason"]
    split, gone, keys, replayed, honest = job["rounds"]
    assert "1 parties signed the same list of survivors, and 3 are the fewest" in split["missing"]["ann"]
    assert "0 parties signed the same list of survivors, and 3 are the fewest" in gone["missing"]["ann"]
    assert "the keys that the aggregator sent for party 3 are not signed by dan" in keys["missing"]["ann"]
    assert "1 of the parties that share secrets with it are left, and 3 are the fewest" in replayed["missing"]["ann"]
    assert "missing" not in honest
    assert "not signed by dan" in keys["missing"]["bob"]  # all parties are sent the keys in one message
    assert [line["replies"] for line in job["rounds"]] == [4, 4, 0, 3, 4]
    assert answered.count("secure-unmask") == 1


def open_wrongly() -> None:
    """Send a wrong share of the first party's masks."""

    def change(op: Any, payload: Any, reply: Any) -> Any:
        if op.name == "secure-unmask":
            reply.tensors["shares"][0, 0] ^= 1
        return reply

    answer(change)


def deal_wrongly() -> None:
    """Commit to another seed than that of the party's own mask."""

    def change(op: Any, payload: Any, reply: Any) -> Any:
        if op.name == "secure-shares":
            reply.tensors["seed"][0] ^= 1
        return reply

    answer(change)


@pytest.mark.parametrize("lie", ["open_wrongly", "deal_wrongly"])
def test_a_party_with_wrong_shares_is_named(tmp_path: Path, lie: str) -> None:
    """Before, the sum was wrong without a word, or could not be opened, and nobody was named."""
    with Stage(tmp_path, PARTIES, lies={"cid": f"test_lying_masks:{lie}"}) as stage:
        job = stage.run(experiment(run={"rounds": 1}, privacy={"secure": "masking"}))
    (line,) = job["rounds"]
    assert set(line["rejected"]) == {"cid"}
    if lie == "open_wrongly":
        assert line["rejected"]["cid"] == "its share of the masks of party 0 is not the one that it was dealt"
        assert line["replies"] == 4 and "empty" not in line
        assert line["train_loss"] < 1.0
    else:
        assert "do not give the seed to which it committed" in line["rejected"]["cid"]
        assert "the masks of party 2 cannot be removed" in line["empty"]
