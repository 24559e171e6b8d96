"""A tracker that fails in any way: the run is unaffected, no event is lost, and undelivered events are reported."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chatty_tracker import Chatty
from small_runs import run, untimed

import hansa
from hansa.plumbing.errors import ConfigError
from hansa.track import Log, RunInfo, Tracker, delivery, sinks

PATIENCE = 600.0  # seconds after which a missing event is a failure
HEARD: list[tuple[str, Any]] = []
Hook = Callable[[str], None]
HOOK: list[Hook] = []


class Diary(Log):
    """Records its events, after a hook that may fail or hang."""

    def __init__(self, about: RunInfo, state: dict[str, Any]) -> None:
        self.state = {**state, "run": about.run}
        self._note("open", dict(state))

    def _note(self, what: str, value: Any) -> None:
        for hook in HOOK:
            hook(what)
        HEARD.append((what, value))

    def rounds(self, lines: list[dict[str, Any]]) -> None:
        self._note("rounds", [line["round"] for line in lines])

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        self._note("finish", (summary["rounds"], sorted(p.name for p in Path(folder).iterdir())))

    def fail(self, reason: str) -> None:
        self._note("fail", reason)


@hansa.register("diary")
@dataclass(frozen=True)
class DiaryTracker(Tracker):
    """Records its events."""

    wait: float = PATIENCE

    def open(self, about: RunInfo, state: dict[str, Any], say: Any) -> Log:
        return Diary(about, state)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    HEARD.clear()
    HOOK.clear()
    monkeypatch.setattr(delivery, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(delivery, "GRACE", 0.2)
    monkeypatch.setattr(sinks, "REPLY_SECONDS", PATIENCE)


def over(tracker: str) -> bool:
    """Wait until no thread delivers events to the tracker."""
    for thread in threading.enumerate():
        if thread.name == f"track {tracker}":
            thread.join(PATIENCE)
    return not [t for t in threading.enumerate() if t.name == f"track {tracker}"]


def heard(what: str) -> list[Any]:
    return [value for name, value in HEARD if name == what]


def rounds() -> list[int]:
    return [number for numbers in heard("rounds") for number in numbers]


def test_a_tracker_hears_of_all_in_order_and_the_run_is_the_same() -> None:
    plain, tracked = run(), run(track=DiaryTracker())
    assert HEARD[0][0] == "open" and HEARD[-1][0] == "finish"
    assert rounds() == [1, 2, 3, 4]
    (finish,) = heard("finish")
    assert finish[0] == 4 and {"experiment.json", "metrics.jsonl", "model.safetensors", "summary.json"} <= set(
        finish[1]
    )
    assert untimed(tracked.history) == untimed(plain.history)
    assert torch.equal(tracked.params["weight"], plain.params["weight"])
    assert tracked.experiment == plain.experiment


def test_what_failed_is_tried_again_in_order_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "GRACE", PATIENCE)
    attempts: list[str] = []

    def thrice(what: str) -> None:
        attempts.append(what)
        if attempts.count(what) < 4:
            raise ConnectionError("//me:secret@host is down")

    HOOK.append(thrice)
    with caplog.at_level(logging.INFO, "hansa"):
        run(track=DiaryTracker())
    assert rounds() == [1, 2, 3, 4] and len(heard("finish")) == 1
    assert [name for name, _ in HEARD].index("finish") == len(HEARD) - 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "secret" not in caplog.text and "is down" in caplog.text


def test_a_tracker_that_always_fails_costs_one_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def fails(what: str) -> None:
        if what != "open":
            raise RuntimeError("no room")

    HOOK.append(fails)
    plain = run()
    result = run(track=DiaryTracker(), run_dir=tmp_path / "run")
    assert untimed(result.history) == untimed(plain.history)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "diary did not get 4 rounds (the first is round 1) and the end of the run with its files" in warning
    assert "RuntimeError: no room" in warning and "metrics.jsonl" in warning
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_hangs_does_not_hold_the_run_up(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    HOOK.append(lambda what: never.wait() and None)
    told: list[int] = []
    result = run(track=DiaryTracker(wait=0.3), on_round=lambda line: told.append(line["round"]))
    assert told == [1, 2, 3, 4] and result.summary["rounds"] == 4 and HEARD == []
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "did not get 4 rounds" in warning and "longer than 0.3 s" in warning
    never.set()
    assert over("diary")


class Clock:
    """A clock that advances when the test says so."""

    def __init__(self) -> None:
        self.now, self.looks, self.over = 0.0, 0, False

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def go(self, seconds: float) -> None:
        """Advance the clock, and wait until that is noticed."""
        self.now += seconds
        seen = self.looks
        while self.looks < seen + 2 and not self.over:
            time.sleep(0.001)


def closed(monkeypatch: pytest.MonkeyPatch, starts: Callable[[Any, Clock], None]) -> tuple[str | None, Clock]:
    """Close a delivery whose run is started after that; returns what was lost, and the clock."""
    clock, ended = Clock(), threading.Event()
    monkeypatch.setattr(delivery, "time", clock)

    def waits(what: str) -> None:
        ended.wait()
        starts(way, clock)

    HOOK.append(waits)
    way = delivery.Delivery(DiaryTracker(wait=20.0), lambda event, state: None)
    way.put({"do": "open", "about": {"run": "r", "experiment": "e", "record": {}, "mark": "m", "parent": None},
             "state": {}})  # fmt: skip

    def look() -> bool:
        ended.set()
        return False

    lost = way.close(look)
    clock.over = True
    assert over("diary")
    return lost, clock


@pytest.mark.slow
@pytest.mark.parametrize(("hours", "given_up"), [(0.1, False), (1.0, True)])
def test_a_tracker_at_work_is_waited_for_longer_than_an_idle_one_but_not_for_ever(
    hours: float, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting may take minutes on a slow machine, unlike a server that does not answer."""

    def starts(way: Any, clock: Clock) -> None:
        while clock.now < 3600 * hours and not clock.over:
            way._sink.busy_reports += 1
            clock.go(10.0)

    lost, clock = closed(monkeypatch, starts)
    assert clock.now > 60 and (lost is not None) == given_up
    assert lost is None or "diary did not get the start of the run: it took longer than 6" in lost


