"""A piece of a split network at a party: a model, its optimiser, and one pass forward and back.

The piece stays in the party's memory, with the state of its optimiser. Only activations and gradients leave it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hansa.core.op import Memory, Party, Shape, like
from hansa.holdings.stored_rows import whole
from hansa.local import SGD, Adam
from hansa.local.context import Batch, Context
from hansa.models.model import Model
from hansa.numerics import rng
from hansa.numerics.objective import Objective, count_numbers, one_tensor
from hansa.numerics.params import Params
from hansa.plumbing.errors import PartyError
from hansa.plumbing.functions import double
from hansa.replies.reply_checks import all_finite

PREFIX = "split/"  # of the names in a party's memory
MOST_LOSS = 1e20  # of a batch
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Optimiser:
    """How a piece is trained: SGD with momentum, or Adam. Its state is kept from round to round."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0

    def solver(self) -> SGD | Adam:
        """The local solver whose steps the piece takes."""
        return SGD(lr=self.lr, momentum=self.momentum) if self.name == "sgd" else Adam(lr=self.lr)


def fitted(model: Model, inputs: tuple[int, ...], outputs: int | None = None) -> Model:
    """The model for samples of a shape; by default with its own number of outputs."""
    recipe: Any = model
    made: Model = replace(recipe, inputs=inputs, outputs=model.outputs if outputs is None else outputs)
    return made


@functools.lru_cache(maxsize=64)
def numbers(model: Model) -> int:
    """The number of parameters of a model."""
    return count_numbers(model)


@functools.lru_cache(maxsize=64)
def piece_shapes(name: str, model: Model, optimiser: Optimiser, dtype: str) -> dict[str, Shape]:
    """Names, shapes and types of what a party keeps of a piece (`Piece.remembered`)."""
    objective = Objective(_factory(model, dtype), "mse", 0)
    carry = optimiser.solver().start(_context(objective, 0, optimiser), objective.initial.w, {}, {})[1]
    return {f"{PREFIX}{name}/{key}": like(value) for key, value in {**objective.initial._asdict(), **carry}.items()}


def _factory(model: Model, dtype: str) -> Callable[[], torch.nn.Module]:
    return functools.partial(double, model) if dtype == "float64" else model


def _context(objective: Objective, round: int, optimiser: Optimiser) -> Context:
    """What the optimiser's solver may see: no samples."""
    return Context(objective, 0, 0, round, optimiser.lr, _no_samples, (torch.empty(0), torch.empty(0)))


class Piece:
    """One piece of a network, during an ask. `name` tells it from the other pieces of the network."""

    def __init__(self, name: str, model: Model, party: Party, memory: Memory, optimiser: Optimiser, dtype: str) -> None:
        own, make = party.objective, _factory(model, dtype)
        self.objective = Objective(make, "mse", rng.key(party.seed, "split", name), str(own.device), own.bf16)
        self._name, self._outputs, self._key = (
            name,
            model.outputs,
            rng.key(party.seed, "split", name, party.round, party.id),
        )
        self._solver = optimiser.solver()
        self._context = _context(self.objective, party.round, optimiser)
        start = f"{PREFIX}{name}/"
        stored = {key.removeprefix(start): value for key, value in memory.items() if key.startswith(start)}
        params = self.objective.initial
        if stored:
            params = Params(*(stored.pop(field) for field in Params._fields))
            if [vector.shape for vector in params] != [vector.shape for vector in self.objective.initial]:
                raise PartyError(f"it remembers another {name} of the network than this ask has")
        self.params, carry = params, stored
        if not carry:
            carry = self._solver.start(self._context, params.w, {}, {})[1]
        self._carry = carry
        self._steps = 0

    def remembered(self) -> Memory:
        """What the party keeps of the piece."""
        kept = {**self.params._asdict(), **self._carry}
        return {f"{PREFIX}{self._name}/{name}": value for name, value in kept.items()}

    def forward(self, x: Tensor, first: bool = False) -> Tensor:
        """The outputs for a batch, in training mode; `back` needs them. `first`: nobody needs the inputs' gradient."""
        weights = self.objective.spec.split(self.params.w.detach())
        self._weights = {name: weight.requires_grad_() for name, weight in weights.items()}
        self._inputs = x.detach() if first else x.detach().requires_grad_()
        key = torch.tensor(rng.folded(self._key, self._steps))
        self._steps += 1
        output, buffers = self.objective.training_outputs(
            self._weights, (self.params.stats, self.params.counts), self.objective.laid_out(self._inputs), key
        )
        if finite(*buffers):
            self.params = Params(self.params.w, *(buffer.detach() for buffer in buffers))
        return self._checked(output, len(x))

    def back(self, output: Tensor, gradient: Tensor | None = None) -> Tensor | None:
        """Train the piece by one step, from the gradient of the loss by `output`; without it, `output` is the loss.

        Returns the gradient by the inputs; None for the first piece.
        """
        leaves = [*self._weights.values(), *([self._inputs] if self._inputs.requires_grad else [])]
        gradients = torch.autograd.grad(output, leaves, gradient, materialize_grads=True)
        direction = torch.cat([each.reshape(-1) for each in gradients[: len(self._weights)]])
        w, carry = self._solver.step(self._context, self.params.w, direction, self._carry)
        if finite(w, *carry.values()):  # a piece that diverges keeps its last finite weights
            self.params, self._carry = self.params._replace(w=w.detach()), carry
        return gradients[-1].nan_to_num() if self._inputs.requires_grad else None

    def outputs(self, x: Tensor) -> Tensor:
        """The outputs for a batch, in evaluation mode."""
        return self._checked(self.objective.outputs(self.params, x), len(x))

    def _checked(self, output: Tensor, rows: int) -> Tensor:
        if tuple(one_tensor(output).shape) != (rows, self._outputs):
            raise PartyError(
                f"the {self._name} of the network gives outputs of the shape {tuple(output.shape)}, expected "
                f"{(rows, self._outputs)}"
            )
        return output.nan_to_num()  # a refusal of numbers that are not finite would tell that there are some


def finite(*tensors: Tensor) -> bool:
    """Whether all numbers of some tensors are finite."""
    return all(all_finite(tensor) for tensor in tensors if tensor.is_floating_point())


def added_loss(mean: Tensor, rows: int) -> Tensor:
    """The loss of a batch for the sum of an epoch; of a network that diverges a large number, which is finite."""
    return mean.detach().nan_to_num(nan=MOST_LOSS).clamp(max=MOST_LOSS) * rows


def _no_samples() -> Batch:
    raise PartyError("the optimiser of a piece reads no samples")


def batch_sizes(rows: int, batch: int) -> list[int]:
    """The number of rows of each batch, in order."""
    return [min(batch, rows - at) for at in range(0, rows, batch)]


def typed_samples(x: Any, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Samples in memory, in the type of the network; a PartyError if they have another shape than announced."""
    if tuple(x.shape[1:]) != shape:
        raise PartyError(f"its samples have the shape {tuple(x.shape[1:])}, and this ask names {shape}")
    samples = whole(x)
    return samples.to(DTYPES[dtype]) if samples.is_floating_point() else samples
