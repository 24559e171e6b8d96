"""Convert a model's parameters to flat vectors and back, without copying.

The trainable parameters form one vector `w`. Norms, distances, fusions and optimisers act on `w`. Buffers are kept
apart, because they must not enter a norm or an optimiser's moments: floating-point buffers (`stats`, such as
BatchNorm's running mean) are averaged, integer buffers (`counts`) take the maximum. Frozen parameters
(`requires_grad = False`, a pretrained base) are in none of the vectors. They are neither trained nor sent: the function
that makes the model makes them, at the aggregator and at every party, and the task has their digest.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hansa.plumbing.errors import ConfigError


class Params(NamedTuple):
    """A model as vectors: trainable parameters, floating-point buffers, integer buffers."""

    w: Tensor
    stats: Tensor
    counts: Tensor

    @classmethod
    def none(cls) -> Params:
        """Empty vectors, for methods without a parameter vector."""
        return cls(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True)
class ParamEntry:
    """One named tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParamSpec:
    """Names, shapes and order of a model's tensors in the three vectors, and its frozen parameters."""

    weights: tuple[ParamEntry, ...]
    stats: tuple[ParamEntry, ...]
    counts: tuple[ParamEntry, ...]
    frozen: tuple[ParamEntry, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> ParamSpec:
        """The layout of a module. Shared parameters count once; buffers outside the state dict are not included."""
        weights: list[ParamEntry] = []
        frozen: list[ParamEntry] = []
        stats, counts = [], []
        for name, tensor in _named_tensors(module):
            if tensor.is_sparse or tensor.is_complex():
                raise ConfigError(f"model: {name} is sparse or complex; use dense real tensors")
            entry = ParamEntry(name, tuple(tensor.shape), tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                (weights if tensor.requires_grad else frozen).append(entry)
            elif not tensor.is_floating_point():
                counts.append(entry)
            else:
                stats.append(entry)
        dtypes = {e.dtype for e in weights}
        if len(dtypes) > 1:
            raise ConfigError(f"model: trainable parameters have several types ({dtypes}); give them one")
        return cls(tuple(weights), tuple(stats), tuple(counts), tuple(frozen))

    @property
    def dim(self) -> int:
        """The length of the trainable vector."""
        return sum(e.numel for e in self.weights)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype if self.weights else torch.get_default_dtype()

    def flatten(self, module: nn.Module) -> Params:
        """A copy of a module's tensors as vectors."""
        named = {name: tensor.detach() for name, tensor in _named_tensors(module)}
        stats_dtype = torch.float64 if any(e.dtype == torch.float64 for e in self.stats) else self.dtype
        return Params(
            _cat([named[e.name] for e in self.weights], self.dtype),
            _cat([named[e.name] for e in self.stats], stats_dtype),
            _cat([named[e.name] for e in self.counts], torch.int64),
        )

    def named(self, params: Params) -> dict[str, Tensor]:
        """The named tensors, as views of the vectors (a copy if a buffer has another type)."""
        return self.split(params.w) | self.buffers(params.stats, params.counts)

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """The named trainable tensors, as views of a vector [d], or of a stack [K, d] as [K, ...]."""
        pieces, lead = torch.split_with_sizes(w, self._sizes, dim=-1), w.shape[:-1]
        return {
            e.name: p if len(e.shape) == 1 else p.view(*lead, *e.shape)
            for e, p in zip(self.weights, pieces, strict=True)
        }

    def stacked(self, named: dict[str, Tensor]) -> Tensor:
        """The stack of vectors [K, d] from named trainable tensors: the inverse of `split`."""
        return torch.cat([named[e.name].flatten(1) for e in self.weights], 1)

    def buffers(self, stats: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """The named buffers."""
        out: dict[str, Tensor] = {}
        for entries, vector in ((self.stats, stats), (self.counts, counts)):
            if entries:
                pieces = torch.split(vector, [e.numel for e in entries])
                out.update({e.name: p.view(e.shape).to(e.dtype) for e, p in zip(entries, pieces, strict=True)})
        return out

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [e.numel for e in self.weights]

    @staticmethod
    def joined(entries: tuple[ParamEntry, ...], named: dict[str, Tensor], like: Tensor) -> Tensor:
        """The named tensors of the entries as one vector, in the type of `like`."""
        return _cat([named[e.name] for e in entries], like.dtype) if entries else like

    def share(self, module: nn.Module, params: Params) -> None:
        """Let the trainable parameters of a module be views of a vector with the same values, to save memory."""
        views = self.split(params.w)
        for name, parameter in module.named_parameters():
            if name in views and views[name].dtype == parameter.dtype:
                parameter.data = views[name]

    def load(self, module: nn.Module, params: Params) -> nn.Module:
        """Write the vectors into a module and return it; frozen parameters stay unchanged."""
        values = self.named(params)
        with torch.no_grad():
            for name, tensor in _named_tensors(module):
                if name in values:
                    tensor.copy_(values[name])
        return module


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    saved = set(module.state_dict(keep_vars=True))
    named: list[tuple[str, Tensor]] = list(module.named_parameters())
    return named + [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def _cat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.zeros(0, dtype=dtype)
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


def short(base: str | None) -> str:
    """The digest of a model's frozen parameters, for a message."""
    return "none" if base is None else base[:12]
