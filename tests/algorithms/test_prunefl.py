"""PruneFL: card 3.6 of the specification."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.algorithms import pruning
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.core.plain_data import build
from hansa.fusion import FLTrust
from hansa.holdings.gateway import SampleGateway
from hansa.local import DPSGD, SGD, Adam, Controlled, Gradient, Proximal
from hansa.local.pruned import Pruned, SquaredGradient, mask_payload, remaining
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import PartyError
from hansa.testing import PartyPool, check_algorithm, experiment_for, same_bits
from hansa.testing.algorithms import check_engines, check_replay
from hansa.testing.experiments import simulated
from quadratics import ENGINES
from small_tasks import SIZES, classes, net, samples

DIM = 4 * 5 + 5 + 5 * 3 + 3
LAYERS = [(0, 20), (25, 40)]  # the two weight matrices


def dense(**fields: Any) -> hansa.PruneFL:
    """PruneFL that begins with the whole model, without rounds of a single party."""
    return hansa.PruneFL(**{"first_rounds": 0, "density": 1.0, **fields})


LOCAL = SGD(lr=0.3, batch=3)
PRUNES: dict[str, Any] = {"local": LOCAL, "interval": 2, "removable": 0.4}


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The states after each round of the runs of a test."""
    seen: list[Any] = []
    whole = hansa.PruneFL.round

    async def watched(self: hansa.PruneFL, fed: Federation, state: Any) -> Any:
        seen.append(await whole(self, fed, state))
        return seen[-1]

    monkeypatch.setattr(hansa.PruneFL, "round", watched)
    return seen


# The choice of a mask


