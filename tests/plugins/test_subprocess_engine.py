"""An engine outside the package: bit-equal to the reference, found by its entry point, never with stale samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocess_engine import Subprocess, SubprocessEngine
from torch import nn

import hansa
from hansa.sim.engines import Reference, Stacked, Workers
from hansa.testing import check_engine
from hansa.testing.engines import check_data_changes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "tolerance"),
    [(Subprocess(), 0.0), (Reference(), 0.0), (Workers(), 0.0), (Stacked(), 1e-9)],
    ids=lambda part: getattr(part, "name", ""),
)
def test_an_engine_gives_what_the_reference_gives(engine: Any, tolerance: float) -> None:
    check_engine(engine, tolerance)


def task(scale: float = 1.0) -> hansa.Task:
    draws = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=draws), torch.randint(0, 2, (n,), generator=draws)) for n in (5, 9, 14, 6)]
    pairs[2][0].mul_(scale)
    return hansa.Task(model=lambda: nn.Linear(3, 2), parties=pairs, test=pairs[0])


def results(monkeypatch: pytest.MonkeyPatch, given: hansa.Task | None = None, **settings: Any) -> tuple[Any, Any, int]:
    """The results of the reference and of the plug-in, and how often the plug-in was asked for partial sums."""
    calls = []
    honest = SubprocessEngine.partial_sums
    monkeypatch.setattr(
        SubprocessEngine, "partial_sums", lambda self, *asked: calls.append(asked) or honest(self, *asked)
    )
    runs = [
        hansa.simulate(hansa.FedAvg(), given or task(), rounds=2, engine=engine, **settings)
        for engine in ("reference", "plugin-subprocess")
    ]
    return *runs, len(calls)


def test_partial_sums_give_the_reference_s_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, plugin, calls = results(monkeypatch, sums="exact")
    assert torch.equal(reference.state.params.w, plugin.state.params.w) and calls >= 2
    assert reference.history[-1]["bytes_up"] == plugin.history[-1]["bytes_up"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {}, {"sums": "exact", "max_norm": 100.0}, {"sums": "exact", "compress": "int8"},
    {"sums": "exact", "adversary": {"name": "sign-flip", "parties": [1]}},
], ids=str)  # fmt: skip
def test_an_engine_is_asked_for_single_replies_where_each_one_is_looked_at(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, plugin, calls = results(monkeypatch, **settings)
    assert torch.equal(reference.state.params.w, plugin.state.params.w)
    assert calls == 0 or "max_norm" in settings  # outside the rounds no norm is limited: evaluations may be summed


def test_a_reply_that_does_not_fit_a_partial_sum_is_rejected_by_its_party(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, plugin, _ = results(monkeypatch, task(scale=1e30), sums="exact")
    assert torch.equal(reference.state.params.w, plugin.state.params.w)
    for line, other in zip(reference.history, plugin.history, strict=True):
        assert line["rejected"] == other["rejected"] and len(line["rejected"]) == 1


def test_a_partial_sum_of_an_engine_that_lies_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SubprocessEngine.partial_sums

    def lies(self: SubprocessEngine, *asked: Any) -> Any:
        for item in honest(self, *asked):
            if not isinstance(item, tuple) and 3 in item.parties:
                item.reply.count += 1
            yield item

    monkeypatch.setattr(SubprocessEngine, "partial_sums", lies)
    result = hansa.simulate(hansa.FedAvg(), task(), rounds=1, engine="plugin-subprocess", sums="exact")
    assert set(result.history[0]["rejected"]) == {"2", "3"} and result.history[0]["replies"] == 2
    for why in result.history[0]["rejected"].values():
        assert why == (
            "the partial sum of the engine 'plugin-subprocess': it stands for 3 parties, and its sender was given 2"
        )


def test_an_engine_that_ignores_changes_of_the_data_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubprocessEngine, "data_changed", lambda self, parties=None: None)
    with pytest.raises(AssertionError, match=r"after a change of \[1\]: the outcome of 'sgd' at party 1"):
        check_data_changes(Subprocess(), 0.0)
    with pytest.raises(AssertionError, match=r"fedavg with .*: the state is not the reference's"):
        check_engine(Subprocess())  # its run prepares the features after the first ask


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_an_engine_by_its_entry_point(tmp_path: Path) -> None:
    listed = subprocess.run(
        [sys.executable, "-c", "from hansa.cli import main; main()", "parts", "engine"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in ("auto", "reference", "workers", "stacked", "plugin-subprocess"):
        assert name in listed.stdout
