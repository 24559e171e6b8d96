"""Attacks inside runs: which parties attack, what changes, and that all engines and resumed runs agree."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.adversary import Band
from hansa.core.ask import Ask
from hansa.core.op import Replies
from hansa.core.registry import registered
from hansa.fusion import NormClip, TrimmedMean, WeightedMean
from hansa.local import SGD, Controlled
from hansa.numerics.objective import Objective
from hansa.numerics.rows import MappedRows
from hansa.sim.workers import usable
from quadratics import ENGINES, found
from quadratics import task as quadratics

ATTACKS = sorted(registered("adversary"))
ONE_STEP = SGD(lr=1.0, steps=1, batch=None)  # on a quadratic of curvature 1, the update from 0 is the optimum itself
OPTIMA = [float(2**k) for k in range(10)]


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Dark images of 3 classes, 6 by 6; the row that is bright gives the class."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=draws)
    x = torch.rand(n, 1, 6, 6, generator=draws, dtype=torch.float64) * 0.5
    x[torch.arange(n), 0, y + 2] += 0.7
    return x, y


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()


def task(**given: Any) -> hansa.Task:
    parties = [images(n, seed) for seed, n in enumerate((20, 30, 25, 40, 20, 35))]
    return hansa.Task(**{"model": linear, "parties": parties, "test": images(200, 99), "classes": 3, **given})


def attacked(adversary: Any, algorithm: hansa.Algorithm | None = None, **settings: Any) -> hansa.Result:
    made = algorithm or hansa.FedAvg(local=SGD(lr=0.5, batch=10))
    return hansa.simulate(made, settings.pop("task", None) or task(), adversary=adversary,
                          **{"rounds": 3, "seed": 2, "engine": "reference", **settings})  # fmt: skip


def one_round(adversary: Any, engine: str = "reference", **settings: Any) -> float:
    given = quadratics([1.0] * 10, OPTIMA)
    return found(hansa.FedAvg(local=ONE_STEP), given, 1, adversary=adversary, engine=engine, **settings)


# --- who attacks ---


@pytest.mark.parametrize("engine", ENGINES)
def test_exactly_those_drawn_attack_and_they_are_the_share_rounded_down(engine: str) -> None:
    for seed in range(4):
        made = hansa.simulate(hansa.FedAvg(local=ONE_STEP), quadratics([1.0] * 10, OPTIMA), rounds=1, seed=seed,
                              adversary=hansa.SignFlip(fraction=0.39), engine=engine)  # fmt: skip
        attackers = made.training.attackers
        assert attackers is not None and len(attackers) == 3
        wanted = sum(-b if party in attackers else b for party, b in enumerate(OPTIMA)) / 10
        assert float(made.state.params.w) == pytest.approx(wanted, abs=1e-9)
        assert made.experiment["attackers"] == [str(party) for party in sorted(attackers)]


def test_the_draw_depends_on_the_seed_and_not_on_the_attack() -> None:
    drawn = {
        (name, seed): attacked({"name": name, "fraction": 0.5}, rounds=1, seed=seed).training.attackers
        for name in ("sign-flip", "label-flip") for seed in range(6)
    }  # fmt: skip
    assert all(drawn["sign-flip", seed] == drawn["label-flip", seed] for seed in range(6))
    assert len(set(drawn.values())) > 1


def test_a_fraction_is_not_lost_to_rounding() -> None:
    made = attacked(hansa.FreeRider(fraction=0.29), rounds=1, task=quadratics([1.0] * 100, [1.0] * 100))
    assert len(made.training.attackers or ()) == 29  # 0.29 * 100 is 28.999...


def test_attackers_can_be_named_by_name_and_by_number() -> None:
    names = ["ada", "ben", "cleo", "dan", "eva", "fay"]
    made = attacked(hansa.FreeRider(parties=("cleo", "4", 5)), task=task(names=names))
    assert made.training.attackers == {2, 4, 5}
    assert made.experiment["attackers"] == ["cleo", "eva", "fay"]


def test_a_run_without_an_adversary_has_no_attackers() -> None:
    made = attacked(None)
    assert made.training.attackers is None and "attackers" not in made.experiment
    assert "attack_success" not in made.history[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_honest_are_those_outside_all_groups(engine: str) -> None:
    groups = [hansa.IPM(parties=(0, 1), epsilon=0.5), hansa.FreeRider(parties=(2,)), hansa.SignFlip(parties=(3,))]
    honest = OPTIMA[4:]
    wanted = (sum(honest) - 2 * 0.5 * sum(honest) / 6 - OPTIMA[3]) / 10
    assert one_round(groups, engine) == pytest.approx(wanted, abs=1e-9)


def test_groups_that_are_drawn_have_no_member_in_common_and_spare_those_named() -> None:
    for seed in range(5):
        groups = [hansa.SignFlip(fraction=0.3), hansa.FreeRider(fraction=0.3), hansa.IPM(parties=(4,))]
        made = hansa.simulate(hansa.FedAvg(local=ONE_STEP), quadratics([1.0] * 10, OPTIMA), rounds=1, seed=seed,
                              adversary=groups)  # fmt: skip
        assert len(made.training.attackers or ()) == 7


@pytest.mark.parametrize("engine", ENGINES)
def test_attackers_outside_the_cohort_do_nothing_and_missing_ones_stay_missing(engine: str) -> None:
    away = one_round(hansa.SignFlip(parties=(9,)), engine, absent=lambda party, round: party == 9)
    assert away == pytest.approx(sum(OPTIMA[:9]) / 9)
    both = one_round(hansa.IPM(parties=(8, 9)), engine, absent=lambda party, round: party == 9)
    assert both == pytest.approx((sum(OPTIMA[:8]) - 0.5 * sum(OPTIMA[:8]) / 8) / 9)


@pytest.mark.parametrize("engine", ENGINES)
def test_where_nobody_is_honest_omniscient_attackers_send_what_they_have(engine: str) -> None:
    alone = one_round(hansa.IPM(parties=(0, 1)), engine, absent=lambda party, round: party > 1)
    assert alone == pytest.approx(sum(OPTIMA[:2]) / 2)


@dataclass(frozen=True)
class Replaced(hansa.Backdoor):
    """The model replacement of a backdoor, without its trigger, which needs images."""

    name: ClassVar[str] = "replaced"
    poisons: ClassVar[bool] = False


# --- what attacks do, and what they leave alone ---


@pytest.mark.parametrize("name", ["sign-flip", "alie", "label-flip", "bit-flip"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_group_of_nobody_changes_no_bit(name: str, engine: str) -> None:
    attack = hansa.build("adversary", name, fraction=0.0)
    assert torch.equal(attacked(attack, engine=engine).state.params.w, attacked(None, engine=engine).state.params.w)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_update_is_forged_and_memories_stay_as_computed(engine: str) -> None:
    runs = [attacked(adversary, hansa.Scaffold(), rounds=1, engine=engine)
            for adversary in (None, hansa.SignFlip(fraction=0.5))]  # fmt: skip
    honest, forged = runs
    assert not torch.equal(honest.state.params.w, forged.state.params.w)
    assert torch.equal(honest.state.slots["c"], forged.state.slots["c"])
    assert honest.history[0]["train_loss"] == forged.history[0]["train_loss"]
    for party in range(6):
        for name, kept in honest.memories[party].items():
            assert torch.equal(kept, forged.memories[party][name])


def test_data_are_poisoned_in_copies_of_the_attackers_rows_alone() -> None:
    given = task()
    before = [(x.clone(), y.clone()) for x, y in given.parties]  # type: ignore[misc]
    made = attacked([hansa.LabelFlip(parties=(1,)), hansa.Backdoor(parties=(4,), size=2)], task=given, rounds=1)
    for (x, y), (x_before, y_before) in zip(given.parties, before, strict=True):  # type: ignore[misc]
        assert torch.equal(x, x_before) and torch.equal(y, y_before)
    for party, (x_before, y_before) in enumerate(before):
        x, y = made.training.holdings.train.of(party)
        assert torch.equal(x, x_before) == (party != 4)
        assert torch.equal(y, 2 - y_before if party == 1 else y_before) == (party != 4)  # 4 relabels some as 0


def test_data_in_one_piece_are_the_tasks_own_and_stay_as_they_are() -> None:
    x, y = images(60)
    kept = (x.clone(), y.clone())
    given = task(parties=(x, y, [0, 20, 40, 60]))
    attacked([hansa.LabelFlip(parties=(1,)), hansa.Backdoor(parties=(2,), size=2)], task=given, rounds=1)
    assert torch.equal(x, kept[0]) and torch.equal(y, kept[1])


def test_an_update_that_overflows_is_rejected_and_reported() -> None:
    small = task(model=lambda: linear().float())
    made = attacked(hansa.Omniscient(parties=(2,), scale=1e60), task=small, rounds=1)
    assert made.history[0]["rejected"] == {"2": "w has values that are not finite"}
    assert made.history[0]["replies"] == 5


def test_what_was_not_finite_is_not_among_the_honest() -> None:
    parties = [images(20, seed) for seed in range(4)]
    parties[1][0][:] = torch.finfo(parties[1][0].dtype).max
    made = attacked(hansa.IPM(parties=(3,)), task=task(parties=parties), rounds=1)
    assert list(made.history[0]["rejected"]) == ["1"]
    assert bool(torch.isfinite(made.state.params.w).all())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("uniform", "lr"), [(False, 1.0), (True, 1.0), (False, 0.25)])
def test_model_replacement_gives_the_attackers_model_where_others_send_nothing(
    uniform: bool, lr: float, engine: str
) -> None:
    def run(adversary: Any, rate: float, **settings: Any) -> Tensor:
        algorithm = hansa.FedAvg(local=SGD(lr=0.5, batch=10), fusion=WeightedMean(uniform), server=hansa.Descent(rate))
        return attacked(adversary, algorithm, rounds=1, engine=engine, **settings).state.params.w

    group = {"size": 2, "parties": (0, 3)}
    alone = run(hansa.Backdoor(**group, replace=False), 1.0, absent=lambda party, round: party not in (0, 3))
    replaced = run([hansa.Backdoor(**group), hansa.FreeRider(parties=(1, 2, 4, 5))], lr)
    torch.testing.assert_close(replaced, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "fusion",
    [NormClip(bound=1e9), NormClip(bound=1e9, weighted=True), TrimmedMean(beta=0.0), WeightedMean()],
    ids=["norm-clip", "norm-clip by samples", "trimmed-mean", "mean"],
)
def test_model_replacement_counts_parties_as_the_fusion_does(fusion: Any, engine: str) -> None:
    given = quadratics([1.0] * 3, [5.0, 7.0, 11.0], sizes=[90, 10, 10])
    for member, optimum in ((0, 5.0), (1, 7.0)):
        others = tuple({0, 1, 2} - {member})
        groups = [Replaced(parties=(member,)), hansa.FreeRider(parties=others)]
        algorithm = hansa.FedAvg(local=ONE_STEP, fusion=fusion)
        assert found(algorithm, given, 1, adversary=groups, engine=engine) == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_model_replacement_knows_the_step_of_scaffold(engine: str) -> None:
    given = quadratics([1.0] * 3, [5.0, 7.0, 11.0], sizes=[90, 10, 10])
    algorithm = hansa.Scaffold(local=Controlled(lr=1.0, steps=1, batch=None), server=hansa.Descent(0.5))
    groups = [Replaced(parties=(0,)), hansa.FreeRider(parties=(1, 2))]
    assert found(algorithm, given, 1, adversary=groups, engine=engine) == pytest.approx(5.0, abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_where_the_servers_rate_ends_at_zero_a_backdoor_sends_what_it_has(engine: str) -> None:
    server = hansa.build("server", "descent", schedule={"name": "cosine", "rounds": 2, "floor": 0.0})
    algorithm = hansa.FedAvg(local=SGD(lr=0.5, batch=10), server=server)
    assert server.schedule.factor(3) == 0.0
    two, five = (attacked(hansa.Backdoor(parties=(0,), size=2), algorithm, rounds=rounds, engine=engine)
                 for rounds in (3, 5))  # fmt: skip
    assert torch.equal(two.state.params.w, five.state.params.w)
    assert hansa.Backdoor()(torch.ones(3, 2), [1], rate=0.0)[1].tolist() == [1.0, 1.0]


def test_model_replacement_follows_the_schedule_of_the_servers_rate() -> None:
    server = hansa.build("server", "descent", lr=0.5, schedule={"name": "exponential", "decay": 0.5})
    groups = [hansa.Backdoor(parties=(0,), size=2, share=0.0), hansa.FreeRider(parties=(1, 2, 3, 4, 5))]
    local = SGD(lr=0.5, batch=None, steps=1)
    two = attacked(groups, hansa.FedAvg(local=local, server=server), rounds=2).state.params.w
    alone = attacked(None, hansa.FedAvg(local=local), rounds=2, absent=lambda party, round: party != 0).state.params.w
    torch.testing.assert_close(two, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("adversary", [hansa.SignFlip(fraction=0.34, scale=10.0), hansa.IPM(fraction=0.34, epsilon=10),
                                       hansa.Omniscient(fraction=0.34), hansa.GaussianAttack(fraction=0.34),
                                       hansa.BitFlip(fraction=0.34), hansa.LabelFlip(fraction=0.67),
                                       hansa.BitFlip(fraction=0.34, mode="dimensional"),
                                       hansa.Gambler(probability=0.05)], ids=lambda a: a.name)  # fmt: skip
def test_the_attacked_mean_falls_where_the_unattacked_learns(adversary: hansa.Adversary) -> None:
    assert attacked(None, rounds=4).history[-1]["accuracy"] > 0.95
    assert attacked(adversary, rounds=4).history[-1]["accuracy"] < 0.7


# --- success of an attack ---


@pytest.mark.parametrize("prepare", [None, hansa.Standardise()])
def test_the_success_of_a_backdoor_is_the_share_of_triggered_test_images_given_the_target(prepare: Any) -> None:
    attack = hansa.Backdoor(parties=(3, 5), size=2, target=1, value=2.0, scale=1.0, share=0.7)
    made = attacked(attack, rounds=5, task=task(prepare=prepare))
    x, y = images(200, 99)
    x[:, :, :2, :2] = 2.0
    share = (made.predict(x[y != 1]).argmax(1) == 1).double().mean()
    assert made.history[-1]["attack_success"] == pytest.approx(float(share), abs=1e-12)
    assert share > 0
    clean = attacked(hansa.Backdoor(parties=(3, 5), size=2, target=1, value=2.0, replace=False, share=0.0),
                     rounds=5, task=task(prepare=prepare))  # fmt: skip
    assert clean.history[-1]["attack_success"] < made.history[-1]["attack_success"]
    assert made.summary["attack_success"] == made.history[-1]["attack_success"]


def test_the_success_of_a_label_flip_is_the_share_of_source_samples_given_the_target() -> None:
    made = attacked(hansa.LabelFlip(source=2, target=0, fraction=0.5), rounds=5)
    x, y = images(200, 99)
    share = (made.predict(x[y == 2]).argmax(1) == 0).double().mean()
    assert made.history[-1]["attack_success"] == pytest.approx(float(share))
    assert 0.2 < share < 0.8
    assert "attack_success" not in attacked(hansa.LabelFlip()).history[-1]


def test_success_is_measured_only_where_there_is_one_model_and_a_central_test() -> None:
    attack = hansa.LabelFlip(source=2, target=0)
    assert "attack_success" not in attacked(attack, task=task(test=None)).history[-1]
    tests = [images(10, seed) for seed in range(6)]
    assert "attack_success" not in attacked(attack, hansa.FedPer(), task=task(party_tests=tests)).history[-1]


# --- engines, replays, asynchronous runs ---


# Gradients at a model of 1e20 are rounding errors, on which engines need not agree.
MILD: dict[str, dict[str, Any]] = {
    "backdoor": {"size": 2}, "gambler": {"probability": 0.05, "factor": -2.0}, "bit-flip": {"bits": [22, 32]},
    "omniscient": {"scale": 1.0}, "gaussian": {"sigma": 1.0},
}  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ATTACKS)
def test_engines_agree_on_attacked_runs(name: str) -> None:
    adversary = hansa.build("adversary", name, **MILD.get(name, {}))
    reference, stacked = (attacked(adversary, engine=engine) for engine in ENGINES)
    assert reference.training.attackers == stacked.training.attackers
    w = reference.state.params.w
    torch.testing.assert_close(w, stacked.state.params.w, rtol=1e-9, atol=1e-9)
    assert not torch.equal(w, attacked(None).state.params.w)
    for a, b in zip(reference.history, stacked.history, strict=True):
        assert (a["bytes_up"], a.get("rejected")) == (b["bytes_up"], b.get("rejected"))


@pytest.mark.parametrize("engine", ENGINES)
def test_alie_counts_the_parties_that_were_asked_and_not_those_that_replied(engine: str) -> None:
    # n = 10 and m = 3: s = 3, z = Phi^-1(4 / 7). By the 8 replies s would be 2 and z Phi^-1(3 / 5).
    found = one_round(hansa.ALIE(parties=(0, 1, 2)), engine, absent=lambda party, round: party in (8, 9))
    honest = OPTIMA[3:8]
    mean, spread = statistics.fmean(honest), statistics.pstdev(honest)
    shift = statistics.NormalDist().inv_cdf(4 / 7)
    assert found == pytest.approx((sum(honest) + 3 * (mean - shift * spread)) / 8, rel=1e-12)


@pytest.mark.thin(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", [None, hansa.Scaffold(), hansa.FedAvg(fusion=NormClip())], ids=str)
@pytest.mark.parametrize("name", ["alie", "ipm", "omniscient", "backdoor"])
def test_updates_that_wait_on_disk_are_attacked_as_those_in_memory(
    name: str, algorithm: hansa.Algorithm | None, engine: str
) -> None:
    adversary = hansa.build("adversary", name, **MILD.get(name, {}))
    disk, memory = (attacked(adversary, algorithm, engine=engine, reply_memory=most) for most in (1, 2**30))
    assert torch.equal(disk.state.params.w, memory.state.params.w)


@pytest.mark.parametrize(("most", "mapped"), [(6 * 111 * 8, 0), (6 * 111 * 8 - 1, 1)])
def test_updates_wait_on_disk_where_they_take_more_memory_than_they_may(
    most: int, mapped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    temporary = MappedRows.temporary

    def noted(*given: Any) -> MappedRows:
        made.append(given)
        return temporary(*given)

    monkeypatch.setattr(MappedRows, "temporary", noted)
    attacked(hansa.IPM(), rounds=1, reply_memory=most, run_dir=tmp_path / "run")
    assert made == [(6, 111, torch.float64, tmp_path / "run")] * mapped


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ATTACKS)
def test_updates_on_a_gpu_are_attacked_as_those_on_a_cpu(name: str) -> None:
    adversary = hansa.build("adversary", name, **MILD.get(name, {}))
    cpu, gpu = (attacked(adversary, engine="stacked", device=device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(cpu.state.params.w, gpu.state.params.w.cpu(), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not usable(torch.device("cpu")), reason="needs a system that forks and more than one core")
def test_worker_processes_see_the_poisoned_data_and_give_the_references_bits() -> None:
    groups = [hansa.LabelFlip(parties=(0,)), hansa.ALIE(parties=(1, 2), z=2.0), hansa.GaussianAttack(parties=(4,))]
    reference, workers = (attacked(groups, engine=engine) for engine in ("reference", "workers"))
    assert torch.equal(reference.state.params.w, workers.state.params.w)


def test_updates_are_kept_where_an_engine_uses_its_memory_again() -> None:
    given = quadratics([1.0] * 4, [0.0] * 4)
    objective = Objective(given.model, given.loss, 0)
    band = Band((hansa.IPM(parties=(3,)),), given.holdings(objective), 0)
    payload = {"model": objective.initial._asdict(), "c": objective.initial.w}
    ask = Ask("reduce", 0, "round", 0, op=Controlled(), payload=payload, parties=(0, 1, 2, 3, 4))
    memory = torch.zeros(2, 1, dtype=torch.float64)

    def stacks() -> Iterator[Replies | tuple[int, str]]:
        yield 4, "it did not answer"
        for parties in ([0, 1], [2, 3]):
            memory.copy_(torch.tensor(parties).view(2, 1))
            yield Replies(parties, {"w": memory, "c": memory}, [1, 1])

    sent: dict[int, Any] = dict(band.forge(ask, stacks()))  # type: ignore[arg-type]
    assert [float(sent[party].tensors["w"]) for party in range(4)] == [0.0, 1.0, 2.0, -0.5]
    assert [float(sent[party].tensors["c"]) for party in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert list(sent) == [4, 0, 1, 2, 3]


def test_what_attackers_make_of_their_own_update_waits_for_nobody() -> None:
    given = quadratics([1.0] * 6, [0.0] * 6)
    objective = Objective(given.model, given.loss, 0)
    band = Band((hansa.SignFlip(parties=(3,)),), given.holdings(objective), 0)
    ask = Ask(
        "reduce", 0, "round", 0, op=ONE_STEP, payload={"model": objective.initial._asdict()}, parties=(*range(6),)
    )
    stacks = [Replies([k, k + 1], {"w": torch.tensor([[k], [k + 1]]).double()}, [1, 1]) for k in (0, 2, 4)]
    given_out = []

    def coming() -> Iterator[Replies]:
        for stack in stacks:
            given_out.append(stack)
            yield stack

    arriving = iter(band.forge(ask, coming()))
    assert next(arriving) is stacks[0]
    (_, two), (party, three) = next(arriving), next(arriving)  # type: ignore[misc]
    assert (party, float(two.tensors["w"]), float(three.tensors["w"])) == (3, 2.0, -3.0)
    assert len(given_out) == 2
    assert next(arriving) is stacks[2]
    assert float(stacks[1].tensors["w"][1]) == 3.0  # the engine's memory stays as it was


class Stopped(BaseException):
    """A run that ends between two rounds."""


BUFFERED = hansa.FedBuff(local=SGD(lr=0.5, batch=10), buffer=3)


@pytest.mark.parametrize(
    ("adversary", "algorithm"),
    [
        ([hansa.GaussianAttack(fraction=0.2), hansa.ALIE(fraction=0.2)], None),
        ([hansa.Gambler(probability=0.05), hansa.LabelFlip(share=0.5)], None),
        (hansa.BitFlip(mode="dimensional"), None),
        (hansa.GaussianAttack(fraction=0.4, sigma=1.0), BUFFERED),
    ],
)
def test_a_resumed_attacked_run_gives_the_bits_of_an_undisturbed_one(
    adversary: Any, algorithm: hansa.Algorithm | None, tmp_path: Path
) -> None:
    devices = {"compute": {"name": "exponential", "mean": 0.1}, "latency": "exponential"}
    settings: dict[str, Any] = {"devices": devices, "checkpoint_seconds": 0.0, "rounds": 4}
    whole = attacked(adversary, algorithm, **settings)

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise Stopped

    with pytest.raises(Stopped):
        attacked(adversary, algorithm, run_dir=tmp_path / "run", on_round=stop, **settings)
    resumed = attacked(adversary, algorithm, run_dir=tmp_path / "run", resume=True, **settings)
    assert torch.equal(whole.state.params.w, resumed.state.params.w)
    assert len(resumed.history) == 4


def test_a_run_does_not_go_on_with_another_adversary(tmp_path: Path) -> None:
    attacked(hansa.LabelFlip(fraction=0.5), run_dir=tmp_path / "run")
    again = {"run_dir": tmp_path / "run", "resume": True, "rounds": 4}
    with pytest.raises(hansa.ConfigError, match=r"begun with another adversary .*group 0 was .*label-flip"):
        attacked(hansa.LabelFlip(fraction=0.4), **again)
    with pytest.raises(hansa.ConfigError, match=r"begun with another adversary .*is None"):
        attacked(None, **again)
    assert len(attacked(hansa.LabelFlip(fraction=0.5), **again).history) == 4


def test_attackers_whose_updates_arrive_one_by_one_forge_their_own() -> None:
    optima = [3.0] * 4
    algorithm = hansa.FedBuff(local=ONE_STEP, buffer=4, refill="flush")
    runs = {
        name: found(algorithm, quadratics([1.0] * 4, optima), 1, adversary=adversary)
        for name, adversary in (("none", None), ("flip", hansa.SignFlip(fraction=1.0)),
                                ("some", hansa.FreeRider(parties=(0,))), ("nobody", hansa.SignFlip(fraction=0.0)))
    }  # fmt: skip
    assert runs["flip"] == pytest.approx(-runs["none"])
    assert runs["some"] == pytest.approx(0.75 * runs["none"])
    assert runs["nobody"] == runs["none"]


@dataclass(frozen=True)
class TwoAsks(hansa.FedAvg):
    """Asks its fusion for two updates per round."""

    name: ClassVar[str] = "two-asks"

    async def round(self, fed: hansa.Federation, state: hansa.State) -> hansa.State:
        start = state.params
        for _ in range(2):
            update = await self.fusion.collect(fed, self.local, start)
            state = self.server.step(state, update)
        return state


def test_noise_differs_from_round_to_round_from_ask_to_ask_and_from_arrival_to_arrival() -> None:
    def place(algorithm: hansa.Algorithm, rounds: int) -> float:
        return found(algorithm, quadratics([1.0], [0.0]), rounds, adversary=hansa.GaussianAttack(fraction=1.0))

    averaged, buffered = hansa.FedAvg(local=ONE_STEP), hansa.FedBuff(local=ONE_STEP, buffer=1)
    for algorithm in (averaged, buffered):
        assert place(algorithm, 2) != pytest.approx(2 * place(algorithm, 1))
    assert place(TwoAsks(local=ONE_STEP), 1) != pytest.approx(2 * place(averaged, 1))
