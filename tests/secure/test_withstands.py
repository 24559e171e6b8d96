"""Every secure sum says which aggregator it withstands: in `hansa parts`, in the log, and in a party's refusal."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from test_masking_runs import task

import hansa
from hansa.cli.parts import show_parts
from hansa.core.plain_data import build
from hansa.core.registry import registered
from hansa.net.party.floor import Floor
from hansa.secure import Masking
from hansa.secure.channel import CURIOUS, LYING, Channel
from hansa.secure.masking_ops import SecureKeys, SecureShares

CHANNELS: dict[str, Any] = registered("secure")


@pytest.mark.parametrize("name", CHANNELS)
def test_every_secure_sum_says_itself_against_whom_it_holds(name: str) -> None:
    assert issubclass(CHANNELS[name], Channel)
    assert CHANNELS[name].__dict__["against"] in (LYING, CURIOUS)  # not inherited


def test_only_signed_masks_withstand_a_lying_aggregator() -> None:
    assert {name for name, channel in CHANNELS.items() if channel.against == LYING} == {"masking"}
    assert Masking().withstands == LYING
    assert Masking(active=False).withstands == CURIOUS
    assert build("secure", "paillier").withstands == CURIOUS


def test_the_list_of_secure_sums_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    show_parts("secure", None, as_json=True)
    shown = {part["name"]: part["withstands"] for part in json.loads(capsys.readouterr().out)}
    assert shown.pop("masking") == f"{LYING} (with active = false: {CURIOUS})"
    assert set(shown) == set(CHANNELS) - {"masking"} and set(shown.values()) == {CURIOUS}
    show_parts("secure", "paillier", as_json=False)
    assert f"withstands: {CURIOUS}" in " ".join(capsys.readouterr().out.split())
    show_parts("secure", None, as_json=False)
    assert "withstands" in capsys.readouterr().out
    show_parts("server", None, as_json=True)
    assert "withstands" not in capsys.readouterr().out


@pytest.mark.parametrize(("given", "said"), [({}, LYING), ({"active": False}, CURIOUS)])
def test_a_run_logs_it_when_it_starts(given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hansa"):
        hansa.simulate(hansa.FedAvg(), task(), rounds=1, privacy={"secure": "masking", **given})
    assert f"secure sum 'masking': withstands {said}" in caplog.messages


def test_an_active_party_says_it_when_it_refuses() -> None:
    floor = Floor(active=True)
    weak = (SecureKeys(), SecureShares(3, 0.7, 2), build("op", "secure-paillier", inner=hansa.SGD()))
    for op in weak:
        refusal = floor.refuses(op, 10, {})
        assert refusal is not None and f"is not part of one, and withstands {CURIOUS}; set privacy.secure" in refusal
    assert CURIOUS not in str(floor.refuses(hansa.SGD(), 10, {}))
    assert floor.refuses(SecureKeys(active=True), 10, {}) is None
