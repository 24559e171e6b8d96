"""Sums of clipped gradients: the gradient of each sample is clipped to a length before it is added.

There are three methods; `prepare` selects the fastest that a model allows. If linear and convolutional layers hold all
parameters, one backward pass gives the gradient at each layer's output for each sample. With the layer's input this
gives the length of each sample's gradient (Goodfellow 2015) and the clipped sum as one matrix product, without storing
any sample's gradient. Convolutions are linear layers on patches of the image. Where a layer sees many rows per sample,
its gradients are stored instead if that is less work. Other models are mapped over their samples by `torch.func.vmap`,
and models that cannot be mapped (recurrent layers) go one sample at a time.

The bound holds for gradients of any length (`kernel.clipped_sums`). A sample that the model of a deployed party cannot
take (a character without an embedding) adds zero: a failure would reveal that such a sample was drawn. A party with a
floor of differential privacy trains no model that keeps state between its calls (`keeps_state`).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hansa.kernel.clipped_sums import ROWS, Gradients, apart, exact_sum, float_sum, joined, of_product, of_rows
from hansa.kernel.grid import Grid
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import ParamSpec
from hansa.plumbing.stopping import go_on

if TYPE_CHECKING:
    from hansa.local.context import Batch, Context

ROOM = 2**26  # bytes of gradients stored at a time
PROBE = 3  # samples for trying the methods on a model
ROUNDING = {"linear", "conv2d", "cross_entropy", "binary_cross_entropy_with_logits", "tanh", "sigmoid", "gelu", "silu"}
# Functions that move, select or compare numbers, or round each number by itself as IEEE 754 says: they give a sample
# the same bits in any batch.
ROW_WISE = {"__get__", "dim", "numel", "size", "__len__", "flatten", "unflatten", "view", "reshape", "squeeze",
            "unsqueeze", "permute", "transpose", "contiguous", "relu", "max_pool2d", "add", "sub", "abs"}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer: its parameters' names, its patches, and the shape of its output per sample."""

    weight: str
    bias: str | None
    patches: dict[str, Any] | None
    output: torch.Size

    def gradients(self, entered: Tensor, back: Tensor, dtype: torch.dtype,
                  exact: bool) -> Iterable[tuple[str, Gradients]]:  # fmt: skip
        """The gradients of the layer's parameters, from its input and the gradients of its output."""
        if self.patches is None:  # one row per sample, or many, as in a sequence
            rows = entered.reshape(len(back), -1, entered.shape[-1])
            back = back.reshape(len(back), -1, back.shape[-1])
        else:
            rows, back = F.unfold(entered, **self.patches).transpose(1, 2), back.flatten(2).transpose(1, 2)
        yield self.weight, of_product(rows, back, dtype, exact)
        if self.bias is not None:
            total = torch.stack([one.sum(0) for one in back]) if exact and back.shape[1] > 1 else back.sum(1)
            yield self.bias, of_rows(total, dtype, exact)

    def stored_if_exact(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether an exact sum stores gradients of the layer that a sum in floating point does not."""
        times = math.prod(self.output[:-1] if self.patches is None else self.output[1:])
        return times > 1 and 2 * times * times <= weights[self.weight].numel()


@dataclass(frozen=True)
class Way:
    """How per-sample gradients of a model are computed.

    By its `layers`, in the order of their calls, if they hold all parameters and no row of a batch affects another;
    else by vmap if `maps`; else one sample at a time. `works` is False if the model failed on the trial samples.
    `splits` says that a backward pass over a batch can give each sample the bits that it has by itself: all functions
    of the model that round are in `ROUNDING`, and can be called for one sample after another.
    """

    layers: tuple[Layer, ...] | None
    maps: bool
    works: bool = True
    splits: bool = False


_ways: weakref.WeakKeyDictionary[Objective, Way] = weakref.WeakKeyDictionary()
_stateful: weakref.WeakKeyDictionary[Objective, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelPoint:
    """A model with its weights and buffers. `stacked` is True inside `torch.func.vmap` over parties."""

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
    """The sum of g * min(1, clip / |g|) over the samples' gradients g; in float64, unless parties are stacked.

    The length is over all parameters. With `per_layer`, each of the model's L layers is clipped to clip / sqrt(L), so
    that the whole is no longer than `clip`. `at_once` is the number of samples processed at a time: it bounds memory
    and changes nothing else. The model's buffers do not change. Call `prepare` for the model first.
    """
    groups = _groups(ctx.spec, per_layer)
    total: Tensor | None = None
    for gradients, mask in _parts(ctx, w, batch, key, at_once, exact=False):
        sums = float_sum(groups, gradients, mask, clip, ctx.stacked)
        part = torch.cat([sums[entry.name].reshape(-1) for entry in ctx.spec.weights])
        total = part if total is None else total.add_(part)
    return torch.zeros_like(w, dtype=ctx.objective.dtype if ctx.stacked else torch.float64) if total is None else total


def exact_clipped_sum(ctx: Context, w: Tensor, batch: Batch, key: Tensor, grid: Grid, per_layer: bool = False,
                      at_once: int | None = None) -> Tensor:  # fmt: skip
    """As `clipped_sum`, in fine steps of a grid (int64): the bound holds in exact arithmetic.

    The gradient of each sample is computed by itself. Matrix products of a batch round differently for different
    numbers of rows, so that one sample would change the gradients of the others, and a model can be made in which small
    changes grow. For one party at a time.
    """
    groups = _groups(ctx.spec, per_layer)
    total = torch.zeros_like(w, dtype=torch.int64)
    for gradients, _ in _parts(ctx, w, batch, key, at_once, exact=True):
        sums = exact_sum(groups, gradients, grid)
        total += torch.cat([sums[entry.name].reshape(-1) for entry in ctx.spec.weights])
    return total


def _groups(spec: ParamSpec, per_layer: bool) -> list[list[str]]:
    return layers_of(spec) if per_layer else [[entry.name for entry in spec.weights]]


def _parts(ctx: Context, w: Tensor, batch: Batch, key: Tensor, at_once: int | None,
           exact: bool) -> Iterator[tuple[dict[str, Gradients], Tensor | None]]:  # fmt: skip
    """The gradients of a batch and its mask, a part of the batch at a time."""
    model = ModelPoint(ctx.objective, ctx.spec.split(w.detach()), ctx.buffers, ctx.stacked)
    way, key = _ways[ctx.objective], ctx.draws(key)
    count = len(batch.x)
    if count == 0:
        return
    stored = way.layers is None or (exact and any(layer.stored_if_exact(model.weights) for layer in way.layers))
    size = at_once or (max(1, ROOM // (w.numel() * model.wide.itemsize)) if stored else count)
    size = min(size, ROWS) if exact else size
    x = ctx.inputs(batch)
    for at in range(0, count, size):
        rows = slice(at, at + size)
        lenient = ctx.private is not None and way.works
        if exact:
            places = torch.arange(count, device=x.device) if ctx.rows is None else ctx.rows
            gradients = _apart(model, way, x[rows], batch.y[rows], rng.fold(key, places[rows]), lenient)
        else:
            try:
                gradients = _gradients(model, way, x[rows], batch.y[rows], key, at)
            except Exception:
                if not lenient:
                    raise
                gradients = _alone(model, x[rows], batch.y[rows], key, at)
        if gradients:
            yield gradients, None if batch.mask is None else batch.mask[rows]


def layers_of(spec: ParamSpec) -> list[list[str]]:
    """The names of a model's parameters, grouped by layer."""
    grouped: dict[str, list[str]] = {}
    for entry in spec.weights:
        grouped.setdefault(entry.name.rpartition(".")[0], []).append(entry.name)
    return list(grouped.values())


def _gradients(model: ModelPoint, way: Way, x: Tensor, y: Tensor, key: Tensor, at: int) -> dict[str, Gradients]:
    """The gradients of a part of a batch that begins at sample `at`."""
    if way.layers is not None:
        return _by_layer(model, way.layers, x, y, key, exact=False)
    keys = rng.fold(key, at + torch.arange(len(x), device=x.device))  # each sample has its own dropout
    apart = _mapped if way.maps or model.stacked else _each
    return {name: of_rows(held, model.wide) for name, held in apart(model, x, y, keys).items()}


def _apart(model: ModelPoint, way: Way, x: Tensor, y: Tensor, keys: Tensor, lenient: bool) -> dict[str, Gradients]:
    """The gradients of samples, each with the bits that it has alone.

    `lenient` leaves out samples that the model cannot take. The draws of a sample (dropout) depend on its key, not on
    its place in the batch.
    """
    if way.layers is not None and way.splits:
        with contextlib.suppress(Exception):  # then the samples are tried one by one
            return _by_layer(model, way.layers, x, y, keys[0], exact=True)
    each = []
    for one, target, key in zip(apart(x), apart(y), keys, strict=True):
        go_on()
        try:
            if way.layers is not None:
                each.append(_by_layer(model, way.layers, one, target, key, exact=True))
            else:
                alone = _each(model, one, target, key.unsqueeze(0))
                each.append({name: of_rows(held, model.wide) for name, held in alone.items()})
        except Exception:
            if not lenient:
                raise
    return {name: joined([one[name] for one in each]) for name in each[0]} if each else {}


def _alone(model: ModelPoint, x: Tensor, y: Tensor, key: Tensor, at: int) -> dict[str, Gradients]:
    """As `_gradients`, sample by sample; NaN for a sample that the model cannot take."""
    held: dict[str, list[Tensor]] = {name: [] for name in model.weights}
    for k in range(len(x)):
        try:
            own_key = rng.fold(key, at + k + torch.arange(1, device=x.device))
            gradients = _each(model, x[k : k + 1], y[k : k + 1], own_key)
        except Exception:
            gradients = {name: torch.full_like(weight, torch.nan)[None] for name, weight in model.weights.items()}
        for name, gradient in gradients.items():
            held[name].append(gradient)
    return {name: of_rows(torch.cat(rows), model.wide) for name, rows in held.items()}


def _mapped(model: ModelPoint, x: Tensor, y: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Each sample's gradient, by vmap."""
    over = torch.func.vmap(torch.func.grad(model.loss_of_one), in_dims=(None, 0, 0, 0))
    gradients: dict[str, Tensor] = over(model.weights, x, y, keys)
    return gradients


def _each(model: ModelPoint, x: Tensor, y: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Each sample's gradient, one sample at a time."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in model.weights.items()}
    gradients = []
    for one in zip(x, y, keys, strict=True):
        go_on()
        loss = model.loss_of_one(leaves, *one)
        gradients.append(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))
    return {name: torch.stack(rows) for name, rows in zip(leaves, zip(*gradients, strict=True), strict=True)}


def _by_layer(model: ModelPoint, layers: Sequence[Layer], x: Tensor, y: Tensor, key: Tensor,
              exact: bool) -> dict[str, Gradients]:  # fmt: skip
    """All samples' gradients, by one backward pass to the layers' outputs."""
    names = {id(weight): name for name, weight in model.weights.items()}
    dtype = model.objective.dtype
    nudges = [torch.zeros(len(x), *layer.output, dtype=dtype, device=x.device) for layer in layers]

    def total(nudges: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with _Taps(names, nudges, exact) as taps:
            losses = model.losses(x, y, key)
        return losses.sum(), taps.entered

    if model.stacked:
        backs, entered = torch.func.grad(total, has_aux=True)(nudges)
    else:
        loss, entered = total([nudge.requires_grad_() for nudge in nudges])
        backs = torch.autograd.grad(loss, nudges)
    parts = zip(layers, entered, backs, strict=True)
    return dict(pair for layer, rows, back in parts for pair in layer.gradients(rows, back, model.wide, exact))


class _Taps(TorchFunctionMode):
    """Records the inputs of a model's layers and adds a nudge to each output.

    The gradient of a nudge is the gradient of the output. Without nudges it records the layers; `only` stays True while
    no other function uses a parameter and no code reads values of the data.
    """

    def __init__(self, names: Mapping[int, str], nudges: Sequence[Tensor] | None = None, exact: bool = False) -> None:
        super().__init__()
        self.names, self.nudges, self.exact, self.only, self.splits = names, nudges, exact, True, True
        self.entered: list[Tensor] = []
        self.layers: list[Layer] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        keywords = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        self.splits &= name in ROUNDING or name in ROW_WISE
        one_by_one = self.exact and name in ROUNDING
        out = self._one_by_one(func, args, keywords) if one_by_one else func(*args, **keywords)
        if self.nudges is None:
            self._note(func, args, keywords, out)
        elif len(args) > 1 and id(args[1]) in self.names:
            self.entered.append(args[0].detach())
            return out + self.nudges[len(self.entered) - 1]
        return out

    def _one_by_one(self, func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
        """The results of a function for a batch, with the bits that each sample has by itself; see `apart`."""
        count = len(args[0])
        columns = []
        for arg in args:
            batched = isinstance(arg, Tensor) and arg.dim() > 0 and len(arg) == count and id(arg) not in self.names
            columns.append(apart(arg) if batched else [arg] * count)
        results = [func(*row, **keywords) for row in zip(*columns, strict=True)]
        for result in results:
            if result.requires_grad and result.numel() > 1:
                result.register_hook(torch.clone)  # what comes back is a row of a batch, too
        return torch.cat(results)

    def _note(self, func: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], out: Any) -> None:
        if isinstance(out, (bool, int, float)):  # shapes are allowed; reading a value of the data means a branch
            self.only &= getattr(func, "__name__", "") in ("size", "dim", "numel", "__get__", "__len__")
        used = [self.names[id(value)] for value in pytree.tree_leaves((args, keywords)) if id(value) in self.names]
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


def keeps_state(objective: Objective, x: Tensor, y: Tensor) -> bool:
    """Whether a model gives other gradients of the same samples after it has seen other samples, or fails on them.

    Such a model keeps state outside its parameters and buffers, so that a sample changes the gradients of others, and a
    clipped sum by more than the clip. `x` and `y` show what samples look like; none of them is used. The result is
    computed once per model.
    """
    if objective not in _stateful:
        model, x, y, keys = _probe(objective, x, y)
        try:
            before = _each(model, x, y, keys)
            _each(model, -x if x.is_floating_point() else torch.ones_like(x), y, keys)
            after = _each(model, x, y, keys)
            _stateful[objective] = any(not torch.equal(before[name], after[name]) for name in before)
        except Exception:  # whatever it is, it cannot be shown to keep none
            _stateful[objective] = True
    return _stateful[objective]


def _probe(objective: Objective, x: Tensor, y: Tensor) -> tuple[ModelPoint, Tensor, Tensor, Tensor]:
    """A model, and generated samples like `x` and `y` to try it on, which are the same at every party."""
    key = torch.zeros((), dtype=torch.int64, device=objective.device)
    x, y = x.new_zeros(PROBE, *x.shape[1:]), y.new_zeros(PROBE, *y.shape[1:])
    if x.is_floating_point():
        x = rng.normal(key, x.shape).to(x.dtype)
    if objective.weighting is not None:
        y[..., -1] = 1  # the weight: with 0, all gradients would be
    initial = objective.initial
    w = initial.w + 0.1 * rng.normal(key, initial.w.shape).to(initial.w.dtype)  # a zero could hide others
    return ModelPoint(objective, objective.spec.split(w), (initial.stats, initial.counts)), x, y, key.expand(PROBE)


def prepare(objective: Objective, x: Tensor, y: Tensor) -> None:
    """Select, once per model, the method for per-sample gradients; the methods are tried on generated samples."""
    if objective in _ways:
        return
    model, x, y, keys = _probe(objective, x, y)
    key = keys[0]
    try:
        wanted = _each(model, x, y, keys)
    except Exception:  # training will report the error
        _ways[objective] = Way(None, maps=True, works=False)
        return
    layers, splits = _layers(model, x, y, key, wanted)
    _ways[objective] = Way(layers, layers is None and _maps(model, x, y, keys, wanted), splits=splits)


def _maps(model: ModelPoint, x: Tensor, y: Tensor, keys: Tensor, wanted: Mapping[str, Tensor]) -> bool:
    if any(isinstance(layer, nn.RNNBase) for layer in model.objective.network().modules()):
        return False  # slow, even where it works
    try:
        gradients = _mapped(model, x, y, keys)
    except Exception:
        return False
    return all(_near(gradients[name], wanted[name]) for name in wanted)


def _layers(
    model: ModelPoint, x: Tensor, y: Tensor, key: Tensor, wanted: Mapping[str, Tensor]
) -> tuple[tuple[Layer, ...] | None, bool]:
    """The layers whose inputs and outputs give the per-sample gradients; None if they do not give those `wanted`.

    Also whether the model can be split (`Way.splits`).

    Models with dropout are excluded: what is dropped would depend on how a batch is divided.
    """
    if model.objective.draws or model.objective.bf16:
        return None, False
    names = {id(weight): name for name, weight in model.weights.items()}
    try:
        with torch.no_grad(), _Taps(names) as taps:
            model.losses(x, y, key)
        used = [name for layer in taps.layers for name in (layer.weight, layer.bias) if name is not None]
        if not taps.only or sorted(used) != sorted(names.values()):
            return None, False
        gradients = _by_layer(model, taps.layers, x, y, key, exact=False)
        for name, rows in wanted.items():
            scale, length = gradients[name].scale, gradients[name].length
            computed = torch.stack([gradients[name].summed(one, None).view(rows.shape[1:]) for one in scale.diag()])
            lengths = torch.linalg.vector_norm(rows.flatten(1), dim=1)
            if not (_near(computed, rows) and _near(scale * length, lengths, slack=50)):
                return None, False
    except Exception:  # this method does not work for the model
        return None, False
    return tuple(taps.layers), taps.splits


def _near(computed: Tensor, wanted: Tensor, slack: float = 1.0) -> bool:
    close = slack * (1e-9 if wanted.dtype == torch.float64 else 1e-3)
    return bool((computed - wanted).norm() <= close * wanted.norm() + 1e-12)
