"""Several models in one task: parties train different architectures, and each model has a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hansa.core.task import Task


class PartyModels:
    """The models of a task by name, and the models that the parties take in turn."""

    def __init__(self, objectives: Mapping[str, Objective], turn: Sequence[str]) -> None:
        self.objectives, self.turn = dict(objectives), tuple(turn)

    @property
    def first(self) -> Objective:
        """The first model, in whose type all of them take samples."""
        return next(iter(self.objectives.values()))

    @property
    def bases(self) -> dict[str, str]:
        """The digests of frozen parameters, of the models that have any."""
        return {name: each.base for name, each in self.objectives.items() if each.base is not None}

    def name(self, party: int) -> str:
        """The name of a party's model."""
        return self.turn[party % len(self.turn)]

    def of(self, party: int) -> Objective:
        """The objective of a party's model."""
        return self.objectives[self.name(party)]


def make_models(models: Mapping[str, Callable[[], nn.Module]], task: Objective) -> dict[str, Objective]:
    """The objectives of several models, with the loss, seed and device of the task."""
    if not isinstance(models, Mapping) or not models or not all(isinstance(name, str) and name for name in models):
        raise ConfigError("models: expected at least one model, each a function under its name: {'small': make_small}")
    objectives = {}
    for name, model in models.items():
        try:
            objectives[name] = Objective(model, task.loss, task.seed, str(task.device), task.bf16)
        except ConfigError as error:
            raise ConfigError(f"models: {name!r}: {error}") from error
    dtypes = {name: str(each.dtype).removeprefix("torch.") for name, each in objectives.items()}
    if len(set(dtypes.values())) > 1:
        raise ConfigError(f"models: they have several types ({dtypes}); give them one")
    return objectives


def check_choice(model: Any, models: Any, assigned: Any) -> None:
    """Raise a ConfigError for a task whose model, models and assigned do not go together."""
    if models is not None and model is not None:
        raise ConfigError("model and models: a task has one model for all parties, or several by name; leave one out")
    if models is None and assigned is not None:
        raise ConfigError(
            "assigned says which party trains which of several models, and there is no models; leave it out"
        )


def task_models(task: Task, objective: Objective) -> dict[str, Objective]:
    """The models of a task by name, with the loss, seed and device of the objective; none if the task has one model."""
    check_choice(task.model, task.models, task.assigned)
    return {} if task.models is None else make_models(task.models, objective)


def turn_of(models: Iterable[str], assigned: Sequence[str] | Mapping[str, str] | None, parties: int,
            find: Callable[[str, str], int]) -> tuple[str, ...]:  # fmt: skip
    """The models that parties take in turn.

    `assigned` is a list of models, which is repeated as often as needed, or has the model of every party by the party's
    name. By default parties take all models in turn. `find` gives the number of a party from its name.
    """
    known = list(models)
    if assigned is None:
        return tuple(known)
    if isinstance(assigned, str) or not isinstance(assigned, (Sequence, Mapping)) or not assigned:
        raise ConfigError(
            f"assigned: expected a list of models, or the model of each party by name, got {assigned!r:.80}"
        )
    for name in assigned.values() if isinstance(assigned, Mapping) else assigned:
        if name not in known:
            raise ConfigError(f"assigned: there is no model {name!r}{nearest(str(name), known)}")
    if not isinstance(assigned, Mapping):
        return tuple(assigned)
    by_party = {find(str(party), "assigned"): name for party, name in assigned.items()}
    if len(by_party) < parties:
        raise ConfigError(f"assigned: it has a model for {len(by_party)} of {parties} parties; give each party one")
    return tuple(by_party[party] for party in range(parties))
