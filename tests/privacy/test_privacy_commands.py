"""`hansa privacy`: sigma from epsilon, epsilon from sigma, and one sentence for invalid input."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from hansa.cli import main
from hansa.core.budget import Release
from hansa.privacy.accounting import epsilon

SGD = ("--samples", "600", "--batch", "32", "--epochs", "5")
CENTRAL = ("--parties", "1000", "--cohort", "100", "--rounds", "20")


def hansa(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hansa", "privacy", *args])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def calibrated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert hansa(monkeypatch, "calibrate", *args, "--json") == 0
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    return tree


def test_an_epsilon_gives_the_sigma_that_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = calibrated(monkeypatch, capsys, "--epsilon", "3", "--delta", "1e-5", *SGD)
    assert (found["rate"], found["steps"]) == (32 / 600, 5 * 19)
    assert found["epsilon"] == epsilon([Release(32 / 600, found["sigma"], 95)], 1e-5)
    assert 2.999 < found["epsilon"] <= 3
    assert found["epsilons"]["pld"] <= found["epsilons"]["rdp"] < found["epsilons"]["classic"]
    back = calibrated(monkeypatch, capsys, "--sigma", str(found["sigma"]), *SGD)
    assert back["epsilon"] == found["epsilon"]


def test_central_privacy_counts_rounds_and_parties(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = calibrated(monkeypatch, capsys, "--sigma", "1.5", *CENTRAL, "--accountant", "pld")
    assert (found["rate"], found["steps"]) == (0.1, 20)
    assert found["epsilon"] == epsilon([Release(0.1, 1.5, 20)], 1e-5, "pld")
    assert calibrated(monkeypatch, capsys, "--sigma", "0", *CENTRAL)["epsilon"] is None


@pytest.mark.parametrize(("args", "said"), [
    (("--epsilon", "3", "--sigma", "1", *SGD), "either --epsilon"),
    (SGD, "either --epsilon"),
    (("--epsilon", "3", "--samples", "600"), "give --samples, --batch and --epochs"),
    (("--epsilon", "3", *SGD, *CENTRAL), "give --samples, --batch and --epochs"),
    (("--epsilon", "3", "--samples", "10", "--batch", "32", "--epochs", "1"), "--batch 32 is more than --samples 10"),
    (("--epsilon", "3", "--samples", "10", "--batch", "0", "--epochs", "1"), "--batch must be at least 1"),
    (("--epsilon", "-1", *SGD), "epsilon must be positive"),
    (("--epsilon", "3", "--delta", "2", *SGD), "delta must lie between 0 and 1"),
    (("--sigma", "-1", *SGD), "sigma must not be negative"),
    (("--sigma", "1", "--accountant", "moments", *SGD), "--accountant must be rdp or pld"),
])  # fmt: skip
def test_bad_input_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str
) -> None:
    assert hansa(monkeypatch, "calibrate", *args) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
