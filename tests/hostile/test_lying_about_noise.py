"""Parameters of DP-SGD that a lying aggregator chooses: what it can learn from a party with a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import Stage, experiment, samples
from liars import Message, believe_everything, note, rewrite

from hansa.core.budget import Release
from hansa.net.aggregator import reply_rules
from hansa.privacy import spent

FEATURES, RECORDS, SURE = 3, 40, 56.0  # a bias of 56 makes gradients of 5e-25, whose squares vanish in float32
SIGMA, RATE = 4.0, 2e24
ATTACK = {"name": "dp-sgd", "kind": "local", "clip": 1e-30, "sigma": SIGMA, "batch": 1, "steps": 1, "lr": RATE}
# What the aggregator asks in each round: fields of the solver, fields of `work`, and the size of the model's weights.
ROUNDS: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    *[({}, {}, 0.0)] * 8,
    ({"clip": 1e-6}, {}, 0.0),
    ({"clip": 1e-6}, {"sigma": 0.0}, 0.0),
    ({"clip": 1e-6}, {"clip": 1e-30, "lr": RATE}, 0.0),
    ({"clip": 1e-6, "lr": 1e35}, {}, 1e30),
    ({"clip": 1e-6, "sigma": 1e-300}, {}, 0.0),
    ({"clip": 1e-6, "delta": 0.999999, "epsilon": 1e9, "sigma": 3.0}, {}, 0.0),
]


def asks_for_next_to_no_noise() -> None:
    """Send the rounds above instead of the job's asks, and record the replies."""

    def change(party: int, message: Message) -> Message:
        op = message["op"]
        if op.get("name") != "dp-sgd":
            return message
        fields, work, size = ROUNDS[message["round"]]
        model = dict(message["payload"]["model"])
        w = torch.full_like(model["w"], size)
        w[-2:] = torch.tensor([0.0, SURE])
        payload = {"model": {**model, "w": w}, **({"work": work} if work else {})}
        return {**message, "op": {**ATTACK, **fields}, "payload": payload}

    def read(reply, *rest):  # type: ignore[no-untyped-def]
        if "w" in reply.tensors:
            note({"w": reply.tensors["w"]})
        return reply

    rewrite(change)
    believe_everything()
    reply_rules.received = read


def recovered(w: torch.Tensor, x: Any) -> bool:
    """Whether an update is the gradient of one record: its weights' part divided by its bias'."""
    weights, bias = w[:-2].double().view(2, FEATURES), w[-2:].double()
    found = (weights / bias.unsqueeze(1)).numpy()
    return any(bool(np.isclose(row, record, rtol=1e-3, atol=1e-3).all()) for row in found for record in x)


@pytest.mark.slow
def test_no_record_is_read_by_choosing_clip_rate_noise_or_model(tmp_path: Path) -> None:
    x, _ = samples(RECORDS, FEATURES)
    parties = {name: (x, np.zeros(RECORDS, np.int64) + np.arange(RECORDS) % 2) for name in ("ann", "bob")}
    wide = f"[privacy]\nepsilon = 1.0\nsigma = {SIGMA}\n[ranges]\nlr = [0.0, 1e40]\n"
    policies = {"ann": wide, "bob": f"{wide}clip = [0.1, 10.0]"}
    lies = {"aggregator": "test_lying_about_noise:asks_for_next_to_no_noise"}
    local = {"name": "dp-sgd", "lr": 0.1, "batch": 1, "steps": 1, "sigma": SIGMA}
    with Stage(tmp_path, parties, policies, lies) as stage:
        job = stage.run(experiment(algorithm={"name": "fedavg", "local": local}, run={"rounds": len(ROUNDS)}))
        notes = stage.notes()
        spendings = {name: stage.spent(name) for name in parties}
    answers = list({tuple(found["w"].tolist()): found["w"] for found in notes}.values())  # each is checked twice
    assert not any(recovered(w, x) for w in answers)
    assert sum(of["replies"] for books in spendings.values() for of in books["jobs"].values()) == 2
    # The answer is noise of sigma times the clip.
    noisy = answers[0].double() / RATE
    assert len(answers) == 2 and 0.3 < float(noisy.std()) / (SIGMA * 1e-6) < 3
    why = [line["missing"] for line in job["rounds"]]
    for reasons in why[:8]:
        assert all("clip must be at least 1e-06 and at most 1000000, got" in reason for reason in reasons.values())
    assert list(why[8]) == ["bob"] and "requires a clip of 0.1 to 10, and the job has 1e-06" in why[8]["bob"]
    assert all("malformed ask" in reason for reason in why[9].values())
    assert all("malformed ask" in reason for reason in why[10].values())
    assert all("sigma must lie in 1e-06 to 1e+06" in reason for reason in why[12].values())
    assert all("requires a sigma of at least 4, and the job has 3" in reason for reason in why[13].values())
    # The spending is that of the answers given.
    assert spendings["ann"]["epsilon"] == spent([Release(1 / RECORDS, SIGMA, 2)], 1e-5)
    assert spendings["bob"]["epsilon"] == 0.0
