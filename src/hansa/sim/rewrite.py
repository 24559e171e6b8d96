"""Layers rewritten for stacks of parties: convolutions as matrix products of patches, recurrent layers as cells.

Under `vmap`, filters per party become grouped convolutions, which are slow on a GPU, and the fused kernels of recurrent
layers do not support `vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BUSY = 96  # concurrent products that keep a GPU busy


class Rewritten(TorchFunctionMode):
    """While active, computes convolutions and recurrent layers in forms that stack well."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.parties = parties
        self._still = patch.object(nn.RNNBase, "flatten_parameters", lambda layer: None)  # it needs real memory

    def __enter__(self) -> Rewritten:
        self._still.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._still.stop()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        keywords = dict(kwargs or {})
        if func is F.conv2d and not keywords and len(args) == 7 and args[6] == 1 and not isinstance(args[4], str):
            return convolve(self.parties, *args[:6])
        if func in _CELLS and len(args) == 9:
            return unroll(_CELLS[func], *args)
        return func(*args, **keywords)


def convolve(parties: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any,
             dilation: Any) -> Tensor:  # fmt: skip
    """Compute a convolution as patches times a matrix.

    Patches are gathered so that the derivative is a sum without atomic additions, which gives the same bits each time.
    They are padded to a multiple of four numbers, as tensor cores require. Small stacks are split by samples:
    otherwise the product for the weights' gradient would use few of the GPU's processors.
    """
    (up, left), (down, across), (apart, aside) = padding, stride, dilation
    count, channels = x.shape[0], x.shape[1]
    out, _, high, wide = weight.shape
    x = F.pad(x, (left, left, up, up)).permute(0, 2, 3, 1)
    rows = (x.shape[1] - apart * (high - 1) - 1) // down + 1
    columns = (x.shape[2] - aside * (wide - 1) - 1) // across + 1
    size = channels * high * wide
    if (down, across, apart, aside) == (1, 1, 1, 1):
        gathered = Patches.apply(x, high, wide)  # type: ignore[no-untyped-call]
    else:
        pieces = [
            x[:, i : i + down * (rows - 1) + 1 : down, j : j + across * (columns - 1) + 1 : across]
            for i in range(0, apart * high, apart)
            for j in range(0, aside * wide, aside)
        ]
        gathered = torch.cat(pieces, -1)
    spare = -size % 4
    if spare:
        gathered = F.pad(gathered, (0, spare))
    split = max(s for s in range(1, count + 1) if count % s == 0 and (s == 1 or s * parties <= BUSY))
    patches = gathered.reshape(split, count * rows * columns // split, size + spare)
    matrix = F.pad(weight.permute(2, 3, 1, 0).reshape(size, out), (0, 0, 0, spare))
    done = torch.bmm(patches, matrix.expand(split, -1, -1))
    if bias is not None:
        done = done + bias
    return done.view(count, rows, columns, out).permute(0, 3, 1, 2)


class Patches(torch.autograd.Function):
    """All patches [n, rows, columns, high * wide * channels] of images [n, height, width, channels], in one copy.

    The derivative is a sum of shifted images, without atomic additions.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, high: int, wide: int) -> Tensor:
        return x.unfold(1, high, 1).unfold(2, wide, 1).permute(0, 1, 2, 4, 5, 3).flatten(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.high, ctx.wide = inputs
        ctx.channels = x.shape[3]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        high, wide, channels = ctx.high, ctx.wide, ctx.channels
        parts = gradient.unflatten(3, (high, wide, channels))  # type: ignore[no-untyped-call]
        shifted = [
            F.pad(parts[:, :, :, i, j], (0, 0, j, wide - 1 - j, i, high - 1 - i))
            for i in range(high)
            for j in range(wide)
        ]
        return functools.reduce(torch.add, shifted), None, None


def _lstm(gates: Tensor, state: tuple[Tensor, ...], recurrent: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    h, c = state
    i, f, g, o = (gates + recurrent(h)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(gates: Tensor, state: tuple[Tensor, ...], recurrent: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    (h,) = state
    (a, b, c), (p, q, r) = gates.chunk(3, -1), recurrent(h).chunk(3, -1)
    reset, keep = torch.sigmoid(a + p), torch.sigmoid(b + q)
    return ((1 - keep) * torch.tanh(c + reset * r) + keep * h,)


def _plain(name: str) -> Callable[..., tuple[Tensor, ...]]:
    def cell(gates: Tensor, state: tuple[Tensor, ...], recurrent: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return (getattr(torch, name)(gates + recurrent(state[0])),)

    return cell


_CELLS: dict[Any, Any] = {
    torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _plain("tanh"), torch.rnn_relu: _plain("relu"),
}  # fmt: skip


def unroll(cell: Callable[..., tuple[Tensor, ...]], x: Tensor, start: Any, weights: Sequence[Tensor], biased: bool,
           layers: int, dropout: float, training: bool, both: bool, batch_first: bool) -> Any:  # fmt: skip
    """Compute a recurrent layer as a loop over cells; return outputs and last states as the fused layer does."""
    start = tuple(start) if isinstance(start, (tuple, list)) else (start,)
    x = x.transpose(0, 1) if batch_first else x  # [time, batch, features]
    directions, each = (2 if both else 1), (4 if biased else 2)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outs = []
        for way in range(directions):
            at = layer * directions + way
            own = weights[at * each : (at + 1) * each]
            enter = F.linear(x, own[0], own[2] if biased else None)

            def recurrent(h: Tensor, own: Sequence[Tensor] = own) -> Tensor:
                return F.linear(h, own[1], own[3] if biased else None)

            state = tuple(part[at] for part in start)
            seen = []
            for t in reversed(range(len(x))) if way else range(len(x)):
                state = cell(enter[t], state, recurrent)
                seen.append(state[0])
            outs.append(torch.stack(seen[::-1] if way else seen))
            last.append(state)
        x = torch.cat(outs, -1) if both else outs[0]
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    ends = tuple(torch.stack(part) for part in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, *ends
