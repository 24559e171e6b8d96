from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

from hansa import FedAvg, Task, build, simulate
from hansa.artifacts.run_folder import SUMMARY
from hansa.demo.hospitals import hospitals
from hansa.plumbing.errors import ConfigError
from hansa.report import plots
from hansa.report.html import POLICY, SCRIPT, Detail, Picture, Sheet, write_report
from hansa.report.run_report import run_report

NASTY = "<script>alert('x')</script> & \"Söhne\""


def stands_alone(page: str) -> None:
    """Check that the page and its embedded pictures load nothing from elsewhere."""
    assert "http://" not in page and "https://" not in page
    assert page.count("<script") == 1 and f"<script>{SCRIPT}</script>" in page
    assert "<link" not in page and "@import" not in page
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in POLICY and f'content="{POLICY}"' in page and "unsafe" not in POLICY
    sources = re.findall(r'src="([^"]*)"', page)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    for source in sources:
        drawn = base64.b64decode(source.partition(",")[2]).decode()
        assert "<svg" in drawn and not re.search(r'href="(?!#)|url\((?!#)', drawn)


def small_run(folder: Path, names: list[str], rounds: int = 6, **more: object) -> None:
    torch.manual_seed(0)
    parties = [(torch.randn(30, 3), torch.randint(0, 2, (30,))) for _ in names]
    task = Task(build("model", "logistic", inputs=(3,), outputs=2), "cross_entropy", parties, party_tests=parties,
                names=names)  # fmt: skip
    simulate(FedAvg(), task, rounds=rounds, eval_every=2, run_dir=folder, **more)  # type: ignore[arg-type]


def test_a_report_is_one_file_that_refers_to_nothing_outside(tmp_path: Path) -> None:
    figure = plots.traffic([10.0, 20.0], [5.0, 5.0])
    sections = [Sheet("T", ("a", "b"), [("1", "2")]), Picture("P", "what to see", figure),
                Detail("D", "x = 1\ny = 2", code=True)]  # fmt: skip
    path = write_report(tmp_path / "r.html", "A run", ["First.", "Second."], sections)
    assert list(tmp_path.iterdir()) == [path]
    page = path.read_text()
    stands_alone(page)
    assert page.count("<img") == 1 and "<pre>x = 1\ny = 2</pre>" in page and "<p>Second.</p>" in page


def test_all_text_in_a_report_is_escaped(tmp_path: Path) -> None:
    figure = plots.traffic([1.0], [1.0])
    tables = [Sheet(NASTY, (NASTY,), [(NASTY,)], note=NASTY)]
    details = [Detail(NASTY, NASTY), Detail(NASTY, NASTY, code=True)]
    sections = [*tables, Picture(NASTY, NASTY, figure), *details]
    path = write_report(tmp_path / "r.html", NASTY, [NASTY], sections)
    page = path.read_text()
    stands_alone(page)
    assert page.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;Söhne&quot;") == 14


@pytest.mark.slow
def test_the_demonstrations_report_stands_alone_and_names_its_source(tmp_path: Path) -> None:
    page = hospitals(tmp_path, seeds=1).report.read_text()
    stands_alone(page)
    for word in ("Switzerland", "local-only", "UCI Machine Learning Repository", "CC BY 4.0", "hansa demo --seeds 1"):
        assert word in page
    assert page.count("<img") == 3


def test_a_runs_report_shows_curves_bytes_and_configuration(tmp_path: Path) -> None:
    small_run(tmp_path / "first", ["north", NASTY])
    path = run_report(tmp_path / "first")
    page = path.read_text()
    stands_alone(page)
    assert path == tmp_path / "first" / "report.html"
    for word in ("fedavg: first", "Learning curves", "Bytes exchanged", "Exact configuration", "&quot;rounds&quot;: 6"):
        assert word in page
    assert "north" in page and "&lt;script&gt;" in page
    assert "Missing and rejected" not in page
    assert str(tmp_path) not in page


@pytest.mark.slow
def test_a_runs_report_says_who_was_missing(tmp_path: Path) -> None:
    small_run(tmp_path / "run", ["a", "b", NASTY], absent=lambda party, round: party == 2 and round % 2 == 0)
    page = run_report(tmp_path / "run").read_text()
    stands_alone(page)
    assert "Missing and rejected" in page and "it did not answer" in page and "Replies" in page


