"""Sums of clipped gradients: each sample's gradient is cut to a length before it is added to the others'.

Three ways, the fastest that a model allows. Where all parameters are those of linear and convolutional layers, one
backward pass gives what arrives at each layer's output for each sample; with what went into the layer it gives the
length of each sample's gradient (Goodfellow 2015) and, the rows scaled, the clipped sum as one matrix product: no
sample's gradient is ever held. Convolutions are linear layers on patches of the image. Where a layer sees many rows of
one sample, its gradients are held instead if that is less work. Other models are mapped over their samples by
`torch.func.vmap`, and what cannot be mapped (recurrent layers) goes one sample at a time.

Whatever a gradient's length, what is added is no longer than the bound. A gradient is kept as a number times a vector
whose entries are at most 1 (its largest entry, and the rest in units of it), so that no square of an entry and no
product of two lengths leaves the range of floating-point numbers. Lengths and sums are float64: in float32 the rounding
of a sum of many samples could outgrow what one of them changes. (Stacked parties of a simulation, which nobody attacks,
stay in the type of the model.) What cannot be shown to be within the bound counts as nothing: a sample whose gradient
is not finite adds zero, which is within every bound, and that is decided by this sample alone. The same holds at a
deployed party for a sample to which the model cannot be applied (a character that it has no row for): were the work to
fail, the failure would tell that such a sample was drawn.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hansa.core import rng
from hansa.core.objective import Objective
from hansa.core.params import ParamSpec
from hansa.core.stopping import go_on

if TYPE_CHECKING:
    from hansa.local.solver import Batch, Context

ROOM = 2**26  # bytes of gradients held at a time
PROBE = 3  # samples that a model's ways are tried on


class Gradients(NamedTuple):
    """The gradients of one parameter, one for each of B samples, held or not, each a scale [B] times a unit: bounds on
    the units' lengths [B], and the sum of the units, each times a factor [B], leaving out those that do not count (None
    where all do)."""

    scale: Tensor
    length: Tensor
    summed: Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer: the names of its parameters, how a convolution cuts its patches, and the shape
    of what it gives for one sample."""

    weight: str
    bias: str | None
    patches: dict[str, Any] | None
    output: torch.Size

    def gradients(self, entered: Tensor, back: Tensor, dtype: torch.dtype) -> Iterable[tuple[str, Gradients]]:
        """The gradients of its parameters, given what went in and the gradients of what came out."""
        if self.patches is None:  # one row a sample, or many, as of a sequence
            rows = entered.reshape(len(back), -1, entered.shape[-1])
            back = back.reshape(len(back), -1, back.shape[-1])
        else:
            rows, back = F.unfold(entered, **self.patches).transpose(1, 2), back.flatten(2).transpose(1, 2)
        yield self.weight, _of_product(rows, back, dtype)
        if self.bias is not None:
            yield self.bias, _held(back.sum(1), dtype)


@dataclass(frozen=True)
class Way:
    """How a model's samples are told apart: by its layers in the order of their calls, where they hold all of its
    parameters and no more than one row of a batch meets another; else by vmap, where it maps. `works` where the model
    could be tried at all."""

    layers: tuple[Layer, ...] | None
    maps: bool
    works: bool = True


