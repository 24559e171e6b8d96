"""Named, counter-based randomness: every draw is a function of a key, not of earlier draws.

A key names a stream: (seed, purpose, round, party, step). Streams with different names are independent. So selection
does not affect training, and a party's draws depend neither on the parties trained with it nor on padding.

`generator` (numpy's Philox) is for selection and partitions, `shuffled` for the order of samples. `uniform` and
`normal` are pure torch functions of an integer key. They work under `torch.func.vmap`, and element (i, j, ...) has the
same value in a tensor of any size. `noise` is a faster `normal` for long vectors, `fractions` a faster `uniform`. The
mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood 2014). It uses integers alone, so that all
machines and devices draw the same bits.

These streams are not secret: the seed determines them. What must not be guessed is drawn by `kernel.secret_draws`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
# Odd multipliers, one per dimension: an element's counter depends on its coordinates, not on the tensor's size.
_AXES = (0xD1342543DE82EF95, 0xAF251AF3B0F025B5, 0xC6BC279692B5C323, 0x9FB21C651E98DF25, 0xB492B66FBE98F273,
         0xE7037ED1A0B428DB)  # fmt: skip
_FEW = 2**12  # numbers that are shuffled by sorting: a Feistel network of few bits has too few permutations
_FEISTEL = 8  # rounds of a keyed permutation; an even number, so that its halves end where they began
_CACHED = 2**15  # hashes computed at once on a CPU, so that they stay in its cache


def key(*parts: int | str) -> int:
    """A signed 64-bit key for a named stream."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator for a named stream."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int64 tensor."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_MULTIPLY_1)
    z = (z ^ _shift(z, 27)) * _signed(_MULTIPLY_2)
    return z ^ _shift(z, 31)


def _mix_in_place(z: Tensor) -> Tensor:
    """As `_mix`; overwrites z."""
    z.bitwise_xor_(_shift(z, 30)).mul_(_signed(_MULTIPLY_1))
    z.bitwise_xor_(_shift(z, 27)).mul_(_signed(_MULTIPLY_2))
    return z.bitwise_xor_(_shift(z, 31))


def fold(k: Tensor, index: int | Tensor) -> Tensor:
    """A new key from a key and an index."""
    if isinstance(index, Tensor):
        return _mix(k + (index + 1) * _signed(_GOLDEN))
    return _mix(k + _signed(((index + 1) * _GOLDEN) % (1 << 64)))


def folded(k: int, *indices: int) -> int:
    """As `fold`, for a single key and several indices in turn."""
    whole = (1 << 64) - 1
    for index in indices:
        z = (k + (index + 1) * _GOLDEN) & whole
        z = ((z ^ (z >> 30)) * _MULTIPLY_1) & whole
        z = ((z ^ (z >> 27)) * _MULTIPLY_2) & whole
        k = z ^ (z >> 31)
    return _signed(k & whole)


def step_keys(k: int, steps: int) -> Tensor:
    """The keys of steps 0, 1, ... of one stream, as an int64 tensor."""
    index = torch.arange(1, steps + 1, dtype=torch.int64)
    return _mix(index * _signed(_GOLDEN) + k)


def keys_of_steps(k: Tensor, steps: int) -> Tensor:
    """As `step_keys`, for many streams at once: [streams, steps]."""
    index = torch.arange(1, steps + 1, dtype=torch.int64, device=k.device)
    return _mix(index * _signed(_GOLDEN) + k.unsqueeze(-1))


def shuffled(k: int, n: int) -> np.ndarray[Any, Any]:
    """0, 1, ..., n - 1 in an order drawn from a key: sorted by their hashes.

    `shuffles` gives the same orders for many keys at once, on any device.
    """
    return np.argsort(step_keys(k, n).numpy(), kind="stable")


def uniforms(k: int, n: int) -> np.ndarray[Any, Any]:
    """n uniform float64 numbers in [0, 1), drawn from a single key."""
    return (step_keys(k, n).numpy().view(np.uint64) >> np.uint64(11)) * 2.0**-53


