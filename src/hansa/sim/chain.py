"""Chains: models that are a sequence of layers, trained without automatic differentiation where that is faster.

A model's forward pass is recorded once. If each call takes the result of the previous call and of no other, the chain
can be computed from the parameters of a whole stack of parties [K, d]: linear layers become batched matrix products,
elementwise functions run on all rows at once. In the backward pass the matrix product that computes a layer's gradient
also writes it to its destination: into a gradient or, for steps of a StepRule, directly into the weights, so that no
gradient is stored.

With one party, the calls between linear layers may be anything (convolutions, pooling, norms): PyTorch differentiates
them, and only linear layers take their step inside the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hansa.local.context import Batch
from hansa.local.step_rule import StepRule
from hansa.numerics import rng
from hansa.numerics.norms import row_norms
from hansa.numerics.objective import Objective, kept_generator
from hansa.plumbing.determinism import unfilled_like
from hansa.plumbing.errors import HansaError

_RELU: frozenset[Any] = frozenset([torch.relu, F.relu, Tensor.relu, torch.relu_, Tensor.relu_])
# Elementwise functions. Any other function might mix rows, and so parties.
_ELEMENTWISE: frozenset[Any] = _RELU | frozenset(
    [torch.tanh, Tensor.tanh, F.tanh, torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.gelu, F.silu, F.elu, F.leaky_relu,
     F.softplus, F.hardtanh, F.relu6]
)  # fmt: skip
_FLATTEN: frozenset[Any] = frozenset([Tensor.flatten, torch.flatten])
ROUNDING = 8  # units in the last place: the largest error of a length after clipping
_THRESHOLD_BACKWARD = torch.ops.aten.threshold_backward.default
_PREVIOUS, _ROWS = object(), object()  # in a call's arguments: the previous result, the number of rows


@dataclass(frozen=True)
class Name:
    """In a call's arguments: a parameter of the model."""

    name: str


def _filled(value: Any, previous: Tensor, weights: Mapping[str, Tensor]) -> Any:
    """An argument of a call, with placeholders replaced by their values."""
    if value is _PREVIOUS:
        return previous
    if value is _ROWS:
        return len(previous)
    if isinstance(value, Name):
        return weights[value.name]
    return type(value)(_filled(v, previous, weights) for v in value) if isinstance(value, (tuple, list)) else value


@dataclass(frozen=True)
class LayerCall:
    """One call of a model's forward pass."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, previous: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        kwargs = {name: _filled(value, previous, weights) for name, value in self.kwargs.items()}
        out: Tensor = self.func(*(_filled(value, previous, weights) for value in self.args), **kwargs)
        return out

    @property
    def names(self) -> list[str]:
        """The parameters that the call uses."""
        return [value.name for value in (*self.args, *self.kwargs.values()) if isinstance(value, Name)]

    @property
    def by_row(self) -> bool:
        """Whether each row of the result depends on the same row of the input only, and on no parameter."""
        if self.func in _FLATTEN:
            start = self.args[1] if len(self.args) > 1 else self.kwargs.get("start_dim", 0)
            return isinstance(start, int) and start >= 1
        return self.func in _ELEMENTWISE and not self.names


class _Watch(TorchFunctionMode):
    """Records the calls of a module; `is_chain` is True while each call takes the result of the previous one."""

    def __init__(self, names: Mapping[int, str], x: Tensor) -> None:
        super().__init__()
        self.names, self.last, self.is_chain = names, x, True
        self.calls: list[LayerCall] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            call = LayerCall(func, tuple(map(self._mark, args)), {k: self._mark(v) for k, v in (kwargs or {}).items()})
            self.is_chain &= [*call.args, *call.kwargs.values()].count(_PREVIOUS) == 1
            self.calls.append(call)
            self.last = out
        else:  # shapes are allowed; reading a value of the data means a branch
            self.is_chain &= getattr(func, "__name__", "") in ("size", "dim", "__get__", "__len__")
        return out

    def _mark(self, value: Any) -> Any:
        if value is self.last:
            return _PREVIOUS
        if isinstance(value, Tensor):
            self.is_chain &= id(value) in self.names
            return Name(self.names.get(id(value), ""))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._mark, value))
        return value


def _merged(a: Any, b: Any) -> Any:
    """Merge an argument recorded with two rows and with three: the pair (2, 3) becomes the number of rows."""
    if isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
        return type(a)(_merged(p, q) for p, q in zip(a, b, strict=True))
    if a is b or a == b:
        return a
    if (a, b) == (2, 3):
        return _ROWS
    raise ValueError("the calls depend on the batch")


@dataclass(frozen=True)
class Link:
    """A linear layer (its weight and bias), or the calls between two of them."""

    weight: str = ""
    bias: str | None = None
    calls: tuple[LayerCall, ...] = ()

    @functools.cached_property
    def relu(self) -> bool:
        """Whether the link is a single ReLU, which is differentiated without autograd."""
        return len(self.calls) == 1 and self.calls[0].func in _RELU

    @functools.cached_property
    def names(self) -> list[str]:
        """The parameters that the calls use."""
        return [name for call in self.calls for name in call.names]


@dataclass(frozen=True)
class ChainStep:
    """The new value of a parameter: keep * value + times * gradient + rate * toward.

    With one rate per party, `keep` may have one number per party too, and gradients are already times the rates.
    """

    keep: float | Tensor
    times: float
    toward: Mapping[str, Tensor] = field(default_factory=dict)
    rate: float | Tensor = 0.0

    def multiply(self, into: dict[str, Tensor], name: str, left: Tensor, right: Tensor) -> None:
        """Take a parameter's step; its gradients are the product [K, a, b] x [K, b, c]; of one party, without K."""
        at, keep = into[name], self._decayed(into[name])
        product = at.addmm_ if at.dim() == 2 else at.baddbmm_
        self._draw(product(left, right, beta=keep, alpha=self.times), name)

    def add(self, into: dict[str, Tensor], name: str, gradient: Tensor) -> None:
        """Take a parameter's step; its gradients are [K, ...]; of one party, without K."""
        keep, at = self._decayed(into[name]), into[name]
        at.mul_(keep).add_(gradient, alpha=self.times) if keep else torch.mul(gradient, self.times, out=at)
        self._draw(at, name)

    def _decayed(self, at: Tensor) -> float:
        if isinstance(self.keep, float):
            return self.keep
        at.mul_(_by_party(self.keep, at))
        return 1.0

    def _draw(self, at: Tensor, name: str) -> None:
        if name in self.toward:
            if isinstance(self.rate, float):
                at.add_(self.toward[name], alpha=self.rate)
            else:
                at.addcmul_(self.toward[name], _by_party(self.rate, at))


