"""Statistics of tables that parties answer with whole numbers, so that every sum of them is exact.

Masked, encrypted and plain sums of whole numbers have the same bits. Real numbers travel as whole numbers: `hi` in
steps of 2^-8, and `lo` in steps of 2^-35, 2^-62 and so on to 2^-143, each below 2^31, which every secure sum holds. So
squares of deviations keep their digits where the deviations are as small as the spacing of floats at the mean. A
party's rows never leave it. Every payload is checked: the aggregator chooses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.entries import WHOLE, Shaped, Sizes, stated
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import CHECKED
from hansa.core.registry import register
from hansa.core.sample_bounds import Bounds, PerSample
from hansa.data.cells import CODE_BITS, NAME_BYTES
from hansa.data.date_parts import NAMED, checked_features, number_columns
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import PartyError

EXPONENTS = 129  # powers of two that magnitudes are counted by: 2^-64 to 2^63, and a cell for zero
CELLS = 4096  # of a histogram, from which the edges of bins are taken
PREFIXES = 4096  # prefixes of codes in one ask, at most
MOST_BITS = 12  # by which one ask prolongs a prefix, at most
SHORTEST = 16  # the last bits of a code, which no ask reads
WEIGHT = 2**20  # of a name in a sum, at most
DIGITS, DRAWN = 53, 32  # bits of a float64; bytes that are drawn for a number
HI, LO, PARTS = 8, 27, 5  # bits after the point in `hi`, in each part of `lo`, and the number of these parts
ROWS: Shape = ((), torch.int64)


def coded_rows(party: Party) -> tuple[Tensor, TableLayout]:
    """The coded rows of a party, and their layout; a PartyError if it has no table."""
    table = party.data.table
    if table is None:
        raise PartyError("its samples are no table with named columns")
    return party.samples("statistics")[0], table


def split_sums(values: Tensor) -> dict[str, Tensor]:
    """Real numbers as whole numbers: `hi`, and the parts of `lo` along a new last dimension."""
    rest, parts = values * 2.0**HI, []
    for _ in range(PARTS):
        parts.append(rest.trunc())
        rest = (rest - parts[-1]) * 2.0**LO  # exact: the sign stays, and the number of digits falls
    hi, *lo = (part.to(torch.int64) for part in (*parts, rest.round()))
    return {"hi": hi, "lo": torch.stack(lo, -1)}


def joined_sums(hi: Tensor, lo: Tensor) -> Tensor:
    """The sums of real numbers, from the sums of their whole numbers; rounded once."""
    values = [whole / 2 ** (HI + PARTS * LO) for whole in _wholes(hi, lo)]
    return torch.tensor(values, dtype=torch.float64).view(hi.shape)


def _wholes(hi: Tensor, lo: Tensor) -> list[int]:
    """Each sum as one whole number, in the steps of its last part."""
    wholes = hi.flatten().tolist()
    for part in lo.reshape(-1, PARTS).T.tolist():
        wholes = [(whole << LO) + more for whole, more in zip(wholes, part, strict=True)]
    return wholes


def _split_wholes(wholes: list[int], like: Tensor) -> dict[str, Tensor]:
    """The inverse of `_wholes`: `hi` with the shape of `like`, and the parts of `lo`."""
    parts = [[whole >> (LO * PARTS), *((whole >> (LO * k)) % 2**LO for k in reversed(range(PARTS)))]
             for whole in wholes]  # fmt: skip
    split = torch.tensor(parts, dtype=torch.int64).view(*like.shape, 1 + PARTS)
    return {"hi": split[..., 0], "lo": split[..., 1:]}


CODES = Shaped(types=WHOLE, shape=("pairs",), least=0, most=2 ** (CODE_BITS - SHORTEST) - 1)


@register("table-magnitudes")
@dataclass(frozen=True)
class TableMagnitudes(Op):
    """Count the values of each number column by their power of two, so that sums can be scaled."""

    per_sample: ClassVar[Bounds] = {"rows": PerSample(), "counts": PerSample(over=(-1,))}
    entries = stated(features=NAMED)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        _check_named(payload, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, layout = coded_rows(party)
        values = number_columns(x, checked_features(payload["features"], layout))
        counts = torch.zeros(values.shape[1], EXPONENTS, dtype=torch.int64)
        for k, column in enumerate(values.unbind(1)):
            known = column[~torch.isnan(column)]
            cells = (torch.frexp(known).exponent.long() - 1).clamp(-64, 63) + 64
            cells = torch.where(known == 0, torch.full_like(cells, EXPONENTS - 1), cells)
            counts[k] = torch.bincount(cells, minlength=EXPONENTS)
        return Reply({"rows": torch.tensor(len(x)), "counts": counts}, weight=len(x)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"rows": ROWS, "counts": ((len(payload["features"]), EXPONENTS), torch.int64)}


@register("table-sums")
@dataclass(frozen=True)
class TableSums(Op):
    """Sum the known values of each number column after a shift and a division, and with `squares` their squares too.

    `count` is the number of known values. `hi` and `lo` have a row per column: the sum, then the sum of squares. A
    value beyond the scale is cut, so that the sum stays within its range.
    """

    squares: bool = False
    entries = stated(features=NAMED, centre=Shaped(shape=("named",)), scale=Shaped(shape=("named",), above=0))

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        _check_named(payload, sizes, "centre", "scale")

    @property
    def per_sample(self) -> Bounds:  # type: ignore[override]
        highest = PerSample(2.0**HI * (4 if self.squares else 2), signed=True)
        return {"rows": PerSample(), "count": PerSample(), "hi": highest,
                "lo": PerSample(2.0**LO, signed=True, per_party=True)}  # fmt: skip

    def rescaled(self, tensors: Mapping[str, Tensor], samples: int, limit: int) -> dict[str, Tensor]:
        """As of other ops; each sum keeps its mean, also where it is so small that `lo` alone holds it."""
        less = super().rescaled(tensors, samples, limit)
        hi, lo, was = tensors["hi"], tensors["lo"], tensors["count"].clamp(min=1)
        counts = zip(less["count"].repeat_interleave(hi.shape[1]).tolist(), was.repeat_interleave(hi.shape[1]).tolist(),
                     strict=True)  # fmt: skip
        wholes = [whole * new // old for whole, (new, old) in zip(_wholes(hi, lo), counts, strict=True)]
        return {**less, **_split_wholes(wholes, hi)}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, layout = coded_rows(party)
        features = checked_features(payload["features"], layout)
        centre, scale = payload["centre"].double(), payload["scale"].double()
        scaled = (number_columns(x, features).cpu() - centre) / scale
        known = ~torch.isnan(scaled)
        scaled = torch.where(known, scaled, 0.0).clamp(-2.0, 2.0)
        sums = torch.stack([scaled.sum(0), *([scaled.square().sum(0)] if self.squares else [])], -1)
        found = {"rows": torch.tensor(len(x)), "count": known.sum(0), **split_sums(sums)}
        return Reply(found, weight=len(x)), memory

    def covered(self, party: Party, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As of other ops; random digits follow the last one of each float64: a sum would show a small number's."""
        hi, wholes = tensors["hi"], _wholes(tensors["hi"], tensors["lo"])
        draws = hashlib.shake_256(party.private("table sums")).digest(DRAWN * len(wholes))
        for k, whole in enumerate(wholes):
            drawn = int.from_bytes(draws[DRAWN * k : DRAWN * (k + 1)], "little")
            wholes[k] += drawn % 2 ** max(0, abs(whole).bit_length() - DIGITS)
        return {**tensors, **_split_wholes(wholes, hi)}

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        return self.impossible_sum(reply.tensors, payload, reply.weight)

    def impossible_sum(self, sums: Mapping[str, Tensor], payload: Payload, samples: int) -> str | None:
        most = torch.tensor([2, 4]) * 2**HI  # that a value adds to the sum, and to the sum of squares
        beyond = sums["hi"].abs() > most[: sums["hi"].shape[1]] * sums["count"][:, None]
        return "it has sums that its counts do not allow" if bool(beyond.any()) else None

    def expects(self, payload: Payload) -> dict[str, Shape]:
        count, sums = len(payload["features"]), 2 if self.squares else 1
        return {"rows": ROWS, "count": ((count,), torch.int64), "hi": ((count, sums), torch.int64),
                "lo": ((count, sums, PARTS), torch.int64)}  # fmt: skip