_ways: weakref.WeakKeyDictionary[Objective, Way] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelPoint:
    """A model at one point: what gradients are taken of. `stacked` inside `torch.func.vmap` over parties."""

    objective: Objective
    weights: dict[str, Tensor]
    buffers: tuple[Tensor, Tensor]
    stacked: bool = False

    @property
    def wide(self) -> torch.dtype:
        """The type of lengths and sums."""
        return self.objective.dtype if self.stacked else torch.float64

    def losses(self, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """The loss of each sample."""
        return self.objective.losses(self.weights, self.buffers, x, y, key)[0]

    def loss_of_one(self, weights: dict[str, Tensor], x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """The loss of a single sample at other weights."""
        return self.objective.losses(weights, self.buffers, x.unsqueeze(0), y.unsqueeze(0), key)[0].sum()


def clipped_sum(ctx: Context, w: Tensor, batch: Batch, key: Tensor, clip: float, per_layer: bool = False,
                at_once: int | None = None) -> Tensor:  # fmt: skip
    """The sum over a batch of the samples' gradients g * min(1, clip / |g|), the length taken over all parameters; in
    float64, unless parties are stacked.

    With `per_layer`, each of a model's L layers is cut to clip / sqrt(L) by itself, so that the whole is no longer than
    `clip`. `at_once` samples are worked on at a time, which bounds memory and changes nothing else. The model's
    buffers do not move. `prepare` was called for the model before.
    """
    model = ModelPoint(ctx.objective, ctx.spec.split(w.detach()), ctx.buffers, ctx.stacked)
    way = _ways[ctx.objective]
    count = len(batch.x)
    if count == 0:
        return torch.zeros_like(w, dtype=model.wide)
    x = ctx.inputs(batch)
    size = at_once or (count if way.layers is not None else max(1, ROOM // (w.numel() * model.wide.itemsize)))
    sums: list[Tensor] = []
    for at in range(0, count, size):
        some = slice(at, at + size)
        try:
            found = _gradients(model, way, x[some], batch.y[some], key, at)
        except IndexError:
            if ctx.private is None or not way.works:
                raise
            found = _alone(model, x[some], batch.y[some], key, at)
        mask = None if batch.mask is None else batch.mask[some]
        part = _clipped(ctx.spec, found, mask, clip, per_layer, ctx.stacked)
        sums = [part if not sums else sums[0].add_(part)]
    return sums[0]


def layers_of(spec: ParamSpec) -> list[list[str]]:
    """The names of a model's parameters, those of one layer together."""
    grouped: dict[str, list[str]] = {}
    for entry in spec.weights:
        grouped.setdefault(entry.name.rpartition(".")[0], []).append(entry.name)
    return list(grouped.values())


def _clipped(spec: ParamSpec, found: Mapping[str, Gradients], mask: Tensor | None, clip: float,
             per_layer: bool, stacked: bool) -> Tensor:  # fmt: skip
    groups = layers_of(spec) if per_layer else [[entry.name for entry in spec.weights]]
    bound = clip / math.sqrt(len(groups))
    sums: dict[str, Tensor] = {}
    for names in groups:
        scales = torch.stack([found[name].scale for name in names])
        most = scales.amax(0)
        shares = scales / torch.where(most > 0, most, 1.0)
        lengths = torch.stack([found[name].length for name in names])
        length = torch.linalg.vector_norm(shares * lengths, dim=0)  # in units of the largest entry of all
        factor = torch.minimum(most, bound / length)
        sound = factor * length <= bound * (1 + 8 * torch.finfo(length.dtype).eps)  # False also for what is no number
        factor = torch.where(sound, factor if mask is None else factor * mask, 0.0)
        counts = None if not stacked and bool(sound.all()) else sound  # the common case is spared a pass
        shares = torch.where(sound, shares, 0.0)
        sums |= {name: found[name].summed(factor * share, counts) for name, share in zip(names, shares, strict=True)}
    return torch.cat([sums[entry.name].reshape(-1) for entry in spec.weights])


def _gradients(model: ModelPoint, way: Way, x: Tensor, y: Tensor, key: Tensor, at: int) -> dict[str, Gradients]:
    """The gradients of a piece of a batch, which begins at its sample `at`."""
    if way.layers is not None:
        return _by_layer(model, way.layers, x, y, key)
    keys = rng.fold(key, at + torch.arange(len(x), device=x.device))  # what a model drops is each sample's own
    apart = _mapped if way.maps or model.stacked else _each
    return {name: _held(held, model.wide) for name, held in apart(model, x, y, keys).items()}


def _alone(model: ModelPoint, x: Tensor, y: Tensor, key: Tensor, at: int) -> dict[str, Gradients]:
    """The same, sample by sample; not a number for a sample that has none."""
    held: dict[str, list[Tensor]] = {name: [] for name in model.weights}
    for k in range(len(x)):
        try:
            found = _each(model, x[k : k + 1], y[k : k + 1], rng.fold(key, at + k + torch.arange(1, device=x.device)))
        except IndexError:
            found = {name: torch.full_like(weight, torch.nan)[None] for name, weight in model.weights.items()}
        for name, gradient in found.items():
            held[name].append(gradient)
    return {name: _held(torch.cat(rows), model.wide) for name, rows in held.items()}


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as its largest entry [B] times a row [B, d] of entries that are at most 1."""
    rows = rows.flatten(1)
    scale = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    return scale, rows / torch.where(scale == 0, 1.0, scale).unsqueeze(1)


def _held(held: Tensor, dtype: torch.dtype) -> Gradients:
    scale, units = _scaled(held.to(dtype))

    def summed(factor: Tensor, counts: Tensor | None) -> Tensor:
        return factor @ _only(counts, units)

    return Gradients(scale, torch.linalg.vector_norm(units, dim=1), summed)


def _only(counts: Tensor | None, rows: Tensor) -> Tensor:
    return rows if counts is None else torch.where(counts.unsqueeze(1), rows, 0.0)


def _of_product(rows: Tensor, back: Tensor, dtype: torch.dtype) -> Gradients:
    """The gradients back^T rows of a matrix that met rows [B, T, I] and whose outputs' gradients are [B, T, O].

    Where the T parts of a gradient nearly cancel, little is left of its length but rounding: as much as that can be is
    added, and as much as can have been rounded to zero, so that no gradient is taken to be shorter than it is.
    """
    (_, times, inner), outer = rows.shape, back.shape[2]
    if 2 * times * times > inner * outer:
        return _held(torch.bmm(back.transpose(1, 2), rows), dtype)
    (entered, units), (came, backs) = _scaled(rows.to(dtype)), _scaled(back.to(dtype))
    if times == 1:
        length = torch.linalg.vector_norm(units, dim=1) * torch.linalg.vector_norm(backs, dim=1)
    else:
        left, right = units.view(rows.shape), backs.view(back.shape)
        squared = (torch.bmm(left, left.transpose(1, 2)) * torch.bmm(right, right.transpose(1, 2))).sum((1, 2))
        parts = torch.linalg.vector_norm(left, dim=2) * torch.linalg.vector_norm(right, dim=2)
        numbers, terms = torch.finfo(dtype), inner + outer + times
        squared = squared.clamp(min=0.0) + terms * numbers.eps * parts.sum(1).square()
        length = (squared + times * times * terms * numbers.tiny).sqrt()

    def summed(factor: Tensor, counts: Tensor | None) -> Tensor:
        left = _only(counts, backs) * factor.unsqueeze(1)
        return left.view(-1, outer).t() @ _only(counts, units).view(-1, inner)

    return Gradients(entered * came, length, summed)


def _mapped(model: ModelPoint, x: Tensor, y: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Each sample's gradient, by vmap."""
    over = torch.func.vmap(torch.func.grad(model.loss_of_one), in_dims=(None, 0, 0, 0))
    found: dict[str, Tensor] = over(model.weights, x, y, keys)
    return found


def _each(model: ModelPoint, x: Tensor, y: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Each sample's gradient, one after another."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in model.weights.items()}
    found = []
    for one in zip(x, y, keys, strict=True):
        go_on()
        loss = model.loss_of_one(leaves, *one)
        found.append(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))
    return {name: torch.stack(rows) for name, rows in zip(leaves, zip(*found, strict=True), strict=True)}


def _by_layer(model: ModelPoint, layers: Sequence[Layer], x: Tensor, y: Tensor, key: Tensor) -> dict[str, Gradients]:
    """All samples' gradients, from one backward pass to the outputs of the layers."""
    names = {id(weight): name for name, weight in model.weights.items()}
    dtype = model.objective.dtype
    nudges = [torch.zeros(len(x), *layer.output, dtype=dtype, device=x.device) for layer in layers]

    def total(nudges: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with _Taps(names, nudges) as taps:
            return model.losses(x, y, key).sum(), taps.entered

    if model.stacked:
        backs, entered = torch.func.grad(total, has_aux=True)(nudges)
    else:
        loss, entered = total([nudge.requires_grad_() for nudge in nudges])
        backs = torch.autograd.grad(loss, nudges)
    parts = zip(layers, entered, backs, strict=True)
    return dict(pair for layer, rows, back in parts for pair in layer.gradients(rows, back, model.wide))


class _Taps(TorchFunctionMode):
    """Notes what goes into a model's layers and adds a nudge to what comes out of each: the gradient of the nudge is
    that of the output. Without nudges it notes the layers themselves; `only` while no parameter is used elsewhere and
    nothing of the data is looked at."""

    def __init__(self, names: Mapping[int, str], nudges: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.names, self.nudges, self.only = names, nudges, True
        self.entered: list[Tensor] = []
        self.layers: list[Layer] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        given = dict(kwargs or {})
        out = func(*args, **given)
        if self.nudges is None:
            self._note(func, args, given, out)
        elif len(args) > 1 and id(args[1]) in self.names:
            self.entered.append(args[0].detach())
            return out + self.nudges[len(self.entered) - 1]
        return out

    def _note(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any], out: Any) -> None:
        if isinstance(out, (bool, int, float)):  # a shape is a number; a value of the data would be a branch
            self.only &= getattr(func, "__name__", "") in ("size", "dim", "numel", "__get__", "__len__")
        used = [self.names[id(value)] for value in pytree.tree_leaves((args, given)) if id(value) in self.names]
        if not used:
            return
        weight = args[1] if len(args) > 1 else None
        patches = None
        if func is F.conv2d and len(args) == 7 and args[6] == 1 and not isinstance(args[4], str) and args[0].dim() == 4:
            patches = {"kernel_size": args[1].shape[2:], "stride": args[3], "padding": args[4], "dilation": args[5]}
        elif func is not F.linear:
            weight = None
        if weight is None or used[0] != self.names.get(id(weight)):
            self.only = False
            return
        self.layers.append(Layer(used[0], used[1] if len(used) > 1 else None, patches, out.shape[1:]))


def prepare(objective: Objective, x: Tensor, y: Tensor) -> None:
    """Find out, once for a model, how the gradients of samples that look like these are told apart: by trying, on a few
    samples that are the same at every party."""
    if objective in _ways:
        return
    key = torch.zeros((), dtype=torch.int64, device=objective.device)
    x, y = x.new_zeros(PROBE, *x.shape[1:]), y.new_zeros(PROBE, *y.shape[1:])
    if x.is_floating_point():
        x = rng.normal(key, x.shape).to(x.dtype)
    initial = objective.initial
    w = initial.w + 0.1 * rng.normal(key, initial.w.shape).to(initial.w.dtype)  # a weight of zero would hide others
    model = ModelPoint(objective, objective.spec.split(w), (initial.stats, initial.counts))
    keys = key.expand(PROBE)
    try:
        wanted = _each(model, x, y, keys)
    except Exception:  # training itself will say what is wrong
        _ways[objective] = Way(None, maps=True, works=False)
        return
    layers = _layers(model, x, y, key, wanted)
    _ways[objective] = Way(layers, layers is None and _maps(model, x, y, keys, wanted))


def _maps(model: ModelPoint, x: Tensor, y: Tensor, keys: Tensor, wanted: Mapping[str, Tensor]) -> bool:
    if any(isinstance(layer, nn.RNNBase) for layer in model.objective.network().modules()):
        return False  # slow where it works
    try:
        found = _mapped(model, x, y, keys)
    except Exception:
        return False
    return all(_near(found[name], wanted[name]) for name in wanted)


def _layers(
    model: ModelPoint, x: Tensor, y: Tensor, key: Tensor, wanted: Mapping[str, Tensor]
) -> tuple[Layer, ...] | None:
    """The layers by whose inputs and outputs the samples' gradients are told apart, if that gives what is wanted.

    A model that drops at random is not asked: what is dropped would depend on how a batch is cut to pieces.
    """
    if model.objective.draws or model.objective.bf16:
        return None
    names = {id(weight): name for name, weight in model.weights.items()}
    try:
        with torch.no_grad(), _Taps(names) as taps:
            model.losses(x, y, key)
        used = [name for layer in taps.layers for name in (layer.weight, layer.bias) if name is not None]
        if not taps.only or sorted(used) != sorted(names.values()):
            return None
        found = _by_layer(model, taps.layers, x, y, key)
        for name, rows in wanted.items():
            scale, length, summed = found[name]
            got = torch.stack([summed(one, None).view(rows.shape[1:]) for one in scale.diag()])
            lengths = torch.linalg.vector_norm(rows.flatten(1), dim=1)
            if not (_near(got, rows) and _near(scale * length, lengths, slack=50)):
                return None
    except Exception:  # not told apart so after all
        return None
    return tuple(taps.layers)


def _near(found: Tensor, wanted: Tensor, slack: float = 1.0) -> bool:
    close = slack * (1e-9 if wanted.dtype == torch.float64 else 1e-3)
    return bool((found - wanted).norm() <= close * wanted.norm() + 1e-12)
