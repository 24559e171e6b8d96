"""The crew of actors, with a Ray of this process whose answers the tests choose: losses, late and repeated answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hansa.cluster import crew, gather
from hansa.cluster.crew import LOSSES, Crew, CrewWork, is_loss
from hansa.plumbing.errors import ConfigError, RuntimeFailure


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"in a call\n{cause!r}")
        self.cause = cause


class RayActorError(RayError):
    pass


class ObjectLostError(RayError):
    pass


@dataclass(eq=False)
class Answer:
    """A reference of an answer: a value or an error, that is ready or not."""

    value: Any
    ready: bool = True


class Actor:
    """Answers calls of its methods by `answers`; the actor's name is its machine."""

    def __init__(self, ray: FakeRay, name: str) -> None:
        self.ray, self.name = ray, name

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Answer(self.ray.answers(self, method, *arguments)))


@dataclass
class FakeRay:
    """As much of Ray as a crew uses. `script` gives the answer of an actor to a method."""

    script: dict[str, Any] = field(default_factory=dict)
    made: list[Actor] = field(default_factory=list)
    killed: list[Actor] = field(default_factory=list)

    exceptions: ClassVar[Any] = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, RayActorError=RayActorError, ObjectLostError=ObjectLostError
    )

    def remote(self, **_: Any) -> Any:
        def made(*_: Any) -> Actor:
            self.made.append(Actor(self, f"machine {len(self.made)}"))
            return self.made[-1]

        return lambda _: SimpleNamespace(remote=made)

    def answers(self, actor: Actor, method: str, *arguments: Any) -> Any:
        answer = self.script.get(method, {"node": actor.name} if method == "hold" else True)
        return answer(actor, *arguments) if callable(answer) else answer

    def wait(self, refs: list[Answer], num_returns: int, timeout: float | None = None) -> Any:
        assert refs, "Ray refuses to wait for nothing"
        return [ref for ref in refs if ref.ready], [ref for ref in refs if not ref.ready]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if isinstance(refs.value, Exception):
            raise refs.value
        return refs.value

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


def started(ray: FakeRay, size: int) -> Crew:
    return Crew(ray, size, 1.0, 0.0, None, lambda _: None)


def of(chunks: int, calls: Any, ray: FakeRay, size: int = 2, kept: bool = False) -> CrewWork:
    return started(ray, size).perform(list(range(chunks)), calls, lambda _: None, kept)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PAUSE", 0.0)


def test_an_object_that_was_lost_is_a_loss_and_an_error_of_the_call_is_not() -> None:
    ray = FakeRay()
    for error in (RayActorError(), ObjectLostError(), RayTaskError(ObjectLostError()), RayTaskError(RayActorError())):
        assert is_loss(ray, error)
    assert not is_loss(ray, RayTaskError(ValueError("no loss today")))