@register("table-histogram")
@dataclass(frozen=True)
class TableHistogram(Op):
    """Count the known values of number columns in equal cells between two bounds; values beyond go to the end cells."""

    per_sample: ClassVar[Bounds] = {"counts": PerSample(over=(-1,))}
    entries = stated(features=NAMED, low=Shaped(shape=("named",)), high=Shaped(shape=("named",)))

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        _check_named(payload, sizes, "low", "high")
        if not bool((payload["low"].double() < payload["high"].double()).all()):
            raise PartyError("the bounds in the payload are not a lower and a higher one")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, layout = coded_rows(party)
        features = checked_features(payload["features"], layout)
        low, high = payload["low"].double(), payload["high"].double()
        counts = torch.zeros(len(features), CELLS, dtype=torch.int64)
        for k, column in enumerate(number_columns(x, features).cpu().unbind(1)):
            known = column[~torch.isnan(column)]
            cells = torch.floor((known - low[k]) / (high[k] - low[k]) * CELLS).clamp(0, CELLS - 1)
            counts[k] = torch.bincount(cells.long(), minlength=CELLS)
        return Reply({"counts": counts}, weight=len(x)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"counts": ((len(payload["features"]), CELLS), torch.int64)}


def _codes(x: Tensor, column: int) -> np.ndarray:
    """The codes of a text column's known values."""
    values = x[:, column].cpu().numpy()
    return values[~np.isnan(values)].astype(np.int64)  # type: ignore[no-any-return]


