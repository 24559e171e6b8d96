"""LEGATO: layers are weighted by how steady their norms are over rounds (Varma, Zhou, Baracaldo and Anwar 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from hansa.core.fields import Advice
from hansa.core.quantities import PastRounds
from hansa.core.registry import register
from hansa.fusion.distances import combination, layer_norms
from hansa.fusion.fusion import Fused, Robust
from hansa.fusion.ordered import NotFinite
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import ConfigError
from hansa.replies.reply_checks import all_finite

STEADY = 1e-3  # a smaller spread counts as this one, so that rounding errors do not decide
LARGEST = 1e6  # a norm counts as at most this many medians


@register("legato")
@dataclass(frozen=True)
class Legato(Robust):
    """The mean of updates, in layers whose norms are unsteady that of the last rounds. Varma et al. 2021.

    The aggregator remembers the last `log` rounds, this one included: the mean update, and the norm of each layer (a
    parameter of the model) of each party. A norm is divided by the median of its round and layer; the spread of a layer
    is the root mean square deviation of these numbers from each party's own mean, over the parties with two or more
    rounds in the log. With weights w in proportion to 1 / spread, of sum 1 over all layers, a layer of the result is w
    times the mean of this round plus 1 - w times the mean of the earlier ones. It is the plain mean in the first round,
    with one layer, with `log` = 1, and while no party is in two rounds. It evens out noise; it is no bound on what a
    party can do. On tensors: `rule.examine(updates, layers=..., parties=..., memory=...)`.
    """

    log: Annotated[PastRounds, Advice("1 is the present round")] = 5
    remembers: ClassVar[bool] = True

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        lengths = _lengths(known.get("layers"), rows.dim)
        parties = known.get("parties")
        ids = rows.index if parties is None else [parties[k] for k in rows.index]
        mean = combination(rows, torch.ones(len(rows), dtype=torch.float64), len(rows))
        norms = layer_norms(rows, lengths).cpu()
        if not all_finite(norms):
            raise NotFinite
        seen = _joined(known.get("memory"), mean, ids, norms)
        shares = layer_weights(seen)
        w = mean.clone() if shares is None else _blend(seen["means"], shares, lengths)
        equal = [1 / len(rows)] * len(rows)
        return Fused(w, equal, memory=None if self.log == 1 else _last(seen, self.log - 1))


def layer_weights(log: Mapping[str, Any]) -> Tensor | None:
    """The weight of each layer, of sum 1: in proportion to 1 / its spread over the log.

    None if no party is in two rounds of the log. A layer without any update in the log has the weight 0.
    """
    norms: Tensor = log["norms"]
    relative = _in_medians(norms, log["rounds"])
    _, party, count = torch.unique(log["parties"], return_inverse=True, return_counts=True)
    often = count[party] > 1
    if not bool(often.any()):
        return None
    sums = torch.zeros(len(count), norms.shape[1], dtype=torch.float64).index_add(0, party, relative)
    spread = (relative - (sums / count.unsqueeze(1))[party])[often].square().mean(0).sqrt()
    steadiness = torch.where(norms.sum(0) > 0, 1 / spread.clamp(min=STEADY), 0.0)
    return steadiness / steadiness.sum().clamp(min=1e-300)


def _in_medians(norms: Tensor, rounds: Tensor) -> Tensor:
    """Norms divided by the median of the norms of their round and layer that are not 0; 1 where all are 0."""
    out = torch.empty_like(norms)
    for number in range(int(rounds[-1]) + 1):
        own = norms[rounds == number]
        typical = torch.where(own > 0, own, torch.nan).nanquantile(0.5, 0)
        out[rounds == number] = torch.where(typical > 0, (own / typical).clamp(max=LARGEST), 1.0)
    return out


def _blend(means: Sequence[Tensor], shares: Tensor, lengths: Sequence[int]) -> Tensor:
    """The last of the means with the mean of those before it, layer by layer."""
    out, start = torch.empty_like(means[-1]), 0
    for length, share in zip(lengths, shares.tolist(), strict=True):
        at = slice(start, start + length)
        layer = share * means[-1][at].double()
        for earlier in means[:-1]:
            layer.add_(earlier[at].double(), alpha=(1 - share) / (len(means) - 1))
        out[at], start = layer, start + length
    if not all_finite(out):
        raise NotFinite
    return out


def _lengths(layers: Sequence[tuple[str, int]] | None, numbers: int) -> list[int]:
    """The lengths of the layers; one layer if none are named."""
    lengths = [length for _, length in layers or [("all", numbers)]]
    if sum(lengths) != numbers:
        raise ConfigError(
            f"legato: the layers have {sum(lengths)} numbers in all, and an update has {numbers}; give the names and "
            "lengths of all layers, in the order of the update"
        )
    return lengths


def _joined(memory: Mapping[str, Any] | None, mean: Tensor, parties: Sequence[int], norms: Tensor) -> dict[str, Any]:
    """The log with a further round."""
    ids, first = torch.tensor(parties, dtype=torch.int64), torch.zeros(len(parties), dtype=torch.int64)
    if memory is None:
        return {"means": [mean], "rounds": first, "parties": ids, "norms": norms}
    if (len(memory["means"][0]), memory["norms"].shape[1]) != (len(mean), norms.shape[1]):
        raise ConfigError("legato: the memory is of updates with other layers; begin without one")
    means = [earlier.to(mean.device) for earlier in memory["means"]]
    return {"means": [*means, mean], "rounds": torch.cat([memory["rounds"], first + len(means)]),
            "parties": torch.cat([memory["parties"], ids]), "norms": torch.cat([memory["norms"], norms])}  # fmt: skip


def _last(log: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """The last rounds of a log."""
    first = max(0, len(log["means"]) - rounds)
    keep = log["rounds"] >= first
    return {"means": log["means"][first:], "rounds": log["rounds"][keep] - first,
            "parties": log["parties"][keep], "norms": log["norms"][keep]}  # fmt: skip