def shuffles(k: Tensor, sizes: Tensor, widest: int) -> Tensor:
    """The orders [keys, widest] of 0, 1, ..., sizes[i] - 1; entries beyond sizes[i] have no meaning."""
    index = torch.arange(1, widest + 1, dtype=torch.int64, device=k.device)
    hashes = keys_of_steps(k, widest)
    beyond = index > sizes.unsqueeze(-1)
    return torch.argsort(hashes.masked_fill(beyond, torch.iinfo(torch.int64).max), dim=-1, stable=True)


def _bits(k: Tensor, shape: Sequence[int]) -> Tensor:
    if len(shape) > len(_AXES):
        raise ValueError(f"keyed randomness supports up to {len(_AXES)} dimensions, got {len(shape)}")
    counter = k
    for axis, extent in enumerate(shape):
        index = torch.arange(extent, dtype=torch.int64, device=k.device) * _signed(_AXES[axis])
        counter = counter + index.view([extent if a == axis else 1 for a in range(len(shape))])
    return _mix(_mix(counter))


def uniform(k: Tensor, shape: Sequence[int]) -> Tensor:
    """Uniform float64 numbers in [0, 1) drawn from the key."""
    return _shift(_bits(k, shape), 11).to(torch.float64) * 2.0**-53


def normal(k: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal float64 numbers drawn from the key (Box and Muller 1958)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(k, 0), shape)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(k, 1), shape))


