"""Layers rewritten for stacks of parties: convolutions as matrix products of patches, recurrent layers as cells,
attention as matrix products.

Under `vmap`, filters per party become grouped convolutions, which are slow on a GPU, and the fused kernels of recurrent
layers and of attention do not support `vmap`.
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
_ATTENTION = F.scaled_dot_product_attention


class Rewritten(TorchFunctionMode):
    """While active, computes convolutions and recurrent layers in forms that stack well."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.parties = parties
        self._patches: list[Any] = [
            patch.object(nn.RNNBase, "flatten_parameters", lambda layer: None),  # it needs real memory
            patch.object(F, "scaled_dot_product_attention", attend),  # inside torch's own layers no mode is active
        ]

    def __enter__(self) -> Rewritten:
        for change in self._patches:
            change.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for change in self._patches:
            change.stop()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
        keywords = dict(kwargs or {})
        if func is F.conv2d and not keywords and len(args) == 7 and args[6] == 1 and not isinstance(args[4], str):
            return convolve(self.parties, *args[:6])
        if func in _CELLS and len(args) == 9:
            return unroll(_CELLS[func], *args)
        if func is _ATTENTION:
            return attend(*args, **keywords)
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


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
           is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` as matrix products and a softmax."""
    if dropout_p or enable_gqa:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        none = float("-inf")
        scores = torch.where(attn_mask, scores, none) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.softmax(scores, -1) @ value


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
    torch.lstm: None, torch.gru: _gru, torch.rnn_tanh: _plain("tanh"), torch.rnn_relu: _plain("relu"),
}  # fmt: skip


def unroll(cell: Callable[..., tuple[Tensor, ...]] | None, x: Tensor, start: Any, weights: Sequence[Tensor],
           biased: bool, layers: int, dropout: float, training: bool, both: bool,
           batch_first: bool) -> Any:  # fmt: skip
    """Compute a recurrent layer as a loop over cells; return outputs and last states as the fused layer does.

    `cell` is None for an LSTM, whose loop has a derivative of its own.
    """
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
            if cell is None:
                gates = (enter + own[3] if biased else enter).to(state[0].dtype)
                outputs, state = lstm_layer(gates.flip(0) if way else gates, state, own[1].to(enter.dtype))
                outs.append(outputs.flip(0) if way else outputs)
                last.append(state)
                continue
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


def lstm_layer(gates: Tensor, state: tuple[Tensor, ...], weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One direction of an LSTM layer: the outputs [T, B, H] and the last state.

    `gates` [T, B, 4H] are the products of the inputs with their weights, plus the biases.
    """
    outputs, cell, _, _ = LstmLayer.apply(gates, *state, weight)  # type: ignore[no-untyped-call]
    return outputs, (outputs[-1], cell)


class LstmLayer(torch.autograd.Function):
    """An LSTM layer over time with its derivative: under vmap two kernels per time and pass, for all parties at once.

    The gradient of the weights is one product over all times, not a sum of one product per time.
    """

    @staticmethod
    def forward(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        outputs, cell, cells, opened = _lstm_forward(
            gates.unsqueeze(1), h.unsqueeze(0), c.unsqueeze(0), weight.unsqueeze(0)
        )
        return outputs.squeeze(1), cell.squeeze(0), cells.squeeze(1), opened.squeeze(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, h, c, weight = inputs
        outputs, _, cells, opened = output
        ctx.mark_non_differentiable(cells, opened)
        ctx.save_for_backward(h, c, weight, outputs, cells, opened)

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, cell: Tensor, *_: Tensor) -> Any:
        return LstmLayerBack.apply(outputs, cell, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        parties = _by_party(info.batch_size, dims, inputs, (1, 0, 0, 0))
        return _lstm_forward(*parties), (1, 0, 1, 1)


class LstmLayerBack(torch.autograd.Function):
    """The derivative of `LstmLayer`; it has none of its own."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        parts = [v.unsqueeze(at) for v, at in zip(inputs, _BACK, strict=True)]
        gates, h, c, weight = _lstm_backward(*parts)
        return gates.squeeze(1), h.squeeze(0), c.squeeze(0), weight.squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: there is no second derivative."""

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _lstm_backward(*_by_party(info.batch_size, dims, inputs, _BACK)), (1, 0, 0, 0)


_BACK = (1, 0, 0, 0, 0, 1, 1, 1)  # where the parties are in the arguments of `_lstm_backward`


def _by_party(
    parties: int, dims: tuple[int | None, ...], inputs: Sequence[Tensor], places: Sequence[int]
) -> list[Tensor]:
    """The inputs of a function under vmap, with the parties at these places."""
    return [
        v.unsqueeze(at).expand(*v.shape[:at], parties, *v.shape[at:]) if dim is None else v.movedim(dim, at)
        for v, dim, at in zip(inputs, dims, places, strict=True)
    ]


def _lstm_forward(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Outputs [T, K, B, H], the last cell, all cells and the opened gates, for a stack of K parties.

    `gates` is [T, K, B, 4H], the first state [K, B, H] each, `weight` [K, 4H, H]; products have the type of `weight`.
    """
    across = weight.transpose(1, 2)
    outputs, cells, opened = [], [], []
    for now in gates:
        h, c, gate = _open(now, _product(h, across), c)
        outputs.append(h)
        cells.append(c)
        opened.append(gate)
    return torch.stack(outputs), c.clone(), torch.stack(cells), torch.stack(opened)


def _lstm_backward(outputs: Tensor, cell: Tensor, h: Tensor, c: Tensor, weight: Tensor, states: Tensor, cells: Tensor,
                   opened: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of gates, first state and weight, from those of outputs and last cell."""
    back = None
    found: list[Tensor] = []
    for t in reversed(range(len(outputs))):
        above = outputs[t] if back is None else outputs[t] + _product(back, weight)
        back, cell = _close(above, cell, cells[t - 1] if t else c, cells[t], opened[t])
        found.append(back)
    assert back is not None
    gates = torch.stack(found[::-1])
    before = torch.cat([h.unsqueeze(0), states[:-1]])
    left, right = (v.transpose(0, 1).flatten(1, 2) for v in (gates, before))  # [K, T * B, ...]
    return gates, _product(back, weight), cell, torch.bmm(left.transpose(1, 2).to(weight.dtype), right.to(weight.dtype))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x times weight, in the weight's type; the result has that of x."""
    return torch.bmm(x.to(weight.dtype), weight).to(x.dtype)


def _open(gates: Tensor, more: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, cell and opened gates [K, B, 4H] of an LSTM cell."""
    if gates.device.type == "cuda":
        flat = torch.ops.aten._thnn_fused_lstm_cell(gates.flatten(0, 1), more.flatten(0, 1), c.flatten(0, 1))
        h, c, opened = (v.unflatten(0, gates.shape[:2]) for v in flat)
        return h, c, opened
    i, f, g, o = (gates + more).chunk(4, -1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    c = f * c + i * g
    return o * torch.tanh(c), c, torch.cat([i, f, g, o], -1)


def _close(h: Tensor, c: Tensor, before: Tensor, after: Tensor, opened: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the gates and of the cell before, from those of output and cell."""
    if h.device.type == "cuda":
        flat = [v.flatten(0, 1) for v in (h, c, before, after, opened)]
        gates, cell, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, False)
        return gates.unflatten(0, h.shape[:2]), cell.unflatten(0, h.shape[:2])
    i, f, g, o = opened.chunk(4, -1)
    bent = torch.tanh(after)
    c = c + h * o * (1 - bent * bent)
    gates = torch.cat([c * g * i * (1 - i), c * before * f * (1 - f), c * i * (1 - g * g), h * bent * o * (1 - o)], -1)
    return gates, c * f
