"""The actors of a run: they are started, given work, and replaced when their machine is lost."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from hansa.cluster.actor import Trainer
from hansa.cluster.connection import RayConnection
from hansa.cluster.engines import Ray
from hansa.plumbing.errors import ConfigError, RuntimeFailure

log = logging.getLogger("hansa")
PATIENCE = 300.0  # seconds in which an actor must start, if no other one is left
PAUSE = 5.0  # seconds after which the driver looks for new actors, though no chunk was finished
LOSSES = 4  # lost actors after which the chunk that they were training is blamed
LOSS_ERRORS = ("RayActorError", "ObjectLostError", "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError")

# actors between runs, by their CPUs and GPUs; None outside `kept_actors`
_spare: dict[tuple[float, float], list[Any]] | None = None


@contextmanager
def kept_actors(engine: Ray) -> Iterator[None]:
    """Inside the block, runs on the cluster of `engine` use the actors of the runs before instead of starting others.

    An actor takes seconds to start, because it imports torch.
    """
    global _spare
    if _spare is not None:
        raise ConfigError("kept_actors: this process keeps its actors already")
    with closing(RayConnection(engine.address, engine.actors, engine.cpus)) as connection:
        _spare = {}
        try:
            yield
        finally:
            for actor in (actor for actors in _spare.values() for actor in actors):
                connection.ray.kill(actor)
            _spare = None


class Crew:
    """Actors that train. `check` raises an error if a new actor, by what it says about itself, does not fit."""

    def __init__(self, ray: Any, size: int, cpus: float, gpus: float, setting: Any,
                 check: Callable[[dict[str, Any]], None]) -> None:  # fmt: skip
        self._ray, self._check, self._setting = ray, check, setting
        self._make = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0,
                                concurrency_groups={"columns": 1})(Trainer)  # fmt: skip
        self.nodes: dict[Any, str] = {}  # the machine of each actor that is ready
        self._starting: dict[Any, Any] = {}  # actors by the reference of their first answer
        self._share, self._failures = (cpus, gpus), 0
        spare = (_spare or {}).pop(self._share, [])
        for actor in spare[:size]:
            self._prepare(actor)
        for actor in spare[size:]:
            ray.kill(actor)
        try:
            for _ in range(size - len(self._starting)):
                self._start()
            self._await(list(self._starting))
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._prepare(self._make.remote([folder for folder in sys.path if folder]))

    def _prepare(self, actor: Any) -> None:
        self._starting[actor.hold.remote([self._setting])] = actor

    def _await(self, references: list[Any]) -> None:
        """Wait for actors that are starting, and until at least one actor is ready."""
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=PATIENCE)
        self.welcome()
        while not self.nodes:
            if not self._ray.wait(list(self._starting), num_returns=1, timeout=PATIENCE)[0]:
                raise RuntimeFailure(
                    f"run.engine (ray): no actor started within {PATIENCE:g} s; other work may occupy the cluster"
                )
            self.welcome()

    def welcome(self) -> None:
        """Take in actors that have become ready."""
        references = list(self._starting)
        for ref in self._ray.wait(references, num_returns=len(references), timeout=0)[0] if references else ():
            actor = self._starting.pop(ref)
            try:
                said = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                if not is_loss(self._ray, error):
                    raise ConfigError(
                        f"run.engine (ray): an actor cannot prepare its work ({last_line(error)}); your own modules "
                        "and files must be on every machine"
                    ) from None
                self._ended_early(error)
                continue
            self._check(said)
            self.nodes[actor], self._failures = said["node"], 0

    def _ended_early(self, error: Exception) -> None:
        """An actor was lost before it was ready: start another one, unless actors are lost so again and again."""
        self._failures += 1
        if self._failures < LOSSES:
            self._start()
        elif not self.nodes:
            raise RuntimeFailure(f"run.engine (ray): no actor could start: {last_line(error)}") from None
        else:
            log.warning("%d Ray actors in a row were lost at their start (%s); the run goes on with %d actors",
                        self._failures, last_line(error), len(self.nodes))  # fmt: skip

    def settle(self) -> None:
        """Wait until at least one actor is ready, and take in all others that are."""
        self._await([])

    def give(self, setting: Any) -> None:
        """Give all actors, also later ones, new data."""
        self._setting = setting
        ready, late = list(self.nodes), list(self._starting.values())
        self.nodes, self._starting = {}, {}
        for actor in ready:
            self._prepare(actor)
        references = list(self._starting)
        for actor in late:
            self._prepare(actor)
        self._await(references)

    def perform(self, chunks: Sequence[Any], call: Callable[[Any, Any], Any], home: Callable[[Any], int | None],
                kept: bool = False) -> CrewWork:  # fmt: skip
        """Distribute chunks over the actors; see `CrewWork`."""
        self.settle()
        return CrewWork(self, chunks, call, home, kept)

    def lose(self, actor: Any) -> None:
        """Forget an actor that was lost, and ask for another one."""
        if self.nodes.pop(actor, None) is not None:
            log.warning("a Ray actor was lost; its parties are trained again by others (%d are left)", len(self.nodes))
            self._ray.kill(actor)
            self._start()

    def alive(self, actor: Any) -> bool:
        """Whether an actor answers."""
        try:
            self._ray.get(actor.alive.remote(), timeout=PATIENCE)
        except self._ray.exceptions.RayError:
            return False
        return True

    def close(self) -> None:
        if _spare is not None:
            _spare.setdefault(self._share, []).extend(self.nodes)
        for actor in [*(self.nodes if _spare is None else ()), *self._starting.values()]:
            self._ray.kill(actor)
        self.nodes, self._starting = {}, {}


class CrewWork:
    """Chunks of an ask that are given to actors, the first ones first, each to the next free actor.

    A free actor takes a chunk whose samples are at home on its machine, if there is one. `call` starts a chunk at an
    actor. If results are `kept` by the actors, a lost actor's chunks are all done again.
    """

    def __init__(self, crew: Crew, chunks: Sequence[Any], call: Callable[[Any, Any], Any],
                 home: Callable[[Any], int | None], kept: bool) -> None:  # fmt: skip
        self._crew, self._ray, self._chunks, self._call, self._kept = crew, crew._ray, chunks, call, kept
        machines = sorted(set(crew.nodes.values()))
        self._home = [None if home(chunk) is None else machines[(home(chunk) or 0) % len(machines)] for chunk in chunks]
        self._waiting: dict[str | None, deque[int]] = {}
        self._flying: dict[Any, tuple[Any, int]] = {}
        self._load = Counter[Any]()
        self._losses = Counter[int]()
        self._unjoined = 0  # how often in a row partial sums were lost, though all actors answered
        self.done_by: dict[Any, list[int]] = {}
        for number in range(len(chunks)):
            self._waiting.setdefault(self._home[number], deque()).append(number)

    def results(self) -> Iterator[tuple[int, Any]]:
        """The results of chunks, by their numbers, as they come. One that was lost comes again."""
        while any(self._waiting.values()) or self._flying:
            self._crew.settle()
            self._send()
            ready, _ = self._ray.wait(list(self._flying), num_returns=1, timeout=PAUSE)
            for ref in ready:
                if ref not in self._flying:
                    continue  # its actor was lost
                actor, number = self._flying[ref]
                try:
                    result = self._ray.get(ref)
                except self._ray.exceptions.RayError as error:
                    if not is_loss(self._ray, error):
                        raise RuntimeFailure(f"run.engine (ray): an actor failed: {last_line(error)}") from None
                    self.lost(actor)
                    continue
                del self._flying[ref]
                self._load[actor] -= 1
                self.done_by.setdefault(actor, []).append(number)
                yield number, result

    def _send(self) -> None:
        """Give every free actor a chunk, and a second one while there are plenty."""
        left = sum(map(len, self._waiting.values()))
        for depth in (1, 2):
            if depth == 2 and left <= 2 * len(self._crew.nodes):
                return
            for actor, machine in self._crew.nodes.items():
                if self._load[actor] < depth and left:
                    number = self._next(machine)
                    self._flying[self._call(actor, self._chunks[number])] = actor, number
                    self._load[actor] += 1
                    left -= 1

    def _next(self, machine: str) -> int:
        own = self._waiting.get(machine)
        return (own or max(self._waiting.values(), key=len)).popleft()

    def lost(self, actor: Any) -> None:
        """An actor was lost: what it was doing, and what it kept, is to be done again."""
        self._crew.lose(actor)
        for ref, (owner, number) in list(self._flying.items()):
            if owner is actor:
                del self._flying[ref]
                self._again(number)
                self._losses[number] += 1
                if self._losses[number] >= LOSSES:
                    raise RuntimeFailure(
                        f"run.engine (ray): {LOSSES} actors were lost while they trained the same parties; their "
                        "machines may have run out of memory"
                    )
        if self._kept:
            for number in self.done_by.pop(actor, []):
                self._again(number)

    def _again(self, number: int) -> None:
        self._waiting.setdefault(self._home[number], deque()).appendleft(number)

    def reduced(self, fan: int = 4) -> Any:
        """The results that actors kept, joined on the cluster in a tree of fan-in `fan`; None if an actor was lost.

        Then `results` has the chunks to do again, and `reduced` must be called again.
        """
        actors = list(self.done_by)
        level = [actor.summed.remote() for actor in actors]
        at = 0
        while len(level) > 1:
            groups = [level[k : k + fan] for k in range(0, len(level), fan)]
            level = []
            for group in groups:
                level.append(actors[at % len(actors)].join.remote(*group) if len(group) > 1 else group[0])
                at += fan
        try:
            return self._ray.get(level[0])
        except self._ray.exceptions.RayError as error:
            gone = [actor for actor in actors if not self._crew.alive(actor)]
            # Actors of a lost machine may answer for a moment: then the sums are joined again.
            self._unjoined = 0 if gone else self._unjoined + 1
            if self._unjoined >= LOSSES or not is_loss(self._ray, error):
                raise RuntimeFailure(
                    f"run.engine (ray): the partial sums could not be joined on the cluster: {last_line(error)}"
                ) from None
            for actor in gone:
                self.lost(actor)
            if not gone:
                time.sleep(PAUSE)
            return None


def is_loss(ray: Any, error: Exception) -> bool:
    """Whether an error of Ray says that an actor was lost, or a machine with an object that a call needed.

    Ray raises the second as an error of the call.
    """
    if not isinstance(error, ray.exceptions.RayTaskError):
        return isinstance(error, ray.exceptions.RayError)
    kinds = (getattr(ray.exceptions, name, ()) for name in LOSS_ERRORS)
    return any(isinstance(error.cause, kind) for kind in kinds)


def last_line(error: BaseException) -> str:
    """The last line of an error of Ray, which quotes a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