def test_the_losses_of_ray_are_known(short_folder: Any) -> None:
    """Names that Ray does not have would be passed over."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (make extras)")
    assert all(issubclass(getattr(ray.exceptions, name), ray.exceptions.RayError) for name in crew.LOSS_ERRORS)
    error = ray.exceptions.RayTaskError("apply", "traceback", ray.exceptions.ActorDiedError())
    assert is_loss(ray, error.as_instanceof_cause())


def test_a_lost_argument_makes_the_chunk_train_again() -> None:
    ray, begun = FakeRay(), list[int]()

    def call(actor: Actor, chunk: int) -> Answer:
        begun.append(chunk)
        return Answer(RayTaskError(ObjectLostError()) if begun == [0] else chunk * 10)

    assert dict(of(3, call, ray).results()) == {0: 0, 1: 10, 2: 20}
    assert begun.count(0) == 2 and ray.killed == [ray.made[0]]


def test_a_late_answer_of_a_lost_actor_is_not_used() -> None:
    """An actor that was declared lost answers all the same: its chunk has been given to another one."""
    ray, late = FakeRay(), list[Answer]()

    def call(actor: Actor, chunk: int) -> Answer:
        if actor is ray.made[0] and len(late) < 2:  # its first chunk is lost, its second one comes late
            late.append(Answer(RayActorError()) if not late else Answer("late", ready=False))
            return late[-1]
        return Answer(chunk)

    def answers(work: CrewWork) -> Iterator[tuple[int, Any]]:
        for answer in work.results():
            late[-1].ready = True
            yield answer

    results = list(answers(of(9, call, ray)))
    assert len(late) == 2 and sorted(results) == [(chunk, chunk) for chunk in range(9)]


def test_sums_are_joined_again_if_actors_of_a_lost_machine_still_answer() -> None:
    tries: list[int] = []

    def joined(*_: Any) -> Any:
        tries.append(1)
        return RayTaskError(ObjectLostError()) if len(tries) == 1 else "sum"

    ray = FakeRay({"join": joined})
    work = of(4, lambda actor, chunk: Answer(chunk), ray, kept=True)
    assert len(dict(work.results())) == 4
    assert work.reduced() is None and not list(work.results())
    assert work.reduced() == "sum"


@pytest.mark.parametrize(("error", "times"), [(ObjectLostError(), LOSSES), (ValueError("too large"), 1)])
def test_sums_that_cannot_be_joined_end_the_run_with_the_reason(error: Exception, times: int) -> None:
    ray = FakeRay({"join": RayTaskError(error)})
    work = of(4, lambda actor, chunk: Answer(chunk), ray, kept=True)
    list(work.results())
    for _ in range(times - 1):
        assert work.reduced() is None
    with pytest.raises(RuntimeFailure, match=f"could not be joined on the cluster: {type(error).__name__}"):
        work.reduced()


def test_actors_that_are_lost_at_their_start_are_not_started_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    def hold(actor: Actor, _: Any) -> Any:
        return {"node": actor.name} if actor is ray.made[0] else RayActorError("killed for its memory")

    ray = FakeRay({"hold": hold})
    team = started(ray, 2)
    for _ in range(2 * LOSSES):
        team.settle()
    assert len(ray.made) == 1 + LOSSES and list(team.nodes) == ray.made[:1]
    assert "4 Ray actors in a row were lost at their start (killed for its memory)" in caplog.text
    team.lose(ray.made[0])
    with pytest.raises(RuntimeFailure, match="no actor could start: killed for its memory"):
        team.settle()


def test_an_actor_that_cannot_prepare_is_named() -> None:
    with pytest.raises(ConfigError, match="an actor cannot prepare its work"):
        started(FakeRay({"hold": RayTaskError(ImportError("no module"))}), 1)


class Store(gather.UpdateGather):
    """A store of updates whose actors answer as the test says."""

    def __init__(self, ray: FakeRay) -> None:
        self.ray, self._losses, self._data, self.fills = ray, 0, 0, 0  # type: ignore[assignment]
        self._engine = SimpleNamespace(data=0, drop_lost=lambda: None)  # type: ignore[assignment]

    def _fill(self) -> dict[int, Any]:
        self.fills += 1
        return {}


def test_columns_that_a_fusion_needs_from_a_lost_actor_are_trained_again() -> None:
    """The actor that answers is alive, and the one whose columns it needs is lost."""
    store, answers = Store(FakeRay()), iter([Answer(RayTaskError(RayActorError())), Answer("total")])
    assert store.surely(lambda: store.ray.get(next(answers))) == "total" and store.fills == 1
    with pytest.raises(ValueError, match="not finite"):
        store.surely(lambda: store.ray.get(Answer(RayTaskError(ValueError("not finite")))))


def test_a_piece_that_was_lost_on_its_way_is_a_loss_of_columns() -> None:
    store = Store(FakeRay())
    with pytest.raises(gather.LostColumns):
        store._settled([Answer(RayTaskError(ObjectLostError()))], 0)
    with pytest.raises(RuntimeFailure, match="an actor cannot store updates: no space left"):
        store._settled([Answer(RayTaskError(OSError("no space left")))], 0)
