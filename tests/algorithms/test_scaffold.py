"""SCAFFOLD: card 1.9 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.fusion import WeightedMean
from hansa.local import SGD, Controlled
from hansa.local.scaffold import OWN
from hansa.schedule import ExponentialDecay
from quadratics import ENGINES, Scalar, found, line, task
from small_tasks import classes, net, samples


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("settings", [{}, {"cohort_size": 3}, {"absent": lambda party, round: party == round % 5}])
def test_the_servers_control_variate_is_the_mean_of_the_parties(
    option: str, settings: dict[str, Any], engine: str
) -> None:
    sizes = [3, 7, 2, 5, 4]
    local = Controlled(lr=0.2, epochs=2, batch=3, option=option)  # type: ignore[arg-type]
    for rounds in (1, 2, 5):
        done = hansa.simulate(hansa.Scaffold(local=local), classes(sizes), rounds=rounds, engine=engine, **settings)
        own = [done.memories.get(k, {}).get(OWN, torch.zeros_like(done.state.slots["c"])) for k in range(len(sizes))]
        assert float(done.state.slots["c"].abs().max()) > 1e-3
        torch.testing.assert_close(done.state.slots["c"], torch.stack(own).mean(0), rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_is_fedavg_with_equal_weights(option: str, engine: str) -> None:
    given, local = classes([3, 7, 2]), {"lr": 0.2, "epochs": 2, "batch": 3}
    uniform = WeightedMean(uniform=True)
    plain = hansa.simulate(hansa.FedAvg(local=SGD(**local), fusion=uniform), given, rounds=1, engine=engine)
    first = hansa.simulate(hansa.Scaffold(local=Controlled(**local, option=option)), given, rounds=1, engine=engine)  # type: ignore[arg-type]
    torch.testing.assert_close(first.state.params.w, plain.state.params.w, rtol=0, atol=1e-14)


@pytest.mark.thin(0)
@pytest.mark.parametrize(("model", "engine"), [(line, "reference"), (Scalar, "reference"), (line, "stacked")])
@pytest.mark.parametrize("option", ["I", "II"])
def test_it_reaches_the_optimum_of_two_quadratics_where_fedavg_stops_short(
    option: str, model: object, engine: str
) -> None:
    # Card 1.9 (c): a = (1, 10), b = (0, 1), rate 0.05, K = 10: 0.909091, FedAvg 0.713442; derived and confirmed there.
    given = task([1.0, 10.0], [0.0, 1.0], model=model)
    local = {"lr": 0.05, "steps": 10, "batch": None}
    scaffold = hansa.Scaffold(local=Controlled(**local, option=option))  # type: ignore[arg-type]
    assert found(scaffold, given, 150, engine=engine) == pytest.approx(10 / 11, abs=1e-9)
    assert found(hansa.FedAvg(local=SGD(**local)), given, 40, engine=engine) == pytest.approx(0.713442, abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["I", "II"])
def test_identical_parties_are_fedavg(option: str, engine: str) -> None:
    given = hansa.Task(net, "cross_entropy", samples([6]) * 3, classes=3)
    local = {"lr": 0.2, "epochs": 3, "batch": None}
    plain = hansa.simulate(hansa.FedAvg(local=SGD(**local)), given, rounds=4, engine=engine)  # type: ignore[arg-type]
    scaffold = hansa.simulate(hansa.Scaffold(local=Controlled(**local, option=option)), given, rounds=4, engine=engine)  # type: ignore[arg-type]
    torch.testing.assert_close(scaffold.state.params.w, plain.state.params.w, rtol=0, atol=1e-12)


def test_option_two_divides_by_the_steps_that_were_taken() -> None:
    # One party, a slope that never changes: whatever the number of steps, c_i becomes that slope.
    def slope(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 3.0 * output[:, 0]

    for size, batch in ((7, 2), (4, 4), (5, 3)):
        given = task([1.0], [0.0], sizes=[size])
        given.loss = slope
        done = hansa.simulate(hansa.Scaffold(local=Controlled(lr=0.1, epochs=2, batch=batch)), given, rounds=2)
        assert float(done.memories[0][OWN]) == pytest.approx(3.0, abs=1e-12)


def by_hand(option: str, rounds: int, rates: list[float], steps: int) -> tuple[float, float, list[float]]:
    """SCAFFOLD on the quadratics a_i / 2 (y - b_i)^2: x, c and the c_i after some rounds, each with its own rate."""
    x, c, own = 2.0, 0.0, [0.0, 0.0, 0.0]
    for lr in rates[:rounds]:
        ends, new = [], []
        for a, b, c_i in zip(CURVES, OPTIMA, own, strict=True):
            y = x
            for _ in range(steps):
                y -= lr * (a * (y - b) - c_i + c)
            ends.append(y)
            new.append(a * (x - b) if option == "I" else c_i - c + (x - y) / (steps * lr))
        c += sum(after - before for after, before in zip(new, own, strict=True)) / 3
        x, own = sum(ends) / 3, new
    return x, c, own


CURVES, OPTIMA = [1.0, 4.0, 2.0], [0.0, 1.0, -3.0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [line, Scalar])
@pytest.mark.parametrize("option", ["I", "II"])
def test_it_is_the_papers_equations_round_by_round_also_while_the_rate_falls(
    option: str, model: object, engine: str
) -> None:
    # Option I takes the gradient at the server's model x, not where training ended; option II divides by the round's
    # rate, which falls to a half with every round here.
    local = Controlled(lr=0.1, steps=3, batch=None, option=option, schedule=ExponentialDecay(decay=0.5))  # type: ignore[arg-type]
    rates = [0.1 * 0.5**t for t in range(4)]
    for rounds in (1, 2, 4):
        given = task(CURVES, OPTIMA, model=model, start=2.0)
        done = hansa.simulate(hansa.Scaffold(local=local), given, rounds=rounds, engine=engine)
        x, c, own = by_hand(option, rounds, rates, 3)
        assert float(done.state.params.w) == pytest.approx(x, abs=1e-12)
        assert float(done.state.slots["c"]) == pytest.approx(c, abs=1e-12)
        assert [float(done.memories[k][OWN]) for k in range(3)] == pytest.approx(own, abs=1e-12)


def test_messages_are_twice_as_long_as_those_of_fedavg() -> None:
    given = hansa.Task(
        lambda: nn.Linear(1000, 2), "cross_entropy", [(torch.randn(4, 1000), torch.tensor([0, 1, 0, 1]))]
    )
    plain, scaffold = (hansa.simulate(a, given, rounds=1).history[0] for a in (hansa.FedAvg(), hansa.Scaffold()))
    for way in ("bytes_up", "bytes_down"):
        assert scaffold[way] / plain[way] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Controlled(momentum=0.9), "use option I"),
        (lambda: Controlled(weight_decay=0.1), "use option I"),
        (lambda: hansa.Scaffold(server="yogi"), "the control variates assume"),
        (lambda: hansa.Scaffold(fusion=WeightedMean(uniform=False)), "fusion.uniform = true"),
        (lambda: hansa.simulate(hansa.FedYogi(local="scaffold"), classes([3])), "one half of scaffold, whose server"),
        (lambda: hansa.simulate(hansa.FedAvg(local="scaffold"), classes([3])), "use the algorithm scaffold"),
        (lambda: hansa.simulate(hansa.Scaffold(local="sgd"), classes([3])), "needs its own local solver"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(hansa.ConfigError, match=reason):
        make()
