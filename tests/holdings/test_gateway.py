"""The gateway to samples: every op that reads samples goes through it, and fails when it refuses."""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from every_op import HAS_RBCL, exercise
from hansa.core.ask import Ask
from hansa.core.op import Memory, Op, Party, Payload, perform
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.core.round_record import Record
from hansa.core.wrapper import Wrapper, unwrap
from hansa.experiment.config import parse
from hansa.holdings.gateway import Purpose, SampleGateway
from hansa.kernel.gateway import GuardedGateway
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import HansaError, PartyError
from hansa.replies.replies import combine
from hansa.sim import runtime
from hansa.sim.engine import Outcome, ReferenceEngine
from hansa.testing.experiments import experiment_for

SOURCE = Path(hansa.__file__).parent
# Ops that hold keys, shares, sizes, models or the proof of a preparation, and never a sample.
PREPARING = {"apply-standardise", "apply-table", "keep-features", "standardise-own", "weigh-classes"}
MATCHING = {"psi-align", "split-same", "link-key", "link-rows", "fedv-secrets", "fedv-key", "fedv-keep"}
NEVER = {"own-model", "own-belief", "route-keys", "deliver", *PREPARING, *MATCHING} | {
    f"secure-{name}" for name in (
        "keys", "shares", "consistent", "unmask", "paillier-key", "paillier-open", "functional-key",
        "functional-ready", "ckks-key", "ckks-open",
        "threshold-deal", "threshold-open", "threshold-ready", "threshold-recall",
    )
}  # fmt: skip
# Encrypted sums take minutes: their wrappers are checked by their code, see below.
ENCRYPTED = {"secure-ckks", "secure-functional", "secure-paillier", "secure-threshold"}
UNWATCHED = (
    set[str]()
    if HAS_RBCL
    else {"psi-size", "psi-ask", "psi-answer", "psi-count", "link-filters", "fedv-batch", "tree-bins"}
)
TALKS = {
    "split-train",
    "split-test",
    "split-turns",
    "split-turns-test",
    "split-scores",
    "boost-trees",
    "forest-trees",
    "tree-test",
    "tree-scores",
    "linear-train",
    "linear-test",
    "linear-scores",
}  # sessions, which no party can run alone
TREES = {"match": "same", "key_bits": 1024, "max_depth": 1}
SEALED = {"route-send", "route-receive", "route-session"}  # a simulation runs their inner op alone


class Watched(SampleGateway):
    """Notes the purposes of readings; with `refuses`, refuses them all."""

    def __init__(self, samples: SampleGateway, refuses: bool = False) -> None:
        super().__init__(samples._train, samples._test, samples.header, samples._before, samples.kinds, samples.table)
        self.stated, self.refuses, self.read = samples.stated, refuses, set[Purpose]()

    def admit(self, purpose: Purpose) -> None:
        self.read.add(purpose)
        if self.refuses:
            raise PartyError("the owner refuses")


class FullLedger:
    """A ledger whose quotas and budget are spent."""

    def read(self, ask: str, purpose: str, op: Any, n: int, payload: Any) -> float | None:
        raise PartyError("the ledger is full")


@dataclass
class Watch:
    """Runs every op of a simulation three times: as it is, and with gateways that refuse."""

    purposes: dict[str, set[Purpose]] = field(default_factory=lambda: defaultdict(set))
    faults: list[str] = field(default_factory=list)
    summed: dict[str, set[str]] = field(default_factory=dict)  # tensors without a bound per sample, by summed op
    rejected: dict[str, dict[int, str]] = field(default_factory=dict)

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

    def combine(self, ask: Ask, outcomes: Any, rules: Any, record: Record, *more: Any) -> Any:
        """Note what an ask sums beside updates, and whose replies are rejected."""
        answer = combine(ask, outcomes, rules, record, *more)
        op = ask.op
        if ask.verb == "reduce" and op is not None and op.update is None and op.expects(ask.payload):
            self.summed.setdefault(op.name, set()).update(set(op.expects(ask.payload)) - set(op.per_sample))
            self.rejected.setdefault(op.name, {}).update(record.rejected)
        return answer

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "combine", seen.combine)
        exercise(seen.run)
    return seen


