"""Fusions in runs: refusals, reports, and the effect of a bad reply (none)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hansa
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.core.wrapper import Wrapper
from hansa.local import SGD, Controlled, LocalSolver
from hansa.local.context import Context
from hansa.local.solver import Carry
from hansa.plumbing.errors import ConfigError
from hansa.testing import PartyPool, check_algorithm, check_engines
from small_tasks import learnable

ENGINES = ["reference", "stacked"]
FUSIONS = [name for name, part in registered("fusion").items() if part.__module__.startswith("hansa.")]
SEEING = [name for name in FUSIONS if name != "mean"]
BOUNDING = [name for name in SEEING if name != "match-permute"]  # which takes the mean of permuted updates
NAMES = ["anna", "boris", "clara", "dora", "emil", "fanny", "gita", "hugo"]
HOSTILE = "clara"


def task(model: Any = None, hostile: bool = True, trusted: bool = True) -> hansa.Task:
    """Eight parties; without the hostile party seven, with the same samples."""
    *parties, test, own = learnable((9, 12, 20, 7, 15, 11, 10, 13, 60, 30))
    kept = [k for k, name in enumerate(NAMES) if hostile or name != HOSTILE]
    return hansa.Task(model or (lambda: nn.Linear(4, 3).double()), "cross_entropy", [parties[k] for k in kept], test,
                      names=[NAMES[k] for k in kept], classes=3, trusted=own if trusted else None)  # fmt: skip


@dataclass(frozen=True)
class Tricks(Wrapper):
    """Honest at every party except one."""

    trick: str = "nan"
    inner: LocalSolver = SGD(lr=0.5)
    name: ClassVar[str] = "test-tricks"
    kind: ClassVar[str] = "local"

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        if party.id == NAMES.index(HOSTILE):
            w, others = reply.tensors["w"], {k: v for k, v in reply.tensors.items() if k != "w"}
            tensors: dict[str, dict[str, torch.Tensor]] = {
                "nan": {"w": w * math.nan},
                "inf": {"w": w + math.inf},
                "shape": {"w": w[:-1]},
                "dtype": {"w": w.float()},
                "name": {"v": w},
                "far": {"w": w + 1e30},
                "stats": {"w": w, **{k: v + 1e30 for k, v in others.items()}},
            }
            reply.tensors = {**(others if self.trick == "far" else {}), **tensors[self.trick]}
            if self.trick == "stats":
                reply.maxima = {k: v + 2**40 for k, v in reply.maxima.items()}
        return reply, memory


# Seeds of shuffles depend on a party's number, so parties here take their samples whole.
WHOLE = SGD(lr=0.5, batch=None, epochs=2)


@pytest.mark.thin(4)
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("trick", ["nan", "inf", "shape", "dtype", "name"])
def test_a_bad_reply_changes_nothing_to_the_last_bit_and_is_reported(fusion: str, trick: str) -> None:
    algorithm = hansa.FedAvg(local=Tricks(trick, WHOLE), fusion=fusion)  # type: ignore[arg-type]
    done = hansa.simulate(algorithm, task(), rounds=3, engine="reference")
    honest = hansa.FedAvg(local=WHOLE, fusion=fusion)  # type: ignore[arg-type]
    without = hansa.simulate(honest, task(hostile=False), rounds=3, engine="reference")
    reasons = [line["rejected"] for line in done.history]
    assert [list(reason) for reason in reasons] == [[HOSTILE]] * 3
    assert torch.equal(done.state.params.w, without.state.params.w)


@pytest.mark.thin(3)
@pytest.mark.parametrize("fusion", [name for name in BOUNDING if name != "legato"])  # which bounds nothing
@pytest.mark.parametrize("engine", ENGINES)
def test_a_huge_update_is_survived(fusion: str, engine: str) -> None:
    algorithm = hansa.FedAvg(local=Tricks("far", WHOLE), fusion=fusion)  # type: ignore[arg-type]
    done = hansa.simulate(algorithm, task(), rounds=30, engine=engine)
    assert done.summary["accuracy"] > 0.8
    if fusion == "norm-clip":  # it counts, at the length of the others
        assert all(
            line["fusion"]["excluded"] == [] and line["fusion"]["scores"][HOSTILE] > 1e29 for line in done.history
        )
    else:
        assert all(HOSTILE in line["fusion"]["excluded"] for line in done.history)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.mark.thin(2)
@pytest.mark.parametrize("fusion", BOUNDING)
def test_what_comes_beside_the_update_is_no_way_in(fusion: str) -> None:
    algorithm = hansa.FedAvg(local=Tricks("stats", WHOLE), fusion=fusion)  # type: ignore[arg-type]
    params = hansa.simulate(algorithm, task(normed), rounds=5).state.params
    assert float(params.stats.abs().max()) < 100
    assert int(params.counts.max()) == 10


@pytest.mark.parametrize("fusion", [hansa.Zeno(b=6), hansa.FLTrust()], ids=lambda rule: rule.name)
def test_past_one_half_running_means_come_from_the_server(fusion: Any) -> None:
    @dataclass(frozen=True)
    class Most(Tricks):
        """Six of eight send a good update and poisoned running means."""

        name: ClassVar[str] = "test-most"

        def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
            if party.id < 6:
                reply.tensors = {**reply.tensors, "stats": reply.tensors["stats"] + 1e6}
                reply.maxima = {name: value + 50 for name, value in reply.maxima.items()}
            return reply, memory

    params = hansa.simulate(hansa.FedAvg(local=Most(inner=WHOLE), fusion=fusion), task(normed), rounds=5).state.params  # type: ignore[arg-type]
    assert float(params.stats.abs().max()) < 100
    assert int(params.counts.max()) == 10


class Counting(nn.Module):
    """Has a running mean, and no count beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("middle", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.middle: torch.Tensor = 0.5 * self.middle + 0.5 * x.mean(0).detach()
        return self.layer(x - self.middle)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fusion", [hansa.Zeno(), hansa.FLTrust()], ids=lambda rule: rule.name)
def test_running_means_without_a_count_come_from_the_server_too(fusion: Any) -> None:
    data = task(lambda: Counting().double())
    algorithm = hansa.FedAvg(local=hansa.SGD(lr=0.1, batch=None), fusion=fusion)
    params = hansa.simulate(algorithm, data, rounds=1, engine="reference").state.params
    assert params.counts.numel() == 0
    assert data.trusted is not None
    assert torch.allclose(params.stats, 0.5 * data.trusted[0].mean(0))


class Hostile(Controlled):
    """Sends a control variate from far away, at the party with as many samples as the hostile one."""

    def finish(self, ctx: Context, start: torch.Tensor, w: torch.Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, torch.Tensor], Memory]:  # fmt: skip
        tensors, memory = super().finish(ctx, start, w, carry, memory)
        return ({**tensors, "c": tensors["c"] + 1e30} if ctx.n == 20 else tensors), memory


