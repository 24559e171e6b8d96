"""Child processes: messages in both directions, timeouts, the reason of an end, and an end with their parent."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hansa.plumbing.child import ChildEnded, ChildProcess, Message

PATIENCE = 600.0


def started(*arguments: str, **options: Any) -> tuple[ChildProcess, Message]:
    child = ChildProcess("child_program", arguments, **options)
    hello = child.receive(PATIENCE)
    assert hello is not None
    return child, hello


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_messages_go_both_ways_and_prints_go_to_standard_error() -> None:
    child, hello = started("one", "two", environment={"WORD": "x"}, keep_errors=True)
    assert hello["arguments"] == ["one", "two"] and hello["word"] == "x"
    for text in ("ä\n\u2028", "long" * 100_000):
        child.send({"do": "echo", "text": text})
        assert child.receive(PATIENCE) == {"do": "echo", "text": text}
    assert child.receive(0.0) is None and child.receive(0.01) is None
    child.send({"do": "fail"})
    with pytest.raises(ChildEnded, match=r"^no room$"):
        child.receive(PATIENCE)
    assert child.close(PATIENCE) == 1


def test_a_child_ends_by_itself_or_is_killed_when_it_takes_too_long() -> None:
    child, _ = started(keep_errors=True)
    assert child.close(PATIENCE) == 0
    child, _ = started(keep_errors=True)
    child.send({"do": "sleep", "seconds": 600.0})
    assert child.close(0.1) == -9
    child, _ = started(keep_errors=True)
    assert child.close() == -9
    with pytest.raises((OSError, ValueError)):
        child.send({"do": "echo"})


def test_a_thread_forwards_messages_and_then_the_end(tmp_path: Path) -> None:
    child = ChildProcess("child_program", log=tmp_path / "log")
    heard: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    child.forward(heard.put)
    assert "pid" in (heard.get(timeout=PATIENCE) or {})
    child.send({"do": "echo", "n": 1})
    assert heard.get(timeout=PATIENCE) == {"do": "echo", "n": 1}
    child.send({"do": "fail"})
    assert heard.get(timeout=PATIENCE) is None
    assert child.close(PATIENCE) == 1
    assert "a print must not" in (tmp_path / "log").read_text() and "no room" in (tmp_path / "log").read_text()
    assert child.last_error() == ""


@pytest.mark.parametrize("busy", [False, True])
def test_a_child_ends_with_its_parent_even_in_the_middle_of_work(busy: bool) -> None:
    code = """if True:
        import json, sys
        from hansa.plumbing.child import ChildProcess
        child = ChildProcess("child_program", ["at-once"], keep_errors=True)
        print(json.dumps(child.receive()), flush=True)
        if sys.argv[1] == "True":
            child.send({"do": "sleep", "seconds": 600.0})
        sys.stdin.read()
    """
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen([sys.executable, "-c", code, str(busy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert parent.stdin is not None and parent.stdout is not None
    pid = json.loads(parent.stdout.readline())["pid"]
    assert alive(pid)
    parent.kill()
    parent.wait()
    until = time.monotonic() + PATIENCE
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(pid)
    parent.stdin.close()
    parent.stdout.close()
