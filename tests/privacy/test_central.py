"""Central differential privacy (card 7.2): one party's influence, the noise, the denominator, and the cost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from central_parties import ENGINES, moved, steps, task, vectors
from torch import Tensor

import hansa
from hansa.cli import main
from hansa.core.ask import Ask, Reduced
from hansa.core.budget import Release
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Reply
from hansa.fusion import WeightedMean
from hansa.numerics import rng
from hansa.privacy import CentralDP, Privacy, accounting
from hansa.privacy.central import UNCLIPPED, Contribution
from hansa.privacy.guard import Guard
from hansa.run import Run
from hansa.secure.masking import Masking
from hansa.transforms import ClippedUpdate

epsilon = functools.partial(accounting.epsilon, accountant="pld")

LENGTHS = [0.1, 0.7, 1.0, 1.5, 40.0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("one", range(len(LENGTHS)))
def test_one_party_changes_the_sum_by_no_more_than_the_clip(one: int, engine: str) -> None:
    updates, clip = vectors(LENGTHS), 0.9
    given: dict[str, Any] = {"dp": CentralDP(clip=clip, sigma=0), "engine": engine}
    whole = moved(updates, **given)
    without = moved(updates, absent=lambda party, round: party == one, **given)
    change = (whole - without) * len(updates)
    assert float(change.norm()) <= clip * (1 + 1e-12)
    assert torch.allclose(change, updates[one] * min(1.0, clip / LENGTHS[one]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clipped_reply_is_never_longer_than_the_clip_and_keeps_its_direction(dtype: torch.dtype) -> None:
    for seed in range(50):
        w = torch.randn(2000, generator=torch.Generator().manual_seed(seed)).to(dtype)
        sent = Reply({"w": w, "c": 3 * w}, 7, metrics={"x": 1.0})
        reply = ClippedUpdate(hansa.SGD(), 0.3).after(None, {}, sent, {})[0]  # type: ignore[arg-type]
        short = reply.tensors["w"].double()
        assert 0.3 * (1 - 1e-6) < float(short.norm()) <= 0.3 * (1 + 1e-15)
        assert torch.nn.functional.cosine_similarity(short, w.double(), dim=0) > 1 - 1e-6
        assert torch.equal(reply.tensors["c"], 3 * w)
        assert (reply.weight, reply.metrics) == (7, {"x": 1.0})


def test_a_short_reply_stays_as_it_is() -> None:
    w = torch.randn(5)
    assert ClippedUpdate(hansa.SGD(), 100.0).after(None, {}, Reply({"w": w}), {})[0].tensors["w"] is w  # type: ignore[arg-type]


def test_the_denominator_is_the_expected_cohort_whoever_replies() -> None:
    updates = vectors([0.5] * 4)
    found = moved(updates, dp=CentralDP(sigma=0), absent=lambda party, round: party > 0)
    assert torch.allclose(found, updates[0] / 4, rtol=1e-12, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cap", [None, 6])
def test_without_noise_and_clip_it_is_federated_averaging_exactly(engine: str, cap: int | None) -> None:
    make = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 3, generator=make), torch.randint(2, (6,), generator=make)) for _ in range(5)]
    some = hansa.Task(lambda: torch.nn.Linear(3, 2), "cross_entropy", data)
    algorithm = hansa.FedAvg(local=hansa.SGD(lr=0.3, epochs=2, batch=2), fusion=WeightedMean(uniform=True))
    plain = hansa.simulate(algorithm, some, rounds=3, engine=engine)
    dp = CentralDP(clip=None, sigma=0, weight_cap=cap)
    private = hansa.simulate(algorithm, some, rounds=3, engine=engine, privacy=Privacy(dp=dp))
    assert torch.equal(plain.state.params.w, private.state.params.w)
    assert private.history[-1]["epsilon"] is None  # nothing is promised


def test_with_all_weights_known_it_is_the_mean_weighted_by_samples() -> None:
    updates, sizes = vectors([1.0, 2.0, 3.0]), [1, 4, 10]
    dp = CentralDP(clip=None, sigma=0, weight_cap=10, total_weight=1.5)
    weighted = sum((n * v for n, v in zip(sizes, updates, strict=True)), torch.zeros(5)) / 15
    assert torch.allclose(moved(updates, dp=dp, sizes=sizes), weighted, rtol=1e-12, atol=0)


def test_parties_over_the_cap_count_alike_and_the_rest_by_their_samples() -> None:
    updates, sizes = vectors([0.9] * 3), [2, 4, 50]
    found = moved(updates, dp=CentralDP(sigma=0, weight_cap=4), sizes=sizes)
    assert torch.allclose(found, (updates[0] / 2 + updates[1] + updates[2]) / 3, rtol=1e-12, atol=0)


def chi_square(draws: Tensor, deviation: float) -> float:
    """The deviation of the sum of squares from its expectation, in standard deviations."""
    n = draws.numel()
    return (float((draws / deviation).square().sum()) - n) / math.sqrt(2 * n)


@pytest.mark.parametrize("mechanism", ["discrete", "float"])
def test_the_noise_has_the_deviation_of_the_formula(mechanism: Any) -> None:
    nothing = [torch.zeros(4000)] * 8
    dp = CentralDP(sigma=1.3, clip=0.5, mechanism=mechanism)
    first, second = moved(nothing, 1, dp), moved(nothing, 2, dp)
    assert abs(chi_square(first, 1.3 * 0.5 / 8)) < 4
    assert abs(chi_square(second - first, 1.3 * 0.5 / 8)) < 4  # fresh in every round
    assert abs(float(torch.corrcoef(torch.stack([first, second - first]))[0, 1])) < 0.07
    assert torch.equal(first, moved(nothing, 1, dp)) and not torch.equal(first, moved(nothing, 1, dp, seed=1))


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_a_contribution_is_whole_steps_of_a_length_that_holds_exactly(quantile: float | None) -> None:
    op = guard(CentralDP(sigma=1.1, clip=0.7, quantile=quantile)).contribution(hansa.Gradient(), 1.1, 0.7)
    assert op.grid is not None
    for value in (0.0, 1e-320, 0.1, 0.7 / math.sqrt(5), 3.0, 1e200, 1.7e308, math.inf, math.nan):
        for dtype in (torch.float32, torch.float64):
            reply = Reply({"w": torch.tensor([value, -value, value, value, value], dtype=dtype)}, 3)
            sent = op.after(None, {}, reply, {})[0].tensors  # type: ignore[arg-type]
            steps = [Fraction(x) / Fraction(op.grid.fine) for t in sent.values() for x in t.double().view(-1).tolist()]
            assert all(step.denominator == 1 for step in steps) and {t.dtype for t in sent.values()} == {torch.float64}
            assert sum(step**2 for step in steps) <= Fraction(op.grid.longest) ** 2
            longest = Fraction(op.grid.clip) / Fraction(op.grid.step) - math.isqrt(max(op.size, 1) - 1) - 1
            assert Fraction(op.grid.longest) <= longest * 2**op.grid.shift
            if value > 1 and bool(torch.isfinite(reply.tensors["w"]).all()):
                assert float(sent["w"].norm()) == pytest.approx(0.7, rel=2e-4)
    assert op.grid.longest * op.parties < 2**53  # a float64 adds them without error


def test_a_discrete_sum_is_exact_in_any_order_and_differs_by_one_contribution() -> None:
    updates = [
        torch.randn(50, generator=torch.Generator().manual_seed(k)).double() * 10.0 ** (k % 7) for k in range(60)
    ]
    private = guard(CentralDP(sigma=1.0), parties=60)
    op = private.contribution(hansa.Gradient(), 1.0, 1.0)
    sent = [op.after(None, {}, Reply({"w": update}), {})[0].tensors["w"] for update in updates]  # type: ignore[arg-type]
    total = torch.stack(sent).sum(0)
    assert torch.equal(total, torch.stack(sent[::-1]).sum(0)) and torch.equal(total - sent[7], sum(sent[:7] + sent[8:]))
    assert op.grid is not None
    noisy, without = (op.grid.exactly_covered({"w": value}, b"s")["w"] for value in (total, total - sent[7]))
    steps = (noisy - without) / op.grid.step
    assert torch.equal(steps, steps.round()) and float(steps.norm()) <= op.grid.clip / op.grid.step


def test_both_mechanisms_give_nearly_the_same_model_and_float_keeps_its_type() -> None:
    updates = vectors([0.5, 2.0, 8.0, 1.0])
    discrete, floats = (
        moved(updates, dp=CentralDP(sigma=1e-4, mechanism=mechanism)) for mechanism in ("discrete", "float")
    )
    clean = moved(updates, dp=CentralDP(sigma=0))
    assert torch.allclose(discrete, clean, atol=5e-4) and torch.allclose(floats, clean, atol=5e-4)
    payload = {"model": {"w": torch.zeros(5), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}}
    for mechanism, dtype in (("discrete", torch.float64), ("float", torch.float32)):
        private = guard(CentralDP(sigma=1.0, mechanism=mechanism))  # type: ignore[arg-type]
        assert private.contribution(hansa.Gradient(), 1.0, 1.0).expects(payload)["w"] == ((5,), dtype)


def test_a_secure_sum_has_no_float_mechanism() -> None:
    with pytest.raises(hansa.ConfigError, match="a secure sum adds integers"):
        steps(vectors([1.0] * 4), 1, Privacy(dp=CentralDP(sigma=1.0, mechanism="float"), secure=Masking()))


def guard(dp: CentralDP, algorithm: hansa.Algorithm | None = None, parties: int = 10) -> Guard:
    return Guard.of(dp, algorithm or hansa.FedSGD(), Run(), parties, parties, ((0,), torch.float32), None)


def clips(dp: CentralDP, updates: list[Tensor], rounds: int) -> tuple[list[float], Tensor]:
    """The clip of each round and the last sum, if every party sends the same update in every round."""
    dp = dataclasses.replace(dp, accountant="rdp")  # a thousand rounds of pld take a minute
    private = guard(dp, parties=len(updates))
    kept, out, total = private.begin(), [], torch.zeros(())
    for round in range(rounds):
        fed = Federation(range(len(updates)), round, 0, len(updates))
        sums = private.round(kept)
        payload = {"model": {"w": updates[0], "stats": torch.zeros(0), "counts": torch.zeros(0)}}
        ask = Ask("reduce", round, "round", 0, hansa.Gradient(), payload, tuple(range(len(updates))))
        answering = drive(sums.reduce(fed, ask), "test")
        op: Any = next(answering).op
        sent = [op.after(None, {}, Reply({"w": update}), {})[0].tensors for update in updates]
        with pytest.raises(StopIteration) as done:
            answering.send(Reduced({name: sum(s[name] for s in sent) for name in sent[0]}, 1, 1))
        out.append(sums.line(kept)["clip"])
        kept, total = sums.after(committed=True), done.value.value.sums["w"]
    return out, total


@pytest.mark.slow
def test_with_a_quantile_the_update_carries_more_noise_and_the_count_its_own() -> None:
    nothing = [torch.zeros(4000)] * 8
    dp = CentralDP(sigma=1.3, clip=0.5, quantile=0.5, sigma_b=0.9)
    tight = (1.3**-2 - (2 * 0.9) ** -2) ** -0.5
    assert abs(chi_square(clips(dp, nothing, 1)[1], tight * 0.5)) < 4
    logs = torch.tensor(clips(dp, [torch.zeros(2)] * 8, 1000)[0], dtype=torch.float64).log()
    noise = -torch.diff(logs) / dp.clip_rate - 0.5  # all are unclipped: b = 1 and its noise
    assert abs(chi_square(noise, 0.9 / 8)) < 4


@pytest.mark.thin(0)
@pytest.mark.parametrize(("quantile", "low", "high"), [(0.5, 10, 11), (0.9, 18, 19)])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_the_clip_goes_to_the_quantile_of_the_lengths(quantile: float, low: int, high: int, sigma: float) -> None:
    dp = CentralDP(sigma=sigma, clip=0.1, quantile=quantile)
    found, _ = clips(dp, vectors([float(k) for k in range(1, 21)]), 300)
    if not sigma:
        assert found[0] == 0.1 and found[1] == pytest.approx(0.1 * math.exp(0.2 * quantile))  # all were clipped
    last = sum(found[-100:]) / 100
    assert low * 0.95 <= last <= high * 1.05


def test_the_epsilon_is_the_accountants_for_the_rounds_done() -> None:
    done = steps([torch.zeros(2)] * 4, 3, CentralDP(sigma=2.0, delta=1e-5))
    for line in done.history:
        assert line["epsilon"] == epsilon([Release(1.0, 2.0, line["round"])], 1e-5)
        assert (line["delta"], line["sampling_rate"]) == (1e-5, 1.0)


def test_a_cohort_of_fixed_size_is_reckoned_as_if_all_took_part(caplog: pytest.LogCaptureFixture) -> None:
    done = steps([torch.zeros(2)] * 8, 2, CentralDP(sigma=2.0, delta=1e-5), cohort=0.25)
    assert done.history[-1]["epsilon"] == epsilon([Release(1.0, 2.0, 2)], 1e-5)
    assert "as if every party took part" in caplog.text


def test_a_poisson_cohort_is_reckoned_with_its_rate_and_divided_by_its_expected_size() -> None:
    updates = vectors([0.5] * 12)
    given: dict[str, Any] = {"select": "poisson", "cohort": 0.25, "seed": 4}
    done = steps(updates, 3, CentralDP(sigma=1.0, delta=1e-5), **given)
    for line in done.history:
        assert line["epsilon"] == epsilon([Release(0.25, 1.0, line["round"])], 1e-5)
        assert line["sampling_rate"] == 0.25
    one = steps(updates, 1, CentralDP(sigma=0), **given)
    drawn = rng.generator(4, "poisson", 0).random(12) < 0.25
    want = sum((v for v, joins in zip(updates, drawn, strict=True) if joins), torch.zeros(5)) / 3
    assert one.history[0]["replies"] == drawn.sum() != 3
    assert torch.allclose(one.state.params.w, want, rtol=1e-12, atol=0)


def test_a_round_to_which_nobody_was_drawn_is_noise_and_costs_as_any() -> None:
    given: dict[str, Any] = {"select": "poisson", "cohort_size": 1, "seed": 0}
    updates, dp = [torch.ones(2000)] * 6, CentralDP(sigma=1.5, delta=1e-5, clip=0.3)
    lines = steps(updates, 8, dp, **given).history
    empty = next(k for k, line in enumerate(lines) if line["asked"] == 0)
    assert "empty" not in lines[empty]
    assert lines[empty]["epsilon"] == epsilon([Release(1 / 6, 1.5, empty + 1)], 1e-5)
    before = moved(updates, empty, dp, **given) if empty else torch.zeros(2000)
    assert abs(chi_square(moved(updates, empty + 1, dp, **given) - before, 1.5 * 0.3)) < 4


def test_two_sums_in_a_round_cost_as_one_with_less_noise() -> None:
    fsvrg = hansa.FSVRG(local=hansa.SVRG(h=0.1))
    done = steps([torch.zeros(2)] * 4, 2, CentralDP(sigma=3.0, delta=1e-5), algorithm=fsvrg)
    assert done.history[-1]["epsilon"] == epsilon([Release(1.0, 3.0 / math.sqrt(2), 2)], 1e-5)


def test_the_default_delta_falls_with_the_parties() -> None:
    assert steps([torch.zeros(2)] * 9, 1, CentralDP(sigma=2.0)).history[0]["delta"] == pytest.approx(9**-1.1)


@pytest.mark.thin(1)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_given_an_epsilon_the_noise_is_what_all_rounds_need(accountant: Any) -> None:
    done = steps([torch.zeros(2)] * 4, 2, CentralDP(epsilon=3, delta=1e-5, accountant=accountant))
    assert len(done.history) == 2
    assert 3 * 0.999 < done.history[-1]["epsilon"] <= 3


def test_the_command_and_a_run_calibrate_by_the_same_tighter_accountant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--epsilon", "3", "--delta", "1e-5", "--parties", "8", "--cohort", "2", "--rounds", "4", "--json"]
    monkeypatch.setattr(sys, "argv", ["hansa", "privacy", "calibrate", *given])
    with contextlib.suppress(SystemExit):
        main()
    sigma = json.loads(capsys.readouterr().out)["sigma"]
    for dp in (CentralDP(epsilon=3, delta=1e-5), CentralDP(sigma=sigma, delta=1e-5)):
        done = steps([torch.zeros(2)] * 8, 4, dp, select="poisson", cohort=0.25)
        assert 3 * 0.999 < done.history[-1]["epsilon"] <= 3
    assert accounting.epsilon([Release(0.25, sigma, 4)], 1e-5, "rdp") > 3 * 1.02


def test_a_run_ends_before_the_round_that_would_overspend() -> None:
    done = steps([torch.zeros(2)] * 4, 50, CentralDP(sigma=4.0, epsilon=4.0, delta=1e-5))
    rounds = len(done.history)
    cost = [epsilon([Release(1.0, 4.0, n)], 1e-5) for n in (rounds, rounds + 1)]
    assert 1 < rounds < 50 and cost[0] <= 4.0 < cost[1]
    assert done.summary["stopped"] == "the privacy budget is spent: epsilon 4 at delta 1e-05"


def test_a_budget_that_one_round_overspends_is_refused() -> None:
    with pytest.raises(hansa.ConfigError, match=r"one round with sigma 0.5 costs epsilon .* more than the 1 "):
        steps([torch.zeros(2)] * 4, 5, CentralDP(sigma=0.5, epsilon=1.0, delta=1e-5))


def test_a_round_that_was_aborted_costs_nothing() -> None:
    dp = CentralDP(sigma=2.0, delta=1e-5)
    done = steps([torch.zeros(2)] * 4, 3, dp, quorum=3, absent=lambda party, round: round == 1 and party > 0)
    assert ["empty" in line for line in done.history] == [False, True, False]
    spent = [line["epsilon"] for line in done.history]
    assert spent[0] == spent[1] < spent[2] == epsilon([Release(1.0, 2.0, 2)], 1e-5)


def test_a_sum_that_was_made_is_paid_for_even_if_the_round_is_aborted_after_it() -> None:
    one = guard(CentralDP(sigma=2.0, delta=1e-5, quantile=None), hansa.FSVRG())
    sums = one.round(one.begin())
    sums.done = 1
    assert one.epsilon(sums.after(committed=False)) == epsilon([Release(1.0, 2.0)], 1e-5)
    sums.done = 2
    assert one.epsilon(sums.after(committed=True)) == epsilon([Release(1.0, 2.0, 1, 2)], 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_was_cut_off_goes_on_with_the_same_bits(engine: str, tmp_path: Path) -> None:
    dp = CentralDP(epsilon=30, delta=1e-5, clip=0.3, quantile=0.4)
    updates = vectors([0.2, 0.4, 0.6, 0.8])
    given: dict[str, Any] = {"privacy": Privacy(dp=dp), "rounds": 6, "engine": engine, "select": "poisson",
                             "cohort": 0.5}  # fmt: skip
    algorithm = hansa.FedSGD(server=hansa.Descent(lr=1.0))
    whole = hansa.simulate(algorithm, task(updates), **given)

    def cut(line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hansa.simulate(algorithm, task(updates), run_dir=tmp_path / "run", on_round=cut, **given)
    resumed = hansa.simulate(algorithm, task(updates), run_dir=tmp_path / "run", resume=True, **given)
    assert torch.equal(whole.state.params.w, resumed.state.params.w)
    for name in ("epsilon", "clip"):
        assert [line[name] for line in whole.history] == [line[name] for line in resumed.history]
    more = hansa.simulate(algorithm, task(updates), run_dir=tmp_path / "run", resume=True, **{**given, "rounds": 9})
    assert more.summary["stopped"] == "the privacy budget is spent: epsilon 30 at delta 1e-05"  # no other noise


def test_no_number_of_a_party_leaves_it_beside_its_part_of_the_sum() -> None:
    reply = Reply({"w": torch.ones(4)}, weight=17, maxima={"counts": torch.ones(1)}, metrics={"train_loss": 0.3})
    out, _ = Contribution(hansa.SGD(), 1.0, None, 3.0).after(None, {}, reply, {})  # type: ignore[arg-type]
    assert (out.weight, out.metrics, out.maxima, set(out.tensors)) == (1, {}, {}, {"w", UNCLIPPED})
    assert float(out.tensors[UNCLIPPED]) == -1.5
    line = steps(vectors([1.0] * 3), 1, CentralDP(sigma=1.0)).history[0]
    assert "train_loss" not in line


@pytest.mark.parametrize("value", [1.7e308, 1e200])
def test_an_update_whose_length_has_no_square_is_clipped_and_no_round_tells_of_it(value: float) -> None:
    updates = vectors([0.5] * 4)
    long = torch.full_like(updates[0], value)
    done = steps([long, *updates[1:]], 1, CentralDP(sigma=0), quorum=4)
    assert "rejected" not in done.history[0] and done.history[0]["replies"] == 4
    cut = torch.ones_like(long) / math.sqrt(long.numel())
    assert torch.allclose(done.state.params.w, (cut + torch.stack(updates[1:]).sum(0)) / 4)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_update_that_is_not_finite_counts_as_nothing(value: float) -> None:
    reply = Reply({"w": torch.tensor([value, 1.0])})
    said, _ = Contribution(hansa.SGD(), 1.0, None, 2.0).after(None, {}, reply, {})  # type: ignore[arg-type]
    assert said.tensors["w"].tolist() == [0.0, 0.0] and float(said.tensors[UNCLIPPED]) == -1.0


def test_a_party_that_does_not_clip_is_rejected_where_its_reply_is_seen() -> None:
    liar = hansa.SignFlip(scale=50.0, parties=(0,))
    updates = vectors([0.5] * 4)
    for protected in (Privacy(dp=CentralDP(sigma=0)), Privacy(bound=1.0)):
        done = steps(updates, 1, protected, adversary=liar)
        reason = "its norm is over 1, the bound to which the party should have clipped it"
        assert list(done.history[0]["rejected"].values()) == [reason]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bound_at_the_party_clips_and_leaves_weights_alone(engine: str) -> None:
    updates, sizes = vectors([0.5, 2.0, 8.0]), [1, 2, 5]
    bounded = [v / max(1.0, float(v.norm())) for v in updates]
    want = sum((n * v for n, v in zip(sizes, bounded, strict=True)), torch.zeros(5)) / 8
    assert torch.allclose(moved(updates, dp=Privacy(bound=1.0), sizes=sizes, engine=engine), want, rtol=1e-9, atol=0)