@pytest.mark.parametrize("seed", range(20))
def test_the_greedy_choice_is_the_best_of_all_subsets(seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    gain = torch.rand(10, generator=draws, dtype=torch.float64) ** 4
    time = torch.rand(10, generator=draws, dtype=torch.float64) + 0.05
    base_gain, base_time = (float(torch.rand((), generator=draws)) for _ in range(2))
    subsets = [list(s) for k in range(11) for s in itertools.combinations(range(10), k)]

    def ratio(subset: list[int]) -> float:
        return float((base_gain + gain[subset].sum()) / (base_time + time[subset].sum()))

    chosen = pruning.worthwhile(gain, time, base_gain, base_time).tolist()
    assert ratio(chosen) == pytest.approx(max(map(ratio, subsets)), rel=1e-12)


def test_nothing_joins_if_no_gradient_tells_the_candidates_apart() -> None:
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert pruning.worthwhile(zeros, ones, 0.0, 1.0).tolist() == []
    assert pruning.worthwhile(zeros[:0], ones[:0], 1.0, 1.0).tolist() == []


def test_magnitude_pruning_keeps_the_largest_of_each_layer_and_every_bias() -> None:
    spans = torch.tensor(LAYERS)
    w = torch.randn(DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = pruning.by_magnitude(torch.ones(DIM, dtype=torch.bool), w, spans, 0.3)
    for start, stop in LAYERS:
        size, kept = w[start:stop].abs(), mask[start:stop]
        assert int(kept.sum()) == int(0.3 * (stop - start) + 1e-9)
        assert size[kept].min() > size[~kept].max()
    assert mask[20:25].all() and mask[40:].all()
    again = pruning.by_magnitude(mask, w * torch.where(mask, 1.0, 100.0), spans, 0.3)
    assert torch.equal(again, mask)  # a pruned weight does not come back by its magnitude


def test_a_new_mask_keeps_the_largest_weights_and_respects_the_cap() -> None:
    spans, draws = torch.tensor(LAYERS), torch.Generator().manual_seed(1)
    w = torch.randn(DIM, generator=draws, dtype=torch.float64)
    mask = pruning.by_magnitude(torch.ones(DIM, dtype=torch.bool), w, spans, 0.5)
    w, importance = torch.where(mask, w, 0.0), torch.rand(DIM, generator=draws, dtype=torch.float64)
    certain = pruning.without_smallest(mask, w, spans, 0.4)
    assert int(certain.sum()) == DIM - 35 + 6 + 5  # of 10 and 7 remaining weights, 4 and 2 may go
    free = pruning.reselected(mask, w, importance, spans, 0.4, 0.5, 1.0)
    assert not (certain & ~free).any() and int(free.sum()) > int(certain.sum())
    capped = pruning.reselected(mask, w, importance, spans, 0.4, 0.5, 0.5)
    assert int(capped.sum()) == int(0.5 * DIM) and not (capped & ~free).any()
    regrown = (free & ~mask).nonzero().flatten()
    assert len(regrown) and importance[regrown].min() > importance[~free & ~mask].max()


def test_rounding_errors_decide_no_tie() -> None:
    """Two outputs of a softmax have gradients of equal size, so weights and importances tie in pairs."""
    draws = torch.Generator().manual_seed(1)
    spans, half = torch.tensor([[0, 12]]), torch.randn(6, generator=draws, dtype=torch.float64)
    w, gain = torch.cat([half, -half]), torch.cat([half.square(), half.square()])
    mask = torch.ones(12, dtype=torch.bool)
    for _ in range(20):
        other_w, other_gain = (
            values * (1 + 1e-15 * torch.randn(12, generator=draws, dtype=torch.float64)) for values in (w, gain)
        )
        for share in (0.25, 0.4, 0.6):
            assert torch.equal(*(pruning.by_magnitude(mask, each, spans, share) for each in (w, other_w)))
            assert torch.equal(*(pruning.without_smallest(mask, each, spans, share) for each in (w, other_w)))
            new, other = (
                pruning.reselected(mask, each, importance, spans, share, 0.3, 0.75)
                for each, importance in ((w, gain), (other_w, other_gain))
            )
            assert torch.equal(new, other)


@pytest.mark.parametrize("fixed", [0.05, 0.5, 0.9])
def test_a_new_mask_has_the_most_gain_per_second_of_all(fixed: float) -> None:
    spans, ones = torch.tensor([[0, 8]]), torch.ones(10, dtype=torch.bool)
    for seed in range(10):
        draws = torch.Generator().manual_seed(seed)
        w, gain = torch.randn(10, generator=draws).double(), torch.rand(10, generator=draws).double().square()
        certain = pruning.without_smallest(ones, w, spans, 0.75)
        open_places = (~certain).nonzero().flatten().tolist()

        def ratio(mask: Tensor, gain: Tensor = gain) -> float:
            return float(gain[mask].sum()) / (fixed + (1 - fixed) * float(mask.double().mean()))

        subsets = itertools.chain.from_iterable(itertools.combinations(open_places, n) for n in range(7))
        best = max(ratio(certain.index_fill(0, torch.tensor(each, dtype=torch.int64), True)) for each in subsets)
        found = pruning.reselected(ones, w, gain, spans, 0.75, fixed, 1.0)
        assert ratio(found) == pytest.approx(best, rel=1e-12)
        assert torch.equal(pruning.reselected(ones, w, gain, spans, 0.75, fixed, 0.3), certain)  # no room


@pytest.mark.parametrize("engine", ENGINES)
def test_the_importance_is_the_mean_of_the_parties_squared_gradients(engine: str) -> None:
    """For F_k(w) = mean (x w - y)^2, the gradient is 2 x' (x w - y) / n_k."""
    draws = torch.Generator().manual_seed(3)
    parties = [
        (torch.randn(n, 6, generator=draws, dtype=torch.float64), torch.randn(n, 2, generator=draws).double())
        for n in (4, 7, 5)
    ]
    given = hansa.Task(lambda: nn.Linear(6, 2, bias=False).double(), "mse", parties)
    algorithm = dense(local=SGD(lr=0.05), interval=1, removable=0.5, fixed=0.3, half_life=2.0)
    before, after = (hansa.simulate(algorithm, given, rounds=r, engine=engine).state for r in (1, 2))
    w = before.params.w.view(2, 6)
    squares = sum(len(x) * (2 * (x @ w.T - y).T @ x / (2 * len(x))).square() for x, y in parties) / 16
    wanted = pruning.reselected(
        before.slots["mask"], before.params.w, torch.as_tensor(squares).flatten(), torch.tensor([[0, 12]]),
        0.5 * 0.5**0.5, 0.3, 1.0,
    )  # fmt: skip
    assert torch.equal(after.slots["mask"], wanted) and 0 < int(wanted.sum()) < 12


# Runs


@pytest.mark.parametrize("local", [LOCAL, SGD(lr=0.1, momentum=0.9), Proximal(lr=0.3, mu=0.5), Adam(lr=0.05)])
def test_without_pruning_it_is_fedavg_bit_for_bit(local: Any) -> None:
    """Also where squared gradients are asked for: they choose nothing, because nothing may be removed."""
    plain = hansa.simulate(hansa.FedAvg(local=local), classes(), rounds=3, engine="reference")
    for fields in ({"interval": 0}, {"interval": 1, "removable": 0.0}):
        pruned = hansa.simulate(dense(local=local, **fields), classes(), rounds=3, engine="reference")
        assert torch.equal(pruned.state.params.w, plain.state.params.w)
        assert pruned.state.slots["mask"].all() and pruned.history[-1]["density"] == 1.0
    stacked = hansa.simulate(dense(local=local), classes(), rounds=3, engine="stacked")
    torch.testing.assert_close(stacked.state.params.w, plain.state.params.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_party_trains_alone_and_the_density_falls_in_equal_ratios(engine: str, states: list[Any]) -> None:
    algorithm = hansa.PruneFL(local=LOCAL, first=2, first_rounds=2, density=0.25)
    done = hansa.simulate(algorithm, classes(), rounds=3, engine=engine)
    assert [line["asked"] for line in done.history] == [1, 1, 3]
    for state, density in zip(states, (0.5, 0.25, 0.25), strict=True):
        assert [int(state.slots["mask"][a:b].sum()) for a, b in LAYERS] == [int(density * (b - a)) for a, b in LAYERS]
    alone = hansa.Task(net, "cross_entropy", samples(SIZES)[2:], classes=3)
    first = hansa.simulate(hansa.FedAvg(local=LOCAL), alone, rounds=1, engine=engine).state.params.w
    mask = states[0].slots["mask"]
    torch.testing.assert_close(states[0].params.w[mask], first[mask], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("server", ["descent", "momentum", "adam"])
def test_the_mask_changes_in_its_rounds_only_and_pruned_weights_are_zero(
    engine: str, server: str, states: list[Any]
) -> None:
    algorithm = hansa.PruneFL(**PRUNES, server=build("server", server))
    done = hansa.simulate(algorithm, classes(), rounds=6, engine=engine)
    masks = [state.slots["mask"] for state in states]
    changes = [not torch.equal(a, b) for a, b in itertools.pairwise(masks)]
    assert changes == [False, False, True, False, True]  # rounds 4 and 6: after two and four rounds of the cohort
    for state, line in zip(states, done.history, strict=True):
        assert not state.params.w[~state.slots["mask"]].any()
        assert line["density"] == pytest.approx(float(state.slots["mask"].double().mean()))


def test_a_weight_that_comes_back_starts_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    ask = Federation._ask

    def watched(self: Federation, verb: Any, **given: Any) -> Any:
        sent.append(given)
        return ask(self, verb, **given)

    monkeypatch.setattr(Federation, "_ask", watched)
    hansa.simulate(hansa.PruneFL(**PRUNES), classes(), rounds=4, engine="reference")
    squares, after = [given for given in sent if isinstance(given["op"], SquaredGradient | Pruned)][-2:]
    assert isinstance(squares["op"], SquaredGradient) and squares["op"].expects(squares["payload"])["w"][0] == (DIM,)
    whole = []
    for payload in (squares["payload"], after["payload"]):
        w = payload["model"]["w"]
        whole.append(torch.zeros(DIM, dtype=w.dtype).index_copy(0, remaining(payload, DIM, len(w)), w))
    old, new = ((w != 0) for w in whole)
    positions = remaining(after["payload"], DIM, len(after["payload"]["model"]["w"]))
    assert len(set(positions.tolist()) - set(old.nonzero().flatten().tolist())) > 0  # some came back
    assert not (new & ~old).any() and torch.equal(whole[1][new], whole[0][new])  # at 0; the others keep their values


def test_messages_shrink_with_the_mask() -> None:
    algorithm = hansa.PruneFL(local=LOCAL, density=0.2, interval=2)
    done = hansa.simulate(algorithm, classes(), rounds=4, engine="reference")
    plain = hansa.simulate(hansa.FedAvg(local=LOCAL), classes(), rounds=2, engine="reference")
    kept = 4 + 5 + 3 + 3
    alone, cohort, squares = (done.history[k] for k in (0, 1, 3))
    assert cohort["density"] == pytest.approx(kept / DIM)
    each = plain.history[0]["bytes_up"] / 3 - cohort["bytes_up"] / 3
    assert abs(each - 8 * (DIM - kept)) < 16  # the codec aligns tensors
    assert abs(alone["bytes_up"] - plain.history[0]["bytes_up"] / 3) < 16
    assert cohort["bytes_down"] < plain.history[0]["bytes_down"]
    assert squares["bytes_up"] > cohort["bytes_up"] + 3 * 8 * DIM  # squared gradients of all parameters


def test_simulated_steps_take_the_time_of_the_remaining_parameters() -> None:
    devices = {"compute": {"name": "constant", "value": 2.0}, "latency": {"name": "constant", "value": 0.5}}
    algorithm = hansa.PruneFL(local=SGD(lr=0.1, steps=5), density=0.2, interval=0, fixed=0.25)
    done = hansa.simulate(algorithm, classes(), rounds=3, devices=devices, engine="reference")
    at = [0.0, *(line["simulated_seconds"] for line in done.history)]
    density = (4 + 5 + 3 + 3) / DIM
    short = 0.5 + 5 * 2.0 * (0.25 + 0.75 * density)
    assert [b - a for a, b in itertools.pairwise(at)] == pytest.approx([10.5, short, short])
    late = hansa.simulate(algorithm, classes(), rounds=3, devices=devices, deadline=short + 0.01, engine="reference")
    assert not any("missing" in line for line in late.history)
    assert late.history[-1]["simulated_seconds"] == pytest.approx(3 * short + 0.01)  # the first round is cut short


CHANGES = hansa.PruneFL(interval=1, density=0.6, first=2, removable=0.5)


def test_engines_agree_and_a_resumed_run_goes_on_while_the_mask_changes() -> None:
    check_replay(CHANGES, check_engines(CHANGES))


@pytest.mark.slow
@pytest.mark.slow
def test_the_algorithm_keeps_its_promises_while_the_mask_changes(pool: PartyPool) -> None:
    check_algorithm(CHANGES, pool)


def test_the_saved_model_is_an_ordinary_one_with_zeros(tmp_path: Path) -> None:
    experiment = experiment_for(hansa.PruneFL(**PRUNES), rounds=4)
    done = simulated(experiment, run_dir=tmp_path / "run")
    loaded = hansa.load(tmp_path / "run")
    weights = torch.cat([value.flatten() for value in loaded.model().state_dict().values()])
    assert torch.equal(weights, done.state.params.w) and torch.equal(weights == 0, ~done.state.slots["mask"])
    assert (
        loaded.history[-1]["density"] == pytest.approx(float((weights != 0).double().mean())) and (weights == 0).any()
    )


# With other parts


@pytest.mark.thin(2)
@pytest.mark.parametrize("fusion", ["median", "trimmed-mean", "krum", "geometric-median", "norm-clip"])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_robust_fusions_and_transforms_see_the_remaining_parameters(fusion: str, compress: str | None) -> None:
    algorithm = hansa.PruneFL(**PRUNES, fusion=build("fusion", fusion))
    runs = [
        hansa.simulate(algorithm, classes([5, 9, 2, 6, 7]), rounds=4, engine=engine, compress=compress)
        for engine in ENGINES
    ]
    torch.testing.assert_close(runs[0].state.params.w, runs[1].state.params.w, rtol=0, atol=1e-9)
    assert not any({"empty", "rejected"} & set(line) for run in runs for line in run.history)
    assert runs[0].history[-1]["density"] < 1


@pytest.mark.parametrize("privacy", [{"secure": "masking"}, {"bound": 0.5}])
def test_private_sums_are_of_the_remaining_parameters(privacy: dict[str, Any]) -> None:
    algorithm = dense(**PRUNES)
    hidden = hansa.simulate(algorithm, classes(), rounds=4, privacy=privacy)
    assert hidden.history[-1]["density"] < 1 and not any("empty" in line for line in hidden.history)
    if "secure" in privacy:
        plain = hansa.simulate(algorithm, classes(), rounds=4)
        torch.testing.assert_close(hidden.state.params.w, plain.state.params.w, rtol=0, atol=1e-6)
        assert hidden.history[-1]["bytes_up"] < hidden.history[0]["bytes_up"] * 1.5 + 3 * 8 * DIM


@pytest.mark.parametrize("engine", ENGINES)
def test_batch_norm_and_a_frozen_layer_stay_whole(engine: str) -> None:
    def model() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
        module[0].requires_grad_(False)
        return module

    done = hansa.simulate(hansa.PruneFL(**PRUNES), classes([6, 9, 3], model), rounds=4, engine=engine)
    values = done.params
    assert values["1.weight"].all() and values["1.running_mean"].any() and int(values["1.num_batches_tracked"]) > 0
    assert 0 < int((values["3.weight"] == 0).sum()) < 18 and not (values["0.weight"] == 0).any()


@pytest.mark.parametrize("select", ["uniform", "poisson", "power-of-choice", "weighted"])
def test_any_selector_draws_the_cohort_of_the_common_rounds(select: str) -> None:
    done = hansa.simulate(
        hansa.PruneFL(**PRUNES), classes([5, 9, 2, 6]), rounds=5, select=select, cohort=0.5, engine="reference"
    )
    assert done.history[0]["asked"] == 1 and done.history[-1]["density"] < 1


def test_one_gradient_of_all_samples_can_be_pruned_too() -> None:
    algorithm = hansa.PruneFL(**{**PRUNES, "local": Gradient(), "server": build("server", "descent", lr=0.2)})
    runs = [hansa.simulate(algorithm, classes(), rounds=4, engine=engine) for engine in ENGINES]
    torch.testing.assert_close(runs[0].state.params.w, runs[1].state.params.w, rtol=0, atol=1e-12)
    assert not runs[0].state.params.w[~runs[0].state.slots["mask"]].any()


# Bad and hostile input


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hansa.PruneFL(density=0.0), "density must be above 0 and at most 1, got 0; 0.5 keeps half"),
        (lambda: hansa.PruneFL(density=1.5), "density must be above 0 and at most 1, got 1.5"),
        (lambda: hansa.PruneFL(density=0.5, max_density=0.4), "max_density must be at least density, got 0.4 and 0.5"),
        (lambda: hansa.PruneFL(removable=1.0), "removable must be at least 0 and below 1, got 1; 1 could empty"),
        (lambda: hansa.PruneFL(fixed=0.0), "fixed must be above 0 and below 1, got 0; it is the time"),
        (lambda: hansa.PruneFL(fixed=1.0), "fixed must be above 0 and below 1, got 1"),
        (lambda: hansa.PruneFL(half_life=0.0), "half_life must be above 0"),
        (lambda: hansa.PruneFL(interval=-1), "interval must be at least 0, got -1"),
        (lambda: hansa.PruneFL(first_rounds=0), "first_rounds is 0; set density to 1"),
        (lambda: hansa.PruneFL(first=3), "algorithm.first is 3, and the parties have the numbers 0 to 2"),
        (lambda: hansa.PruneFL(density=0.05), "would leave no weight in 2.weight, which has 15; set algorithm.density"),
        (lambda: hansa.PruneFL(local=DPSGD(batch=2)), "which the epsilon of 'dp-sgd' does not cover"),
        (lambda: hansa.PruneFL(local=Controlled()), "prunefl cannot use the local solver 'scaffold'"),
        (lambda: hansa.FedAvg(local=Pruned()), "which is one half of prunefl"),
        (lambda: hansa.FedAvg(local=SquaredGradient()), "which is one half of prunefl"),
        (lambda: hansa.PruneFL(fusion=FLTrust()), "fltrust judges updates of a whole model"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_sentence(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(make(), classes(trusted=samples([9], 2)[0]), rounds=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"privacy": {"secure": "masking"}}, "a secure sum of one update hides nothing; set algorithm.first_rounds"),
        ({"min_cohort": 2}, "run.min_cohort: prunefl has rounds that ask a single party"),
        ({"quorum": 3}, "run.quorum: prunefl has rounds that ask a single party, and this setting requires 3"),
        ({"privacy": {"dp": {"kind": "central", "sigma": 1.0}}}, "parties send more than updates of a model"),
        ({"compress": "error-feedback"}, r"run\.compress: error-feedback remembers numbers of a vector"),
        ({"compress": "accumulated-top-k"}, r"run\.compress: accumulated-top-k remembers numbers of a vector"),
        ({"compress": {"*bias": "identity", "*": "int8"}}, r"run\.compress: by-layer needs the layers of a vector"),
        ({"compress_down": {"name": "error-feedback", "inner": "int8"}}, r"run\.compress_down: error-feedback remembe"),
        ({"compress_down": {"*": "int8"}}, r"run\.compress_down: by-layer needs the layers of a vector"),
    ],
)
def test_settings_of_a_run_that_pruning_cannot_meet_are_refused_before_it(settings: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        hansa.simulate(hansa.PruneFL(), classes(), rounds=1, **settings)


def test_a_first_party_without_samples_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match="the party 1, which prunes first, has no samples"):
        hansa.simulate(hansa.PruneFL(first=1), classes([5, 0, 4]), rounds=1)
    hansa.simulate(hansa.PruneFL(first=0), classes([5, 0, 4]), rounds=2)


def test_a_model_of_vectors_alone_is_refused() -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.b.expand(len(x), 3)

    with pytest.raises(hansa.ConfigError, match="no weight matrix to prune"):
        hansa.simulate(hansa.PruneFL(), classes(model=Bias), rounds=1)


@pytest.mark.parametrize("length", [0, DIM - 1, DIM])
def test_a_reply_of_another_mask_is_rejected_by_name_and_the_round_goes_on(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Pruned.run

    def lying(self: Pruned, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply, memory = honest(self, party, payload, memory)
        if party.id == 1:
            reply.tensors["w"] = torch.ones(length, dtype=torch.float64)
        return reply, memory

    monkeypatch.setattr(Pruned, "run", lying)
    done = hansa.simulate(hansa.PruneFL(**PRUNES), classes(), rounds=4, engine="reference")
    assert all(f"w has the shape ({length},), expected" in line["rejected"]["1"] for line in done.history[1:])
    assert not any("empty" in line for line in done.history) and done.history[1]["replies"] == 2


def test_a_negative_square_counts_as_none() -> None:
    spans, w = torch.tensor([[0, 8]]), torch.arange(1.0, 9.0, dtype=torch.float64)
    mask, honest = torch.ones(8, dtype=torch.bool), torch.tensor([3.0, 0, 0, 0, 0, 0, 0, 1.0])
    lied = honest.index_fill(0, torch.tensor([5, 6]), -1e6)
    for importance in (honest, lied):
        new = pruning.reselected(mask, w, importance, spans, 0.5, 0.1, 1.0)
        assert new.tolist() == [True, False, False, False, True, True, True, True]


MASK = torch.zeros(DIM, dtype=torch.bool).index_fill(0, torch.tensor([0, 7, 30]), True)
FITS = mask_payload(MASK)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": DIM + 1}, "for a model of 44 parameters, and this one has 43"),
        ({"size": "43"}, "for a model of '43' parameters, and this one has 43"),
        ({"mask": FITS["mask"][:-1]}, "one bit per parameter"),
        ({"mask": FITS["mask"].int()}, "one bit per parameter"),
        ({"mask": None}, "one bit per parameter"),
        ({"mask": FITS["mask"] | 1}, "keeps 8 parameters, and the ask has 3"),
        ({"mask": mask_payload(torch.cat([MASK[:30], MASK[:13]]))["mask"] | torch.tensor([0] * 5 + [1]).byte()},
         "keeps 5 parameters, and the ask has 3"),
    ],
)  # fmt: skip
def test_a_party_declines_a_mask_that_does_not_fit_its_model(change: dict[str, Any], reason: str) -> None:
    objective = Objective(net, "cross_entropy", 0)
    party = Party(0, objective, SampleGateway(samples([4])[0]), 0)
    model = {**objective.initial._asdict(), "w": torch.ones(3, dtype=torch.float64)}
    for op in (Pruned(), SquaredGradient()):
        reply, _ = op.run(party, {"model": model, **FITS}, {})
        assert len(reply.tensors["w"]) == (3 if isinstance(op, Pruned) else DIM)
        with pytest.raises(PartyError, match=reason):
            op.run(party, {"model": model, **FITS, **change}, {})


def test_a_mask_survives_its_bits() -> None:
    for seed in range(5):
        mask = torch.rand(DIM, generator=torch.Generator().manual_seed(seed)) < 0.4
        payload = mask_payload(mask)
        assert payload["mask"].numel() == 6
        assert torch.equal(remaining(payload, DIM, int(mask.sum())), mask.nonzero().flatten())
        assert same_bits(payload, mask_payload(mask.clone()))
