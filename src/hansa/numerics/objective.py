"""The objective: model and loss as pure functions of the parameter vector, without data."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hansa.numerics import rng
from hansa.numerics.keyed_randomness import KeyedRandomness
from hansa.numerics.losses import LOSSES, Loss, metrics, named_loss
from hansa.numerics.params import Params, ParamSpec
from hansa.numerics.weights import Weighting
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, HansaError
from hansa.plumbing.stopping import go_on

EVALUATION_BATCH = 1024


# PyTorch has one global generator for all threads: jobs of an aggregator, or simulations at the same time
_one_at_a_time = threading.RLock()
if hasattr(os, "register_at_fork"):  # a forked process does not have the thread that may hold the lock
    os.register_at_fork(
        before=_one_at_a_time.acquire, after_in_parent=_one_at_a_time.release, after_in_child=_one_at_a_time.release
    )


@contextmanager
def kept_generator() -> Iterator[None]:
    """Give this thread alone PyTorch's global CPU generator, and restore its state afterwards."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generator, from which new modules draw; restore its state afterwards."""
    with kept_generator():
        # not torch.manual_seed: without a GPU it stores every call, so memory would grow
        torch.default_generator.manual_seed(rng.key(seed, "init") & 0x7FFFFFFFFFFFFFFF)
        yield


def make_module(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call a model factory; the initial values depend on the seed alone."""
    if isinstance(model, nn.Module) or not callable(model):
        raise ConfigError(f"model: expected a function that returns a torch.nn.Module, got a {type(model).__name__}")
    with seeded(seed):
        try:
            module = model()
        except HansaError:
            raise
        except Exception as error:  # the user's own code: quote its error
            raise ConfigError(f"model: the function that makes it failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model: the function must return a torch.nn.Module, it returned a {type(module).__name__}")
    return module


def count_numbers(model: Callable[[], nn.Module]) -> int:
    """Count the numbers in a model's parameters and buffers, without allocating them."""
    with torch.device("meta"):
        module = make_module(model, 0)
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


def one_tensor(output: Any) -> Tensor:
    """The output of a model; a ConfigError if it is not a tensor."""
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"model: for a batch it must return one tensor (class scores, or values), and it returns a "
            f"{type(output).__name__}; wrap it in a module whose forward returns only that tensor"
        )
    return output


