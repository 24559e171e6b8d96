"""The gateway of a deployed party: purposes, quotas and budget are checked at the first reading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import Evaluate
from hansa.core.registry import register
from hansa.data.describe import Describe
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.local import SGD
from hansa.local.dp_sgd import DPSGD
from hansa.net.party.gateway import OwnerGateway
from hansa.net.party.policy import Policy
from hansa.net.party.vault import PartyVault
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.privacy import spent
from hansa.transforms import ClippedUpdate

MODEL = {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
X, Y = torch.ones(30, 2), torch.zeros(30)
ROWS = TableRows(X, Y, np.arange(30).astype(np.str_))


@register("test-peek")
@dataclass(frozen=True)
class Peek(Op):
    """A plug-in that is no evaluation and tries to read test samples."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"x": party.data.test("evaluate")[0][:1]}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"x": ((1, 2), torch.float32)}


@register("test-evaluating")
@dataclass(frozen=True)
class Evaluating(Op):
    """A plug-in that says that it evaluates."""

    evaluates: ClassVar[bool] = True

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


@pytest.fixture
def gateway(tmp_path: Path) -> Any:
    def make(op: Op, policy: str = "", ask: str = "a") -> OwnerGateway:
        (tmp_path / "party.toml").write_text(policy)
        read = Policy.read(tmp_path / "party.toml")
        vault = PartyVault(tmp_path, spent, read.privacy.budget, read.peers)
        opened = OwnerGateway(SampleGateway(ROWS, ROWS), read, vault, "job", op, {"model": MODEL})
        opened.check(held_out=False)
        opened.open(ask)
        return opened

    return make


def test_each_op_reads_for_its_own_purpose_only(gateway: Any) -> None:
    assert len(gateway(SGD()).train("train")[0]) == 30
    assert len(gateway(ClippedUpdate(SGD(), 1.0)).train("train")[0]) == 30
    assert len(gateway(Evaluate()).test("evaluate")[0]) == 30
    assert len(gateway(Describe()).train("describe")[0]) == 30
    for op, purpose in ((SGD(), "describe"), (Evaluate(), "train"), (Describe(), "statistics")):
        with pytest.raises(PartyError, match=f"may not read its samples for the purpose '{purpose}'"):
            gateway(op).train(purpose)
    for op in (SGD(), Peek(), Describe()):
        with pytest.raises(PartyError, match="purpose 'evaluate'"):
            gateway(op).test("evaluate")


def test_the_quota_of_evaluations_holds_at_the_gateway(gateway: Any) -> None:
    policy = "[budget]\nper_job = { evaluate = 1 }"
    first = gateway(Evaluate(), policy)
    first.test("evaluate")
    first.test("evaluate")  # the same ask: recorded once
    gateway(Evaluate(), policy).test("evaluate")  # a repeat of the same ask counts once
    with pytest.raises(PartyError, match="1 evaluations per job"):
        gateway(Evaluate(), policy, ask="b").test("evaluate")


def test_the_budget_is_charged_when_samples_are_read_and_not_before(gateway: Any) -> None:
    private = gateway(DPSGD(batch=5, sigma=2.0))
    private.check(held_out=False)
    assert private.spent is None and not private._ledger.vault.contents.spent
    private.train("train")
    assert private.spent == pytest.approx(spent(private._ledger.vault.contents.job_releases("job"), 1e-5))
    with pytest.raises(PartyError, match="budget"):
        gateway(DPSGD(batch=5, sigma=0.5, epsilon=0.01), ask="c").train("train")


def test_the_owners_limits_refuse_before_the_op_runs(gateway: Any) -> None:
    with pytest.raises(PartyError, match=r"limits\.epochs"):
        gateway(SGD(epochs=7), "[limits]\nepochs = 5").check(held_out=False)
    with pytest.raises(PartyError, match="requires differential privacy"):
        gateway(SGD(), "[privacy]\ndp = true").check(held_out=False)


def test_a_gateway_opens_only_after_the_owners_limits_were_compared(gateway: Any) -> None:
    held = gateway(SGD())
    unchecked = OwnerGateway(held, held._policy, held._ledger.vault, "job", SGD(), {"model": MODEL})
    with pytest.raises(PartyError, match="was not compared with the owner's limits"):
        unchecked.open("b")
    unchecked.check(held_out=False)
    unchecked.open("b")


def test_a_closed_gateway_admits_nothing(gateway: Any) -> None:
    held = gateway(SGD())
    held.close()
    unopened = OwnerGateway(held, held._policy, held._ledger.vault, "job", SGD(), {"model": MODEL})
    with pytest.raises(PartyError, match="may not read"):
        unopened.train("train")
    with pytest.raises(PartyError, match="may not read"):
        held.train("train")


def test_ids_are_read_for_matching_alone_and_a_repeat_counts_once(gateway: Any) -> None:
    with pytest.raises(PartyError, match=r"its policy allows 0 asks over all jobs to match its rows .*parties; see"):
        gateway(SGD()).ids("match")
    first = gateway(SGD(), "matches = 1")
    assert len(first.ids("match")) == len(first.test_ids("match")) == 30  # one ask
    assert len(gateway(SGD(), "matches = 1").ids("match")) == 30  # a repeat of it
    with pytest.raises(PartyError, match="they are used up"):
        gateway(SGD(), "matches = 1", "b").test_ids("match")
    for op, purpose in ((SGD(), "describe"), (Evaluating(), "match"), (Describe(), "match"), (Evaluate(), "match")):
        with pytest.raises(PartyError, match=f"may not read its samples for the purpose '{purpose}'"):
            gateway(op, "matches = 9").ids(purpose)
    closed = gateway(SGD(), "matches = 9")
    closed.close()
    with pytest.raises(PartyError, match="may not read"):
        closed.ids("match")
    with pytest.raises(ConfigError, match="matches must be at least 0"):
        gateway(SGD(), "matches = -1")


def test_an_op_that_evaluates_reads_test_samples_alone_and_is_counted(gateway: Any) -> None:
    limits = "[budget]\nper_job = { evaluate = 1 }"
    assert len(gateway(Evaluating(), limits).test_features("evaluate")) == 30
    with pytest.raises(PartyError, match="1 evaluations per job"):
        gateway(Evaluating(), limits, "b").test_features("evaluate")
    with pytest.raises(PartyError, match="purpose 'train'"):
        gateway(Evaluating()).features("train")
    with pytest.raises(PartyError, match="purpose 'evaluate'"):
        gateway(SGD()).test_features("evaluate")
    with pytest.raises(PartyError, match="requires differential privacy, and 'test-evaluating' has none"):
        gateway(Evaluating(), "[privacy]\ndp = true").check(held_out=False)