GRADIENT = ChainStep(0.0, 1.0)  # writes the gradient itself


def _by_party(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per party so that it multiplies a tensor [K, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


class Chain:
    """A model as a sequence of linear layers and the calls between them."""

    def __init__(self, objective: Objective, calls: list[LayerCall]) -> None:
        self.objective = objective
        self.links: list[Link] = []
        for call in calls:
            if call.func is F.linear and call.names:
                self.links.append(Link(call.names[0], call.names[1] if len(call.names) > 1 else None))
            elif self.links and self.links[-1].calls:
                self.links[-1] = Link(calls=(*self.links[-1].calls, call))
            else:
                self.links.append(Link(calls=(call,)))
        self.others = [name for link in self.links for name in link.names]  # parameters outside linear layers
        self.stacks = all(call.by_row for link in self.links for call in link.calls)
        layers = [link for link in self.links if link.weight]
        used = [name for link in layers for name in (link.weight, link.bias) if name is not None] + self.others
        self.whole = bool(layers) and sorted(used) == sorted(entry.name for entry in objective.spec.weights)
        self.flat = True  # whether each linear layer got one row per sample
        self._shares: dict[int, Tensor] = {}

    def takes(self, rule: StepRule, parties: int) -> bool:
        """Whether the chain can take the steps of a rule for a stack of this many parties."""
        return self.stacks and self.flat if rule.clip is not None else self.stacks or parties == 1

    @torch.no_grad()
    def descend(self, weights: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor, rate: float | Tensor,
                rule: StepRule, toward: Mapping[str, Tensor] | None = None) -> Tensor:  # fmt: skip
        """Take one step of a StepRule in place, with one rate for all parties or one rate per party.

        `share` [K, B] is the weight of each sample in the mean loss of its party; `toward` has that term's values per
        parameter. Returns each sample's loss times its share. With `rule.clip` the sum of the clipped gradients of the
        samples in the batch replaces the gradient: the rate must include the division, and the noise is not added.
        """
        pull = rule.pull
        if isinstance(rate, float):
            step = ChainStep(1.0 - rate * pull, -rate, toward or {}, rate)
        else:
            step = ChainStep(1.0 - rate * pull if pull else 1.0, -1.0, toward or {}, rate)
        return self._sweep(weights, weights, x, y, share, step, None if rule.clip is None else rule.clip.bound)

    @torch.no_grad()
    def gradient(self, flat: Tensor, x: Tensor, y: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients [K, d] of the parties' mean losses, and each sample's loss times its share.

        For one party `flat` and `share` may have no leading dimension: products of matrices are a little faster than
        products of stacks of one matrix.
        """
        out, split = unfilled_like(flat), self.objective.spec.split
        losses = self._sweep(split(flat), split(out), x, y, share, GRADIENT)
        return out, losses

    def alone(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The gradient and the mean loss of one party; a `rule` for Context."""
        n = len(batch.x)
        if n not in self._shares:
            self._shares[n] = torch.full((n,), 1.0 / n, dtype=w.dtype)
        share = self._shares[n] if batch.mask is None else batch.mask / batch.mask.sum()
        gradient, losses = self.gradient(w, self.objective.laid_out(batch.x), batch.y, share)
        return gradient, losses.sum()

    def _sweep(self, weights: dict[str, Tensor], into: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor,
               step: ChainStep, bound: float | None = None) -> Tensor:  # fmt: skip
        """Forward and backward pass; the parameters `into` take their step, from the last layer to the first.

        For a single party, without a leading dimension, `share` is [B].
        """
        single, k = share.dim() == 1, len(share)
        held: list[Any] = []
        alone = {name: (weights[name] if single else weights[name][0]).data.requires_grad_() for name in self.others}
        h = x
        for place, link in enumerate(self.links):
            if link.weight:
                self.flat &= h.dim() == 2
                weight, bias = weights[link.weight], None if link.bias is None else weights[link.bias]
                if single:
                    held.append((h.reshape(-1, h.shape[-1]), h.shape))
                    h = F.linear(h, weight, bias)
                    continue
                rows = h.reshape(k, -1, h.shape[-1])
                held.append((rows, h.shape))
                across = weight.mT
                out = torch.bmm(rows, across) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, across)
                h = out.view(*h.shape[:-1], -1)
            elif link.relu:
                h = h.relu_() if place else h.relu()
                held.append(h)
            elif place or link.names:
                leaf = h.requires_grad_() if place else h
                with torch.enable_grad():
                    for call in link.calls:
                        h = call(h, alone)
                held.append((leaf, h))
                h = h.detach()
            else:  # no earlier link needs a gradient
                for call in link.calls:
                    h = call(h, alone)
                held.append(None)
        back, losses = self._loss(h, y, share)
        due: list[tuple[Link, Tensor, Tensor]] = []
        if isinstance(step.rate, Tensor) and bound is None:
            back = (back.view(k, -1) * step.rate.view(-1, 1)).view(back.shape)
        for place in range(len(self.links) - 1, -1, -1):
            link = self.links[place]
            if link.weight:
                rows, shape = held[place]
                above = back.reshape(-1, back.shape[-1]) if single else back.reshape(k, -1, back.shape[-1])
                if place and not (place == 1 and held[0] is None):
                    back = torch.matmul(above, weights[link.weight]).view(shape)
                due.append((link, above, rows))
                if bound is None:
                    self._take(into, step, due.pop())
            elif link.relu:
                back = _THRESHOLD_BACKWARD(back, held[place], 0)
            elif held[place] is not None:
                leaf, out = held[place]
                leaves = [alone[name] for name in link.names] + ([leaf] if place else [])
                with torch.enable_grad():  # a scalar: for other shapes autograd imports sympy
                    total = (out * back).sum()
                gradients = torch.autograd.grad(total, leaves)
                for name, gradient in zip(link.names, gradients, strict=False):
                    step.add(into, name, gradient if single else gradient.unsqueeze(0))
                back = gradients[-1]
        if bound is not None:
            for layer in self._clipped(due, share, bound, step.rate):
                self._take(into, step, layer)
        return losses

    @staticmethod
    def _take(into: dict[str, Tensor], step: ChainStep, layer: tuple[Link, Tensor, Tensor]) -> None:
        """Take a linear layer's step, from the gradients of its outputs and its inputs."""
        link, above, rows = layer
        step.multiply(into, link.weight, above.mT, rows)
        if link.bias is not None:
            step.add(into, link.bias, above.sum(-2))

    @staticmethod
    def _clipped(due: list[tuple[Link, Tensor, Tensor]], share: Tensor, clip: float,
                 rate: float | Tensor) -> Iterator[tuple[Link, Tensor, Tensor]]:  # fmt: skip
        """The layers' gradients with each sample's gradient clipped to a length of at most `clip`.

        See `local.clipping`. A gradient that is longer after clipping, by rounding, counts as zero. Rates that differ
        between parties are multiplied in.
        """
        length = torch.zeros_like(share, dtype=torch.float64)
        inside = []
        for link, above, rows in due:
            entered = row_norms(rows)
            inside.append(entered if link.bias is None else torch.hypot(entered, torch.ones_like(entered)))
            length = torch.hypot(length, row_norms(above) * inside[-1])
        factor = clip / length.clamp(min=clip)  # 0 for an infinite length
        cut = [(above * factor.unsqueeze(2)).to(share.dtype) for _, above, _ in due]
        left = torch.zeros_like(length)  # the length after clipping, with rounding
        for above, entered in zip(cut, inside, strict=True):
            left = torch.hypot(left, row_norms(above) * entered)
        sound = (left <= clip * (1 + ROUNDING * torch.finfo(share.dtype).eps)) & torch.isfinite(length)
        counts = None if bool(sound.all()) else sound.unsqueeze(2)
        times = share if isinstance(rate, float) else share * rate.view(-1, 1)
        for (link, _, rows), above in zip(due, cut, strict=True):
            if counts is not None:
                above, rows = torch.where(counts, above, 0.0), torch.where(counts, rows, 0.0)
            yield link, above * times.unsqueeze(2), rows

    def _loss(self, output: Tensor, y: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of sum(losses * share) with respect to the output, and losses * share."""
        if self.objective.weighting is not None:
            y, weights = self.objective.weighting.split(y)
            share = share * weights.to(share.dtype).view(share.shape)
        if self.objective.loss == "cross_entropy" and output.dim() == 2 and y.dim() == 1:
            back = torch.log_softmax(output, 1)
            index = y.unsqueeze(1)
            part = share.reshape(-1, 1)
            losses = back.gather(1, index).neg_().mul_(part)
            back = back.exp_().mul_(part).scatter_add_(1, index, -part)
            return back, losses.view(share.shape)
        leaf = output.requires_grad_()
        with torch.enable_grad():
            losses = self.objective.loss_of(leaf, y).view(share.shape) * share
            total = losses.sum()
        (back,) = torch.autograd.grad(total, leaf)
        return back, losses.detach()


def chain_of(objective: Objective, x: Tensor, y: Tensor) -> Chain | None:
    """The model as a chain, or None. The chain must give the model's own gradient on these samples."""
    module, spec = objective.module, objective.spec
    if module is None or spec.stats or spec.counts or spec.frozen or len(x) < 3 or objective.bf16:
        return None
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    recordings = []
    try:
        for rows in (2, 3):
            sample = x[:rows].clone()
            with kept_generator(), torch.no_grad(), _Watch(names, sample) as watch:
                output = objective.learner()(sample)
            if not watch.is_chain or output is not watch.last:
                return None
            recordings.append(watch.calls)
        one, other = recordings
        if len(one) != len(other):
            return None
        calls = [
            LayerCall(a.func, _merged(a.args, b.args), {k: _merged(v, b.kwargs[k]) for k, v in a.kwargs.items()})
            for a, b in zip(one, other, strict=True)
        ]
        chain = Chain(objective, calls)
        return chain if chain.whole and all(_agrees(chain, x[:n], y[:n]) for n in {1, 3, len(x)}) else None
    except HansaError:
        raise
    except Exception:  # not a chain; training will report an error of the model
        return None


def elsewhere(objective: Objective) -> Tensor:
    """Weights near the initial ones, none of them zero: a layer of zeros would hide errors in others."""
    initial = objective.initial.w
    draw = rng.normal(torch.zeros((), dtype=torch.int64, device=initial.device), initial.shape)
    return initial + 0.1 * draw.to(initial.dtype)


def _agrees(chain: Chain, x: Tensor, y: Tensor) -> bool:
    """Whether the chain and the model have the same gradient, at weights that are not zero."""
    objective = chain.objective
    key = torch.zeros((), dtype=torch.int64)
    w = elsewhere(objective)
    weights = {name: value.requires_grad_() for name, value in objective.spec.split(w.clone()).items()}
    losses, _ = objective.losses(weights, (objective.initial.stats, objective.initial.counts), x, y, key)
    if objective.draws:
        return False
    gradients = torch.autograd.grad(losses.mean(), list(weights.values()))
    wanted = torch.cat([gradient.reshape(-1) for gradient in gradients])
    share = torch.full((1, len(x)), 1.0 / len(x), dtype=w.dtype)
    own, _ = chain.gradient(w.unsqueeze(0), x.clone(), y, share)
    close = 1e-9 if w.dtype == torch.float64 else 1e-3
    return bool((wanted - own[0]).norm() <= close * wanted.norm())
