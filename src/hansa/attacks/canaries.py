"""Canaries: samples that only an auditor knows, half of them trained with, and what the model reveals about them.

One run with canaries gives a lower bound of epsilon (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1)
training run") and the exposure of what was trained with (Carlini et al. 2019, "The secret sharer"). Each canary joins
by an independent fair coin. Under DP-SGD and without differential privacy a canary is one sample; under central
differential privacy it is a party of its own, because that is what the run protects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.attacks.recipe import Recipe, Samples, TrainedModel, final_model
from hansa.attacks.success import CONFIDENCE, empirical_epsilon
from hansa.plumbing.errors import ConfigError, HansaError
from hansa.run.result import Result

CANARIES = 500  # of a run, unless the caller says another number
PARTIES = 100  # most canaries that are parties


def make_canaries(recipe: Recipe, count: int) -> tuple[Tensor, Tensor]:
    """Samples that no party held, each with a wrong target: a class drawn from the others, or a shuffled number."""
    draw = recipe.generator("canaries")
    x, y = recipe.others
    rows = torch.from_numpy(np.sort(draw.permutation(len(y))[:count]))
    x, y = x[rows], y[rows]
    if recipe.classes is not None and not y.is_floating_point() and y.dim() == 1:
        shift = torch.from_numpy(draw.integers(1, recipe.classes, size=len(y)))
        return x, (y + shift) % recipe.classes
    return x, y[torch.from_numpy(draw.permutation(len(y)))]


def plant(recipe: Recipe, x: Tensor, y: Tensor, joined: np.ndarray[Any, Any]) -> Samples:
    """The run's samples with the canaries that joined: at random parties, or as parties of their own."""
    rows = torch.from_numpy(np.flatnonzero(joined))
    members = recipe.members
    if recipe.unit == "sample":
        party = recipe.generator("canary parties").integers(recipe.parties, size=len(joined))[joined]
        owners = np.concatenate([members.party, party])
        return Samples.of(torch.cat([members.x, x[rows]]), torch.cat([members.y, y[rows]]), owners, recipe.parties)
    copies = max(int(np.median(np.diff(members.offsets))), 1)  # a canary party has the size of the others
    repeated = rows.repeat_interleave(copies)
    owners = recipe.parties + np.repeat(np.arange(len(rows)), copies)
    return Samples.of(torch.cat([members.x, x[repeated]]), torch.cat([members.y, y[repeated]]),
                      np.concatenate([members.party, owners]), recipe.parties + len(rows))  # fmt: skip


def exposures(scores: np.ndarray[Any, Any], joined: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The exposure of each canary that joined: log2 of candidates, minus log2 of its rank among those that did not.

    Carlini et al. 2019. The largest that can be measured is log2 of one more than the canaries that did not join.
    """
    outside = np.sort(scores[~joined])
    rank = 1 + len(outside) - np.searchsorted(outside, scores[joined], side="right")
    return np.asarray(np.log2(len(outside) + 1) - np.log2(rank))


class WatchedRounds:
    """Scores of canaries by the models of all rounds, as a party and the aggregator see them.

    The score of a canary is the sum over rounds of the product of its gradient with the step of the shared model. Steps
    that trained with the canary go along minus its gradient; so the white-box audits of Steinke et al. 2023 score.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y
        self._before: Tensor | None = None
        self.scores = torch.zeros(len(y), dtype=torch.float64)
        self.refused: str | None = None

    def __call__(self, line: dict[str, Any], result: Result) -> None:
        if self.refused is not None:
            return
        try:
            model = final_model(result)
            model.check_network()
            before = model.objective.initial.w if self._before is None else self._before
            self.scores -= along(model, before, model.params.w - before, self._x, self._y)
            self._before = model.params.w.clone()
        except HansaError as error:
            self.refused = str(error)
        except (RuntimeError, NotImplementedError) as error:  # a layer without a second derivative
            reason = next(iter(str(error).splitlines()), "")[:200]
            self.refused = f"the products of gradients and steps cannot be computed: {reason}"


def along(model: TrainedModel, w: Tensor, step: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The derivative of each sample's loss along a step of the parameters from w, in evaluation mode.

    The gradient of the weighted sum of losses is linear in the weights: its product with the step has the wanted
    derivatives as its own gradient.
    """
    objective = model.objective
    module = objective.network().eval()
    buffers = {name: value.clone() for name, value in
               objective.spec.buffers(model.params.stats, model.params.counts).items()}  # fmt: skip
    w, weights = w.detach().clone().requires_grad_(), torch.zeros(len(y), dtype=w.dtype, requires_grad=True)
    output = torch.func.functional_call(module, objective.spec.split(w) | buffers, (x,))
    (gradient,) = torch.autograd.grad((objective.loss_of(output, y) * weights).sum(), w, create_graph=True)
    (derivatives,) = torch.autograd.grad((gradient * step).sum(), weights)
    return derivatives.double()


def audit_epsilon(recipe: Recipe, count: int = CANARIES, confidence: float = CONFIDENCE,
                  purpose: str = "canaries") -> dict[str, Any]:  # fmt: skip
    """Train once with canaries; the empirical epsilon beside the claimed one, and the canaries' exposure.

    A canary's score is how much smaller its loss is under the model with canaries than under the run's own model, which
    saw none of them. That is an observer of the final model alone; `all_rounds` has the bound of one who sees the
    models of all rounds.
    """
    count = min(count, len(recipe.others[1]), len(recipe.others[1]) if recipe.unit == "sample" else PARTIES)
    if count < 8:
        raise ConfigError(f"the audit needs at least 8 canaries, got {count}; the task needs more test samples")
    x, y = make_canaries(recipe, count)
    joined = recipe.generator("coins", purpose).random(count) < 0.5
    watched = WatchedRounds(x, y)
    result = recipe.train(plant(recipe, x, y, joined), purpose, callbacks=(watched,))
    trained = final_model(result)
    scores = (recipe.model.losses(x, y) - trained.losses(x, y)).numpy()
    spent = [line for line in result.history if line.get("epsilon") is not None]
    claimed = float(spent[-1]["epsilon"]) if spent else None
    delta = float(spent[-1]["delta"]) if spent else 0.0
    exposed = exposures(scores, joined)
    rounds = {"refused": watched.refused} if watched.refused is not None else empirical_epsilon(
        watched.scores.numpy(), joined, delta, confidence)  # fmt: skip
    return {
        **empirical_epsilon(scores, joined, delta, confidence), "all_rounds": rounds, "claimed": claimed,
        "unit": recipe.unit,
        "exposure": float(exposed.mean()) if len(exposed) else 0.0,
        "largest_exposure": float(np.log2((~joined).sum() + 1)),
        "chance_exposure": _chance(int((~joined).sum())),
    }  # fmt: skip


def _chance(outside: int) -> float:
    """The mean exposure of canaries about which the model reveals nothing."""
    return float(np.log2(outside + 1) - np.log2(np.arange(1, outside + 2)).mean())
