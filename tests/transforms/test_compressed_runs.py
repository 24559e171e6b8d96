"""Runs whose parties pack their updates: every algorithm, verb and engine; true bytes; refusals with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from own_transforms import Carry, Halves
from torch import Tensor, nn

import hansa
from hansa.core.algorithm import State
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register, registered
from hansa.experiment.config import parse_set, read
from hansa.local import DPSGD, SGD, Controlled
from hansa.plumbing.errors import ConfigError
from hansa.sim.stacked import StackedEngine
from hansa.testing import check_engines, check_replay, experiment_for
from hansa.testing.transforms import _party as party_of_suite
from hansa.transforms import Clip, ClippedUpdate, Int8, Packed, Transform
from shapes import by_shape
from small_tasks import learnable

ALGORITHMS = {
    name: part
    for name, part in registered("algorithm").items()
    if part.__module__.startswith("hansa.") and part.trains and not part.packs and "route" not in part().verbs  # type: ignore[attr-defined]
}
LOCAL = SGD(lr=0.1, steps=4, batch=8)
SEEN: list[Any] = [hansa.FedAvg(local=LOCAL), hansa.FedAvg(local=LOCAL, fusion="median")]  # type: ignore[arg-type]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.Linear(30, 3)).double()


def task(model: Any = mlp, parties: int = 6) -> hansa.Task:
    *pairs, test = learnable([16 + 3 * k for k in range(parties)] + [40])
    return hansa.Task(model, "cross_entropy", pairs, test=test, classes=3)


def run(algorithm: hansa.Algorithm | None = None, given: hansa.Task | None = None, **settings: Any) -> hansa.Result:
    chosen = algorithm or hansa.FedAvg(local=LOCAL)
    return hansa.simulate(chosen, given or task(), **{"rounds": 3, "engine": "reference", **settings})


@pytest.mark.thin(1)
@pytest.mark.parametrize("name", by_shape(ALGORITHMS))
def test_every_algorithm_that_trains_works_with_int8_in_every_engine_and_after_a_resume(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    assert isinstance(algorithm, hansa.Algorithm)
    reference = check_engines(algorithm, compress="int8")
    check_replay(algorithm, reference, compress="int8")
    plain = hansa.simulate(algorithm, experiment_for(algorithm).build_task(), **experiment_for(algorithm).settings())
    if name not in ("fedper", "fedrep", "lg-fedavg"):  # the only layer of this model is the party's own: no update
        assert sum(line["bytes_up"] for line in reference.history) < sum(line["bytes_up"] for line in plain.history)
    assert all("rejected" not in line for line in reference.history)


@pytest.mark.thin(2)
@pytest.mark.parametrize("fusion", ["median", "krum", "trimmed-mean", "geometric-median", "norm-clip"])
@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_fusions_that_see_each_update_see_the_opened_update(fusion: str, engine: str) -> None:
    algorithm = hansa.FedAvg(local=LOCAL, fusion=fusion)  # type: ignore[arg-type]
    plain, halves, small = (run(algorithm, compress=c, engine=engine) for c in (None, Halves(), "int8"))
    assert torch.equal(plain.state.params.w, halves.state.params.w)
    assert all("excluded" in line or "fusion" in line or line["replies"] == 6 for line in small.history)
    assert 0 < float((small.state.params.w - plain.state.params.w).abs().max()) < 0.1


@pytest.mark.slow
def test_a_lossless_transform_changes_no_bit_of_any_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackedEngine, "ahead", 1)  # packed tickets are not stacked, and stacks may differ in last bits
    for algorithm in (hansa.FedAvg(local=LOCAL), hansa.FedBuff(local=LOCAL, buffer=2), hansa.FSVRG(),
                      hansa.Scaffold(local=Controlled(lr=0.1, steps=4)), hansa.FedNova(), hansa.QFedAvg(),
                      hansa.FedPer(local=LOCAL), hansa.FedAvg(local=LOCAL, fusion="krum")):  # type: ignore[arg-type]  # fmt: skip
        for engine in ("reference", "stacked"):
            plain, halves = (run(algorithm, engine=engine, compress=c) for c in (None, Halves()))
            assert torch.equal(plain.state.params.w, halves.state.params.w), (algorithm.name, engine)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_memory_of_updates_whose_parameters_change_is_refused(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hansa.ConfigError, match=r"run\.compress: test-carry remembers numbers of a vector"):
        run(hansa.PruneFL(local=LOCAL), compress=Carry(), engine=engine)
    monkeypatch.setattr(Carry, "remembers", False)  # a transform that does not declare its memory
    with pytest.raises(hansa.ConfigError, match="test-carry: it remembers the numbers of an update"):
        run(hansa.PruneFL(local=LOCAL), compress=Carry(), engine=engine)


def test_bytes_up_are_those_of_the_packed_replies() -> None:
    dim = 4 * 30 + 30 + 30 * 3 + 3
    plain, small = (run(compress=c) for c in (None, "int8"))
    for before, after in zip(plain.history, small.history, strict=True):
        saved = (before["bytes_up"] - after["bytes_up"]) / 6
        assert abs(saved - (8 * dim - dim - 8)) < 200  # beside the vector, a reply has names and a weight
        assert after["bytes_down"] - before["bytes_down"] < 6 * 300
    scaffold = hansa.Scaffold(local=Controlled(lr=0.1, steps=4))
    before, after = (run(scaffold, compress=c).history[0]["bytes_up"] / 6 for c in (None, "int8"))
    assert abs(before - after - 2 * (7 * dim - 8)) < 300  # both of its vectors


def test_buffers_and_counters_of_a_model_travel_as_they_are() -> None:
    local = SGD(lr=0.0001, steps=2, batch=8)
    plain, small = (run(hansa.FedAvg(local=local), task(normed), compress=c, rounds=1) for c in (None, "int8"))
    assert torch.equal(plain.state.params.stats, small.state.params.stats)
    assert torch.equal(plain.state.params.counts, small.state.params.counts)


def watched_stacks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each stack stays whole after the wrappers around its solver; filled by the runs that follow."""
    whole: list[bool] = []
    original = StackedEngine._wrapped

    def watch(*args: Any) -> Any:
        found = original(*args)
        whole.append(found is not None)
        return found

    monkeypatch.setattr(StackedEngine, "_wrapped", watch)
    return whole


