"""Weight matching at equal widths: permute the hidden units of each update before a fusion.

Ainsworth, Hayase and Srinivasa, "Git Re-Basin: Merging Models modulo Permutation Symmetries", ICLR 2023, algorithms 1
and 3. A network computes the same function with its hidden units in another order, so parties whose units are permuted
agree although the mean of their weights is meaningless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hansa.core.ask import Gathered
from hansa.core.federation import Federation
from hansa.core.op import Op, Payload
from hansa.core.quantities import Sweeps
from hansa.core.registry import register
from hansa.fusion import Fused, Fusion, Update, WeightedMean
from hansa.matching.beta_bernoulli import assign
from hansa.matching.units import Network, Units, permuted
from hansa.numerics.params import Params
from hansa.numerics.rows import Rows, room
from hansa.plumbing.errors import ConfigError

MEMORY = 2**30  # bytes of permuted updates in memory; more of them are stored on disk
Orders = list[Tensor]  # for each hidden layer, which of the own units takes each place


@register("match-permute")
@dataclass(frozen=True)
class MatchPermute(Fusion):
    """Permute each party's hidden units so that they fit those of the others, then fuse. Ainsworth et al. 2023.

    The first model is permuted to fit the global one, each further one to fit the mean of those before it. Then, in up
    to `sweeps` passes, each model is permuted to fit the mean of all others. Layers take turns until none changes: the
    order of a layer's units is the one with the largest inner product of incoming and outgoing weights. The model must
    be a chain of layers without normalisation. `inner` fuses the permuted updates. On bare vectors, where no network is
    known, it is the inner fusion.
    """

    inner: Fusion = WeightedMean()
    sweeps: Sweeps = 5
    verbs: ClassVar[frozenset[str]] = frozenset({"gather"})
    permutes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.inner.trusts or self.inner.remembers or self.inner.permutes:
            needs = "samples of the server" if self.inner.trusts else "the places of units"
            raise ConfigError(
                f"match-permute: the inner fusion {self.inner.name!r} compares updates by {needs}, which permuted "
                "updates do not fit; use another one, such as 'mean' or 'median'"
            )

    def check(self, n: int) -> None:
        self.inner.check(n)

    def fits(self, module: nn.Module) -> None:
        try:
            Network.of(module)
        except ConfigError as error:
            raise ConfigError(f"match-permute: {error}") from None

    def used(self, n: int) -> int:
        return self.inner.used(n)

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        return self.inner.fuse(rows, weights, watch, **known)

    def combine(self, fed: Federation, op: Op, params: Params, payload: Payload, answer: Gathered) -> Update:
        self.check(len(answer.parties))
        return self.inner.combine(fed, op, params, payload, self.fitted(fed.module, params.w, answer))

    def fitted(self, module: nn.Module | None, w: Tensor, answer: Gathered) -> Gathered:
        """The replies with permuted updates; unchanged if no unit of any party moves."""
        if module is None:
            raise ConfigError("match-permute needs the task's model")
        network, base, rows = Network.of(module), w.cpu(), answer.matrix("w")
        sizes = {name: parameter.shape for name, parameter in module.named_parameters()}

        def read(vector: Tensor) -> list[Units]:
            pieces = torch.split(vector.cpu(), [shape.numel() for shape in sizes.values()])
            return network.read({name: piece.view(sizes[name]) for name, piece in zip(sizes, pieces, strict=True)})

        def written(units: Sequence[Units]) -> Tensor:
            named = network.write(units)
            return torch.cat([named[name].reshape(-1) for name in sizes]).to(w.device)

        start = read(base)
        orders = fit([read(base + rows.row(k).cpu()) for k in range(len(rows))], start, self.sweeps)
        identity = [torch.arange(width) for width in network.widths]
        moved = [any(not torch.equal(a, b) for a, b in zip(own, identity, strict=True)) for own in orders]
        if not any(moved):
            return answer
        fitting, replies = room(len(rows), w, MEMORY), []
        for k, (reply, own) in enumerate(zip(answer.replies, orders, strict=True)):
            update = rows.row(k)
            tensors = dict(reply.tensors)
            if moved[k]:
                update = written(permuted(read(base + update.cpu()), own)) - w
                vectors = [name for name, value in tensors.items() if value.shape == w.shape]
                tensors |= {name: written(permuted(read(tensors[name]), own)) for name in vectors}
            replies.append(replace(reply, tensors={**tensors, "w": fitting.write(k, update)}))
        return Gathered(answer.parties, tuple(replies), answer.seconds, {**answer.matrices, "w": fitting})


def fit(models: Sequence[Sequence[Units]], start: Sequence[Units], sweeps: int) -> list[Orders]:
    """The orders of units with which models of equal widths fit each other, and the first one fits `start`."""
    start, *models = ([Units(*(t.double() for t in layer)) for layer in model] for model in (start, *models))
    widths = [len(layer.incoming) for layer in start[:-1]]
    orders = [[torch.arange(width) for width in widths] for _ in models]
    target, total = list(start), None
    for k, model in enumerate(models):
        orders[k] = fit_pair(model, target, orders[k])
        total = _plus(total, permuted(model, orders[k]))
        target = _times(total, 1 / (k + 1))
    for _ in range(sweeps if len(models) > 1 else 0):
        changed = False
        for k, model in enumerate(models):
            assert total is not None
            others = _times(_plus(total, permuted(model, orders[k]), -1.0), 1 / (len(models) - 1))
            own = fit_pair(model, others, orders[k])
            if any(not torch.equal(a, b) for a, b in zip(own, orders[k], strict=True)):
                changed = True
                total = _plus(_plus(total, permuted(model, orders[k]), -1.0), permuted(model, own))
                orders[k] = own
        if not changed:
            break
    return orders


def fit_pair(model: Sequence[Units], target: Sequence[Units], orders: Orders) -> Orders:
    """Orders of a model's units with which its weights have a larger inner product with those of the target.

    Layers take turns. A layer's best order is exact given the others, except for its recurrent weights, where a new
    order is kept only if it is better. So the product never falls, and the turns end.
    """
    orders = list(orders)
    best, improved = _product(permuted(model, orders), target), True
    while improved:
        improved = False
        for layer in range(len(orders)):
            own = list(orders)
            own[layer] = assign(_overlaps(model, target, orders, layer), torch.zeros(len(orders[layer]), 0))
            product = _product(permuted(model, own), target)
            if product > best + 1e-12 * abs(best):
                orders, best, improved = own, product, True
    return orders


def _overlaps(model: Sequence[Units], target: Sequence[Units], orders: Orders, layer: int) -> Tensor:
    """The inner product [places, units] of a layer's weights for each of the target's places and own units."""
    own, fixed = model[layer], target[layer]
    below = own.incoming if layer == 0 else own.incoming[:, orders[layer - 1]]
    overlap = fixed.incoming.flatten(1) @ below.flatten(1).t() + fixed.bias @ own.bias.t()
    above = model[layer + 1].incoming
    above = above if layer + 1 == len(orders) else above[orders[layer + 1]]
    overlap += target[layer + 1].incoming.transpose(0, 1).flatten(1) @ above.transpose(0, 1).flatten(1).t()
    if own.recurrent.shape[2]:
        order = orders[layer]
        for mine, theirs in ((own.recurrent, fixed.recurrent), (own.recurrent.transpose(0, 1),
                                                               fixed.recurrent.transpose(0, 1))):  # fmt: skip
            overlap += theirs.flatten(1) @ mine[:, order].flatten(1).t()
    return overlap


def _product(a: Sequence[Units], b: Sequence[Units]) -> float:
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return float(sum((x * y).sum() for x, y in pairs))


def _plus(total: Sequence[Units] | None, model: Sequence[Units], sign: float = 1.0) -> list[Units]:
    if total is None:
        return list(model)
    return [Units(*(a + sign * b for a, b in zip(x, y, strict=True))) for x, y in zip(total, model, strict=True)]


def _times(model: Sequence[Units], factor: float) -> list[Units]:
    return [Units(*(tensor * factor for tensor in layer)) for layer in model]
