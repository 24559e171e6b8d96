"""One budget for all questions about a party's samples: over all jobs and kinds, each ask once, by its data set."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hansa.cli import main
from hansa.core.op import Op
from hansa.core.predictor import Evaluate
from hansa.data.describe import Describe
from hansa.data.table import Table
from hansa.holdings.gateway import Purpose, SampleGateway, TableRows
from hansa.local import SGD
from hansa.local.dp_sgd import DPSGD
from hansa.net.party.gateway import OwnerGateway
from hansa.net.party.policy import Policy
from hansa.net.party.query_budget import FLOORED, QueryBudget
from hansa.net.party.samples import PartySamples, samples_digest
from hansa.net.party.spending import in_words, report
from hansa.net.party.vault import FILE, PartyVault
from hansa.net.party.vault_lines import read_vault
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.privacy import spent

MODEL = {"w": torch.zeros(3), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
ROWS = TableRows(torch.ones(30, 2), torch.zeros(30), np.arange(30).astype(np.str_))
KINDS: list[tuple[Op, Purpose]] = [(SGD(), "train"), (SGD(), "statistics"), (SGD(), "match"), (Evaluate(), "evaluate"),
                                   (Describe(), "describe")]  # fmt: skip
OTHER = "a" * 64, "b" * 64
Ask = Callable[..., None]


@pytest.fixture
def read(tmp_path: Path) -> Ask:
    """Reads samples for an ask of a party that was just started; a PartyError if it may not."""

    def ask(name: str, policy: str = "", op: Op | None = None, purpose: Purpose = "train", job: str = "job-1",
            data: str = OTHER[0]) -> None:  # fmt: skip
        (tmp_path / "party.toml").write_text(f"matches = 99\n{policy}")
        own = Policy.read(tmp_path / "party.toml")
        vault = PartyVault(tmp_path, spent, own.privacy.budget, own.peers)
        gateway = OwnerGateway(SampleGateway(ROWS, ROWS), own, vault, job, op or SGD(), {"model": MODEL}, data)
        gateway.check(held_out=False)
        gateway.open(name)
        if purpose == "match":
            gateway.ids(purpose)
        elif purpose == "evaluate":
            gateway.test(purpose)
        else:
            gateway.train(purpose)

    return ask


def test_every_kind_of_reading_counts_over_all_jobs_and_a_repeat_is_free(read: Ask) -> None:
    policy = "[budget]\nqueries = 5"
    for number, (op, purpose) in enumerate(KINDS):
        for _ in range(2):
            read(f"ask-{number}", policy, op, purpose, f"job-{number}")
    for op, purpose in KINDS:
        with pytest.raises(
            PartyError, match=r"at a cost of 5 over all jobs, and they are used up; see budget\.queries"
        ):
            read("another", policy, op, purpose, "job-9")
    for number, (op, purpose) in enumerate(KINDS):
        read(f"ask-{number}", policy, op, purpose, f"job-{number}")  # paid for
    read("another", "[budget]\nqueries = 6")


def test_without_a_budget_readings_are_recorded_and_count_once_it_is_set(read: Ask) -> None:
    for number in range(3):
        read(f"{number}")
    with pytest.raises(PartyError, match="used up"):
        read("3", "[budget]\nqueries = 3")
    read("3", "[budget]\nqueries = 4")


def test_each_kind_has_its_cost_and_its_own_limits(read: Ask) -> None:
    policy = "[budget]\nqueries = 10\ncosts = { match = 8, train = 0.5, describe = 0 }\n"
    read("a", policy, SGD(), "match")
    for number in range(4):
        read(f"{number}", policy)
    with pytest.raises(PartyError, match="used up"):
        read("b", policy)
    read("c", policy, Describe(), "describe")  # costs nothing
    limits = "[budget]\ntotal = { train = 5 }\nper_job = { train = 4, describe = 1 }\n"
    with pytest.raises(PartyError, match=r"allows 4 training asks per job, and they are used up; see budget\.per_job"):
        read("d", limits)
    read("e", limits, job="job-2")
    with pytest.raises(PartyError, match=r"allows 5 training asks over all jobs, .* see budget\.total"):
        read("f", limits, job="job-3")
    with pytest.raises(PartyError, match="allows 1 descriptions per job"):
        read("g", limits, Describe(), "describe")


def test_one_ask_that_reads_for_two_purposes_is_two_queries(read: Ask) -> None:
    read("a")
    read("a", purpose="statistics")
    with pytest.raises(PartyError, match="used up"):
        read("b", "[budget]\nqueries = 2")


def test_new_data_begin_a_new_budget_only_if_the_owner_says_so(read: Ask, tmp_path: Path) -> None:
    policy = "[budget]\nqueries = 2\n"
    read("a", policy)
    read("b", policy)
    with pytest.raises(PartyError, match="used up"):
        read("c", policy, data=OTHER[1])
    renewed = f"{policy}renew = true"
    read("c", renewed, data=OTHER[1])
    read("d", renewed, data=OTHER[1])
    for data in OTHER:
        with pytest.raises(PartyError, match="used up"):
            read("e", renewed, data=data)
    with open(tmp_path / FILE, "ab") as vault:  # of an earlier version, which did not record the data set
        vault.write(b'{"job":"job","at":1.0,"name":"evaluation x","digest":"answered"}\n')
    with pytest.raises(PartyError, match="used up"):
        read("f", f"{renewed}\ntotal = {{ evaluate = 1 }}", Evaluate(), "evaluate", data="c" * 64)


def test_what_exceeds_one_budget_is_charged_to_none(read: Ask, tmp_path: Path) -> None:
    private = DPSGD(batch=5, sigma=0.5, epsilon=0.01)
    with pytest.raises(PartyError, match="privacy budget is spent"):
        read("a", "", private)
    assert not (tmp_path / FILE).exists()
    with pytest.raises(PartyError, match="used up"):
        read("a", "[budget]\nqueries = 0", DPSGD(batch=5, sigma=2.0))
    assert not read_vault(tmp_path).spent


def test_with_a_floor_evaluations_are_limited_without_a_word_of_the_owners() -> None:
    plain, own = QueryBudget(), QueryBudget(total={"evaluate": 5, "train": 7})
    assert plain.under(False, 0) == QueryBudget(total={"match": 0})
    assert plain.under(True, 3) == QueryBudget(total={**FLOORED.total, "match": 3}, per_job=FLOORED.per_job)
    assert QueryBudget(total={"evaluate": 1000}, per_job={"evaluate": 100}) == FLOORED
    assert own.under(True, 0).total == {"evaluate": 5, "train": 7, "match": 0}


@pytest.mark.parametrize(("text", "why"), [
    ("queries = -1", "queries must be at least 0"), ("queries = nan", "expected a number"),
    ("total = { trains = 1 }", "unknown kind of query 'trains'; did you mean 'train'"),
    ("per_job = { train = -1 }", "per_job.train: expected a whole number that is not negative"),
    ("per_job = { train = 1.5 }", "expected a whole number"), ("per_job = { train = true }", "expected a whole number"),
    ("queries = 1\ncosts = { train = -0.5 }", "costs.train: expected a number that is not negative"),
    ("costs = { train = 2 }", "set queries too"), ("total = { match = 1 }", "is `matches`, outside this table"),
    ("limit = 1", "unknown field 'limit'"),
])  # fmt: skip
def test_a_malformed_budget_is_refused_with_one_sentence(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "party.toml").write_text(f"[budget]\n{text}")
    with pytest.raises(ConfigError) as caught:
        Policy.read(tmp_path / "party.toml")
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "now"), [
    ("[evaluate]\ntotal = 9", r"evaluate\.total is now total = \{ evaluate"),
    ("[evaluate]\nper_job = 9", r"evaluate\.per_job is now per_job = \{ evaluate"),
])  # fmt: skip
def test_a_setting_that_moved_says_where(tmp_path: Path, text: str, now: str) -> None:
    (tmp_path / "party.toml").write_text(text)
    with pytest.raises(ConfigError, match=now):
        Policy.read(tmp_path / "party.toml")


def test_a_data_set_is_known_by_all_that_it_holds() -> None:
    x, y = torch.ones(3, 2), torch.zeros(3)
    changed = x.clone()
    changed[2, 1] += 1e-6
    ages = {name: Table.of({"age": [1.0, 2.0, 3.0], "town": ["a", "b", town]}) for name, town in
            (("same", "a"), ("other", "c"))}  # fmt: skip
    sets = [
        PartySamples((x, y)), PartySamples((changed, y)), PartySamples((x, y + 1)), PartySamples((x, y), (x, y)),
        PartySamples((x, y), None, ("y", "a", "b")), PartySamples(TableRows(x, y, np.arange(3).astype(np.str_))),
        PartySamples((x, y), tables=(ages["same"], None)), PartySamples((x, y), tables=(ages["other"], None)),
    ]  # fmt: skip
    assert len({samples_digest(each) for each in sets}) == len(sets)
    assert samples_digest(sets[0]) == samples_digest(PartySamples((x.clone(), y.clone())))


def test_the_command_shows_every_kind_and_what_is_left(
    read: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = "[privacy]\ndelta = 1e-5\n[budget]\nqueries = 20\ncosts = { match = 3 }\ntotal = { evaluate = 4 }"
    for number, (op, purpose) in enumerate(KINDS):
        read(f"{number}", policy, op, purpose, f"job-{number % 2}")

    def shown(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["hansa", "privacy", "spent", "--state", str(tmp_path), *options])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return capsys.readouterr().out

    told = json.loads(shown("--json"))
    assert {kind: told[kind] for _, kind in KINDS} == dict.fromkeys((kind for _, kind in KINDS), 1)
    assert told["queries"] == 7 and told["left"]["queries"] == 13 and told["left"]["evaluate"] == 3
    assert told["left"]["epsilon"] is None and told["left"]["match"] == 98 and told["left"]["declines"] == 20
    assert told["jobs"]["job-0"]["match"] == 1 and told["jobs"]["job-1"]["match"] == 0
    assert told["jobs"]["job-0"]["queries"] == 5 and told["lost"] == {}
    words = shown()
    assert "queries 7, 13 left" in words and "evaluations 1, 3 left" in words and "training asks 1, no limit" in words
    assert "readings of ids 1, 98 left" in words and "job-1: no differentially private replies, 1 " in words
    assert "differentially private replies 0; others have no epsilon" in words
    own = Policy.read(tmp_path / "party.toml")
    assert words.splitlines() == list(in_words(report(read_vault(tmp_path), own, spent)))
