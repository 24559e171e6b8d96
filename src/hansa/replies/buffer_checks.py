"""Checks on tensors that parties send beside an update: model buffers, and tensors of a local solver.

The limit on the norm of an update does not cover these tensors. A running variance must not be negative. A running mean
or standard deviation may move by at most `run.max_stats`. A counter may rise by at most the number of steps that the
party could have taken. FedNova's tau, q-FedAvg's h and SCAFFOLD's control variates have the bounds of their solvers
(`Op.most`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hansa.core.op import Op, Payload
from hansa.numerics.params import ParamSpec

Spans = tuple[tuple[int, int], ...]
VARIANCE = "running_var"  # the name of the buffer in PyTorch's normalisation layers
MOST = 10**7  # the most steps of a round, for any number of samples that a party claims
OWN = 100  # by its own policy, a party may take at most this many times the steps of the ask


def variances(spec: ParamSpec) -> Spans:
    """The ranges of a model's running variances in its vector of statistics."""
    spans, at = [], 0
    for entry in spec.stats:
        if entry.name.rpartition(".")[2] == VARIANCE:
            spans.append((at, at + entry.numel))
        at += entry.numel
    return tuple(spans)


def buffer_fault(tensors: Mapping[str, Tensor], maxima: Mapping[str, Tensor], weight: int, op: Op, payload: Payload,
                 spans: Spans, max_stats: float | None) -> str | None:  # fmt: skip
    """The reason why the buffers of one of a stack of replies may not be fused, or None.

    Names, shapes and finite values have been checked before. `weight` is the smallest weight among the replies.
    """
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
                    f"one of its running statistics moved by {float(share.max()):.4g} times (1 + its value), over "
                    f"the limit of {max_stats:.4g} (run.max_stats)"
                )
    if counts is not None and isinstance(model.get("counts"), Tensor):
        most = min(MOST, OWN * max(1, op.demands(weight, payload).get("steps", 1)))
        rise = (counts.to(torch.float64) - model["counts"].to(counts.device, torch.float64)).abs().max()
        if float(rise) > most:
            return f"one of its counters moved by {float(rise):.4g}, and its steps allow {most}"
    return None


def _deviations(stats: Tensor, spans: Spans) -> Tensor:
    """Running statistics with variances replaced by standard deviations, which have the scale of the means."""
    values = stats.to(torch.float64, copy=True)
    for start, stop in spans:
        values[..., start:stop] = values[..., start:stop].sqrt()
    return values


def beside_fault(tensors: Mapping[str, Tensor], weight: int, op: Op, payload: Payload,
                 longest: float | None) -> str | None:  # fmt: skip
    """The reason why the tensors beside the update of one of a stack of replies may not be fused, or None."""
    if op.update is None or op.update not in tensors:  # hidden in a secure sum: the party checks its own range
        return None
    expected = op.expects(payload)
    for name, most in op.most(weight, payload, longest).items():
        shape = expected[name][0]
        rows = tensors[name].to(torch.float64).unsqueeze(-1).flatten(1)
        if (not shape or name in op.counts) and bool((rows < 0).any()):
            return f"its {name} is negative"
        largest = float(torch.linalg.vector_norm(rows, dim=1).max())
        if largest > most:
            return f"its {name} is {largest:.4g}, and at most {most:.4g} is possible"
    return None
