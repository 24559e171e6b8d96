"""Every transform with methods of each kind, in every engine and deployed; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_compressed_runs import AsksForNoUpdate, Lying, NoUpdate, run, task, watched_stacks
from torch import Tensor

import hansa
from hansa.core.algorithm import Parts, State
from hansa.core.federation import Federation
from hansa.core.registry import register, registered
from hansa.local import SGD, Controlled
from hansa.plumbing.errors import ConfigError
from hansa.transforms import QSGD, ErrorFeedback, RandK, Sign, TopK, Transform

LOCAL = SGD(lr=0.1, steps=3, batch=8)
METHODS: dict[str, hansa.Algorithm] = {
    "fedavg": hansa.FedAvg(local=LOCAL),
    "scaffold": hansa.Scaffold(local=Controlled(lr=0.1, steps=3, batch=8)),
    "fedyogi": hansa.FedYogi(local=LOCAL),
    "median": hansa.FedAvg(local=LOCAL, fusion="median"),  # type: ignore[arg-type]
    "fedbuff": hansa.FedBuff(local=LOCAL, buffer=2),
    "fedper": hansa.FedPer(local=LOCAL),
    "ditto": hansa.Ditto(local=LOCAL),
    "fedrep": hansa.FedRep(local=LOCAL, head_epochs=1),
    "lg-fedavg": hansa.LGFedAvg(local=LOCAL),
    "apfl": hansa.APFL(local=LOCAL),
    "mapper": hansa.MAPPER(),
    "optimal-averaging": hansa.OptimalAveraging(),
}
TRANSFORMS: dict[str, Transform] = {
    **{name: part() for name, part in registered("transform").items() if part.__module__.startswith("hansa.")},  # type: ignore[misc]
    "elias": QSGD(2, elias=True),
    "shared": RandK(share=0.2, shared=True),
    "ef-sign": ErrorFeedback(Sign()),
    "ef-top-k": ErrorFeedback(TopK(share=0.2)),
}  # fmt: skip


@pytest.mark.thin(4)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("method", METHODS)
def test_every_engine_gives_the_same_model(transform: str, method: str) -> None:
    shared = task()
    settings: dict[str, Any] = {"compress": TRANSFORMS[transform], "cohort_size": 4, "rounds": 3}
    if method in ("scaffold", "fedbuff"):
        settings.pop("cohort_size")
    reference = run(METHODS[method], shared, **settings)
    assert all("rejected" not in line and line["replies"] for line in reference.history)
    stacked = run(METHODS[method], shared, engine="stacked", **settings)
    torch.testing.assert_close(stacked.state.params.w, reference.state.params.w, rtol=0, atol=1e-9)
    assert [line["bytes_up"] for line in stacked.history] == [line["bytes_up"] for line in reference.history]


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["ef-top-k", "elias", "qsgd", "shared"])
def test_worker_processes_give_the_same_model(transform: str) -> None:
    reference, workers = (
        run(compress=TRANSFORMS[transform], engine=engine, rounds=2) for engine in ("reference", "workers")
    )
    torch.testing.assert_close(workers.state.params.w, reference.state.params.w, rtol=0, atol=1e-9)


@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name not in ("elias", "clip")])
def test_a_stacked_engine_hands_on_whole_stacks(transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = watched_stacks(monkeypatch)
    run(engine="stacked", compress=TRANSFORMS[transform], alone=True, rounds=2)
    assert whole and all(whole)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_secure_sum_takes_what_commutes_with_sums_and_refuses_the_rest(transform: str) -> None:
    rule, private = TRANSFORMS[transform], {"secure": "masking", "range": 16.0}
    if not rule.adds:
        with pytest.raises(ConfigError, match="cannot be added before they are opened, and a secure sum adds them"):
            run(compress=rule, privacy=private)
        return
    hidden, clear = (run(compress=rule, privacy=p, rounds=2) for p in (private, {}))
    assert all("empty" not in line and "missing" not in line for line in hidden.history)
    torch.testing.assert_close(hidden.state.params.w, clear.state.params.w, rtol=0, atol=1e-4)


def test_error_feedback_and_a_shared_choice_of_places_work_with_a_secure_sum() -> None:
    rule = ErrorFeedback(RandK(share=0.2, scaled=False, shared=True))
    hidden, clear = (run(compress=rule, privacy=p) for p in ({"secure": "masking", "range": 16.0}, {}))
    torch.testing.assert_close(hidden.state.params.w, clear.state.params.w, rtol=0, atol=1e-4)
    for setting in ({"dp": {"kind": "central", "sigma": 1.0}}, {"bound": 1.0}):
        with pytest.raises(ConfigError, match="'error-feedback' can make an update longer than privacy"):
            run(compress=rule, privacy=setting)
    with pytest.raises(ConfigError, match=r"'top-k' sends numbers that cannot be added .* privacy\.dp clips"):
        run(compress="top-k", privacy={"dp": {"kind": "central", "sigma": 1.0}})


def test_central_privacy_works_with_a_shared_choice_of_places() -> None:
    rule = RandK(share=0.2, scaled=False, shared=True)
    private = {"dp": {"kind": "central", "sigma": 0, "clip": 100.0}}
    noiseless, plain = (run(compress=c, privacy=private, eval_parties=False, rounds=1) for c in (rule, None))
    start = run(rounds=1, max_norm=1e-12).state.params.w
    moved, whole = noiseless.state.params.w - start, plain.state.params.w - start
    kept = moved != 0
    assert int(kept.sum()) == round(0.2 * len(start))
    torch.testing.assert_close(moved[kept], whole[kept], rtol=0, atol=1e-12)


@register("test-statistics-first")
class StatisticsFirst(hansa.FedAvg):
    """Asks for statistics alone in the first round."""

    async def round(self, fed: Federation, state: State) -> State:
        if state.round == 0:
            await fed.reduce(NoUpdate(), {})
            return state
        return await super().round(fed, state)


def test_a_method_may_ask_for_statistics_before_its_first_updates() -> None:
    done = run(StatisticsFirst(local=LOCAL), compress="int8", rounds=2)
    plain = run(StatisticsFirst(local=LOCAL), rounds=2)
    assert done.history[0]["bytes_up"] == plain.history[0]["bytes_up"]
    assert done.history[1]["bytes_up"] < plain.history[1]["bytes_up"] / 2
    assert AsksForNoUpdate().parts() == Parts()


LIES: dict[str, tuple[Transform, Callable[[dict[str, Tensor]], object], str]] = {
    "place": (TopK(k=3), lambda parts: parts["w.places"].fill_(-1), "it cannot be opened: a place is outside"),
    "twice": (TopK(k=3), lambda parts: parts["w.places"].fill_(7), "it cannot be opened: its places are not in ascen"),
    "norm": (QSGD(2), lambda parts: parts["w.norms"].fill_(torch.nan), "w.norms has values that are not finite"),
    "code": (QSGD(2), lambda parts: parts["w.codes"].fill_(255), "it cannot be opened: "),
    "elias": (QSGD(2, elias=True), lambda parts: parts["w.codes"].fill_(255), "it cannot be opened: "),
    "length": (RandK(k=3), lambda parts: parts.update({"w.values": torch.ones(4).double()}), "w.values has the shape"),
    "scale": (ErrorFeedback(Sign()), lambda parts: parts["w.scale"].fill_(-1), "it cannot be opened: the scale"),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "median"])
def test_a_liar_is_rejected_by_name_and_the_round_goes_on(
    lie: str, engine: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, change, reason = LIES[lie]
    Lying(monkeypatch, change)  # type: ignore[arg-type]
    for line in run(METHODS[method], compress=rule, engine=engine, rounds=2).history:
        assert list(line["rejected"]) == ["2"] and line["rejected"]["2"].startswith(reason), line
        assert line["replies"] == 5