@pytest.mark.parametrize("fusion", ["median", "krum", "trimmed-mean"])
def test_a_control_variate_is_no_way_in(fusion: str) -> None:
    algorithm = hansa.Scaffold(local=Hostile(lr=0.1), fusion=fusion)  # type: ignore[arg-type]
    done = hansa.simulate(algorithm, task(), rounds=5, engine="reference")
    assert float(done.state.slots["c"].abs().max()) < 100


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", FUSIONS)
def test_engines_agree_under_every_fusion(name: str) -> None:
    check_engines(hansa.FedAvg(fusion=name))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["krum", "median", "zeno", "fltrust"])
def test_runs_with_robust_fusions_keep_the_promises_of_all_algorithms(fusion: str, pool: PartyPool) -> None:
    check_algorithm(hansa.FedYogi(fusion=fusion), pool)  # type: ignore[arg-type]


@pytest.mark.thin(2)
@pytest.mark.parametrize("fusion", SEEING)
def test_replies_on_disk_give_the_bits_of_replies_in_memory(fusion: str, tmp_path: Path) -> None:
    runs = [
        hansa.simulate(hansa.FedAvg(fusion=fusion), task(), rounds=2, engine="reference", reply_memory=limit,  # type: ignore[arg-type]
                       run_dir=tmp_path / str(limit))
        for limit in (1, 2**20)
    ]  # fmt: skip
    assert torch.equal(runs[0].state.params.w, runs[1].state.params.w)
    assert not [path for path in (tmp_path / "1").iterdir() if "rows" in path.name or path.name.startswith("tmp")]


