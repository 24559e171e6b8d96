"""Each party's own metrics: in metrics lines, summaries, tables and reports."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import hansa
from hansa.cli import show
from hansa.core.ask import Gathered
from hansa.core.op import Reply
from hansa.core.plain_data import build
from hansa.metrics.measures import measure_of
from hansa.metrics.names import higher_is_better, known_metrics, plain_metric
from hansa.report.party_metrics import own_metrics
from hansa.report.run_report import run_report
from hansa.run.party_fields import WORST, over_parties


def answers(losses: list[float]) -> Gathered:
    replies = tuple(Reply({}, weight=2, metrics={"loss": loss, "accuracy": 1 - loss}) for loss in losses)
    return Gathered(tuple(range(len(losses))), replies)


def task(parties: int = 3, tested: int = 3) -> hansa.Task:
    draw = torch.Generator().manual_seed(0)

    def pair(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 3, generator=draw), torch.randint(0, 2, (n,), generator=draw)

    tests = [pair(5 if k < tested else 0) for k in range(parties)]
    return hansa.Task(build("model", "logistic", inputs=(3,), outputs=2), "cross_entropy",
                      [pair(6) for _ in range(parties)], party_tests=tests)  # fmt: skip


def test_the_spread_is_the_standard_deviation_over_parties() -> None:
    line = over_parties(answers([0.1, 0.2, 0.6]), 1, str)
    assert line["party_loss_spread"] == pytest.approx(math.sqrt(line["party_loss_variance"]))
    assert line["party_loss_spread"] == pytest.approx(torch.tensor([0.1, 0.2, 0.6]).std(correction=0).item())
    assert "party_auc_spread" in known_metrics() and plain_metric("party_auc_spread") == "auc"
    assert not higher_is_better("party_accuracy_spread") and measure_of("spread", "accuracy").higher is False


def test_of_many_parties_a_line_has_the_worst() -> None:
    losses = [((7 * k) % 101) / 200 for k in range(101)]
    losses[50] = math.nan
    line = over_parties(answers(losses), 1, str)
    assert "parties" not in line and len(line["worst_parties"]) == WORST
    order = sorted(range(101), key=lambda k: -losses[k] if k != 50 else -math.inf)
    assert list(line["worst_parties"]) == [str(k) for k in order[:WORST]]


def test_a_smallest_cohort_hides_each_party_s_metrics_and_says_so() -> None:
    line = over_parties(answers([0.1, 0.2]), 2, str)
    assert "parties" not in line and "worst_parties" not in line
    assert line["hidden"] == "run.min_cohort is 2, so no party's own metrics are shown"


def test_a_secure_sum_hides_each_party_s_metrics_and_says_so() -> None:
    done = hansa.simulate(hansa.FedAvg(), task(), rounds=1, privacy={"secure": "masking"})
    found = own_metrics(done.history, done.summary, 20)
    assert not found.rows and found.notes == ["A secure sum hides the metrics of each party."]


def test_a_table_has_every_party_before_and_after_and_of_many_the_worst() -> None:
    done = hansa.simulate(hansa.FedAvg(), task(4, 3), rounds=1, finetune={"epochs": 1})
    found = own_metrics(done.history, done.summary, 20)
    assert [row[0] for row in found.rows] == ["0", "1", "2"]
    assert found.header[:3] == ("party", "accuracy", "accuracy, fine-tuned")
    after = done.summary["finetuned"]["after"]["parties"]["1"]["loss"]
    assert found.rows[1][found.header.index("loss, fine-tuned")] == f"{after:.4f}"
    assert found.notes == ["Without test samples: 3."]
    worst = own_metrics(done.history, done.summary, 2)
    losses = {name: own["loss"] for name, own in done.history[-1]["parties"].items()}
    assert [row[0] for row in worst.rows] == sorted(losses, key=lambda name: -losses[name])[:2]
    assert worst.notes[0] == "The 2 parties with the highest loss."


@pytest.mark.slow
def test_the_command_and_the_report_show_each_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"rounds": 1, "finetune": {"epochs": 2, "lr": 0.1}, "run_dir": tmp_path / "run"}
    done = hansa.simulate(hansa.FedAvg(), task(), **settings)
    printed = io.StringIO()
    monkeypatch.setattr(show, "console", Console(file=printed, width=120))
    show.print_summary(done.summary, done.history)
    own = done.history[-1]["parties"]["2"]["loss"]
    assert f"{own:.4f}" in printed.getvalue() and "3 parties, 2 epochs at the rate 0.1" in printed.getvalue()
    page = run_report(tmp_path / "run").read_text()
    assert f"{own:.4f}" in page and "loss, fine-tuned" in page and "party loss mean, fine-tuned" in page
