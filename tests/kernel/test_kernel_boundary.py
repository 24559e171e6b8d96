"""The kernel stands alone, and nothing beside it draws noise or reads samples behind its back."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from hansa.core.op import Op
from hansa.core.predictor import Evaluate
from hansa.data.describe import Describe
from hansa.holdings.gateway import SampleGateway
from hansa.kernel import secret_draws
from hansa.kernel.gateway import GuardedGateway, purposes_of
from hansa.kernel.secret_draws import poisson_sample, secret_normal, secret_uniform
from hansa.local import DPSGD, SGD
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.transforms import ClippedUpdate

SOURCE = Path(hansa.__file__).parent
# The places that draw noise or samples from a secret, beside the kernel itself.
CALLERS = {
    "secret_normal": {"local/context.py", "vertical/split_ops.py"},
    "poisson_sample": {"local/solver.py"},
    "secret_uniform": {"secure/encoding.py", "vertical/psi_ops.py"},
    "discrete_gaussian": {"classical/trees/private.py", "secure/encoding.py"},
    "renyi_epsilon": {"privacy/__init__.py", "privacy/accounting.py"},
    "exact_sum": {"local/clipping.py"},
    "exact_contribution": {"privacy/central.py"},
    "GuardedGateway": {"net/party/gateway.py"},
}


class Notes:
    """A ledger that notes what is recorded, and refuses from the given entry on."""

    def __init__(self, refuses_at: int = 99) -> None:
        self.entries: list[tuple[str, str]] = []
        self.refuses_at = refuses_at

    def _note(self, kind: str, ask: str) -> None:
        if len(self.entries) == self.refuses_at:
            raise PartyError(f"no more {kind}")
        self.entries.append((kind, ask))

    def read(self, ask: str, purpose: str, op: Any, n: int, payload: Any) -> float | None:
        self._note(purpose, ask)
        return float(n)


def gateway(op: Op, ledger: Notes) -> GuardedGateway:
    rows = torch.ones(5, 2), torch.zeros(5), np.arange(5).astype(np.str_)
    return GuardedGateway(SampleGateway(rows, rows), ledger, op, {})  # type: ignore[arg-type]


def test_the_kernel_is_used_only_where_it_is_expected() -> None:
    for name, expected in CALLERS.items():
        found = {
            str(path.relative_to(SOURCE))
            for path in SOURCE.rglob("*.py")
            if path.parent.name != "kernel" and re.search(rf"\b{name}\b", path.read_text())
        }
        assert found == expected, name


def test_the_kernel_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in (SOURCE / "kernel").glob("*.py")) < 1000


def test_no_other_package_has_noise_of_its_own() -> None:
    """PyTorch's and numpy's normal numbers are not secret: those who use them draw no protection from them."""
    for folder in ("local", "privacy", "secure", "transforms", "net/party"):
        for path in (SOURCE / folder).rglob("*.py"):
            assert not re.search(r"\brandn\(|\.normal_\(|standard_normal\(|np\.random\.normal", path.read_text()), path


def test_a_reading_is_recorded_before_it_happens_and_once() -> None:
    for op, purpose in (
        (SGD(), "train"), (ClippedUpdate(SGD(), 1.0), "statistics"), (SGD(), "match"), (Describe(), "describe"),
    ):  # fmt: skip
        ledger = Notes()
        data = gateway(op, ledger)
        data.open("a")
        for _ in range(2):
            if purpose == "match":
                data.ids("match")
            else:
                data.train(purpose)  # type: ignore[arg-type]
        assert ledger.entries == [(purpose, "a")]
        assert data.spent == 5.0
    ledger = Notes()
    data = gateway(Evaluate(), ledger)
    data.open("b")
    data.test("evaluate")
    data.test_features("evaluate")
    assert ledger.entries == [("evaluate", "b")]


def test_each_purpose_of_an_ask_is_recorded() -> None:
    ledger = Notes()
    data = gateway(SGD(), ledger)
    data.open("a")
    data.train("train")
    data.ids("match")
    data.train("statistics")
    data.train("train")
    assert [kind for kind, _ in ledger.entries] == ["train", "match", "statistics"]


def test_nothing_is_read_once_the_ledger_refuses() -> None:
    data = gateway(Evaluate(), Notes(0))
    data.open("a")
    for _ in range(2):  # a second try is no way around it
        with pytest.raises(PartyError, match="no more"):
            data.test("evaluate")
    assert data.spent is None


def test_a_gateway_is_closed_before_and_after_its_ask() -> None:
    ledger = Notes()
    data = gateway(SGD(), ledger)
    for _ in range(2):
        with pytest.raises(PartyError, match="may not read"):
            data.train("train")
        data.open("a")
        data.close()
    assert not ledger.entries


def test_the_purposes_of_an_op_are_those_of_its_kind() -> None:
    assert purposes_of(Evaluate()) == ("evaluate",)
    assert purposes_of(Describe()) == ("describe",)
    assert purposes_of(ClippedUpdate(DPSGD(), 1.0)) == ("train", "statistics", "match")
    ledger = Notes()
    data = gateway(SGD(), ledger)
    data.open("a")
    for purpose in ("evaluate", "describe"):
        with pytest.raises(PartyError, match=f"may not read its samples for the purpose '{purpose}'"):
            data.train(purpose)  # type: ignore[arg-type]
    assert not ledger.entries


def test_each_sample_joins_with_the_rate_that_is_accounted() -> None:
    drawn = np.concatenate([poisson_sample(bytes([step]) * 32, 1000, 0.3) for step in range(100)])
    assert abs(len(drawn) / 100_000 - 0.3) < 5 * math.sqrt(0.21 / 100_000)
    assert abs(np.bincount(drawn, minlength=1000) - 30).max() < 5.5 * math.sqrt(21)
    assert len(poisson_sample(b"s", 1000, 1.0)) == 1000 and not len(poisson_sample(b"s", 1000, 0.0))
    assert not len(poisson_sample(b"s", 1000, 2.0**-60))  # below the resolution of the draw: never, not too often
    assert np.array_equal(poisson_sample(b"s", 50, 0.4), np.flatnonzero(secret_uniform(b"s", 50) < 0.4))
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="sampling rate"):
            poisson_sample(b"s", 5, rate)


def test_a_sample_joins_below_the_rate_and_not_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array([0, 2**52 - 1, 2**52, 2**53 - 1], dtype=np.uint64)
    monkeypatch.setattr(secret_draws, "_words", lambda secret, n: words)
    for rate, joins in ((0.5, [0, 1]), (2.0**-53, [0]), (2.0**-54, []), (1.0, [0, 1, 2, 3])):
        assert poisson_sample(b"s", 4, rate).tolist() == joins


def test_normal_numbers_are_pairs_made_of_uniform_ones() -> None:
    """Box and Muller 1958: sqrt(-2 log(1 - u)) times the cosine and the sine of 2 pi v."""
    for count in (7, 8):
        half = (count + 1) // 2
        u, v = np.split(secret_uniform(b"n", 2 * half), 2)
        length, angle = np.sqrt(-2 * np.log1p(-u)), 2 * math.pi * v
        pairs = np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count]
        assert np.allclose(secret_normal(b"n", count).numpy(), pairs, rtol=1e-12, atol=0)


def test_uniform_and_normal_numbers_are_those_of_their_secret() -> None:
    assert np.array_equal(secret_uniform(b"a", 9), secret_uniform(b"a", 9))
    assert not np.array_equal(secret_uniform(b"a", 9), secret_uniform(b"b", 9))
    normal = secret_normal(b"a", 20_001)
    assert normal.shape == (20_001,) and abs(float(normal.var()) - 1) < 0.05 and abs(float(normal.mean())) < 0.04