@pytest.mark.parametrize("compress", ["int8", Halves(), Carry()], ids=str)
def test_a_stacked_engine_hands_on_whole_stacks(compress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = watched_stacks(monkeypatch)
    run(engine="stacked", compress=compress, alone=True)
    assert whole and all(whole)


@register("test-quarrelsome")
@dataclass(frozen=True)
class Quarrelsome(Halves):
    """Parties with an odd number decline."""

    def pack(self, party: Party, name: str, value: Tensor, memory: Any) -> Any:
        if party.id % 2:
            raise hansa.plumbing.errors.PartyError("it does not like to be packed")  # type: ignore[attr-defined]
        return super().pack(party, name, value, memory)


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_a_party_that_declines_while_it_packs_is_missing_by_name(engine: str) -> None:
    for line in run(engine=engine, compress=Quarrelsome()).history:
        assert line["missing"] == dict.fromkeys("135", "it does not like to be packed") and line["replies"] == 3


@register("test-labels")
@dataclass(frozen=True)
class Labels(Halves):
    """Notes the labels of the asks."""

    def pack(self, party: Party, name: str, value: Tensor, memory: Any) -> Any:
        LABELS.append((party.round, party.id, name))
        return super().pack(party, name, value, memory)


LABELS: list[tuple[int, int, str]] = []


def test_no_two_vectors_of_a_party_draw_the_same_random_numbers() -> None:
    scaffold = hansa.Scaffold(local=Controlled(lr=0.1, steps=4))
    for algorithm in (hansa.FSVRG(), scaffold, hansa.FedBuff(local=LOCAL, buffer=9)):
        LABELS.clear()
        run(algorithm, compress=Labels(), cohort_size=None if algorithm.participation == "all" else 3)
        assert len(LABELS) >= 9 and len(set(LABELS)) == len(LABELS), algorithm.name
    value, party = torch.ones(300).double() / 3, party_of_suite(1)
    value[0] = 1.0
    replies = [Packed(LOCAL, Int8(), label).after(party, {}, Reply({"w": value}), {})[0] for label in ("a.0", "a.1")]
    assert not torch.equal(replies[0].tensors["w.codes"], replies[1].tensors["w.codes"])


# The party's memory of a transform.


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
@pytest.mark.parametrize("split", [False, True])
def test_what_a_party_carries_over_is_kept_with_its_memory(engine: str, split: bool) -> None:
    done = run(compress=Carry(0.05, split), engine=engine, cohort_size=3, seed=1)
    names = {"test-carry/sgd/w/a", "test-carry/sgd/w/b"} if split else {"test-carry/sgd/w"}
    asked = {name for line in done.history for name in line["cohort"]}
    assert {str(party) for party in done.memories} == asked
    reference = run(compress=Carry(0.05, split), cohort_size=3, seed=1)
    for party, memory in done.memories.items():
        assert set(memory) == names
        for name, value in memory.items():
            assert 0 < float(value.abs().max()) <= 0.025
            torch.testing.assert_close(value, reference.memories[party][name], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_what_is_left_out_of_one_round_is_sent_in_a_later_one() -> None:
    """The sum of what a party sends is the sum of its updates, up to what it still carries."""
    local = SGD(lr=1e-3, steps=1, batch=None)  # its updates are below half a step of the transform
    one = task(parties=1)
    plain, carried = (run(hansa.FedAvg(local=local), one, rounds=200, compress=c) for c in (None, Carry(0.05)))
    assert torch.equal(run(hansa.FedAvg(local=local), one, rounds=1, compress=Carry(0.05)).state.params.w,
                       run(hansa.FedAvg(local=local), one, rounds=2, compress=Carry(0.05)).state.params.w)  # fmt: skip
    assert float((carried.state.params.w - plain.state.params.w).abs().max()) < 0.03


def test_the_memory_of_a_rejected_reply_is_dropped() -> None:
    done = run(compress=Carry(0.05), max_norm=1e-6)
    assert all("empty" in line and len(line["rejected"]) == 6 for line in done.history)
    assert len(done.memories) == 0


def test_the_vectors_of_different_ops_have_memories_of_their_own() -> None:
    done = run(hansa.FSVRG(), compress=Carry(0.05))
    assert set(done.memories[0]) == {"test-carry/gradient/w", "test-carry/svrg/w"}


# The aggregator checks what it opens.


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("algorithm", [*SEEN, hansa.FedBuff(local=LOCAL, buffer=2)], ids=["reduce", "gather", "submit"])
def test_the_limit_on_norms_is_that_of_the_opened_update(algorithm: hansa.Algorithm, engine: str) -> None:
    free = run(algorithm, compress="int8", engine=engine, rounds=1)
    assert "rejected" not in free.history[0]
    tight = run(algorithm, compress="int8", engine=engine, rounds=1, max_norm=1e-3)
    assert all("the norm of its update" in why for why in tight.history[0]["rejected"].values())
    assert len(tight.history[0]["rejected"]) == 6 or "empty" in tight.history[0]


class Lying:
    """A simulated party that packs something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], None]) -> None:
        honest = Packed.after

        def after(op: Packed, party: Party, payload: Payload, reply: Reply, memory: Memory) -> Any:
            packed, kept = honest(op, party, payload, reply, memory)
            if party.id == 2:
                change(packed.tensors)
            return packed, kept

        monkeypatch.setattr(Packed, "after", after)
        monkeypatch.setattr(Packed, "after_stack", lambda *_: None)


def fill(part: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[part].fill_(value)

    return change


def set_scale(value: float) -> Callable[[dict[str, Tensor]], None]:
    return fill("w.scales", value)


HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "nan": (set_scale(torch.nan), "w.scales has values that are not finite"),
    "inf": (set_scale(torch.inf), "w.scales has values that are not finite"),
    "negative": (set_scale(-1.0), "it cannot be opened: a scale is negative"),
    "huge": (set_scale(1e300), "the norm of its update, "),
    "code": (fill("w.codes", -128), "it cannot be opened: a code is below -127"),
    "shape": (lambda tensors: tensors.update({"w.codes": tensors["w.codes"][:-1]}), "w.codes has the shape"),
    "type": (lambda tensors: tensors.update({"w.codes": tensors["w.codes"].int()}), "w.codes is torch.int32"),
    "name": (lambda tensors: tensors.update({"w": tensors.pop("w.codes")}), "it has the tensors"),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("lie", HOSTILE)
@pytest.mark.parametrize("algorithm", SEEN, ids=["reduce", "gather"])
@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_hostile_parts_reject_one_reply_by_name(
    lie: str, algorithm: hansa.Algorithm, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = HOSTILE[lie]
    Lying(monkeypatch, change)
    for line in run(algorithm, compress="int8", engine=engine, max_norm=100.0).history:
        assert list(line["rejected"]) == ["2"] and line["rejected"]["2"].startswith(reason), line
        assert line["replies"] == 5


def test_a_stack_with_one_hostile_row_loses_that_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Packed.after_stack

    def after_stack(op: Packed, parties: Any, replies: Any, memories: Any) -> Any:
        found, changed = honest(op, parties, replies, memories)  # type: ignore[misc]
        if 2 in found.parties:
            found.tensors["w.scales"][found.parties.index(2)] = -1.0
        return found, changed

    monkeypatch.setattr(Packed, "after_stack", after_stack)
    for line in run(compress="int8", engine="stacked", alone=True).history:
        assert line["rejected"] == {"2": "it cannot be opened: a scale is negative"} and line["replies"] == 5


# Attackers change an update before it is packed.


@pytest.mark.thin(2)
@pytest.mark.parametrize("attack", ["sign-flip", "alie", "gaussian", "ipm"])
@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_forged_updates_are_packed_too(attack: str, engine: str) -> None:
    algorithm = hansa.FedAvg(local=LOCAL, fusion="median")  # type: ignore[arg-type]
    adversary = {"kind": attack, "fraction": 0.34}
    plain, halves, small = (
        run(algorithm, compress=c, engine=engine, adversary=adversary) for c in (None, Halves(), "int8")
    )
    assert torch.equal(plain.state.params.w, halves.state.params.w)
    honest = run(algorithm, compress="int8", engine=engine)
    assert [line["bytes_up"] for line in small.history] == [line["bytes_up"] for line in honest.history]
    assert not torch.equal(small.state.params.w, honest.state.params.w)


def test_an_attacker_of_an_asynchronous_method_packs_its_forged_update() -> None:
    algorithm = hansa.FedBuff(local=LOCAL, buffer=2)
    adversary = {"kind": "sign-flip", "parties": [1]}
    plain, halves, honest = (
        run(algorithm, rounds=8, compress=c, adversary=a)
        for c, a in ((None, adversary), (Halves(), adversary), (Halves(), None))
    )
    assert torch.equal(plain.state.params.w, halves.state.params.w)
    assert not torch.equal(honest.state.params.w, halves.state.params.w)


def test_attackers_keep_the_memory_of_their_transform() -> None:
    done = run(compress=Carry(0.05), adversary={"kind": "sign-flip", "parties": [1]})
    assert {str(party) for party in done.memories} == set("012345")
    assert "test-carry/sgd/w" in done.memories[1]


# Together with privacy.


@pytest.mark.slow
def test_a_transform_that_commutes_with_sums_works_with_a_secure_sum() -> None:
    hidden = {"secure": "masking", "range": 8.0}
    for algorithm in (hansa.FedAvg(local=LOCAL), hansa.Scaffold(local=Controlled(lr=0.1, steps=4))):
        plain, halves = (run(algorithm, compress=c, privacy=hidden) for c in (None, Halves()))
        assert torch.equal(plain.state.params.w, halves.state.params.w)
        assert all("missing" not in line and "empty" not in line for line in halves.history)
    bounded = {**hidden, "bound": 0.05}
    plain, halves = (run(compress=c, privacy=bounded) for c in (None, Halves()))
    assert torch.equal(plain.state.params.w, halves.state.params.w)
    assert not torch.equal(plain.state.params.w, run(privacy=hidden).state.params.w)


def test_a_transform_that_commutes_with_sums_works_under_central_privacy() -> None:
    for secure in ({}, {"secure": "masking", "range": 8.0}):
        private = {**secure, "dp": {"kind": "central", "sigma": 0, "clip": 0.05}}
        plain, halves = (run(compress=c, privacy=private, eval_parties=False) for c in (None, Halves()))
        torch.testing.assert_close(plain.state.params.w, halves.state.params.w, rtol=0, atol=1e-9 if secure else 1e-15)
    noisy = {"dp": {"kind": "central", "sigma": 1.0, "clip": 0.05, "delta": 1e-5}}
    plain, halves = (run(compress=c, privacy=noisy, eval_parties=False) for c in (None, Halves()))
    assert [line["epsilon"] for line in plain.history] == [line["epsilon"] for line in halves.history]


def test_clip_on_the_axis_is_the_clip_of_privacy_bound() -> None:
    for engine in ("reference", "stacked"):
        bound, axis = run(privacy={"bound": 0.05}, engine=engine), run(compress=Clip(0.05), engine=engine)
        assert torch.equal(bound.state.params.w, axis.state.params.w)
        assert not torch.equal(axis.state.params.w, run(engine=engine).state.params.w)
        assert [line["bytes_up"] for line in bound.history] == [line["bytes_up"] for line in axis.history]


def test_clip_bounds_the_updates_that_a_robust_fusion_sees() -> None:
    clipped = run(hansa.FedAvg(local=LOCAL, fusion="krum"), compress={"name": "clip", "clip": 1e-3}, rounds=1)  # type: ignore[arg-type]
    start = run(hansa.FedAvg(local=LOCAL, fusion="krum"), rounds=1, max_norm=1e-12)  # type: ignore[arg-type]
    assert float((clipped.state.params.w - start.state.params.w).norm()) <= 1e-3 * (1 + 1e-9)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_private_training_costs_the_same_however_its_updates_travel(engine: str) -> None:
    algorithm = hansa.FedAvg(local=DPSGD(sigma=1.0, epsilon=50.0, batch=8, steps=3))
    plain, small = (run(algorithm, compress=c, engine=engine) for c in (None, "int8"))
    for before, after in zip(plain.history, small.history, strict=True):
        assert after["epsilon"] == before["epsilon"] > 0 and after["epsilons"] == before["epsilons"]
        assert after["bytes_up"] < before["bytes_up"] / 2
    op = Int8().around(algorithm.local)
    assert op.budget == algorithm.local.budget and op.release(20, {}) == algorithm.local.release(20, {})


class Protocol:
    async def reduce(self, fed: Federation, ask: Any) -> Any:
        return await ask


def test_a_protocol_of_ones_own_may_sum_in_the_clear() -> None:
    plain, halves = (run(compress=c, protocol=Protocol()) for c in (None, Halves()))
    assert torch.equal(plain.state.params.w, halves.state.params.w)


@register("test-no-update")
@dataclass(frozen=True)
class NoUpdate(Op):
    """An op whose reply is not an update."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"x": torch.ones(2)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"x": ((2,), torch.float32)}


@register("test-asks-for-no-update")
@dataclass(frozen=True)
class AsksForNoUpdate(hansa.Algorithm):
    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"reduce"})

    async def round(self, fed: Federation, state: State) -> State:
        await fed.reduce(NoUpdate(), {})
        return state


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: run(hansa.DecentralizedSGD(), compress="int8"), "the parties of d-psgd send whole models"),
        (lambda: run(hansa.GaussianNB(), compress="int8"), "run.compress: the parties of naive-bayes send no updates"),
        (lambda: run(AsksForNoUpdate(), compress="int8"), "asks the parties for no update that 'int8' could change"),
        (lambda: run(compress="int8", privacy={"secure": "masking"}), "before they are opened, and a secure sum adds"),
        (lambda: run(compress="int8", protocol=Protocol()), "before they are opened, and protocol= adds"),
        (lambda: run(compress="int8", privacy={"dp": {"kind": "central", "sigma": 1.0}}), "privacy.dp would not hold"),
        (lambda: run(compress="int8", privacy={"bound": 1.0}), "privacy.bound would not hold"),
        (lambda: run(compress=Halves(), privacy={"bound": 1.0}), "privacy.bound: the aggregator checks the length"),
        (lambda: run(compress=Halves(), privacy={"dp": {"kind": "central", "sigma": 1.0}}, max_norm=1.0),
         "run.max_norm: with privacy.dp and run.compress = 'test-halves'"),
        (lambda: run(compress="int8", adversary={"kind": "bit-flip", "mode": "dimensional", "fraction": 0.5}),
         "corrupts the numbers of updates on their way"),
        (lambda: run(hansa.FedAvg(local=ClippedUpdate(LOCAL, 1.0)), compress="int8"),  # type: ignore[arg-type]
         "run.compress: int8: it can make an update longer than 1, the length to which 'clip' clips it"),
        (lambda: run(hansa.FedAvg(local=Packed(LOCAL, Int8())), compress="int8"),  # type: ignore[arg-type]
         "the algorithm's local solver packs its updates already"),
        (lambda: run(hansa.FedAvg(local=Packed(LOCAL, Int8())), privacy={"secure": "masking"}),  # type: ignore[arg-type]
         "local: 'int8' sends numbers that cannot be added"),
        (lambda: run(compress="int9"), "run.compress: unknown transform 'int9'; did you mean 'int8'?"),
        (lambda: run(compress={"name": "int8", "block": 0}), "block must be at least 1, got 0"),
        (lambda: run(compress=3), "run.compress: expected a transform or nothing, got 3"),
        (lambda: Packed(LOCAL, Clip(1.0)), "clip keeps the form of a reply; its own op applies it"),
        (lambda: Packed(NoUpdate(), Int8()), "int8 packs updates, and 'test-no-update' sends none"),
        (lambda: Clip(0.0), "clip must be above 0"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_reason(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("?", r"\?")):
        make()


def test_a_local_solver_may_pack_by_itself() -> None:
    axis, own = run(compress="int8"), run(hansa.FedAvg(local=Packed(LOCAL, Int8(), "round.0")))  # type: ignore[arg-type]
    assert torch.equal(axis.state.params.w, own.state.params.w)


def test_the_same_names_work_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    text = '[task]\ndataset = "digits"\nmodel = "logistic"\n[partition]\nname = "iid"\nparties = 3\n[run]\nrounds = 1\n'
    path.write_text(text + 'compress = "int8"\n')
    assert read(path).run.compress == Int8()
    assert read(path, parse_set(["run.compress.block=64"])).run.compress == Int8(64)
    assert read(path, parse_set(["run.compress=clip", "run.compress.clip=2.5"])).run.compress == Clip(2.5)
    path.write_text(text + '[run.compress]\nname = "clip"\nclip = 0.5\n')
    assert read(path).run.compress == Clip(0.5)
    path.write_text(text)
    assert read(path).run.compress is None


def test_a_run_is_not_resumed_with_another_transform(tmp_path: Path) -> None:
    run(compress="int8", rounds=1, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"compress was \{'block': 1024, 'name': 'int8'\} and is None"):
        run(rounds=2, run_dir=tmp_path / "run", resume=True)


def test_every_transform_of_a_run_is_a_part() -> None:
    assert all(issubclass(part, Transform) for part in registered("transform").values())
