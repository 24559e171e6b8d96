"""Plain SGD on stacked dense layers, with each layer's step taken inside the backward pass.

For models made of linear layers and functions of single elements, a chunk of K parties runs as one batch of K * B
rows: the functions act row by row anyway, and the layers become batched matrix products over stacked weights.
A layer's weights are updated as soon as its gradient is known, by the same product, so no gradient is ever stored. It
computes what stacking by vmap computes, in fewer and larger operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hansa.core.objective import Objective
from hansa.core.task import Holdings
from hansa.local.solver import local_reply
from hansa.sim.engine import Outcome

if TYPE_CHECKING:
    from hansa.sim.stacked import Stack


class SteppingLinear(torch.autograd.Function):
    """A linear layer of K parties: [K * B, ..., in] to [K * B, ..., out]. Its backward pass takes the SGD step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None, lr: float) -> Tensor:
        rows = x.reshape(len(weight), -1, x.shape[-1])
        ctx.save_for_backward(rows)
        ctx.weight, ctx.bias, ctx.lr, ctx.shape = weight, bias, lr, x.shape
        across = weight.transpose(1, 2)
        out = torch.bmm(rows, across) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, across)
        return out.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        back = gradient.reshape(len(ctx.weight), -1, gradient.shape[-1])
        below = torch.bmm(back, ctx.weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        ctx.weight.baddbmm_(back.transpose(1, 2), rows, alpha=-ctx.lr)
        if ctx.bias is not None:
            ctx.bias.sub_(back.sum(1), alpha=ctx.lr)
        return below, None, None, None, None


class StackedLayers(TorchFunctionMode):
    """While active, a module's linear layers use stacked weights in place of their own."""

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor | None]], lr: float) -> None:
        super().__init__()
        self.layers, self.lr = layers, lr
        self.token = torch.zeros((), requires_grad=True)  # makes the first layer part of the graph

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        if func is F.linear and id(args[1]) in self.layers:
            return SteppingLinear.apply(args[0], self.token, *self.layers[id(args[1])], self.lr)
        return func(*args, **(kwargs or {}))


# What may stand between linear layers: functions of single elements. Anything else might look across rows.
_ELEMENTWISE: frozenset[Any] = frozenset(
    [torch.relu, F.relu, Tensor.relu, torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid, F.gelu, F.silu, F.elu,
     F.leaky_relu, F.softplus, F.hardtanh, F.relu6]
)  # fmt: skip


class RowWise(TorchFunctionMode):
    """Watches a module: `kept` while it only calls linear layers and functions of single elements, or flattens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.calls = {id(m.weight): 0 for m in module.modules() if isinstance(m, nn.Linear)}
        self.kept = True

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        given = dict(kwargs or {})
        if func is F.linear and id(args[1]) in self.calls:
            self.calls[id(args[1])] += 1
        elif func in (Tensor.flatten, torch.flatten):
            self.kept &= (args[1] if len(args) > 1 else given.get("start_dim", 0)) >= 1
        else:
            self.kept &= func in _ELEMENTWISE
        return func(*args, **given)


def fusable(objective: Objective, holdings: Holdings) -> bool:
    """Whether a model is made of linear layers, each used once, and functions of single elements."""
    module, spec = objective.module, objective.spec
    if module is None or spec.stats or spec.counts or objective.draws:
        return False
    trained = {f"{name}.{kind}" if name else kind for name, layer in module.named_modules()
               if isinstance(layer, nn.Linear) for kind in ("weight", "bias")}  # fmt: skip
    if any(entry.name not in trained for entry in spec.weights):
        return False
    sample = holdings.train.x[:2]
    with torch.no_grad(), RowWise(module) as watched:
        module(sample)
    return watched.kept and all(count == 1 for count in watched.calls.values())


def stacked_layers(objective: Objective, flat: Tensor) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Each linear layer's weights and biases as views of the parties' vectors [K, d], by the layer's own weight."""
    views: dict[str, Tensor] = {}
    at = 0
    for entry in objective.spec.weights:
        views[entry.name] = flat[:, at : at + entry.numel].view(len(flat), *entry.shape)
        at += entry.numel
    out: dict[int, tuple[Tensor, Tensor | None]] = {}
    for name, layer in objective.network().named_modules():
        if isinstance(layer, nn.Linear):
            prefix = f"{name}." if name else ""
            out[id(layer.weight)] = (views[f"{prefix}weight"], views.get(f"{prefix}bias"))
    return out


def train(stack: Stack) -> dict[int, Outcome]:
    """Train a chunk of parties as `Stack.train` does."""
    engine, solver, objective = stack.engine, stack.solver, stack.engine.objective
    shards, dtype = engine.holdings.train, objective.dtype
    jobs = [job for job, _ in stack.planned]
    rows, masks, active = stack.index(objective.device)
    start = torch.stack([job.payload["model"]["w"] for job in jobs]).to(objective.device)
    flat = start.clone()
    layers = stacked_layers(objective, flat)
    lr = solver.rate(stack.round)
    module = objective.learner()
    counts = masks.sum(2)
    share = (masks & active[:, :, None]).to(dtype) / counts[:, :, None].to(dtype)  # of each sample in the mean loss
    seen = torch.zeros(len(jobs), dtype=torch.float64, device=objective.device)
    for s, width in enumerate(counts.max(0).values.tolist()):
        index = rows[:, s, :width].reshape(-1)
        with StackedLayers(layers, lr):
            output = module(shards.x[index])
        losses = objective.loss_of(output, shards.y[index]).view(len(jobs), width) * share[:, s, :width]
        losses.sum().backward()
        seen += losses.detach().sum(1).to(torch.float64)
    steps = torch.tensor([len(batches) for _, batches in stack.planned], dtype=torch.float64, device=objective.device)
    update, loss = flat - start, (seen / steps).tolist()
    buffers = (objective.initial.stats, objective.initial.counts)
    return {
        job.party: (local_reply(objective, {"w": update[k]}, buffers, shards.size(job.party), loss[k]), job.memory)
        for k, job in enumerate(jobs)
    }
