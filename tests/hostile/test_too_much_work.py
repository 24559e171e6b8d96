"""An aggregator that asks parties for more work than they allow: they refuse or stop, and stay connected."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import PATIENCE, Stage, experiment, samples
from liars import rewrite

from hansa.classical.domains import ValueProfile
from hansa.core.ask import op_config
from hansa.experiment.config import parse
from hansa.local import SGD
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.net.party import agent

LONG = 4  # the round whose work is within the limits, and takes very long


def _honest() -> bool:
    return (Path(os.environ["HANSA_NOTES"]).parent / "honest").exists()


def asks_too_much() -> None:
    def change(number: int, message: dict[str, Any]) -> dict[str, Any]:
        if _honest() or not isinstance(message["payload"], dict) or "model" not in message["payload"]:
            return message
        if message["round"] == 0:
            message["op"] = {**message["op"], "epochs": 10**9}
        elif message["round"] == 1:
            message["payload"] = {**message["payload"], "work": {"steps": 10**9}}
        elif message["round"] == 2:
            message |= {"op": op_config(ValueProfile(10**9)), "payload": {}}
        elif message["round"] == LONG:
            message["op"] = op_config(SGD(lr=1e-9, batch=1, steps=1_000_000))
        return message

    rewrite(change)
    offers = NetworkRuntime._offers

    def lying(self: NetworkRuntime, ask: Any, *more: Any) -> Any:
        """In one round the task names a model that fits into no memory."""
        if _honest() or ask.round != 3 or not self.task:
            return offers(self, ask, *more)
        honest, written = self.task, dict(self._written)
        self.task = {**honest, "model": {"name": "2nn", "hidden": 10**9}}
        self._written = {name: blob for name, blob in written.items() if name[0] != "task"}
        try:
            return offers(self, ask, *more)
        finally:
            self.task, self._written = honest, written

    NetworkRuntime._offers = lying  # type: ignore[method-assign]


def beats_often() -> None:
    """Not a lie: the party learns soon that nobody waits for its reply."""
    agent.HEARTBEAT = 1.0


def never_ends_a_step() -> None:
    """Work that does not come to the end of a step: its thread stays inside torch, and wakes up all the time."""

    class Endless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            while True:
                time.sleep(0.0001)

    def run(*_: Any) -> Any:
        x = torch.ones(1, requires_grad=True)
        Endless.apply(x).backward()  # type: ignore[no-untyped-call]

    SGD.run = run  # type: ignore[method-assign]


@pytest.mark.slow
def test_parties_refuse_what_is_too_much_stop_what_nobody_awaits_and_end_when_told(tmp_path: Path) -> None:
    people = {name: samples(seed=seed) for seed, name in enumerate(("ann", "bob", "cat"))}
    lies = {"aggregator": "test_too_much_work:asks_too_much", "ann": "test_too_much_work:beats_often",
            "cat": "test_too_much_work:never_ends_a_step"}  # fmt: skip
    with Stage(tmp_path, people, {"ann": "[limits]\nepochs = 7\n"}, lies, interpreters=("bob", "cat")) as stage:
        tree = experiment(run={"rounds": 6, "deadline": 600.0, "eval_parties": False})
        job, _ = stage.operator.submit(parse(tree), "greedy")
        end = time.monotonic() + 2 * PATIENCE
        while not all(
            stage.log(name).count("ask received") > LONG + 1 for name in people
        ):  # they have described their data
            assert time.monotonic() < end, stage.log("ann")
            time.sleep(0.2)
        lines = stage.operator.job(job)["rounds"]
        said = [line["missing"] for line in lines]
        for name, most in (("ann", 7), ("bob", 10000), ("cat", 10000)):
            limit = f"at most {most} epochs (limits.epochs in party.toml), and this one requests 1000000000"
            assert limit in said[0][name]
        for name in people:
            assert (
                "at most 1000000 steps (limits.steps in party.toml), and this one requests 1000000000" in said[1][name]
            )
            assert "asks about 1000000000 features" in said[2][name]
            assert "its policy allows models of at most 1000000000 parameters" in said[3][name]
        for name in ("bob", "cat"):  # in the middle of a million steps, and in the middle of one
            stage.processes[name].terminate()
        assert [stage.processes[name].wait(PATIENCE) for name in ("bob", "cat")] == [0, 0], stage.log("cat")
        assert stage.operator.stop(job)
        for name in ("bob", "cat"):
            stage.operator.revoke(name)  # or the next job would wait for them until its deadline
        (tmp_path / "honest").touch()
        after, _ = stage.operator.submit(parse(experiment(run={"rounds": 1})), "modest", min_parties=1)
        ended = stage.operator.wait(after, None)
        assert ended["status"] == "finished", (ended, stage.log("ann"))
        assert "the aggregator no longer waits for the reply" in stage.log("ann")