def test_a_run_that_is_not_finished_is_reported_so_far(tmp_path: Path) -> None:
    small_run(tmp_path / "run", ["a", "b"])
    (tmp_path / "run" / SUMMARY).unlink()
    assert "the run is not finished" in run_report(tmp_path / "run").read_text()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        run_report(tmp_path)


def test_a_method_without_curves_still_has_a_report(tmp_path: Path) -> None:
    parties = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(2)]
    simulate(build("algorithm", "naive-bayes"), Task(None, "cross_entropy", parties), run_dir=tmp_path / "nb")
    page = run_report(tmp_path / "nb").read_text()
    stands_alone(page)
    assert "Learning curves" not in page and "Bytes exchanged" in page


@pytest.mark.parametrize(("most", "name"), [(0, "bytes"), (999, "bytes"), (1000, "kB"), (5e6, "MB"), (2e9, "GB")])
def test_bytes_are_shown_in_a_unit_that_reads_well(most: float, name: str) -> None:
    assert plots.unit(most)[1] == name


@pytest.mark.slow
def test_learning_is_drawn_over_simulated_time_only_where_rounds_take_different_times(tmp_path: Path) -> None:
    for name, devices in (("even", {}), ("uneven", {"latency": "exponential"})):
        small_run(tmp_path / name, ["a", "b"], devices=devices)
        page = run_report(tmp_path / name).read_text()
        stands_alone(page)
        assert ("Learning over simulated time" in page) == (name == "uneven")
        assert "simulated seconds" in page  # in numbers


def attacked(folder: Path) -> Path:
    from hansa.experiment.config import parse

    tree = {
        "task": {"dataset": "digits", "model": "logistic"},
        "partition": {"name": "iid", "parties": 8},
        "algorithm": {"name": "fedavg", "fusion": "multi-krum"},
        "adversary": {"kind": "sign-flip", "parties": [2, 5], "scale": 4},
        "run": {"rounds": 4},
    }
    experiment = parse(tree)
    simulate(experiment.algorithm, experiment.build_task(), run_dir=folder, **experiment.settings())
    return folder


@pytest.mark.slow
def test_a_run_with_hostile_parties_reports_who_was_left_out(tmp_path: Path) -> None:
    page = run_report(attacked(tmp_path / "run")).read_text()
    assert "Share in the model by party" in page
    assert "Shares in the fusion" in page
    rows = re.findall(r"<tr><td>(\d)</td><td>(\w+)</td><td>4</td><td>(\d)</td><td>0</td><td>([\d.]+)</td></tr>", page)
    assert [(name, kind) for name, kind, *_ in rows[:2]] == [("2", "attacker"), ("5", "attacker")]
    assert [(left_out, share) for _, _, left_out, share in rows[:2]] == [("4", "0.0000")] * 2
    assert len(rows) == 8


def test_precision_and_recall_of_exclusion_are_those_of_the_parties_left_out(tmp_path: Path) -> None:
    folder = attacked(tmp_path / "run")
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in history:
        out = set(line["fusion"]["excluded"])
        assert {"2", "5"} <= out
        assert line["exclusion_recall"] == 1
        assert line["exclusion_precision"] == 2 / len(out)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exclusion_recall"] == 1
    assert summary["exclusion_precision"] == pytest.approx(sum(line["exclusion_precision"] for line in history) / 4)


def test_the_figure_of_shares_has_the_attackers_above_the_line() -> None:
    from hansa.report import fusion_shares

    history = [
        {"round": k, "fusion": {"shares": {"a": 0.5, "b": 0.0, "c": 0.5}, "excluded": ["b"]}, "exclusion_recall": 1.0}
        for k in (1, 2)
    ]
    figure = fusion_shares.figure(history, ["b"])
    assert figure is not None
    shares, caught = figure.axes[0], figure.axes[1]
    assert [label.get_text() for label in shares.get_yticklabels()] == ["b", "a", "c"]
    assert shares.images[0].get_array().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert caught.get_title(loc="left") == "Excluded parties"
    assert fusion_shares.figure([{"round": 1}], []) is None