def _pairs(payload: Payload) -> list[tuple[int, int]]:
    """The text columns and prefixes that a message names."""
    return list(zip(payload["column"].tolist(), payload["prefix"].tolist(), strict=True))


def _check_pairs(payload: Payload, sizes: Sizes) -> None:
    """Raise a PartyError for prefixes that are not in order, or not those of columns of texts."""
    pairs = _pairs(payload)
    if not 0 < len(pairs) <= PREFIXES:
        raise PartyError(f"the payload names {len(pairs)} prefixes of codes, and at most {PREFIXES} are answered")
    columns = sizes["table"].columns if "table" in sizes else None
    texts = {column for column, _ in pairs} if columns is None else {
        k for k, (_, kind) in enumerate(columns) if kind == "text"
    }  # fmt: skip
    if sorted(set(pairs)) != pairs or not {column for column, _ in pairs} <= texts:
        raise PartyError("the payload names a column that is not a text, or prefixes that are not in order")


def _check_named(payload: Payload, sizes: Sizes, *names: str) -> None:
    """Raise a PartyError for columns that a table does not have as numbers, or numbers that are not one per column."""
    if "table" in sizes:
        checked_features(payload["features"], sizes["table"])
    if any(len(payload[name]) != len(payload["features"]) for name in names):
        raise PartyError(f"the payload must have a number in {' and '.join(names)} for each of its columns")


@register("table-categories")
@dataclass(frozen=True)
class TableCategories(Op):
    """Count the texts of columns by the leading bits of their codes, for some prefixes.

    The parties' counts are summed, and the aggregator prolongs the prefixes that enough samples share: a prefix tree,
    as in Zhu et al., "Federated heavy hitters discovery with differential privacy", AISTATS 2020, over hashes. `shift`
    is the number of bits that are left out, at least 16. `bits` is the number of bits beyond the prefix.
    """

    shift: Annotated[int, Meta(ge=SHORTEST), CHECKED]
    bits: Annotated[int, Meta(ge=1, le=MOST_BITS), Owner(1, 64)]
    per_sample: ClassVar[Bounds] = {"rows": PerSample(), "counts": PerSample(over=(-1,))}
    entries = stated(column=CODES, prefix=CODES)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        if self.shift > CODE_BITS - self.bits:
            raise PartyError("the ask reads other bits of codes than are answered")
        _check_pairs(payload, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, _ = coded_rows(party)
        pairs = _pairs(payload)
        counts = np.zeros((len(pairs), 2**self.bits), dtype=np.int64)
        for column in dict.fromkeys(column for column, _ in pairs):
            rows = [k for k, (at, _) in enumerate(pairs) if at == column]
            prefixes = np.array([pairs[k][1] for k in rows])
            codes = _codes(x, column)
            heads = codes >> (self.shift + self.bits)
            at = np.minimum(np.searchsorted(prefixes, heads), len(prefixes) - 1)
            here = prefixes[at] == heads
            cells = (codes[here] >> self.shift) & (2**self.bits - 1)
            flat = np.bincount(at[here] * 2**self.bits + cells, minlength=len(rows) * 2**self.bits)
            counts[rows] = flat.reshape(len(rows), -1)
        return Reply({"rows": torch.tensor(len(x)), "counts": torch.from_numpy(counts)}, weight=len(x)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"rows": ROWS, "counts": ((len(payload["prefix"]), 2**self.bits), torch.int64)}


@register("table-names")
@dataclass(frozen=True)
class TableNames(Op):
    """Name categories: the bytes of each one's text, times the number of the party's samples that have it.

    Divided by the sum of these numbers, the sum of the bytes is the text, which all holders share.
    """

    per_sample: ClassVar[Bounds] = {
        "weights": PerSample(WEIGHT, per_party=True), "letters": PerSample(255 * WEIGHT, per_party=True),
    }  # fmt: skip
    entries = stated(column=CODES, prefix=CODES)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        _check_pairs(payload, sizes)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x, layout = coded_rows(party)
        pairs = _pairs(payload)
        weights = torch.zeros(len(pairs), dtype=torch.int64)
        letters = torch.zeros(len(pairs), NAME_BYTES, dtype=torch.int64)
        held = {column: np.unique(_codes(x, column), return_counts=True) for column, _ in pairs}
        for k, (column, prefix) in enumerate(pairs):
            codes, counts = held[column]
            first, last = np.searchsorted(codes, [prefix << SHORTEST, (prefix + 1) << SHORTEST])
            for code, count in zip(codes[first:last].tolist(), counts[first:last].tolist(), strict=True):
                text = layout.texts[code].encode()
                weight = min(count, WEIGHT)
                weights[k] += weight
                letters[k, : len(text)] += weight * torch.tensor(list(text), dtype=torch.int64)
        return Reply({"weights": weights, "letters": letters}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        count = len(payload["prefix"])
        return {"weights": ((count,), torch.int64), "letters": ((count, NAME_BYTES), torch.int64)}