@pytest.mark.slow
def test_every_op_that_reads_samples_fails_when_the_gateway_refuses(watch: Watch) -> None:
    assert not watch.faults


def test_every_registered_op_was_watched(watch: Watch) -> None:
    parts = {**registered("op"), **registered("local")}
    ours = {name for name, part in parts.items() if part.__module__.startswith("hansa.")}
    read = {name for name, purposes in watch.purposes.items() if purposes}
    assert ours - read == NEVER | ENCRYPTED | SEALED | TALKS | UNWATCHED
    assert not read & NEVER


def test_every_op_that_is_summed_states_what_one_sample_adds(watch: Watch) -> None:
    """All tensors have a bound, or None on the op whose docstring has the reason; and honest parties keep to it."""
    assert not {name: tensors for name, tensors in watch.summed.items() if tensors}
    assert not {name: reasons for name, reasons in watch.rejected.items() if reasons}
    ours = {name: part for name, part in registered("op").items() if part.__module__.startswith("hansa.")}
    stated = {name for name, part in ours.items() if part.per_sample and not issubclass(part, Wrapper)}
    assert stated - set(watch.summed) == {"evaluate-metrics"}  # summed where a secure sum hides the counts
    for name in stated:
        bounds = ours[name].per_sample
        if isinstance(bounds, Mapping) and any(bound.most is None for bound in bounds.values()):
            assert "no bound" in str(ours[name].__doc__), name


class Closed(SampleGateway):
    """Refuses readings for one purpose."""

    closed: Purpose

    @classmethod
    def of(cls, samples: SampleGateway, closed: Purpose) -> Closed:
        out = cls(samples._train, samples._test, samples.header, samples._before, samples.kinds, samples.table)
        out.closed = closed
        return out

    def admit(self, purpose: Purpose) -> None:
        if purpose == self.closed:
            raise PartyError("the owner refuses")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("split", {"match": "same", "lr": 1e-12}),
        ("split-sequential", {"lr": 1e-12}),
        ("secureboost", TREES),
        ("column-forest", TREES),
    ],
)
def test_a_session_ends_where_the_gateway_refuses(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = experiment_for(build("algorithm", name, **fields), rounds=1).tree
    whole = {**tree["partition"], **({"overlap": 1.0} if "match" in fields else {})}
    experiment = parse({**tree, "partition": whole, "task": {**tree["task"], "prepare": None}})
    task, party_of = experiment.build_task(), ReferenceEngine.party
    shut: tuple[int, Purpose]

    def party(self: ReferenceEngine, number: int, round: int) -> Party:
        here = party_of(self, number, round)
        return replace(here, data=Closed.of(here.data, shut[1])) if number == shut[0] else here

    monkeypatch.setattr(ReferenceEngine, "party", party)
    for shut in ((1, "train"), (2, "train"), (1, "evaluate"), (2, "evaluate")):
        line = hansa.simulate(experiment.algorithm, task, **experiment.settings(), progress=False).history[-1]
        if shut[1] == "train":
            assert "empty" in line and line["missing"][str(shut[0])] == "the owner refuses"
        else:
            assert "empty" not in line and f"{shut[0]}: the owner refuses" in line["unmeasured"]


def test_wrappers_that_encrypt_reach_samples_only_through_their_inner_op() -> None:
    for name in ENCRYPTED | SEALED:
        wrapper = registered("op")[name]
        assert issubclass(wrapper, Wrapper) and (wrapper.run is Wrapper.run or name in SEALED)
        source = inspect.getsource(sys.modules[wrapper.__module__])
        assert not re.search(r"party\.(samples|data\.(?!begin_again\b))", source)


def test_an_op_names_one_purpose(watch: Watch) -> None:
    inner = {name: purposes for name, purposes in watch.purposes.items() if name in registered("local")}
    assert set.union(*inner.values()) == {"train"}
    assert watch.purposes["evaluate"] == {"evaluate"} and watch.purposes["describe"] == {"describe"}
    assert watch.purposes["loss"] == watch.purposes["class-moments"] == {"statistics"}


def test_no_other_module_touches_the_samples_behind_the_gateway() -> None:
    allowed = {"holdings/gateway.py", "kernel/gateway.py"}
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
