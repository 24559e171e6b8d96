"""An aggregator that lies about the cohort, with an enrolled colluder, against parties that require signed masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Stage, experiment, samples
from liars import note, rewrite

from hansa.net.aggregator import runtime
from hansa.net.party.vault_lines import read_vault
from hansa.net.transport.wire import Work

PARTIES = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "mallory"))}
FLOOR = "[privacy]\nsecure = true\nactive = true\n"
ROWS = ("keys", "certificates", "signatures")


def announce_a_large_cohort() -> None:
    """The job promises a cohort of ten, and sums three parties. In each round it tries another lie."""
    before: dict[str, Any] = {}

    def change(party: int, message: dict[str, Any]) -> dict[str, Any]:
        name, round = message["op"]["name"], message["round"]
        if name == "secure-unmask" or "secure" in message["payload"]:  # it is asked, and not announced
            note({"op": name, "round": round, "party": party})
        if name != "secure-shares":
            return message
        op, payload = dict(message["op"]), dict(message["payload"])
        before.setdefault("payload", payload)
        if round == 1:  # the aggregator claims that ten of fourteen are needed; three take part
            op |= {"parties": 14, "neighbours": 13}
        if round == 2:  # and the colluder stands for eight of them
            op |= {"parties": 10, "threshold": 1.0, "neighbours": 9}
            place = [0, 1, *[2] * 8]
            payload |= {"ids": torch.arange(10), **{row: payload[row][place] for row in ROWS}}
            payload["keys"] = payload["keys"].clone()
            payload["keys"][3:, 0] += torch.arange(1, 8, dtype=torch.uint8)
            payload["keys"][3:, 40] += torch.arange(1, 8, dtype=torch.uint8)
        if round == 3:  # the keys that the colluder advertised in the first round
            payload |= {row: torch.cat([payload[row][:2], before["payload"][row][2:]]) for row in ROWS}
        return {**message, "op": op, "payload": payload}

    rewrite(change)
    runtime.Work = lambda *fields: Work(*fields[:11], 10, *fields[12:])  # type: ignore[assignment,misc]


@pytest.mark.slow
def test_a_promise_of_a_large_cohort_gets_an_aggregator_no_smaller_sum(tmp_path: Path) -> None:
    """In 0.1.0 ann, who requires a cohort of ten, was summed with a colluder alone: her update was the difference."""
    policies = {"ann": f"min_cohort = 10\n{FLOOR}", "bob": FLOOR}
    lies = {"aggregator": "test_lying_cohorts:announce_a_large_cohort"}
    with Stage(tmp_path, PARTIES, policies, lies) as stage:
        job = stage.run(experiment(run={"rounds": 4}, privacy={"secure": "masking", "active": True, "threshold": 0.7}))
        asked = stage.notes()
    rounds = job["rounds"]
    assert len(rounds) == 4 and all("empty" in line for line in rounds), job
    reasons = [line["missing"]["ann"] for line in rounds]
    assert "cohort of at least 10, and 3 of the 3 parties that are asked can open the sum" in reasons[0]
    assert (
        "3 parties advertised keys; the secure sum was agreed for 14 parties, of which at least 10 must take part"
        in reasons[1]
    )
    assert "not signed by mallory" in reasons[2]
    assert "not signed by mallory" in rounds[3]["missing"]["bob"]
    assert not asked, "masked numbers were asked for"
    for party in ("ann", "bob"):
        answered = [name.split()[0] for _, name in read_vault(stage.home(party)).answered]
        assert "secure-masked" not in answered
        assert party == "bob" or "secure-shares" not in answered