def test_time_in_which_the_machine_stops_this_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, clock = closed(monkeypatch, lambda way, clock: clock.go(3600.0))
    assert lost is None and clock.now == 3600.0


def test_who_has_had_enough_of_the_wait_is_not_held_up(tmp_path: Path) -> None:
    """Ctrl-C after the run: the run's files are complete, nothing is locked, and no thread continues."""
    never = threading.Event()

    def hangs(what: str) -> None:
        if what == "rounds":
            never.wait()

    HOOK.append(hangs)

    def enough(self: Any, hurry: Any) -> str:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(delivery.Delivery, "_wait", enough)
        run(track=DiaryTracker(), run_dir=tmp_path / "run")
    never.set()
    assert over("diary") and heard("finish") == []
    HOOK.clear()
    HEARD.clear()
    assert run(run_dir=tmp_path / "run", resume=True).summary["rounds"] == 4
    assert rounds() == [1, 2, 3, 4] and len(heard("finish")) == 1


def test_a_finished_run_stays_finished_when_its_files_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Any, folder: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(hansa.Result, "save", broken)
    assert run(track=DiaryTracker()).summary["rounds"] == 4 and rounds() == [1, 2, 3, 4]
    assert "could not be written, so no tracker gets them: too large" in caplog.text


def test_one_bad_tracker_does_not_keep_another_from_its_events(tmp_path: Path) -> None:
    HOOK.append(lambda what: (_ for _ in ()).throw(OSError("gone")))
    run(track=[DiaryTracker(), f"jsonl:{tmp_path / 'events.jsonl'}"])
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 6  # start, four rounds, finish


def test_a_run_that_fails_says_why_to_its_trackers() -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt if not heard("fail") else ConfigError("no more")

    with pytest.raises(KeyboardInterrupt):
        run(track=DiaryTracker(), on_round=stop)
    with pytest.raises(ConfigError):
        run(track=DiaryTracker(), on_round=stop)
    assert heard("fail") == ["interrupted", "no more"] and heard("finish") == []


def test_a_resumed_run_goes_on_with_the_same_trackers_and_their_state(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(track=DiaryTracker(), on_round=stop, run_dir=tmp_path / "run", checkpoint_seconds=0)
    HEARD.clear()
    run(run_dir=tmp_path / "run", resume=True)
    assert heard("open") == [{"run": "run"}]
    assert rounds() == [1, 2, 3, 4]  # all of them: what the tracker did not get the first time is there
    assert (tmp_path / "run" / "tracking.json").stat().st_mode & 0o777 == 0o600
    HEARD.clear()
    with pytest.raises(ConfigError):  # nothing was begun here
        run(run_dir=tmp_path / "none", resume=True)


@pytest.fixture
def chatty_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The other process finds this module's trackers by an entry point, like those of an installed package."""
    made = tmp_path / "site" / "chatty-1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: chatty\nVersion: 1\n")
    (made / "entry_points.txt").write_text("[hansa.tracker]\nchatty = chatty_tracker:Chatty\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site"), str(Path(__file__).parent)])
    return tmp_path / "heard"


def test_a_process_that_dies_is_begun_again_and_misses_nothing(
    chatty_is_known: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hansa"):
        run(track=Chatty(path=str(chatty_is_known), dies_at=2))
    assert chatty_is_known.read_text() == "1\n2\n3\n4\nfinish opened=2\n"
    assert "its process ended" in caplog.text and "chatty: hello" in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.slow
def test_a_process_says_that_it_is_at_work(chatty_is_known: Path) -> None:
    sink = sinks.ProcessSink(Chatty(path=str(chatty_is_known), starts=1.0), lambda sentence: None)
    about = {"run": "r", "experiment": "e", "record": {}, "mark": "m"}
    sink.deliver({"do": "open", "about": about, "state": {}})
    sink.close()
    assert sink.busy_reports > 0


def test_a_process_that_hangs_is_ended_with_the_run(chatty_is_known: Path, caplog: pytest.LogCaptureFixture) -> None:
    def until_it_hangs(line: dict[str, Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not chatty_is_known.exists() or not chatty_is_known.read_text().endswith("\n"):
            assert time.monotonic() < end, "no round came to the tracker"
            time.sleep(0.01)

    result = run(track=Chatty(path=str(chatty_is_known), hangs_at=1, wait=0.5), on_round=until_it_hangs)
    assert result.summary["rounds"] == 4 and chatty_is_known.read_text() == "1\n"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "chatty did not get 4 rounds" in warning and "longer than 0.5 s" in warning
    assert over("chatty")


def test_a_tracker_does_not_outlive_a_run_that_was_killed(tmp_path: Path) -> None:
    """Its standard input ends with the run, and so the process ends."""
    child = subprocess.Popen(
        [sys.executable, "-m", "hansa.track"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b'{"name": "console"}\n')
    child.stdin.close()
    assert child.wait(PATIENCE) == 0
    child.stdout.close()
