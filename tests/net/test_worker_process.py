"""A worker process that can be killed: whatever an op does, the party says so in one sentence and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import faulthandler
import hashlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PATIENCE, League, Member, samples, until

import hansa
from forked import needs_fork
from hansa.core.ask import op_config
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.wrapper import Wrapper
from hansa.local import SGD
from hansa.local.finetune import FineTune
from hansa.net.party import agent as parties
from hansa.net.party import confinement, store
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.asks import AskFiles, AskOutcome, Runner, WorkerThread
from hansa.net.party.nursery import Nursery
from hansa.net.party.peers import Peers
from hansa.net.party.policy import Policy
from hansa.net.party.post import SILENT
from hansa.net.party.samples import preparer
from hansa.net.party.store import PartyStore
from hansa.net.party.vault_lines import read_vault
from hansa.net.party.worker import Worker
from hansa.net.party.worker_main import serve
from hansa.net.party.worker_process import PartyWorkerProcess, resident
from hansa.net.transport.client import Refusal
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec, forking
from hansa.plumbing.errors import ConfigError, DataError
from hansa.plumbing.forking import CannotFork
from hansa.plumbing.stopping import Halted

TASK = {"model": "logistic", "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the filter of system calls is Linux's")


def allocate() -> None:
    kept = []
    while True:
        kept.append(torch.ones(2**24))


def many_threads() -> None:
    """Take CPU time in a way that no lock of Python stops."""
    data = bytes(2**24)
    while True:
        hashlib.sha256(data)


def send_garbage() -> None:
    """Write to the connection to the agent."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.sendall(b"\xff" * 100)
    time.sleep(1000)


OPENED: list[int] = []


def check_connections() -> None:
    assert OPENED and not any(stat.S_ISSOCK(os.fstat(number).st_mode) for number in OPENED)


DEEDS: dict[str, Callable[[], Any]] = {
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "abort": os.abort,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "allocate": allocate,
    "socket": socket.socket,
    "local socket": lambda: socket.socket(socket.AF_UNIX),
    "fork": os.fork,
    "program": lambda: subprocess.run(["true"], check=True),
    "loop": lambda: any(iter(int, 1)),  # in C, with Python's lock held
    "sleep": lambda: time.sleep(1000),
    "cpu": many_threads,
    "thread": lambda: threading.Thread(target=print).start(),
    "environment": lambda: os.environ["HANSA_TEST_PASSWORD"],
    "garbage": send_garbage,
    "connections": check_connections,
    "nothing": lambda: None,
}


async def silent(request: bytes) -> bytes:
    raise AssertionError("no op of these tests exchanges messages")


@hansa.register("misbehaving")
@dataclass(frozen=True)
class Misbehaving(SGD):
    """Do something that an op must not do."""

    deed: str = "nothing"

    def drawn(self, party: Any) -> Any:
        faulthandler.disable()  # pytest's, which a forked process has too
        DEEDS[self.deed]()
        return super().drawn(party)


@hansa.register("secure-misbehaving")
@dataclass(frozen=True)
class Hidden(Wrapper):
    """Hide the reply of the inner op, by its name."""

    inner: Op


