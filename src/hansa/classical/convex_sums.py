"""The party's side of linear models: sums of a convex loss, its gradient and its Hessian over the party's samples."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.entries import Flag, Number, Shaped, Sizes, stated
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, sent
from hansa.core.quantities import Gamma, Seed
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.numerics import rng
from hansa.plumbing.errors import PartyError
from hansa.plumbing.stopping import go_on

ROWS = 2**14  # samples that are taken at once
MOST_FEATURES = 2**13  # random features that a party draws at most
LOSSES = ("squared", "logistic", "squared-hinge", "hinge")


class Features(NamedTuple):
    """What a sample becomes before the linear model: itself or `fourier` random features, with a constant 1 in front.

    Random Fourier features of a Gaussian kernel exp(-gamma ||x - x'||^2) (Rahimi and Recht 2007): the scalar product of
    two samples' features estimates the kernel. All parties draw the same features by the key.
    """

    intercept: bool
    fourier: int
    gamma: float
    key: int

    def width(self, columns: int) -> int:
        """The number of features of a sample."""
        return (self.fourier or columns) + self.intercept

    def of(self, x: Tensor) -> Tensor:
        """The features of samples, in float64."""
        flat = x.flatten(1).double()
        if self.fourier:
            frequencies, phases = _drawn(self.key, flat.shape[1], self.fourier)
            flat = torch.addmm(phases.to(x.device), math.sqrt(2 * self.gamma) * flat, frequencies.to(x.device))
            flat.cos_().mul_(math.sqrt(2 / self.fourier))
        return torch.cat([flat.new_ones(flat.shape[0], 1), flat], 1) if self.intercept else flat


@functools.lru_cache(maxsize=2)
def _drawn(key: int, columns: int, count: int) -> tuple[Tensor, Tensor]:
    draws = rng.generator(key, "fourier features", columns, count)
    frequencies = torch.from_numpy(draws.standard_normal((columns, count)))
    return frequencies, torch.from_numpy(draws.uniform(0, 2 * math.pi, count))


FEATURES = stated(intercept=Flag(), fourier=Number(whole=True, least=0, most=MOST_FEATURES), gamma=Number(above=0),
                  key=Number(whole=True))  # fmt: skip


@register("convex-sums")
@dataclass(frozen=True)
class ConvexSums(Op):
    """Sums over the party's samples at the parameters that the aggregator sends: loss, gradient, Hessian, count.

    The loss of a sample with scores s = W f(x) is: `squared` (s - y)^2 / 2, with y = 1 for a row's class and -1 for the
    others if targets are classes; `logistic` -log softmax(s)_y, for one row
    of W log(1 + exp(-s)) for class 1 and log(1 + exp(s)) for class 0; `squared-hinge` and `hinge` the sum over rows of
    max(0, 1 - s y)^2 and of max(0, 1 - s y), with the same y. The Hessian has a
    block for each pair of rows of W (logistic), one block that all rows share (squared), or a block for each row
    (squared-hinge); the hinge loss has none. With `centre` in the payload, f(x) is the distance to this point: then the
    Hessian keeps the digits of columns far from zero. Features and weights of samples have no bound, nor have these
    sums.
    """

    per_sample: ClassVar[Bounds] = {
        "loss": PerSample(None), "gradient": PerSample(None, signed=True), "hessian": PerSample(None, signed=True),
        "count": PerSample(),
    }  # fmt: skip

    loss: str = "squared"
    intercept: bool = True
    fourier: Annotated[int, Meta(ge=0, le=MOST_FEATURES), Owner(0, 100_000)] = 0
    gamma: Gamma = 1.0
    key: Seed = 0
    entries = stated(w=Shaped(shape=("rows", "columns")), centre=Shaped(shape=("columns",), optional=True))

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        rows, classes = len(payload["w"]), sizes.get("classes", 0)
        if rows < 1 or (classes and max(2, rows) != max(2, classes)):
            raise PartyError(f"convex-sums has rows for {max(2, rows)} classes, and the party's task has {classes}")
        if "features" in sizes and payload["w"].shape[1] != self.features.width(sizes["features"]):
            raise PartyError("convex-sums has weights for another number of features")

    @property
    def features(self) -> Features:
        return Features(self.intercept, self.fourier, self.gamma, self.key)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if self.loss not in LOSSES:
            raise PartyError(f"convex-sums asks for the loss {self.loss!r}; losses: {', '.join(LOSSES)}")
        x, y = party.samples("statistics")
        w = sent(payload, "w", (None, self.features.width(math.prod(x.shape[1:])))).double().to(x.device)
        if not y.is_floating_point() and int(y.max()) >= max(2, len(w)):
            raise PartyError(f"convex-sums has rows for {max(2, len(w))} classes, and a label here is none of them")
        centre = payload["centre"].double().to(x.device) if "centre" in payload else 0.0
        sums: dict[str, Tensor] = {}
        for at in range(0, len(x), ROWS):
            go_on()
            rows = slice(at, at + ROWS)
            weights = None if party.data.weights is None else party.data.weights[rows].to(x.device)
            for name, value in self.part(w, self.features.of(x[rows]) - centre, y[rows], weights).items():
                sums[name] = sums[name] + value if name in sums else value
        if not all(bool(torch.isfinite(value).all()) for value in sums.values()):
            raise PartyError("sums of squares overflow: standardise the data")
        return Reply({**sums, "count": torch.tensor(len(x))}, weight=len(x)), memory

    def part(self, w: Tensor, f: Tensor, y: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """The sums over some samples, from their features, targets and weights."""
        scores = f @ w.T
        sign = 2 * (y.view(len(f), -1) == _classes_of(w)).double() - 1
        if self.loss == "squared":
            apart = scores - (y.view(len(f), -1).double() if y.is_floating_point() else sign)
            slope = _times(apart, weights)
            hessian = (_times(f, weights).T @ f)[None]
            return {"loss": (apart * slope).sum() / 2, "gradient": slope.T @ f, "hessian": hessian}
        if self.loss == "logistic" and len(w) > 1:
            log_p = torch.log_softmax(scores, 1)
            p = log_p.exp()
            loss = -_times(log_p.gather(1, y[:, None]), weights).sum()
            slope = _times(p.scatter_add(1, y[:, None], p.new_full((len(y), 1), -1.0)), weights)
            weighted = _times(f, weights)
            pairs = [(weighted * (p[:, a] * (float(a == b) - p[:, b]))[:, None]).T @ f
                     for a in range(len(w)) for b in range(len(w))]  # fmt: skip
            return {"loss": loss, "gradient": slope.T @ f, "hessian": torch.stack(pairs)}
        if self.loss == "logistic":
            margin = scores * sign
            slope = _times(-sign * torch.sigmoid(-margin), weights)
            curve = _times(torch.sigmoid(margin) * torch.sigmoid(-margin), weights)
            return {
                "loss": _times(torch.nn.functional.softplus(-margin), weights).sum(),
                "gradient": slope.T @ f,
                "hessian": ((f * curve).T @ f)[None],
            }
        short = (1 - scores * sign).clamp(min=0)
        if self.loss == "hinge":
            return {"loss": _times(short, weights).sum(), "gradient": _times(-sign * (short > 0), weights).T @ f}
        weighted = _times(f, weights)
        blocks = []
        for active in (short > 0).T:
            rows = f[active]
            blocks.append(2 * ((rows if weights is None else weighted[active]).T @ rows))
        return {
            "loss": _times(short**2, weights).sum(),
            "gradient": _times(-2 * sign * short, weights).T @ f,
            "hessian": torch.stack(blocks),
        }

    def expects(self, payload: Payload) -> dict[str, Shape]:
        rows, width = payload["w"].shape
        shapes: dict[str, Shape] = {
            "loss": ((), torch.float64),
            "gradient": ((rows, width), torch.float64),
            "count": ((), torch.int64),
        }
        if self.loss != "hinge":
            shapes["hessian"] = ((blocks(self.loss, rows), width, width), torch.float64)
        return shapes

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"steps": 1}


def _times(values: Tensor, weights: Tensor | None) -> Tensor:
    """Numbers of samples, times the samples' weights."""
    return values if weights is None else values * weights[:, None]


def blocks(loss: str, rows: int) -> int:
    """How many blocks the Hessian has, for a number of rows of W."""
    return {"squared": 1, "squared-hinge": rows}.get(loss, rows**2)


def _classes_of(w: Tensor) -> Tensor:
    """The class of each row: with one row, class 1 against class 0."""
    return torch.arange(len(w), device=w.device) if len(w) > 1 else torch.ones(1, dtype=torch.int64, device=w.device)
