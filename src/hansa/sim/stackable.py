"""Whether the parties of a model can be stacked: by its layers, and by trial on a few samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hansa.core.task import Holdings
from hansa.local.context import Batch, Context
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import HansaError
from hansa.sim.chain import elsewhere
from hansa.sim.engine import first_line
from hansa.sim.rewrite import Rewritten


def heavy(objective: Objective) -> bool:
    """Whether a model has layers that are slow in stacks on a CPU: convolutions, recurrent layers."""
    kinds = (nn.RNNBase, nn.modules.conv._ConvNd)
    return any(isinstance(layer, kinds) for layer in objective.network().modules())


def mixes_rows(objective: Objective, holdings: Holdings) -> bool:
    """Whether a sample's loss or a buffer depends on other rows of the batch, as with BatchNorm; by trial."""
    x, y = holdings.train.x[:3], holdings.train.targets[:3]
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    if objective.module is None or len(x) < 3 or any(isinstance(m, norms) for m in objective.module.modules()):
        return True
    if x.is_floating_point():  # random rows, which differ for any data
        x = rng.normal(torch.ones((), dtype=torch.int64, device=x.device), x.shape).to(x.dtype)
    buffers = (objective.initial.stats, objective.initial.counts)
    key = torch.zeros((), dtype=torch.int64, device=objective.device)
    try:
        with torch.no_grad():
            weights = objective.spec.split(elsewhere(objective))
            two, (stats_two, _) = objective.losses(weights, buffers, x[:2], y[:2], key)
            three, (stats_three, _) = objective.losses(weights, buffers, x, y, key)
    except HansaError:
        raise
    except Exception:  # training will report the error
        return True
    tight = objective.dtype == torch.float64
    rtol, atol = (1e-9, 1e-12) if tight else (1e-3, 1e-5)
    pairs = ((two, three[:2]), (stats_two, stats_three))
    return not all(torch.allclose(a, b, rtol, atol, equal_nan=True) for a, b in pairs)


def obstacle(objective: Objective, holdings: Holdings, unrolls: bool = False) -> str | None:
    """Why the model cannot be stacked, naming the layer, or None; by trial with two copies on two samples.

    Recurrent layers can be stacked only where they are unrolled.
    """
    module = objective.network()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase) and not unrolls:
            return f"{type(layer).__name__} at {name!r} cannot be batched over parties"
    rows = torch.arange(min(2, len(holdings.train.x)), device=objective.device).repeat(2, 1)
    inside: list[str] = []
    hooks = []
    for name, layer in module.named_modules():
        enter = f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__
        hooks.append(layer.register_forward_pre_hook(lambda *_, enter=enter: inside.append(enter)))
        hooks.append(layer.register_forward_hook(lambda *_: inside.pop() and None))
    initial = objective.initial
    keys = torch.zeros(2, dtype=torch.int64, device=objective.device)

    def one(w: Tensor, stats: Tensor, counts: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        ctx = Context(objective, 2, 1, 0, 0.0, lambda: Batch(x, y, None), (stats, counts), stacked=True)
        with Rewritten(2):
            return ctx.gradient(w, Batch(x, y, None), key)

    try:
        stacked = [v.expand(2, *v.shape) for v in initial]
        x, y = holdings.train.x[rows], holdings.train.targets[rows]
        torch.func.vmap(one)(stacked[0], stacked[1], stacked[2], x, y, keys)
    except HansaError:
        raise
    except Exception as error:
        where = inside[-1] if inside else "the loss"
        return f"{where} cannot be batched over parties ({first_line(error)[:160]})"
    finally:
        for hook in hooks:
            hook.remove()
    return None