def noise(k: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """A vector of standard normal numbers drawn from the key, computed in `dtype`.

    One hash makes two numbers: 40 bits for the radius, 24 for the angle (Box and Muller 1958), so no absolute value
    exceeds 7.6. Each key has its own odd step between counters, so that streams do not overlap. On a CPU numpy computes
    the numbers: its integers and functions of float32 are twice as fast as PyTorch's.
    """
    if k.device.type == "cpu" and dtype in (torch.float32, torch.float64):
        if torch._C._functorch.is_batchedtensor(k):
            drawn: Tensor = _NoiseOnCpu.apply(k, count, dtype)  # type: ignore[no-untyped-call]
            return drawn
        return _NoiseOnCpu.forward(k, count, dtype)
    return by_torch(k, count, dtype)


def by_torch(k: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The numbers of `noise` by PyTorch, for other devices than a CPU; they may differ in their last bits."""
    first, stride = fold(k, 0), fold(k, 1) | 1
    counter = torch.arange(-(-count // 2), dtype=torch.int64, device=k.device)
    z = _mix_in_place((counter * stride).add_(first))
    radius = _shift(z, 24).to(dtype).add_(0.5).mul_(2.0**-40).log_().mul_(-2.0).sqrt_()
    angle = z.bitwise_and_((1 << 24) - 1).to(dtype).mul_(2.0 * math.pi * 2.0**-24)
    return torch.cat([torch.cos(angle).mul_(radius), angle.sin_().mul_(radius)])[:count]


class _NoiseOnCpu(torch.autograd.Function):
    """`noise` by numpy; under `torch.func.vmap` with the same bits, one key after another."""

    @staticmethod
    def forward(k: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        try:
            key = int(k)
        except RuntimeError:  # the steps are being recorded, and values are not known yet
            return by_torch(k, count, dtype)
        return torch.from_numpy(_normals(key, count, np.float32 if dtype == torch.float32 else np.float64))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: draws have no derivative."""

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], k: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        keys = k.expand(info.batch_size) if dims[0] is None else k.movedim(dims[0], 0)
        return torch.stack([noise(key, count, dtype) for key in keys]), 0


def _normals(k: int, count: int, dtype: type) -> np.ndarray[Any, Any]:
    """The numbers of `noise`, in blocks that stay in a core's cache."""
    half, whole = -(-count // 2), (1 << 64) - 1
    size = min(half, _CACHED)
    first, stride = folded(k, 0), folded(k, 1) | 1
    out: np.ndarray[Any, Any] = np.empty(2 * half, dtype)
    steps = np.arange(size, dtype=np.uint64) * np.uint64(stride & whole)
    hashes, shifted, radii = np.empty_like(steps), np.empty_like(steps), np.empty_like(out[:size])
    for at in range(0, half, _CACHED):
        end = min(half, at + _CACHED)
        z, t, radius = hashes[: end - at], shifted[: end - at], radii[: end - at]
        cosine, sine = out[at:end], out[half + at : half + end]
        np.add(steps[: end - at], np.uint64((first + at * stride) & whole), out=z)
        for bits, factor in ((30, _MULTIPLY_1), (27, _MULTIPLY_2), (31, None)):
            np.bitwise_xor(z, np.right_shift(z, np.uint64(bits), out=t), out=z)
            if factor is not None:
                np.multiply(z, np.uint64(factor), out=z)
        radius[:] = np.right_shift(z, np.uint64(24), out=t).view(np.int64)
        radius += 0.5
        radius *= 2.0**-40
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        sine[:] = np.bitwise_and(z, np.uint64((1 << 24) - 1), out=t).view(np.int64)
        sine *= 2.0 * math.pi * 2.0**-24
        np.cos(sine, out=cosine)
        np.sin(sine, out=sine)
        cosine *= radius
        sine *= radius
    return out[:count]


def fractions(k: Tensor, start: int, stop: int) -> Tensor:
    """The numbers start..stop-1 of each key's uniform float32 stream in [0, 1), as [keys, stop - start].

    They are multiples of 2^-24. One hash makes two numbers (its halves, of 24 bits each), so `start` is even. As for
    `noise`, each key has its own odd step between counters. On a CPU ask for some 2^16 numbers at once, so that they
    stay in its cache.
    """
    if start % 2:
        raise ValueError(f"fractions: start must be even, got {start}")
    first, stride = fold(k, 0).unsqueeze(-1), (fold(k, 1) | 1).unsqueeze(-1)
    counter = torch.arange(start // 2, -(-stop // 2), dtype=torch.int64, device=k.device)
    z = _mix_in_place((counter * stride).add_(first))
    halves = z.view(torch.int32).bitwise_and_((1 << 24) - 1)
    return halves.to(torch.float32).mul_(2.0**-24)[..., : stop - start]


def coordinates(k: Tensor, size: int, count: int) -> Tensor:
    """`count` different numbers of 0..size-1 for each key, as [keys, count]: the first of a keyed permutation.

    Each is uniform over all places. The cost does not grow with a large `size`: a Feistel network permutes the numbers
    of as many bits as `size` has, and is repeated where its result is not below `size` (Black and Rogaway 2002). Few
    numbers are sorted by their hashes instead.
    """
    if not 0 <= count <= size:
        raise ValueError(f"coordinates: count must lie in 0..{size}, got {count}")
    if size <= _FEW:
        return torch.argsort(keys_of_steps(k, size), dim=-1, stable=True)[:, :count]
    bits = (size - 1).bit_length()
    widths = bits // 2, bits - bits // 2
    rounds = [fold(k, index) for index in range(_FEISTEL)]
    row, x = torch.arange(len(k), device=k.device).repeat_interleave(count), torch.arange(count, device=k.device)
    out = _permuted(x.repeat(len(k)), [keys[row] for keys in rounds], widths)
    while bool((outside := out >= size).any()):
        at = outside.nonzero().flatten()
        out[at] = _permuted(out[at], [keys[row[at]] for keys in rounds], widths)
    return out.view(len(k), count)


def _permuted(x: Tensor, keys: Sequence[Tensor], widths: tuple[int, int]) -> Tensor:
    """The images of numbers under a Feistel network with one key per round; the halves have `widths` bits."""
    low, high = widths
    left, right = x >> low, x & ((1 << low) - 1)  # of `high` and `low` bits
    for key in keys:
        mixed = _mix_in_place(right * _signed(_GOLDEN) + key).bitwise_and_((1 << high) - 1)
        left, right = right, left ^ mixed
        low, high = high, low
    return (left << low) | right
