"""Parties that lie beside their updates: about frozen parameters, running statistics and counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Stage, experiment, samples
from liars import answer
from torch import nn

from hansa.numerics.objective import Objective
from hansa.plumbing import codec

NET = "test_lying_buffers:net"


def net() -> nn.Module:
    """A frozen layer, a BatchNorm and a layer that is trained."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


rounds: list[int] = []


def moves_the_frozen_base() -> None:
    """First among the statistics, where it was in version 0.1.0, then as a tensor of its own."""

    def change(op: Any, payload: Any, reply: Any) -> Any:
        if op.update is None:
            return reply
        rounds.append(0)
        moved = torch.full((16,), 0.25)
        if len(rounds) == 1:
            reply.tensors["stats"] = torch.cat([moved, reply.tensors["stats"]])
        else:
            reply.tensors["frozen"] = moved
        return reply

    answer(change)


def lies_about_buffers() -> None:
    def change(op: Any, payload: Any, reply: Any) -> Any:
        if op.update is None:
            return reply
        rounds.append(0)
        if len(rounds) == 1:
            reply.tensors["stats"][:] = 1e30
        elif len(rounds) == 2:
            reply.tensors["stats"][4:] = -1.0
        else:
            reply.maxima["counts"][:] = 2**52
        return reply

    answer(change)


@pytest.mark.slow
def test_nobody_moves_frozen_parameters_and_lies_about_buffers_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    people = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "cid", "dan"))}
    lies = {"cid": "test_lying_buffers:moves_the_frozen_base", "dan": "test_lying_buffers:lies_about_buffers"}
    stage = Stage(tmp_path, people, dict.fromkeys(people, f'functions = ["{NET}"]\n'), lies)
    settings = stage.federation.folder / "federation.toml"
    text = settings.read_text()
    assert "# functions = []" in text
    settings.write_text(text.replace("# functions = []", f'functions = ["{NET}"]'))
    with stage:
        job = stage.run(experiment(task={"model": NET}, run={"rounds": 3}))
        assert job["status"] == "finished", job["reason"]
        stage.operator.pull(job["job"], tmp_path / "model")
    words = [("stats has the shape", "moved by 1e+30"), ("it has the tensors", "variances is negative"),
             ("it has the tensors", "counters moved by")]  # fmt: skip
    for line, (cid, dan) in zip(job["rounds"], words, strict=True):
        assert line["replies"] == 2
        assert cid in line["rejected"]["cid"] and dan in line["rejected"]["dan"]
    made = codec.decode((tmp_path / "model").read_bytes())["params"]
    start = Objective(net, "cross_entropy", 0).frozen
    assert all(torch.equal(made[name], value) for name, value in start.items())
    assert float(made["1.running_var"].min()) >= 0 and float(made["1.running_mean"].abs().max()) < 10
    assert int(made["1.num_batches_tracked"]) == 3 * 3  # three steps in each round