def _channels_last(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


class Objective:
    """Model, loss and metrics of a task, without data.

    `model` may be None for methods that bring their own model (naive Bayes, trees).
    """

    def __init__(self, model: Callable[[], nn.Module] | None, loss: str | Loss, seed: int, device: str = "cpu",
                 bf16: bool = False) -> None:  # fmt: skip
        self.loss, self.make, self.seed = loss, model, seed
        self.device = torch.device(device)
        self.bf16 = bf16  # matrix products and convolutions in bfloat16; parameters and losses keep their type
        self.loss_of = named_loss(loss)  # (outputs, targets) -> the loss of each sample
        self.weighting: Weighting | None = None  # set if the targets of training carry weights
        self._random: bool | None = None
        self._base: str | None = None  # computed when it is needed: a large base takes seconds
        self._tied = False  # whether parameters are shared; searched once, because a search costs as much as a layer
        self._convolves = False
        self._takes_channels_last: bool | None = None  # whether the model accepts channels-last images; None: not tried
        self.module: nn.Module | None = None
        self.spec = ParamSpec((), (), ())
        self.initial = Params.none()
        if model is not None:
            module = make_module(model, seed)
            self.module = module.to(self.device)
            self._convolves = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
            tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            self._tied = len(tensors) > len({id(tensor) for _, tensor in tensors})
            self.spec = ParamSpec.of(module)
            if self.spec.dim == 0:
                raise ConfigError("model: it has no trainable parameter")
            self.initial = Params(*(v.to(self.device) for v in self.spec.flatten(module)))

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers in training; true until a pass without any was seen."""
        return self._random is not False

    def network(self) -> nn.Module:
        """The module; a ConfigError if the task has none."""
        if self.module is None:
            raise ConfigError("the task has no model; give Task(model=...) for a method that trains one")
        return self.module

    def drawn(self, seed: int) -> Params:
        """Other initial values of the same model, which depend on the seed alone."""
        self.network()
        assert self.make is not None
        return Params(*(v.to(self.device) for v in self.spec.flatten(make_module(self.make, seed))))

    def with_loss(self, loss: str | Loss) -> Objective:
        """The same model with another loss, such as a distance to the outputs of other parties' models."""
        other = copy.copy(self)
        other.loss, other.loss_of, other.weighting = loss, named_loss(loss), None
        return other

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The frozen parameters by name. They stay in the module and are in no message."""
        if not self.spec.frozen:
            return {}
        parameters = dict(self.network().named_parameters())
        return {entry.name: parameters[entry.name].detach() for entry in self.spec.frozen}

    @property
    def base(self) -> str | None:
        """The SHA-256 of the frozen parameters; None if there are none.

        It covers names, shapes, types and bytes, in the order of names. A deployed party compares it with the task's.
        """
        if self._base is None and self.spec.frozen:
            self._base = codec.digest(dict(sorted(self.frozen.items())))
        return self._base

    def take_frozen(self, values: Any) -> None:
        """Load the frozen parameters of a saved model.

        A DataError if their names, shapes or types are not those of this model.
        """
        own = self.frozen
        if not isinstance(values, Mapping) or set(values) != set(own):
            raise DataError(f"frozen parameters: expected those of the model, {sorted(own)}")
        for name, parameter in own.items():
            value = values[name]
            if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise DataError(
                    f"frozen parameters: {name} must be {parameter.dtype} of shape {tuple(parameter.shape)}"
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(values[name])
        self._base = None

    def channels_last(self, x: Tensor) -> bool:
        """Whether batches like x should be in channels-last order, in which convolutions are fastest.

        On a GPU they also repeat their bits only in that order.
        """
        if not (self._convolves and x.dim() == 4 and x.dtype == torch.float32):
            return False
        if self._takes_channels_last is None:
            self._takes_channels_last = self._takes(_channels_last(x[:1]))
        return self._takes_channels_last

    def laid_out(self, x: Tensor) -> Tensor:
        """A batch in the order that its model's layers prefer."""
        return _channels_last(x) if self.channels_last(x) else x

    def laid_out_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Filters in the order of the images, which a GPU's layers would otherwise lose after the first norm."""
        if not (self._takes_channels_last and self.device.type == "cuda"):
            return weights
        last = torch.channels_last
        return {name: w.contiguous(memory_format=last) if w.dim() == 4 else w for name, w in weights.items()}

    def _takes(self, x: Tensor) -> bool:
        """Whether the model accepts inputs in this memory layout; a model that calls `view` on images does not."""
        module = self.network()
        training = module.training
        try:
            with torch.no_grad():
                module.eval()(x)
        except RuntimeError:
            return False
        finally:
            module.train(training)
        return True

    def _forward(self, module: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        if not self.bf16:
            output: Tensor = functional_call(module, tensors, (x,), tie_weights=self._tied)
            return output
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            output = functional_call(module, tensors, (x,), tie_weights=self._tied)
        return output.to(self.dtype) if isinstance(output, Tensor) and output.is_floating_point() else output

    def learner(self) -> nn.Module:
        """The module in training mode; set only if needed, because setting it costs more than a small layer."""
        module = self.network()
        return module if module.training else module.train()

    def losses(self, weights: dict[str, Tensor], buffers: tuple[Tensor, Tensor], x: Tensor, y: Tensor,
               key: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """The loss of each sample in training mode, and the buffers after the pass. Changes no argument.

        `weights` are the trainable tensors by name, as from `spec.split`.
        """
        output, buffers = self.training_outputs(weights, buffers, x, key)
        if isinstance(self.loss, str) and self.loss in LOSSES:  # the user's own loss may take any output
            output = one_tensor(output)
        return self.training_losses(output, y), buffers

    def training_outputs(self, weights: dict[str, Tensor], buffers: tuple[Tensor, Tensor], x: Tensor,
                         key: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """As `losses`, but the model's outputs."""
        module = self.learner()
        tensors = dict(weights)
        for name, buffer in self.spec.buffers(*buffers).items():
            tensors[name] = buffer.clone()  # layers write into buffers, and stacked layers need them dense
        if self._random is False:
            output = self._forward(module, tensors, x)
        else:
            with KeyedRandomness(key) as randomness:
                output = self._forward(module, tensors, x)
            self._random = randomness.used
        buffers = (
            self.spec.joined(self.spec.stats, tensors, buffers[0]),
            self.spec.joined(self.spec.counts, tensors, buffers[1]),
        )
        return output, buffers

    def training_losses(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample, times its weight if the targets carry weights."""
        if self.weighting is None:
            return self.loss_of(output, y)
        y, weights = self.weighting.split(y)
        values = self.loss_of(output, y)
        return values * weights.to(values.dtype)

    def targets(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Targets as training takes them: with weights, if samples of this task have any."""
        return y if self.weighting is None else self.weighting.join(y, weights)

    @torch.no_grad()
    def outputs(self, params: Params, x: Tensor) -> Tensor:
        """The model's outputs in evaluation mode."""
        module = self.network().eval()
        tensors = self.spec.named(params)
        parts = []
        for piece in torch.split(x, EVALUATION_BATCH):
            go_on()
            parts.append(one_tensor(self._forward(module, tensors, self.laid_out(piece))))
        return torch.cat(parts)

    def metrics(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """The task's metrics of outputs against targets."""
        return metrics(self.loss, output, y)
