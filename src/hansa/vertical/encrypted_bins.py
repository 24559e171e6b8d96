"""Sums by bin under encryption: the statistics of a sample in one ciphertext, and the sums of several bins in one.

The active party encrypts one number per sample: its gradient, its second derivative and a 1 for the count, side by side
in fields that are wide enough for their sums over all samples. A passive party multiplies the ciphertexts of the
samples of each bin, puts several sums into one ciphertext by powers of 2, and hides how it was computed
(Cheng et al. 2021, SecureBoost; Chen et al. 2021, SecureBoost+).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hansa.classical.trees.bins import Bins
from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import go_on
from hansa.secure.additive import AdditivePrivateKey, AdditivePublicKey
from hansa.secure.big_integers import big
from hansa.secure.primes import Stream

Array = np.ndarray[Any, Any]
STEP = 1024  # samples between two looks whether to stop


@dataclass(frozen=True)
class Fields:
    """The fields of a number: the gradient of each output, the second derivative unless `constant`, and the count.

    `first` and `second` are the largest absolute gradient and second derivative of a sample. Gradients are shifted by
    `first` for each counted sample, so that no field is negative.
    """

    outputs: int
    constant: bool
    first: int
    second: int
    rows: int

    @functools.cached_property
    def widths(self) -> list[int]:
        """The bits of each field, the count last: enough for the sum over all rows."""
        middle = [] if self.constant else [(self.second * self.rows).bit_length()]
        return [(2 * self.first * self.rows).bit_length()] * self.outputs + middle + [self.rows.bit_length()]

    @property
    def width(self) -> int:
        """The bits of a number."""
        return sum(self.widths)

    def slots(self, capacity: int) -> int:
        """The number of sums in one ciphertext; a DataError if not even one fits."""
        if self.width > capacity:
            raise DataError(f"the statistics of a sample need {self.width} bits, and the key encrypts {capacity}; "
                            "raise key_bits")  # fmt: skip
        return capacity // self.width

    def encode(self, statistics: Array) -> list[int]:
        """The number of each sample, from its statistics [statistics, samples]."""
        total, shift = np.zeros(statistics.shape[1], dtype=object), 0
        count = statistics[-1].astype(np.int64)
        for at, (row, width) in enumerate(zip(statistics, self.widths, strict=True)):
            whole = row.astype(np.int64) + (self.first * count if at < self.outputs else 0)
            total += whole.astype(object) << shift
            shift += width
        found: list[int] = total.tolist()
        return found

    def decode(self, numbers: Sequence[int]) -> Array:
        """The statistics [statistics, sums] of sums."""
        rest, out = np.array(numbers, dtype=object), list[Array]()
        for width in self.widths:
            out.append((rest & ((1 << width) - 1)).astype(np.int64) if len(rest) else np.zeros(0, dtype=np.int64))
            rest = rest >> width
        found = np.stack(out)
        found[: self.outputs] -= self.first * found[-1]
        return found


@dataclass(frozen=True, eq=False)
class Layout:
    """The bins of a party: how many each feature has, which are summed, and which are left out.

    Bins without samples are left out, and so is the fullest bin of each feature: the active party knows the total.
    Positions count through the bins of all features.
    """

    widths: Array
    summed: Array
    omitted: Array

    @classmethod
    def of(cls, codes: Array, bins: Bins) -> Layout:
        """The layout of a party, from the bin numbers [features, samples] of its samples."""
        summed, omitted = list[int](), list[int]()
        for row, width, offset in zip(codes, bins.widths.tolist(), bins.offsets.tolist(), strict=False):
            counts = np.bincount(row, minlength=width)
            fullest = int(counts.argmax())
            omitted.append(offset + fullest)
            summed += [offset + k for k in np.flatnonzero(counts).tolist() if k != fullest]
        return cls(*(np.array(part, dtype=np.int32) for part in (bins.widths, summed, omitted)))

    @property
    def offsets(self) -> Array:
        return np.concatenate([[0], np.cumsum(self.widths)]).astype(np.int64)

    def fault(self, most: int) -> str | None:
        """Why a received layout is impossible, for at most `most` bins of a feature; None if it may be."""
        if int(self.widths.min()) < 2 or int(self.widths.max()) > most:
            return f"a feature has at least 2 and at most {most} bins"
        ends = self.offsets
        inside = bool(((self.omitted >= ends[:-1]) & (self.omitted < ends[1:])).all())
        rising = bool((np.diff(self.summed) > 0).all())
        known = not len(self.summed) or (int(self.summed[0]) >= 0 and int(self.summed[-1]) < ends[-1])
        if not (inside and rising and known) or np.isin(self.omitted, self.summed).any():
            return "its bins do not fit together"
        return None

    def bins(self) -> Bins:
        """Bins of these numbers, with cuts 0, 1, ... in place of the party's own, which the active party never sees."""
        return Bins.of_features([[float(k) for k in range(width - 2)] for width in self.widths.tolist()], ())

    def whole(self, found: Array, totals: Array) -> Array:
        """All sums [nodes, statistics, bins], from the summed ones [statistics, nodes * summed] and the totals."""
        nodes = len(totals)
        out = np.zeros((nodes, totals.shape[1], int(self.offsets[-1])), dtype=np.int64)
        out[:, :, self.summed] = found.reshape(totals.shape[1], nodes, len(self.summed)).transpose(1, 0, 2)
        rest = totals[:, :, None] - np.add.reduceat(out, self.offsets[:-1], axis=2)
        out[:, :, self.omitted] = rest
        return out