@hansa.register("talking")
@dataclass(frozen=True)
class Talking(Op):
    """Send a request to the mailboxes of a session."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        assert party.post is not None
        party.post.enter(bytes(16))
        return Reply({}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


class Place:
    """A party's folder, and runners of its asks."""

    def __init__(self, folder: Path, policy: str = "") -> None:
        needs_fork()
        folder.mkdir(exist_ok=True)
        (folder / "party.toml").write_text(policy)
        about = {"party": "ann", "federation": "league", "url": "https://localhost:1", "instance": "0" * 32}
        (folder / "party.json").write_text(json.dumps(about))
        self.folder, self.store = folder, PartyStore(folder)
        self.prepare = preparer((samples(0)[0], None))
        self.nursery = Nursery(lambda connection: serve(connection, self.store, self.prepare))
        self.runner = PartyWorkerProcess(self.store, self.nursery)
        self.asked = 0

    def close(self) -> None:
        self.nursery.close()
        self.store.close()

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        async def closing() -> Any:
            with contextlib.closing(self.runner):
                return await main

        return asyncio.run(closing())

    def files(self, op: Op, payload: Any = None) -> tuple[Work, AskFiles]:
        model = {"w": torch.zeros(8, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
        message = {"op": op_config(op), "payload": {"model": model, **(payload or {})}, "round": self.asked + 1}
        self.asked += 1
        blobs = []
        for name, tree in (("message", message), ("task", {"task": TASK, "preparations": []})):
            data = codec.encode(tree)
            (self.folder / name).write_bytes(data)
            blobs.append(Blob(hashlib.sha256(data).hexdigest(), len(data)))
        return (Work("job-1", "job", 0, self.asked, "round", 0, *blobs, None, None, None, 1),
                AskFiles(*(self.folder / name for name in ("message", "task", "reply"))))  # fmt: skip

    async def answer(self, op: Op, runner: Runner | None = None) -> AskOutcome:
        return await (runner or self.runner).begin(*self.files(op), silent).done

    def allow(self, seconds: float) -> None:
        """From the next ask on, an ask may take so long."""
        limits = dataclasses.replace(self.store.policy.limits, seconds=seconds)
        self.store.next_policy = dataclasses.replace(self.store.policy, limits=limits)
        self.runner.take_policy()

    def tensors(self) -> dict[str, Any]:
        """The reply in its file."""
        tree: dict[str, Any] = codec.decode((self.folder / "reply").read_bytes())
        return tree


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(policy: str = "") -> Place:
        made.append(Place(tmp_path / f"home-{len(made)}", policy))
        return made[-1]

    yield make
    for each in made:
        each.close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.thin(2)
@pytest.mark.parametrize(("deed", "words"), [
    ("segfault", "the ask was stopped: its process was ended by SIGSEGV; see the party's log"),
    ("exit", "the ask was stopped: its process ended with the exit code 3; see the party's log"),
    ("abort", "was ended by SIGABRT"), ("killed", "was ended by SIGKILL; the party's machine may lack memory"),
    ("allocate", ""), pytest.param("socket", "", marks=LINUX), pytest.param("local socket", "", marks=LINUX),
    pytest.param("fork", "", marks=LINUX), pytest.param("program", "", marks=LINUX),
    ("garbage", "was ended by SIGKILL"),
    ("environment", ""),
])  # fmt: skip
def test_an_op_that_misbehaves_gives_one_sentence_and_the_next_ask_is_answered(
    deed: str, words: str, place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The sentence is the same, whatever went wrong. `words` is the reason that the party itself logs, if it ends."""
    monkeypatch.setenv("HANSA_TEST_PASSWORD", "xyzzy")
    here = place(f"[limits]\nmemory = {used() + 2**29}\n" if deed == "allocate" else "")

    async def main() -> tuple[AskOutcome, AskOutcome]:
        return await here.answer(Misbehaving(deed=deed)), await here.answer(SGD())

    first, second = here.run(main())
    assert first.why == REFUSAL
    details = [getattr(record, "detail", None) or {} for record in caplog.records]
    assert not words or any(words in detail.get("why", "") for detail in details)
    assert second.why is None and second.weight == len(samples(0)[0][1])


def used() -> int:
    """The private memory of this process, which a forked worker begins with."""
    status = Path("/proc/self/status").read_text() if Path("/proc/self/status").exists() else ""
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))


def test_a_reply_has_the_bits_of_the_run_in_this_process_also_after_a_crash(place: Callable[..., Place]) -> None:
    here, op = place(), SGD(epochs=3, batch=5)

    async def main() -> list[dict[str, Any]]:
        replies = []
        thread = WorkerThread(Worker(here.store, here.prepare))
        for runner in (thread, here.runner):
            here.asked = 0
            assert (await here.answer(op, runner)).why is None
            replies.append(here.tensors())
        await here.answer(Misbehaving(deed="segfault"))
        here.asked = 0
        assert (await here.answer(op)).why is None
        return [*replies, here.tensors()]

    before = torch.get_num_threads()
    first, second, third = here.run(main())
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
    assert same(first, second) and same(first, third)


@pytest.mark.parametrize(("deed", "after"), [("loop", 0.6), ("sleep", 0.6), ("sleep", 0.0)])
def test_work_that_never_ends_is_killed_and_the_worker_is_replaced(
    deed: str, after: float, place: Callable[..., Place]
) -> None:
    """After no time at all, the worker is not ready yet."""
    here = place("[limits]\nseconds = 0.5\n")

    async def main() -> tuple[AskOutcome, int | None, AskOutcome, int | None]:
        run = here.runner.begin(*here.files(Misbehaving(deed=deed)), silent)
        await asyncio.sleep(after)
        assert not run.done.done()
        old = here.runner.pid
        run.end()
        killed = await run.done
        here.allow(PATIENCE)
        return killed, old, await here.answer(SGD()), here.runner.pid

    killed, old, answered, new = here.run(main())
    early = "its policy gives an ask at most 0.5 seconds (limits.seconds in party.toml), and this one takes longer"
    assert killed.why == (REFUSAL if after else early)
    assert answered.why is None and old != new


def test_stopped_work_gives_no_answer_whether_it_stops_or_is_killed(place: Callable[..., Place]) -> None:
    here = place()

    async def main() -> None:
        for op in (SGD(steps=10**6, lr=1e-9), Misbehaving(deed="sleep")):
            run = here.runner.begin(*here.files(op), silent)
            await asyncio.sleep(0.2)
            run.stop()
            if isinstance(op, Misbehaving):
                await asyncio.sleep(0.1)
                assert not run.done.done()
                run.end()
            with pytest.raises(Halted):
                await run.done
        assert (await here.answer(SGD())).why is None

    here.run(main())


@pytest.mark.slow
def test_cpu_time_is_limited_in_the_worker_even_if_nobody_kills_it(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "SPARE_SECONDS", 0.0)
    here = place("[limits]\nseconds = 1\n")

    async def main() -> tuple[AskOutcome, AskOutcome]:
        first = await here.answer(Misbehaving(deed="cpu"))
        here.allow(PATIENCE)
        return first, await here.answer(SGD())

    first, second = here.run(main())
    assert first.why == REFUSAL and second.why is None
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == resource.RLIM_INFINITY


def test_connections_that_the_owners_function_left_open_are_closed_in_the_worker(place: Callable[..., Place]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as opened:
        OPENED[:] = [server.fileno(), opened.fileno()]
        here = place()  # its processes have copies of both
        assert here.run(here.answer(Misbehaving(deed="connections"))).why is None
        opened.sendall(b"still open here")


def test_threads_are_allowed_and_the_filter_says_what_is_not(place: Callable[..., Place]) -> None:
    here = place()
    assert here.run(here.answer(Misbehaving(deed="thread"))).why is None
    for machine in ("x86_64", "aarch64"):
        assert len(confinement.refusing(machine)) % 8 == 0


@pytest.mark.slow
@LINUX
def test_a_worker_that_trains_on_a_gpu_is_watched_from_outside(place: Callable[..., Place],
                                                               caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """Without a limit of the system, as for a GPU; here the device is the CPU under another name."""
    assert resident(os.getpid()) > 2**25 and resident(2**22 + 1) == 0
    here = place(f'device = "cpu:0"\n[limits]\nmemory = {resident(os.getpid()) + 2**29}\n')

    async def main() -> tuple[AskOutcome, AskOutcome]:
        return await here.answer(Misbehaving(deed="allocate")), await here.answer(SGD())

    first, second = here.run(main())
    assert first.why == REFUSAL and second.why is None
    details = [getattr(record, "detail", None) or {} for record in caplog.records]
    assert any("(limits.memory in party.toml), and this one takes more" in each.get("why", "") for each in details)


@pytest.mark.parametrize(("floor", "op"), [
    ("secure = true", lambda: Hidden(Misbehaving(deed="segfault"))),
    ("dp = true", lambda: FineTune(Misbehaving(deed="segfault"))),
])  # fmt: skip
def test_a_crash_after_a_reading_counts_as_a_decline(place: Callable[..., Place], floor: str,
                                                     op: Callable[[], Op]) -> None:  # fmt: skip
    """Each crash would otherwise reveal a bit about the samples without end."""
    here = place(f"[privacy]\n{floor}\ndeclines = 2\n")

    async def main() -> list[str]:
        outcomes = [await here.answer(op()) for _ in range(3)]
        return [str(outcome.why) for outcome in outcomes]

    first, second, third = here.run(main())
    assert first == second == REFUSAL
    assert "allows it to decline 2 asks over all jobs" in third and "privacy.declines" in third


def test_a_crash_that_counts_as_a_decline_is_in_the_vault_before_the_aggregator_learns_of_it(
    place: Callable[..., Place],
) -> None:
    """An aggregator that ends the party with an invalid receipt would otherwise get one bit per restart for nothing."""
    here = place("[privacy]\nsecure = true\n")

    async def main() -> float:
        await here.answer(Hidden(Misbehaving(deed="segfault")))
        return read_vault(here.folder).declined()

    assert here.run(main()) == 1


def test_a_worker_that_is_ended_again_and_again_still_has_its_decline_written_down(place: Callable[..., Place]) -> None:
    """Ending the next worker, which begins with the decline, would end the party instead."""
    here = place("[privacy]\nsecure = true\n")

    async def main() -> tuple[str | None, float]:
        await here.answer(SGD())
        running = here.runner.begin(*here.files(Hidden(Misbehaving(deed="loop"))), silent)
        await asyncio.sleep(1.0)
        while not (await asyncio.wait((running.done,), timeout=0.001))[0]:
            running.end()
        return running.done.result().why, read_vault(here.folder).declined()

    assert here.run(main()) == (REFUSAL, 1)


@pytest.mark.parametrize("error, words", [
    (DataError("the response has too many bytes"), "the response has too many bytes"),
    (Refusal(404, "no session"), "no session"), (TimeoutError(), SILENT), (ValueError("private"), SILENT),
])  # fmt: skip
def test_a_request_of_a_session_that_fails_ends_the_ask(place: Callable[..., Place], error: Exception,
                                                        words: str) -> None:  # fmt: skip
    """A worker without a response would wait as long as an ask may take: a day."""
    here = place()

    async def fails(request: bytes) -> bytes:
        raise error

    async def main() -> AskOutcome:
        running = here.runner.begin(*here.files(Talking()), fails)
        return await asyncio.wait_for(running.done, PATIENCE)

    assert here.run(main()).why == words


def test_the_agent_signs_messages_to_other_parties_for_its_worker_and_nothing_else(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[bytes] = []
    monkeypatch.setattr(Peers, "sign", lambda self, data: signed.append(data) or (b"certificate", b"signature"))
    runner = place().runner
    for data in (b"hansa-1 request", b"hansa-1 statement", b"", b"hansa route"):
        assert "signs nothing for its worker" in str(runner._sign(data).error)
    assert runner._sign(b"hansa secure keys").signature == b"signature" and signed == [b"hansa secure keys"]


def test_the_worker_has_its_agent_sign() -> None:
    peers = Peers(Path("nowhere"), {}, lambda data: (b"certificate", data[::-1]))
    assert peers.sign(b"abc") == (b"certificate", b"cba")


def test_a_new_policy_reaches_the_worker_with_its_next_ask(place: Callable[..., Place]) -> None:
    here = place()

    async def main() -> tuple[AskOutcome, AskOutcome]:
        before = await here.answer(SGD())
        here.store.next_policy = dataclasses.replace(here.store.policy, ops=("describe",))
        here.runner.take_policy()
        return before, await here.answer(SGD())

    before, after = here.run(main())
    assert before.why is None and "its policy does not accept the op 'sgd'" in str(after.why)


def test_a_worker_that_cannot_start_says_why(place: Callable[..., Place]) -> None:
    here = place("[limits]\nmemory = 1000\n")
    with pytest.raises(ConfigError, match=r"limits\.memory is 1000 bytes, but the party needs at least \d+ to start"):
        here.run(here.runner.start())
    here.store.policy = Policy(device="cuda:99")
    with pytest.raises(ConfigError, match=r"device = 'cuda:99' in party\.toml cannot be used here \(.+\); use 'cpu'"):
        here.run(here.runner.start())
    (here.folder / "vault.jsonl").write_text("damaged\n")
    with pytest.raises(ConfigError, match="the privacy spending of this party is unknown"):
        here.run(here.runner.start())


def test_a_message_that_is_malformed_or_damaged_is_refused_by_the_worker(place: Callable[..., Place]) -> None:
    here = place()

    async def main() -> list[str]:
        reasons = []
        for data in (b"", b"damaged", codec.encode([1, 2])):
            work, files = here.files(SGD())
            files.message.write_bytes(data)
            reasons.append(str((await here.runner.begin(work, files, silent).done).why))
        files.message.unlink()
        with pytest.raises(OSError, match="No such file"):  # a fault of the party's disk: it is asked again
            await here.runner.begin(work, files, silent).done
        return reasons

    *damaged, table = here.run(main())
    assert all("not a valid message" in reason for reason in damaged) and table == "invalid message: expected a table"


def test_a_worker_that_is_killed_between_two_asks_is_replaced_unnoticed(place: Callable[..., Place]) -> None:
    here = place()

    async def main() -> AskOutcome:
        assert (await here.answer(SGD())).why is None
        assert here.runner.pid is not None
        os.kill(here.runner.pid, signal.SIGKILL)
        while here.runner._process is not None and not here.runner._process.ended:
            await asyncio.sleep(0.01)
        return await here.answer(SGD())

    assert here.run(main()).why is None


@LINUX
def test_a_killed_agent_takes_its_worker_with_it_and_the_folder_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_fork()
    monkeypatch.setattr(store, "ENDING", PATIENCE)
    told, home = tmp_path / "worker", tmp_path / "home"
    agent = os.fork()
    if agent == 0:
        here = Place(home)

        async def main() -> None:
            run = here.runner.begin(*here.files(Misbehaving(deed="loop")), silent)
            while here.runner.pid is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            told.with_suffix(".part").write_text(str(here.runner.pid))
            told.with_suffix(".part").rename(told)
            await run.done

        try:
            asyncio.run(main())
        finally:
            os._exit(1)
    until(told.exists)
    worker = Path("/proc") / told.read_text()
    assert worker.exists()
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    PartyStore(home).close()  # waits for the worker's end
    until(lambda: not worker.exists() or "State:\tZ" in (worker / "status").read_text())


@pytest.mark.parametrize(
    ("device", "remedy"), [("cpu", "tensors on the CPU, or start Python again"), ("cuda", r"tensors on the CPU$")]
)
def test_a_process_that_must_not_fork_starts_no_workers_and_says_why(
    device: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_trial", lambda gpu: 1)
    monkeypatch.setattr(forking, "_harmless", frozenset())
    with pytest.raises(CannotFork, match=rf"^--data: .* PyTorch has started threads for gradients .* {remedy}"):
        Nursery(lambda connection: None, device)


class ForkedMember(Member):
    """A party whose worker is a process, as in a deployment."""

    def _make_runner(self) -> Runner:
        self._nursery = Nursery(lambda connection: serve(connection, self.store, self._prepare))
        return PartyWorkerProcess(self.store, self._nursery)

    def _ended(self) -> None:
        assert isinstance(self.runner, PartyWorkerProcess)
        self.runner.close()
        self._nursery.close()


@pytest.mark.slow
def test_an_agent_sends_heartbeats_while_its_worker_hangs_and_then_does_the_next_job(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_fork()
    monkeypatch.setattr(parties, "HEARTBEAT", 0.05)
    monkeypatch.setattr(parties, "STUCK", 0.2)
    task = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
    bad = {"task": task, "run": {"rounds": 1},
           "algorithm": {"name": "fedavg", "local": {"name": "misbehaving", "deed": "loop"}}}  # fmt: skip
    good = {"task": task, "run": {"rounds": 2},
            "algorithm": {"name": "fedavg", "local": {"name": "sgd", "epochs": 2, "batch": 4}}}  # fmt: skip
    heard, calls = league.queue.heard, list[float]()
    monkeypatch.setattr(league.queue, "heard", lambda *given: calls.append(time.monotonic()) or heard(*given))
    limits = "[limits]\nseconds = 6\n"  # enough for the first ask, also on a busy machine
    member = league.members["ann"] = ForkedMember(league, "ann", samples(0), limits)
    ended = league.ended(league.submit(bad, min_parties=1))
    assert ended["status"] == "failed" and REFUSAL in str(ended)
    assert len(calls) > 10
    longer = dataclasses.replace(member.store.policy.limits, seconds=PATIENCE)
    member.store.next_policy = dataclasses.replace(member.store.policy, limits=longer)
    forked = league.submit(good, min_parties=1)
    assert league.ended(forked)["status"] == "finished"
    member.leave()
    league.join("ann", samples(0))  # with its worker in a thread
    threaded = league.submit(good, min_parties=1)
    assert league.ended(threaded)["status"] == "finished" and same(league.model(forked), league.model(threaded))