def refused(algorithm: Any, which: hansa.Task | None = None, **run: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        hansa.simulate(algorithm, which or task(), rounds=1, **run)
    return str(caught.value)


def test_what_cannot_work_is_refused_before_it_runs() -> None:
    krum = build("algorithm", "fedavg", fusion={"name": "krum", "f": 3})
    assert "needs 2f + 2 < n, so at least 9 updates, got 8" in refused(krum)
    assert "got 4" in refused(hansa.FedAvg(fusion=hansa.Krum(f=1)), cohort_size=4)
    zeno = build("algorithm", "fedavg", fusion="zeno")
    assert "zeno judges updates by samples of the server's own" in refused(zeno, task(trusted=False))
    assert "task.trusted" in refused(hansa.ZenoPlusPlus(), task(trusted=False))
    assert "the server has no head" in refused(hansa.FedPer(fusion="zeno"))  # type: ignore[arg-type]
    assert "has no memory" in refused(hansa.EASGD(fusion="fltrust"))  # type: ignore[arg-type]
    for algorithm in (hansa.QFedAvg, hansa.FedNova, hansa.Scaffold):
        assert "cannot judge what the local solver" in refused(algorithm(fusion="zeno"))  # type: ignore[arg-type]

    class Hidden:
        async def reduce(self, fed: Any, ask: Any) -> Any: ...

    for seeing in (hansa.FedAvg(fusion="krum"), hansa.ZenoPlusPlus(), hansa.FedBuff()):  # type: ignore[arg-type]
        assert "a secure sum hides" in refused(seeing, protocol=Hidden())
    assert "which a secure sum or a bound on updates does not cover" in refused(
        hansa.DecentralizedSGD(), protocol=Hidden()
    )


@pytest.mark.parametrize("algorithm", ["zeno", "fltrust", "zeno++"])
def test_trusted_samples_are_checked_as_the_parties_are(algorithm: str) -> None:
    method = hansa.ZenoPlusPlus() if algorithm == "zeno++" else hansa.FedAvg(fusion=algorithm)  # type: ignore[arg-type]
    spoilt = task()
    assert spoilt.trusted is not None
    x, y = spoilt.trusted
    spoilt.trusted = (x.clone(), y)
    spoilt.trusted[0][0, 0] = math.nan
    with pytest.raises(hansa.DataError, match="trusted: the features have missing values"):
        hansa.simulate(method, spoilt, rounds=1)
    spoilt.trusted = (x, y + 5)
    with pytest.raises(hansa.DataError, match=r"trusted: targets must lie in 0..2"):
        hansa.simulate(method, spoilt, rounds=1)
    spoilt.trusted = (x.sign() * 1.7e308, y)  # outputs overflow: the server learns nothing from it, and says so
    done = hansa.simulate(method, spoilt, rounds=1)
    assert "not finite" in done.history[0]["empty"]


def test_a_run_does_not_go_on_with_other_trusted_samples(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    settings: dict[str, Any] = {"rounds": 3, "checkpoint_seconds": 0.0, "run_dir": tmp_path / "run"}
    algorithm = hansa.FedAvg(fusion="fltrust")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        hansa.simulate(algorithm, task(), on_round=stop, **settings)
    other = task()
    assert other.trusted is not None
    other.trusted = (other.trusted[0] + 1, other.trusted[1])
    with pytest.raises(ConfigError, match="the data are not those"):
        hansa.simulate(algorithm, other, resume=True, **settings)
    assert len(hansa.simulate(algorithm, task(), resume=True, **settings).history) == 3


def test_a_party_that_lies_about_its_loss_does_not_decide_what_is_reported() -> None:
    @dataclass(frozen=True)
    class Liar(Tricks):
        name: ClassVar[str] = "test-liar"

        def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
            if party.id == 2:
                reply.metrics, reply.weight = {"train_loss": 1e9}, 2**50
            return reply, memory

    done = hansa.simulate(hansa.FedAvg(local=Liar(inner=WHOLE), fusion="median"), task(), rounds=2)  # type: ignore[arg-type]
    assert all(line["train_loss"] < 10 for line in done.history)


def test_an_asynchronous_method_counts_all_attackers_that_were_heard() -> None:
    adversary = [{"kind": "gaussian", "parties": [0, 1]}, {"kind": "sign-flip", "parties": [2, 3, 4]}]
    done = hansa.simulate(hansa.FedBuff(buffer=8), task(), rounds=4, max_norm=50.0, adversary=adversary)
    recalls = [line["exclusion_recall"] for line in done.history if "exclusion_recall" in line]
    assert recalls
    assert max(recalls) < 1


def test_an_empty_round_says_nothing_about_who_was_left_out() -> None:
    algorithm = hansa.FedAvg(local=Tricks("nan", WHOLE), fusion=hansa.Krum(f=2))
    adversary = {"kind": "free-rider", "parties": [HOSTILE]}
    done = hansa.simulate(algorithm, task(), rounds=2, adversary=adversary, absent=lambda party, round: party == 0)
    assert all("empty" in line and "exclusion_recall" not in line for line in done.history)


def test_with_too_few_replies_left_a_round_is_empty_and_says_the_bound() -> None:
    algorithm = hansa.FedAvg(local=Tricks("nan", WHOLE), fusion=hansa.Bulyan(f=1))
    done = hansa.simulate(algorithm, task(), rounds=2, absent=lambda party, round: party == 0 and round == 1)
    assert "empty" not in done.history[0]
    assert done.history[1]["empty"] == "bulyan: f = 1 needs n >= 4f + 3, so at least 7 updates, got 6"
    assert torch.equal(done.state.params.w, hansa.simulate(algorithm, task(), rounds=1).state.params.w)


def test_each_round_says_what_part_each_party_had() -> None:
    done = hansa.simulate(hansa.FedAvg(fusion=hansa.MultiKrum(f=2)), task(), rounds=2)
    for line in done.history:
        found = line["fusion"]
        assert found["rule"] == "multi-krum"
        assert list(found["shares"]) == list(found["scores"]) == NAMES
        assert sum(found["shares"].values()) == pytest.approx(1)
        assert found["excluded"] == [name for name in NAMES if found["shares"][name] == 0]
        assert len(found["excluded"]) == 4
    assert "fusion" not in hansa.simulate(hansa.FedAvg(), task(), rounds=1).history[0]


def test_the_server_draws_other_samples_in_each_round_and_the_same_again() -> None:
    def scores() -> list[Any]:
        done = hansa.simulate(hansa.FedAvg(local=SGD(lr=1e-9), fusion=hansa.Zeno(samples=3)), task(), rounds=3)
        return [line["fusion"]["scores"]["anna"] for line in done.history]

    assert len(set(scores())) == 3  # the model hardly moves: it is the sample that differs
    assert scores() == scores()


def test_trusted_samples_are_taken_from_the_data_set_and_prepared_as_the_others() -> None:
    from hansa.experiment.config import parse

    tree = {
        "task": {"dataset": "breast-cancer", "model": "logistic", "prepare": "standardise", "trusted": 50},
        "partition": {"name": "iid", "parties": 5},
        "algorithm": {"name": "fedavg", "fusion": "zeno"},
        "run": {"rounds": 5, "seed": 1},
    }
    made = parse(tree).build_task()
    task = {name: value for name, value in tree["task"].items() if name != "trusted"}
    plain = parse({**tree, "task": task, "algorithm": "fedavg"}).build_task()
    assert made.trusted is not None
    sizes = [sum(len(x) for x, _ in found.parties) for found in (plain, made)]
    assert len(made.trusted[0]) == 50
    assert sizes[0] - sizes[1] == 50
    held = {tuple(row) for x, _ in made.parties for row in x.tolist()}
    assert not held & {tuple(row) for row in made.trusted[0].tolist()}
    experiment = parse(tree)
    done = hansa.simulate(experiment.algorithm, made, **experiment.settings())
    assert done.summary["accuracy"] > 0.9
    for bad, reason in ((0, "at least 1"), (10**6, "cannot keep 1000000 samples"), ("file.csv", "a number of samples")):
        with pytest.raises(ConfigError, match=reason):
            parse({**tree, "task": {**tree["task"], "trusted": bad}}).build_task()


def test_a_trusted_file_goes_with_parties_as_files(tmp_path: Path) -> None:
    from hansa.experiment.config import parse

    for name in ("a", "b", "c", "own"):
        rows = "\n".join(f"{k % 3},{k % 2},{k % 2}" for k in range(8))
        (tmp_path / f"{name}.csv").write_text(f"x,y,target\n{rows}\n")
    files = {"parties": ["a.csv", "b.csv", "c.csv"], "target": "target", "trusted": "own.csv"}
    algorithm = {"name": "fedavg", "fusion": "fltrust"}
    tree = {"task": {**files, "model": "logistic"}, "algorithm": algorithm, "run": {"rounds": 2}}
    experiment = parse(tree, str(tmp_path))
    done = hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings())
    assert done.history[-1]["fusion"]["rule"] == "fltrust"
