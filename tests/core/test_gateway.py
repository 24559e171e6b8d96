"""The gateway to samples: every op that reads samples goes through it, and fails when it refuses."""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from hansa.core.errors import HansaError, PartyError
from hansa.core.gateway import Purpose, SampleGateway
from hansa.core.objective import Objective
from hansa.core.op import Memory, Op, Party, Payload, Wrapper, perform, unwrap
from hansa.core.registry import registered, to_config
from hansa.data.describe import Describe
from hansa.experiment.config import parse
from hansa.kernel.gateway import GuardedGateway
from hansa.models import Logistic
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine
from hansa.testing import TREE

SOURCE = Path(hansa.__file__).parent
# Ops that hold keys, shares, sizes, models or the proof of a preparation, and never a sample.
PREPARING = {"apply-standardise", "apply-table", "keep-features", "standardise-own", "weigh-classes"}
NEVER = {"samples", "own-model", "route-keys", "deliver", *PREPARING} | {
    f"secure-{name}" for name in (
        "keys", "shares", "consistent", "unmask", "paillier-key", "paillier-open", "functional-key",
        "functional-ready", "ckks-key", "ckks-open",
        "threshold-deal", "threshold-open", "threshold-ready", "threshold-recall",
    )
}  # fmt: skip
# Encrypted sums take minutes: their wrappers are checked by their code, see below.
ENCRYPTED = {"secure-ckks", "secure-functional", "secure-paillier", "secure-threshold"}
SEALED = {"route-send", "route-receive"}  # a simulation runs their inner op alone


class Watched(SampleGateway):
    """Notes the purposes of readings; with `refuses`, refuses them all."""

    def __init__(self, samples: SampleGateway, refuses: bool = False) -> None:
        super().__init__(samples._train, samples._test, samples.header, samples._before, samples.kinds, samples.table)
        self.refuses, self.read = refuses, set[Purpose]()

    def admit(self, purpose: Purpose) -> None:
        self.read.add(purpose)
        if self.refuses:
            raise PartyError("the owner refuses")


class FullLedger:
    """A ledger whose quotas and budget are spent."""

    def charge(self, ask: str, op: Any, n: int, payload: Any) -> float | None:
        raise PartyError("the ledger is full")

    def evaluate(self, ask: str) -> None:
        raise PartyError("the ledger is full")

    def match(self, ask: str) -> None:
        raise PartyError("the ledger is full")


@dataclass
class Watch:
    """Runs every op of a simulation three times: as it is, and with gateways that refuse."""

    purposes: dict[str, set[Purpose]] = field(default_factory=lambda: defaultdict(set))
    faults: list[str] = field(default_factory=list)

    def run(self, op: Op, party: Party, payload: Payload, memory: Memory) -> Outcome:
        closed, open_ = Watched(party.data, refuses=True), Watched(party.data)
        guarded = GuardedGateway(party.data, FullLedger(), op, payload)
        guarded.open("ask")
        refused, spent = (self._reason(op, replace(party, data=data), payload, memory) for data in (closed, guarded))
        outcome = perform(op, replace(party, data=open_), payload, memory)
        for part in (*unwrap(op)[0], unwrap(op)[1]):
            self.purposes[part.name] |= open_.read
        if open_.read and refused != "the owner refuses":
            self.faults.append(f"{op.name} answered although its samples were refused")
        if open_.read and spent != "the ledger is full":
            self.faults.append(f"{op.name} answered although its budget or quota was spent")
        if closed.read and not open_.read:
            self.faults.append(f"{op.name} reads only when it is refused")
        return outcome

    @staticmethod
    def _reason(op: Op, party: Party, payload: Payload, memory: Memory) -> Any:
        try:
            return perform(op, party, payload, {k: v.clone() for k, v in memory.items()})
        except HansaError as error:
            return str(error)


