"""The content of the live page: a snapshot, then changes; stored data and subscribers are bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from hansa.plumbing.errors import ConfigError
from hansa.ui import folder
from hansa.ui.events import KEPT, RECENT, ROUNDS, SUBSCRIBERS, WAITING, EventStream, Subscriber, shown
from hansa.ui.folder import RunFolderSource
from hansa.ui.launch import LivePage
from hansa.ui.page import Page


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def heard(listener: Subscriber) -> list[tuple[str, dict[str, Any], str]]:
    """The events that wait for a subscriber: kind, data and id."""
    out = []
    while True:
        event = await listener.next(0.01)
        fields = dict(line.split(": ", 1) for line in (event or b"event: over").decode().strip().splitlines())
        if fields["event"] in ("beat", "over"):
            return out
        out.append((fields["event"], json.loads(fields["data"]), fields["id"]))


def joined(board: EventStream, last: str = "") -> Subscriber:
    listener = board.subscribe(last)
    assert listener is not None
    return listener


@on_a_loop
async def test_who_looks_gets_everything_and_then_only_what_changes() -> None:
    board = EventStream()
    board.update({"a": 1, "b": 2}, {"job": [{"round": 1}]})
    listener = joined(board)
    board.update({"a": 1, "b": 3}, {"job": [{"round": 2}]})
    board.update({"a": 1, "b": 3}, {"job": []})
    board.update({"b": 3}, {})
    (kind, first, _), (_, second, _), (_, third, _) = await heard(listener)
    assert kind == "snapshot" and first["values"] == {"a": 1, "b": 2} and first["rounds"] == {"job": [{"round": 1}]}
    assert second["values"] == {"b": 3} and second["rounds"] == {"job": [{"round": 2}]}
    assert third["values"] == {"a": None} and third["rounds"] == {"job": None}


@on_a_loop
async def test_who_comes_back_gets_what_he_missed_or_everything_where_that_is_not_kept() -> None:
    board = EventStream()
    board.update({"n": 0}, {})
    seen = board.id
    for n in range(1, 4):
        board.update({"n": n}, {})
    missed = await heard(joined(board, seen))
    assert [kind for kind, _, _ in missed] == ["change"] * 3
    assert [data["values"]["n"] for _, data, _ in missed] == [1, 2, 3] and missed[-1][2] == board.id
    assert await heard(joined(board, board.id)) == []
    for last in ("", "another-3", f"{board.id}0", "no id", f"{seen.partition('-')[0]}--1"):
        ((kind, data, _),) = await heard(joined(board, last))
        assert kind == "snapshot" and data["values"] == {"n": 3}, last
    for n in range(KEPT + 10):
        board.update({"n": -n}, {})
    ((kind, data, id),) = await heard(joined(board, seen))
    assert kind == "snapshot" and data["values"] == {"n": -(KEPT + 9)} and id == board.id and data["at"] > 0


@on_a_loop
async def test_who_takes_nothing_is_let_go_and_nobody_else_notices() -> None:
    board = EventStream()
    slow, quick = joined(board), joined(board)
    for n in range(WAITING + 5):
        board.update({"n": n}, {})
        assert await quick.next(1.0) is not None
    assert slow.over and not quick.over
    assert await slow.next(1.0) is None
    assert not slow._events, "nothing is kept for him"


@on_a_loop
async def test_so_many_may_look_and_no_more() -> None:
    board = EventStream()
    all = [joined(board) for _ in range(SUBSCRIBERS)]
    assert board.subscribe("") is None
    board.unsubscribe(all[0])
    assert board.subscribe("") is not None
    board.close()
    assert board.subscribe("") is None


@on_a_loop
async def test_at_the_end_everybody_still_gets_what_waits_for_him() -> None:
    board = EventStream()
    listener = joined(board)
    board.update({"last": True}, {})
    board.close()
    assert [kind for kind, _, _ in await heard(listener)] == ["snapshot", "change"]
    assert await listener.next(1.0) is None


@on_a_loop
async def test_a_source_that_fails_does_not_keep_the_aggregator_from_ending() -> None:
    class Broken:
        def look(self) -> Any:
            raise RuntimeError("no more")

    page = Page(Broken(), None)  # type: ignore[arg-type]
    listener = joined(page.stream)
    await page.close()
    assert page.stream.closed and listener.over


@on_a_loop
async def test_the_rounds_of_a_long_job_are_thinned_and_the_last_ones_are_whole() -> None:
    board = EventStream()
    for at in range(0, 5000, 50):
        board.update({}, {"job": [{"round": n} for n in range(at + 1, at + 51)]})
    ((_, data, _),) = await heard(joined(board))
    rounds = [line["round"] for line in data["rounds"]["job"]]
    assert len(rounds) <= ROUNDS and rounds[0] == 1 and rounds == sorted(rounds)
    assert rounds[-RECENT:] == list(range(5001 - RECENT, 5001))


def test_numbers_about_single_parties_are_not_shown() -> None:
    line = {
        "round": 3, "asked": 2, "replies": 1, "accuracy": 0.5, "train_loss": float("nan"), "seconds": 1.5,
        "epsilon": 1.25, "parties": {"ann": {"accuracy": 0.123}}, "missing": {"bob": "it did not answer"},
        "alarms": {"ann": "its loss is 0.132, and that of its last 10 evaluations was 0.1"}, "forgetting": 0.25,
        "fusion": {"rule": "krum", "shares": {"ann": 0.321}, "scores": {"ann": 0.213}, "excluded": ["bob"]},
    }  # fmt: skip
    told = shown(line)
    assert told == {"round": 3, "asked": 2, "replies": 1, "accuracy": 0.5, "train_loss": None, "seconds": 1.5,
                    "epsilon": 1.25, "missing": {"bob": "it did not answer"}, "missing_count": 1, "alarms": ["ann"],
                    "forgetting": 0.25}  # fmt: skip
    assert not [n for n in ("0.123", "0.321", "0.213", "0.132") if n in json.dumps(told)]


def test_a_round_with_thousands_missing_stays_small() -> None:
    told = shown({"round": 1, "missing": {f"party-{n}": "x" * 10_000 for n in range(5000)}})
    assert told["missing_count"] == 5000 and len(json.dumps(told)) < 50_000


# A run's folder


def write(path: Path, *rounds: dict[str, Any]) -> None:
    (path / "metrics.jsonl").write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in rounds))


def line(round: int, **more: Any) -> dict[str, Any]:
    return {"round": round, "asked": 2, "replies": 2, "bytes_up": 10, "bytes_down": 20, **more}


def test_chosen_metrics_are_shown_of_the_run_and_of_each_party(tmp_path: Path) -> None:
    own = {"loss": 0.3, "f1": 0.5, "accuracy": 0.6, **{f"more_{k}": 0.1 for k in range(9)}}
    measured = {"f1": 0.5, "party_f1_mean": 0.5, "loss": 0.3, "density": 0.2, "recall_by_sex": {"0": 0.1},
                "party_recall_by_sex_mean": 0.1}  # fmt: skip
    write(tmp_path, line(1, parties={"ann": own}, **measured))
    run = RunFolderSource(tmp_path, "token", lambda: None)
    values, rounds = run.look() or ({}, {})
    assert list(values["party:ann"]["scores"])[:2] == ["accuracy", "loss"] and len(values["party:ann"]["scores"]) == 6
    assert rounds[tmp_path.name][0]["chosen"] == {"f1": 0.5}


def test_a_runs_folder_is_read_as_it_grows(tmp_path: Path) -> None:
    run = RunFolderSource(tmp_path, "token", lambda: None)
    values, rounds = run.look() or ({}, {})
    assert rounds == {tmp_path.name: []} and values["jobs"][0]["rounds"] is None
    (tmp_path / "experiment.json").write_text(json.dumps({"run": {"rounds": 7}}))
    write(tmp_path, line(1), line(2, rejected={"ann": "norm"}))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"round": 3, "ask')  # it is being written
    values, rounds = run.look() or ({}, {})
    assert [each["round"] for each in rounds[tmp_path.name]] == [1, 2]
    job = values["jobs"][0]
    assert (job["round"], job["rounds"], job["bytes_up"], job["bytes_down"]) == (2, 7, 20, 40)
    assert values["party:ann"]["rejected"] == 1 and values["party:ann"]["reason"] == "round 2: norm"
    write(tmp_path, line(1), line(2, rejected={"ann": "norm"}), line(3))
    _, rounds = run.look() or ({}, {})
    assert [each["round"] for each in rounds[tmp_path.name]] == [3]


def test_a_run_that_goes_back_to_its_checkpoint_is_shown_anew(tmp_path: Path) -> None:
    run = RunFolderSource(tmp_path, "token", lambda: None)
    write(tmp_path, line(1), line(2), line(3))
    run.look()
    write(tmp_path, line(1), line(2))
    assert run.look() is None
    _, rounds = run.look() or ({}, {})
    assert [each["round"] for each in rounds[tmp_path.name]] == [1, 2]
    write(tmp_path, line(1), line(2), line(2, longer="than before"), line(3))  # truncated and extended in between
    assert run.look() is None


def test_the_names_in_a_runs_folder_are_those_that_the_run_gives_them() -> None:
    from hansa.artifacts import run_folder as store

    assert (folder.METRICS, folder.EXPERIMENT, folder.REPORT) == (store.METRICS, store.EXPERIMENT, store.REPORT)


def test_a_port_that_is_taken_gets_a_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            LivePage(tmp_path, port)
    with pytest.raises(ConfigError, match=r"0\.\.65535"):
        LivePage(tmp_path, 65536)


def test_a_page_that_was_killed_does_not_stop_the_run(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    with LivePage(tmp_path) as page:
        watch = page.watching(seen.append)
        watch(line(1))
        page._child.kill()
        page._child.wait()
        watch(line(2))
        page.ended("finished")
    assert [each["round"] for each in seen] == [1, 2]
