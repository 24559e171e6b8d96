"""Keyed randomness for models: dropout draws the same mask alone, in a stack and at a deployed party.

PyTorch's random functions advance a global generator, so each draw depends on all draws before it. Inside
`KeyedRandomness`, the random functions that a model calls draw from the step's key, with one sub-key per call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError

_REFUSED: frozenset[Any] = frozenset(
    [torch.multinomial, torch.normal, torch.randint, torch.randint_like, torch.randperm, torch.poisson,
     torch.rrelu, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d,
     F.fractional_max_pool3d, Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_,
     Tensor.random_, Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_, Tensor.multinomial,
     torch.binomial, torch._standard_gamma, torch._sample_dirichlet, torch.alpha_dropout, torch.feature_dropout,
     torch.feature_alpha_dropout, torch.native_dropout]
)  # fmt: skip
_fused_attention = F.scaled_dot_product_attention
_RECURRENT: frozenset[Any] = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])


class KeyedRandomness(TorchFunctionMode):
    """While active, random functions draw from `key`; `used` says whether one was called."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

    @property
    def used(self) -> bool:
        return self.calls > 0

    def _next(self) -> Tensor:
        self.calls += 1
        return rng.fold(self.key, self.calls)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kw = dict(kwargs or {})
        keyed = _KEYED.get(func)
        if keyed is not None:
            return keyed(self, *args, **kw)
        if func is F.multi_head_attention_forward:
            return self.multi_head(*args, **kw)
        if func in _REFUSED:
            name = getattr(func, "__name__", str(func))
            raise ConfigError(
                f"the model calls {name} while it trains, which draws from PyTorch's global generator and cannot be "
                "replayed; use dropout, torch.bernoulli, torch.rand(_like) or torch.randn(_like)"
            )
        if func in _RECURRENT and _recurrent_dropout(args):
            raise ConfigError(
                "the model uses dropout inside a recurrent layer, which draws from PyTorch's global generator and "
                "cannot be replayed; put nn.Dropout between single-layer recurrent modules instead"
            )
        return func(*args, **kw)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, x.shape)

    def channel_dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, (*x.shape[:2], *([1] * (x.dim() - 2))))

    def _drop(self, x: Tensor, p: float, training: bool, shape: Sequence[int]) -> Tensor:
        if not training or p == 0.0:
            return x
        if p == 1.0:
            return x * 0.0
        keep = rng.uniform(self._next(), shape) >= p
        return x * keep.to(x.dtype) / (1.0 - p)

    def bernoulli(self, x: Tensor, p: float | None = None) -> Tensor:
        return (rng.uniform(self._next(), x.shape) < (x if p is None else p)).to(x.dtype)

    def rand_like(self, x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return rng.uniform(self._next(), x.shape).to(dtype or x.dtype)

    def randn_like(self, x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return rng.normal(self._next(), x.shape).to(dtype or x.dtype)

    def rand(self, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return rng.uniform(self._next(), _size(sizes or (size,))).to(dtype or torch.get_default_dtype())

    def randn(self, *sizes: Any, size: Any = None, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return rng.normal(self._next(), _size(sizes or (size,))).to(dtype or torch.get_default_dtype())

    def multi_head(self, *args: Any, **kw: Any) -> Any:
        """Multi-head attention, whose dropout calls bypass this mode; so its functions are replaced."""
        with patch.dict(vars(F), dropout=self.dropout, scaled_dot_product_attention=self.attention):
            return F.multi_head_attention_forward(*args, **kw)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                  is_causal: bool = False, **kw: Any) -> Tensor:  # fmt: skip
        """Scaled dot-product attention; not fused if it has dropout, because the fused kernel draws its own mask."""
        if dropout_p == 0.0:
            return _fused_attention(q, k, v, attn_mask, 0.0, is_causal, **kw)
        if kw.get("enable_gqa"):
            raise ConfigError("attention with dropout and grouped queries cannot be replayed; set its dropout to 0")
        scale = kw.get("scale") or q.shape[-1] ** -0.5
        score = q @ k.transpose(-2, -1) * scale
        if is_causal:
            causal = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).tril()
            score = score.masked_fill(~causal, float("-inf"))
        elif attn_mask is not None:
            score = score.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else score + attn_mask
        weights = torch.softmax(score, dim=-1)
        return self._drop(weights, dropout_p, True, weights.shape) @ v


def _size(size: Sequence[Any]) -> Sequence[int]:
    return size[0] if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size


def _recurrent_dropout(args: Sequence[Any]) -> bool:
    """Whether a recurrent kernel is called with dropout, in training: (..., dropout, train, bidirectional, ...)."""
    for at, value in enumerate(args):
        if isinstance(value, float) and at + 1 < len(args):
            return value > 0.0 and bool(args[at + 1])
    return False


_KEYED: dict[Any, Callable[..., Any]] = {
    F.dropout: KeyedRandomness.dropout,
    torch.dropout: KeyedRandomness.dropout,
    F.dropout1d: KeyedRandomness.channel_dropout,
    F.dropout2d: KeyedRandomness.channel_dropout,
    F.dropout3d: KeyedRandomness.channel_dropout,
    torch.bernoulli: KeyedRandomness.bernoulli,
    Tensor.bernoulli: KeyedRandomness.bernoulli,
    torch.rand_like: KeyedRandomness.rand_like,
    torch.randn_like: KeyedRandomness.randn_like,
    torch.rand: KeyedRandomness.rand,
    torch.randn: KeyedRandomness.randn,
    F.scaled_dot_product_attention: KeyedRandomness.attention,
}
