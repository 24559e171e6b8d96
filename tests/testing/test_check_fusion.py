"""Every registered fusion passes `check_fusion`, and each check fails for a fusion that breaks its promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hansa.core.quantities import Factor
from hansa.core.registry import register, registered
from hansa.fusion import FLTrust, Fused, Fusion, GeometricMedian, NormClip, TrimmedMean, WeightedMean, Zeno
from hansa.numerics.rows import Rows
from hansa.testing import check_fusion

OURS = [name for name, part in registered("fusion").items() if part.__module__.startswith("hansa.")]


def known(fusion: Fusion) -> Any:
    """What a fusion needs beside the updates."""

    def given(rows: Tensor) -> Mapping[str, Any]:
        if isinstance(fusion, FLTrust):
            return {"trusted": torch.linspace(0.1, 1.0, rows.shape[1], dtype=rows.dtype)}
        if isinstance(fusion, Zeno):
            return {"loss": lambda w: float((w.double() - 1).square().sum()), "at": torch.zeros_like(rows[0])}
        return {}

    return given


@pytest.mark.parametrize("name", OURS)
def test_every_registered_fusion_keeps_the_promises(name: str) -> None:
    fusion = registered("fusion")[name]()
    check_fusion(fusion, known(fusion))


@pytest.mark.parametrize("fusion", [WeightedMean(uniform=True), GeometricMedian(weighted=True), TrimmedMean(beta=0.3),
                                    NormClip(bound=0.5, weighted=True), Zeno(b=2)], ids=str)  # fmt: skip
def test_fusions_with_other_fields_keep_the_promises(fusion: Fusion) -> None:
    check_fusion(fusion, known(fusion))


def mean(rows: Rows) -> Tensor:
    return rows.block(0, rows.dim).mean(0)


@dataclass(frozen=True)
class Mean(Fusion):
    """The mean of the updates, with equal weights."""

    verbs: ClassVar[frozenset[str]] = frozenset({"gather"})

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        return Fused(self.result(rows, weights), [1.0] * len(rows), weights=self.named(weights))

    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        data = rows.block(0, rows.dim)
        return torch.where(torch.isfinite(data), data, 0.0).mean(0)

    def named(self, weights: Tensor | None) -> Tensor | None:
        return None


@register("sound-mean")
@dataclass(frozen=True)
class SoundMean(Mean):
    pass


@register("broken-fusion-config")
@dataclass(frozen=True)
class Grows(Mean):
    factor: Factor = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", self.factor * 2)


@register("broken-fusion-shape")
@dataclass(frozen=True)
class Flattens(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        return super().result(rows, weights)[:-1]


@register("broken-fusion-type")
@dataclass(frozen=True)
class Narrows(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        return super().result(rows, weights).float()


@register("broken-fusion-finite")
@dataclass(frozen=True)
class Overflows(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        return super().result(rows, weights) / 0.0


@register("broken-fusion-nan")
@dataclass(frozen=True)
class LetsNaNIn(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        return mean(rows)


@register("broken-fusion-order")
@dataclass(frozen=True)
class TakesTheFirst(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        return rows.row(0)


@register("broken-fusion-shares")
@dataclass(frozen=True)
class SharesByOrder(Mean):
    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        return Fused(self.result(rows, weights), [float(k) for k in range(len(rows))])


@register("broken-fusion-single")
@dataclass(frozen=True)
class AddsOne(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        return super().result(rows, weights) + 1


@register("broken-fusion-storage")
@dataclass(frozen=True)
class ReadsMemory(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        return torch.where(torch.isfinite(rows.data), rows.data, 0.0).mean(0)


@register("broken-fusion-silent")
@dataclass(frozen=True)
class WeighsSilently(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        shares = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights
        data = rows.block(0, rows.dim)
        return (shares / shares.sum()) @ torch.where(torch.isfinite(data), data, 0.0)


@register("broken-fusion-claims")
@dataclass(frozen=True)
class ClaimsWeights(Mean):
    def named(self, weights: Tensor | None) -> Tensor | None:
        return weights


@register("broken-fusion-names")
@dataclass(frozen=True)
class NamesOthers(WeighsSilently):
    def named(self, weights: Tensor | None) -> Tensor | None:
        return None if weights is None else weights.flip(0)


@register("broken-fusion-sum")
@dataclass(frozen=True)
class DoesNotDivide(Mean):
    def result(self, rows: Rows, weights: Tensor | None) -> Tensor:
        shares = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights
        data = rows.block(0, rows.dim)
        return shares @ torch.where(torch.isfinite(data), data, 0.0)

    def named(self, weights: Tensor | None) -> Tensor | None:
        return weights


@register("broken-fusion-memory")
@dataclass(frozen=True)
class ChangesMemory(Mean):
    remembers: ClassVar[bool] = True

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        memory = known.get("memory") or {"rounds": torch.zeros(1)}
        memory["rounds"] += 1
        return super().fuse(rows, weights, watch)._replace(memory=memory)


@register("broken-fusion-checkpoint")
@dataclass(frozen=True)
class RemembersElsewhere(Mean):
    remembers: ClassVar[bool] = True
    made: ClassVar[list[Any]] = []

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        fused, memory = super().fuse(rows, weights, watch), known.get("memory")
        own = memory is None or any(memory is other for other in self.made)
        self.made.append({"rounds": 1})
        return fused._replace(w=fused.w if own else 2 * fused.w, memory=self.made[-1])


def test_a_sound_fusion_passes() -> None:
    check_fusion(SoundMean())


@pytest.mark.parametrize(
    ("fusion", "reason"),
    [
        (Grows(), "configuration gives another fusion"),
        (Flattens(), "it gives the shape"),
        (Narrows(), "changes the type"),
        (Overflows(), "finite updates give values that are not finite"),
        (LetsNaNIn(), "gets into the result"),
        (TakesTheFirst(), "gives another result"),
        (SharesByOrder(), "gives other shares"),
        (AddsOne(), "a single update does not give a multiple of itself"),
        (ReadsMemory(), "in a file per party"),
        (WeighsSilently(), "names no weights, and depends on them"),
        (ClaimsWeights(), "names weights, and does not depend on them"),
        (NamesOthers(), "are not those of the parties"),
        (DoesNotDivide(), "depends on the sum of the weights"),
        (ChangesMemory(), "it changes the memory that it is given"),
        (RemembersElsewhere(), "a memory from a checkpoint gives another result"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Fusion) else "",
)
def test_a_fusion_that_breaks_a_promise_is_named_with_it(fusion: Fusion, reason: str) -> None:
    with pytest.raises(AssertionError, match=f"{fusion.name}: .*{reason}"):
        check_fusion(fusion)
