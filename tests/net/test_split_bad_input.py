"""Bad input of split learning gets one sentence, simulated and deployed, and a good job runs afterwards."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from league import PARTIES, League

import hansa
from hansa.core.plain_data import to_config
from hansa.experiment.config import parse
from hansa.models.dense import Logistic
from hansa.net.party.samples import read_samples
from hansa.plumbing.errors import ConfigError, DataError, HansaError
from hansa.vertical.split import Split

pytest.importorskip("rbcl")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
HOLDER, PEOPLE, COMMON = 1, 12, 10
Table = list[list[Any]]


def tables() -> list[Table]:
    """The files of three parties that have ten people in common; the second has the labels."""
    ids = [[*range(COMMON), *range(100 * (party + 1), 100 * (party + 1) + PEOPLE - COMMON)] for party in range(3)]
    made: list[Table] = []
    for party in range(3):
        header = ["id", "a", "b", *(["ill"] if party == HOLDER else [])]
        rows = [[f"p{k}", k % 3, -k % 5, *([k % 2] if party == HOLDER else [])] for k in ids[party]]
        made.append([header, *rows])
    return made


def other_ids(files: list[Table]) -> None:
    for row in files[2][1:]:
        row[0] = f"{row[0]}-of-cid"


def same_id_twice(files: list[Table]) -> None:
    files[0][2][0] = files[0][1][0].upper()


def no_ids(files: list[Table]) -> None:
    files[0][0][0] = "name"


def no_labels(files: list[Table]) -> None:
    files[HOLDER] = [row[:-1] for row in files[HOLDER]]


def two_labels(files: list[Table]) -> None:
    for number, row in enumerate(files[2]):
        row.append("ill" if number == 0 else number % 2)


def nothing(files: list[Table]) -> None:
    """The files are good: the batch is not."""


def write(folder: Path, change: Callable[[list[Table]], None]) -> None:
    files = tables()
    change(files)
    for name, table in zip(PARTIES, files, strict=True):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows(table)


def tree(batch: int = 5) -> dict[str, Any]:
    own = Split(bottoms=(Logistic(outputs=2),), batch=batch)
    task = {"parties": [f"{name}.csv" for name in PARTIES], "ids": "id", "target": "ill"}
    return {"task": task, "algorithm": to_config(own), "run": {"rounds": 1}}


def simulated(folder: Path, batch: int = 5) -> hansa.Result:
    own = parse(tree(batch), str(folder))
    return hansa.simulate(own.algorithm, own.build_task(), **own.settings(), progress=False)


def one_sentence(text: str) -> bool:
    return "\n" not in text and "Traceback" not in text and len(text) < 400


@pytest.mark.parametrize(
    ("change", "batch", "kind", "reason"),
    [
        (other_ids, 5, DataError, "the parties have 0 people in common in their training rows"),
        (same_id_twice, 5, DataError, "ann.csv: the column 'id': two rows have the same id"),
        (no_ids, 5, DataError, "ann.csv.*'id'"),
        (no_labels, 5, DataError, r"no file of task.parties has labels: none has the column 'ill' \(task.target\)"),
        (two_labels, 5, ConfigError, "needs one party with labels, and the parties 1, 2 have"),
        (nothing, 11, DataError, "10 people in common .*, and the method needs at least 11; .* use a smaller batch"),
    ],
)
def test_a_simulation_says_what_is_wrong(
    tmp_path: Path, change: Callable[[list[Table]], None], batch: int, kind: type[HansaError], reason: str
) -> None:
    write(tmp_path, change)
    with pytest.raises(kind, match=reason) as raised:
        simulated(tmp_path, batch)
    assert one_sentence(str(raised.value))
    write(tmp_path, nothing)
    assert "train_loss" in simulated(tmp_path).history[0]


def join(league: League, folder: Path, ids: bool = True) -> None:
    for name in PARTIES:
        file = folder / f"{name}.csv"
        labelled = "ill" in file.read_text().splitlines()[0]
        own_ids = None if name == "ann" and not ids else "id"
        league.join(name, read_samples(str(file), "ill" if labelled else None, ids=own_ids), "matches = 100")


@pytest.mark.parametrize(
    ("change", "batch", "reason"),
    [
        (other_ids, 5, "the parties have 0 people in common in their training rows"),
        (no_labels, 5, "none of the parties has labels"),
        (two_labels, 5, "needs one party with labels, and the parties 1, 2 have"),
        (nothing, 11, "the parties have 10 people in common in their training rows, and the method needs at least 11"),
    ],
)
def test_a_job_says_what_is_wrong(
    league: League, tmp_path: Path, change: Callable[[list[Table]], None], batch: int, reason: str
) -> None:
    write(tmp_path, change)
    join(league, tmp_path)
    done = league.ended(league.submit(tree(batch), min_parties=3))
    assert done["status"] == "failed" and reason in done["reason"] and one_sentence(done["reason"]), done["reason"]
    if change is nothing:
        assert league.ended(league.submit(tree(), min_parties=3))["status"] == "finished"


@pytest.mark.parametrize(
    ("change", "reason"), [(same_id_twice, "two rows have the same id"), (no_ids, "ann.csv.*'id'")]
)
def test_a_party_with_bad_ids_does_not_join(tmp_path: Path, change: Callable[[list[Table]], None], reason: str) -> None:
    write(tmp_path, change)
    with pytest.raises(DataError, match=reason) as raised:
        read_samples(str(tmp_path / "ann.csv"), None, ids="id")
    assert one_sentence(str(raised.value))


def without_ids(files: list[Table]) -> None:
    files[0] = [[number if row[0] != "id" else "ill", *row[1:]] for number, row in enumerate(files[0])]


def test_a_party_that_joins_without_ids_is_named_and_the_others_go_on(league: League, tmp_path: Path) -> None:
    write(tmp_path, without_ids)
    join(league, tmp_path, ids=False)
    job = league.submit(tree(), min_parties=3)
    assert league.ended(job)["status"] == "finished"
    assert league.operator.job(job)["absent"] == {
        "ann": "its rows have no ids, and this job matches parties with different columns by them; name the ids "
        "(hansa join --ids)"
    }