@pytest.fixture(scope="module")
def watch() -> Watch:
    """All algorithms, selectors, preparations and secure sums, watched."""
    seen = Watch()

    def one(self: ReferenceEngine, op: Op, job: PartyWork, round: int) -> Outcome:
        return seen.run(op, self.party(job.party, round), job.payload, dict(job.memory))

    def simulate(**tables: Any) -> None:
        run = {"rounds": 1, "seed": 3, "engine": "reference", **tables.pop("run", {})}
        experiment = parse({**TREE, "algorithm": "fedavg", **tables, "run": run})
        hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings(), progress=False)

    plain = {name: value for name, value in TREE["task"].items() if name != "prepare"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceEngine, "one", one)
        for part in registered("algorithm").values():
            if part.__module__.startswith("hansa."):
                kind = "public_pairs" if getattr(part, "public_targets", False) else "public_samples"
                public = {"public": f"hansa.testing:{kind}"} if getattr(part, "uses_public", False) else {}
                deep = {"model": {"name": "2nn", "hidden": 4}} if getattr(part, "models", "one") == "widths" else {}
                rounds = {"rounds": 3} if deep else {}  # FedMA sends the shares of classes in its last stage
                simulate(task={**TREE["task"], **public, **deep}, algorithm=to_config(part()), run=rounds)
        simulate(algorithm={"name": "boosting", "cuts": "sketch", "held_out": 0.3})
        simulate(algorithm={"name": "boosting", "cuts": "extents"})
        simulate(algorithm={"name": "boosting", "cuts": "pax"})
        simulate(task=plain, algorithm={"name": "boosting", "cuts": "public", "span": [-1, 1], "sigma": 1.0})
        simulate(algorithm={"name": "random-forest", "growth": "local", "trees": 10})
        numbers = hansa.Task(None, "mse", [(torch.tensor([[0.0, 1], [1, 2], [1, 3]]), torch.rand(3))] * 2)
        hansa.simulate(hansa.Boosting(categorical=(0,)), numbers, rounds=1, engine="reference", progress=False)
        simulate(algorithm={"name": "fsvrg", "form": "full"})
        simulate(algorithm={"name": "fednova", "local": {"name": "sgd"}})
        simulate(algorithm={"name": "prunefl", "interval": 1}, run={"rounds": 3})
        simulate(privacy={"bound": 1.0})
        simulate(run={"compress": "int8"})
        simulate(task={**TREE["task"], "class_weight": "balanced"})
        simulate(run={"finetune": {"epochs": 1}})
        simulate(run={"metrics": ["f1", {"name": "recall", "by": 0, "edges": [0]}]})
        for selector in ("power-of-choice", "weighted", "tiers"):
            simulate(run={"select": selector, "cohort": 0.75})
        for local in ("adam", "dp-sgd", "gradient"):
            simulate(task=plain, algorithm={"name": "fedavg", "local": {"name": local}})
        simulate(privacy={"secure": {"name": "masking"}})
        columns = {"a": [1.0, 2.0, 4.0], "b": ["x", "y", "x"], "c": [1.0, 2.0, 4.0]}
        options = {"b": {"min_count": 1}, "c": {"bins": 2, "bounds": [0, 4]}}
        table = hansa.Task(Logistic((3,), 2), parties=[(columns, [0, 1, 0])] * 2,
                           prepare=hansa.ColumnTransformer(columns=options))  # fmt: skip
        hansa.simulate(hansa.FedAvg(), table, rounds=1, engine="reference", progress=False)
        simulate(
            task=plain, privacy={"dp": {"name": "central", "sigma": 1.0, "clip": 1.0}}, run={"eval_parties": False}
        )
    x = torch.ones(4, 2)
    describes = Party(0, Objective(None, "mse", 0), SampleGateway((x, x[:, 0]), (x, x[:, 0])), 0)
    seen.run(Describe(), describes, {}, {})
    return seen


def test_every_op_that_reads_samples_fails_when_the_gateway_refuses(watch: Watch) -> None:
    assert not watch.faults


def test_every_registered_op_was_watched(watch: Watch) -> None:
    parts = {**registered("op"), **registered("local")}
    ours = {name for name, part in parts.items() if part.__module__.startswith("hansa.")}
    read = {name for name, purposes in watch.purposes.items() if purposes}
    assert ours - read == NEVER | ENCRYPTED | SEALED
    assert not read & NEVER


def test_wrappers_that_encrypt_reach_samples_only_through_their_inner_op() -> None:
    for name in ENCRYPTED | SEALED:
        wrapper = registered("op")[name]
        assert issubclass(wrapper, Wrapper) and (wrapper.run is Wrapper.run or name in SEALED)
        source = inspect.getsource(sys.modules[wrapper.__module__])
        assert not re.search(r"party\.(samples|data)", source)


def test_an_op_names_one_purpose(watch: Watch) -> None:
    inner = {name: purposes for name, purposes in watch.purposes.items() if name in registered("local")}
    assert set.union(*inner.values()) == {"train"}
    assert watch.purposes["evaluate"] == {"evaluate"} and watch.purposes["describe"] == {"describe"}
    assert watch.purposes["loss"] == watch.purposes["class-moments"] == {"statistics"}


def test_no_other_module_touches_the_samples_behind_the_gateway() -> None:
    allowed = {"core/gateway.py", "kernel/gateway.py"}
    for path in sorted(SOURCE.rglob("*.py")):
        if str(path.relative_to(SOURCE)) not in allowed:
            assert not re.search(r"data\._(train|test)\b|samples\._(train|test)\b", path.read_text()), path


def test_a_preparation_must_keep_the_shape_of_a_sample() -> None:
    gateway = SampleGateway((torch.ones(5, 3), torch.ones(5)), (torch.ones(2, 3), torch.ones(2)))
    gateway.transform(lambda x: 2 * x)
    assert torch.equal(gateway.train("train")[0], torch.full((5, 3), 2.0))
    assert torch.equal(gateway.test("evaluate")[0], torch.full((2, 3), 2.0))
    with pytest.raises(PartyError, match="another shape"):
        gateway.transform(lambda x: x + torch.ones(5, 3))


def test_a_party_without_samples_says_so() -> None:
    empty = SampleGateway((torch.ones(0, 3), torch.ones(0)))
    assert empty.n == 0 and empty.tests is None
    with pytest.raises(PartyError, match="no samples"):
        Party(0, Objective(None, "mse", 0), empty, 0).samples("train")
    with pytest.raises(PartyError, match="no test samples"):
        empty.test("evaluate")