class BinSums:
    """A passive party's side: sums of ciphertexts by node and bin."""

    def __init__(self, key: AdditivePublicKey, codes: Array, layout: Layout) -> None:
        place = np.full(int(layout.offsets[-1]), -1, dtype=np.int64)
        place[layout.summed] = np.arange(len(layout.summed))
        at = place[codes.astype(np.int64) + layout.offsets[:-1, None]].T  # [samples, features]
        samples, _ = there = np.nonzero(at >= 0)
        ends = np.cumsum(np.bincount(samples, minlength=len(at))).tolist()
        flat = at[there].tolist()
        self._bins = [flat[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        self._key, self._summed = key, len(layout.summed)

    def empty(self, nodes: int) -> list[int]:
        """Sums of no samples."""
        return [big(1)] * (nodes * self._summed)

    def add(self, sums: list[int], ciphertexts: Sequence[int], first: int, nodes: Array) -> None:
        """Add the ciphertexts of samples from number `first` on, whose nodes are given; -1 for no node."""
        modulus, summed = self._key.modulus, self._summed
        for k in np.flatnonzero(nodes >= 0).tolist():
            if k % STEP == 0:
                go_on()
            text, start = ciphertexts[k], int(nodes[k]) * summed
            for bin in self._bins[first + k]:
                sums[start + bin] = sums[start + bin] * text % modulus

    def packed(self, sums: Sequence[int], fields: Fields, draws: Stream) -> list[int]:
        """The sums, several in one ciphertext, hidden."""
        slots, factor, modulus = fields.slots(self._key.capacity), big(1 << fields.width), self._key.modulus
        out = []
        for start in range(0, len(sums), slots):
            go_on()
            group = sums[start : start + slots]
            value = group[-1]
            for text in reversed(group[:-1]):
                value = pow(value, factor, modulus) * text % modulus
            out.append(value)
        return self._key.hidden(out, draws)


def opened(key: AdditivePrivateKey, ciphertexts: Sequence[int], fields: Fields, count: int) -> Array:
    """The statistics [statistics, count] of `count` sums in packed ciphertexts."""
    slots, width = fields.slots(key.public.capacity), fields.width
    numbers = list[int]()
    for number in key.decrypt(ciphertexts, (1 << slots * width) - 1):
        if number < 0:
            raise DataError("a decrypted number is out of range: some sender overflowed its sums")
        numbers += [number >> slot * width & ((1 << width) - 1) for slot in range(slots)]
    return fields.decode(numbers[:count])
