"""Bins of features: cut points, categories, and the bin number of each value of a sample."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.entries import FLAGS, FLOAT64, WHOLE, Nested, Shaped
from hansa.plumbing.errors import PartyError
from hansa.plumbing.stopping import go_on

Array = np.ndarray[Any, Any]
BINS = Nested(entries={"points": Shaped(types=FLOAT64, shape=(None,)), "starts": Shaped(types=WHOLE, shape=(None,)),
                      "categorical": Shaped(types=FLAGS, shape=(None,))})  # fmt: skip
MOST_BINS = 65_535  # of a feature: bin numbers are stored in 16 bits, and one stands for missing values
BinCount = Annotated[int, Meta(ge=2, le=MOST_BINS - 1, description="the most bins of a feature")]


@dataclass(frozen=True, eq=False)
class Bins:
    """The bins of all features: `points[starts[f]:starts[f + 1]]` are the sorted cuts or categories of feature f.

    A number v is in bin i if cut[i - 1] < v <= cut[i]. A category is in the bin of its value. The last bin of a feature
    holds missing values (NaN), and of a categorical feature also values that are none of its categories.
    """

    points: Array
    starts: Array
    categorical: Array

    @classmethod
    def of_features(cls, points: Sequence[Sequence[float]], categorical: Sequence[int]) -> Bins:
        """Bins from the cuts or categories of each feature."""
        starts = np.cumsum([0, *(len(row) for row in points)])
        flags = np.zeros(len(points), dtype=bool)
        flags[list(categorical)] = True
        flat = np.array([value for row in points for value in row], dtype=np.float64)
        return cls(flat, starts.astype(np.int64), flags)

    @functools.cached_property
    def widths(self) -> Array:
        """The number of bins of each feature, that of missing values included."""
        return np.diff(self.starts) + np.where(self.categorical, 1, 2)

    @functools.cached_property
    def offsets(self) -> Array:
        """The position of each feature's first bin among all bins, and the number of all bins."""
        return np.concatenate([[0], np.cumsum(self.widths)]).astype(np.int64)

    def of_feature(self, feature: int) -> Array:
        """The cuts or categories of a feature."""
        return self.points[self.starts[feature] : self.starts[feature + 1]]

    def payload(self) -> dict[str, Tensor]:
        """The bins as tensors by name, for messages and files."""
        return {"points": torch.from_numpy(self.points), "starts": torch.from_numpy(self.starts),
                "categorical": torch.from_numpy(self.categorical)}  # fmt: skip

    @classmethod
    def of(cls, payload: Any, features: int | None = None) -> Bins:
        """The bins of a message; a PartyError if they are malformed, or not for samples with `features` features."""
        names = {"points": torch.float64, "starts": torch.int64, "categorical": torch.bool}
        if not isinstance(payload, Mapping) or set(payload) != set(names):
            raise PartyError(f"malformed bins: expected the tensors {', '.join(names)}")
        for name, dtype in names.items():
            tensor = payload[name]
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.dim() != 1:
                raise PartyError(f"malformed bins: {name!r} is not of the expected type")
        bins = cls(*(payload[name].cpu().numpy() for name in names))
        sizes = np.diff(bins.starts)
        if len(bins.starts) != len(bins.categorical) + 1 or bins.starts[0] != 0 or bins.starts[-1] != len(bins.points):
            raise PartyError("malformed bins: cuts and features do not fit together")
        if len(sizes) and (sizes.min() < 0 or sizes.max() + 2 > MOST_BINS):
            raise PartyError(f"the job asks for {int(sizes.max()) + 2} bins of a feature, and {MOST_BINS} are the most")
        rises = np.diff(bins.points) > 0
        rises[bins.starts[1:-1][(bins.starts[1:-1] > 0) & (bins.starts[1:-1] < len(bins.points))] - 1] = True
        if not np.isfinite(bins.points).all() or not rises.all():
            raise PartyError("malformed bins: the cuts of a feature must be finite and ascend")
        if features is not None and len(sizes) != features:
            raise PartyError(f"the job has bins for {len(sizes)} features, and a sample here has {features}")
        return bins

    def codes(self, x: Array) -> Array:
        """The bin of each value of samples [samples, features], as [features, samples] of 8 or 16 bits."""
        kind = np.uint8 if not len(self.widths) or self.widths.max() <= 256 else np.uint16
        out = np.empty((x.shape[1], len(x)), dtype=kind)
        for feature in range(x.shape[1]):
            go_on()
            column = x[:, feature].astype(np.float64)
            points = self.of_feature(feature)
            at = np.searchsorted(points, column, side="left")
            last = self.widths[feature] - 1
            if self.categorical[feature]:
                near = points[np.minimum(at, len(points) - 1)] if len(points) else np.full(len(column), np.nan)
                out[feature] = np.where(near == column, at, last)
            else:
                out[feature] = np.where(np.isnan(column), last, at)
        return out

    def digest(self) -> bytes:
        """A hash of the bins."""
        parts = (self.points, self.starts, self.categorical)
        return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest()


def rows_of(x: Tensor) -> Array:
    """Samples as a matrix of numbers, one row per sample."""
    flat: Array = x.flatten(1).cpu().numpy() if x.dim() > 1 else x[:, None].cpu().numpy()
    return flat
