"""Checks of what parties send beside an update: running statistics and counters of a model, numbers of an algorithm.

No norm of an update sees them. A running variance is not negative, a mean or a standard deviation moves by no more than
a run allows, and a counter rises by no more than the steps that the party could have taken. FedNova's tau, q-FedAvg's h
and SCAFFOLD's control variates are bounded by what their solvers can send (`Op.most`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hansa.core.op import Op, Payload
from hansa.core.params import ParamSpec

Spans = tuple[tuple[int, int], ...]
VARIANCE = "running_var"  # what PyTorch's normalising layers call the buffer
MOST = 10**7  # steps of a round, whatever number of samples a party claims
OWN = 100  # times the steps that it was asked to take that a party may take by its own policy


def variances(spec: ParamSpec) -> Spans:
    """Where the running variances of a model lie in its vector of statistics."""
    spans, at = [], 0
    for entry in spec.stats:
        if entry.name.rpartition(".")[2] == VARIANCE:
            spans.append((at, at + entry.numel))
        at += entry.numel
    return tuple(spans)


def buffer_fault(tensors: Mapping[str, Tensor], maxima: Mapping[str, Tensor], weight: int, op: Op, payload: Payload,
                 spans: Spans, max_stats: float | None) -> str | None:  # fmt: skip
    """Why the buffers of a reply, or of a stack of replies, may not be fused, or None. They have passed the checks of
    names, shapes and finite values; `weight` is the number of samples that the reply, or each of them, has at least."""
    model = payload.get("model")
    if not isinstance(model, Mapping) or op.update is None:
        return None
    stats, counts = tensors.get("stats"), maxima.get("counts")
    if stats is not None and isinstance(model.get("stats"), Tensor):
        for start, stop in spans:
            if bool((stats[..., start:stop] < 0).any()):
                return "one of its running variances is negative"
        if max_stats is not None:
            before, after = (_deviations(values, spans) for values in (model["stats"].to(stats.device), stats))
            share = (after - before).abs() / (1.0 + before.abs())
            if not bool((share <= max_stats).all()):
                return (
                    f"one of its running statistics moved by {float(share.max()):.4g} times its value (and one), over "
                    f"the limit of {max_stats:.4g} (run.max_stats)"
                )
    if counts is not None and isinstance(model.get("counts"), Tensor):
        most = min(MOST, OWN * max(1, op.demands(weight, payload).get("steps", 1)))
        rise = (counts.to(torch.float64) - model["counts"].to(counts.device, torch.float64)).abs().max()
        if float(rise) > most:
            return f"one of its counters moved by {float(rise):.4g}, and its steps allow {most}"
    return None


def _deviations(stats: Tensor, spans: Spans) -> Tensor:
    """Running statistics with each variance as its standard deviation, which is on the scale of the means."""
    values = stats.to(torch.float64, copy=True)
    for start, stop in spans:
        values[..., start:stop] = values[..., start:stop].sqrt()
    return values


def beside_fault(tensors: Mapping[str, Tensor], weight: int, op: Op, payload: Payload,
                 longest: float | None) -> str | None:  # fmt: skip
    """Why the numbers that a reply, or a stack of replies, has beside its update may not be fused, or None."""
    if op.update is None or op.update not in tensors:  # hidden in a secure sum: the party keeps to a range itself
        return None
    expected = op.expects(payload)
    for name, most in op.most(weight, payload, longest).items():
        shape = expected[name][0]
        rows = tensors[name].to(torch.float64).reshape(-1, math.prod(shape))
        if not shape and bool((rows < 0).any()):
            return f"its {name} is negative"
        largest = float(torch.linalg.vector_norm(rows, dim=1).max())
        if largest > most:
            return f"its {name} is {largest:.4g}, and at most {most:.4g} is possible"
    return None
