"""Functional encryption for inner products: a key for weights y decrypts the sum of y_i x_i and nothing else.

The roles are those of HybridAlpha (Xu, Baracaldo, Zhou, Anwar, Ludwig 2019): parties encrypt; a key authority gives the
aggregator a key for the weights of a round, and refuses weights of too few parties. The scheme is that of Chotard,
Dufour Sans, Gay, Phan and Pointcheval (2018) with one key per session. Party i has a secret exponent s_i and encrypts x
at a label as H(label)^s_i g^x, where H hashes into the group. The key for y is the sum of y_i s_i. Unlike in the scheme
of Abdalla, Catalano, Fiore, Gay and Ursu (2018), ciphertexts of different labels do not combine: nobody can add a value
of one party to a different value of another party.

Assumption: decisional Diffie-Hellman with exponents of 256 bits, in the squares modulo the prime of RFC 3526, group 14
(2048 bits). Each session has fresh exponents and one key, because two keys with different weights would decrypt their
difference. A key is a sum over the integers, not modulo the group's order, so its size reveals a few bits about the
exponents.

Decryption gives g to the power of the sum. The sum is found by a search over its range (Shanks 1971).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

from hansa.plumbing.errors import DataError, PartyError
from hansa.plumbing.stopping import go_on

PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
GENERATOR = 2  # of the squares, because the prime is 7 modulo 8
SIZE = 256  # bytes of a ciphertext
EXPONENT = 256  # bits of a party's secret
STEPS = 2**13  # powers of the generator in the table
LARGEST = 2**28  # the largest sum that the search finds


def base(label: bytes, position: int) -> int:
    """The hash of a label and a position into the squares; nobody knows its logarithm."""
    drawn = hashlib.shake_256(b"hansa functional" + position.to_bytes(8, "little") + label).digest(SIZE + 32)
    return pow(int.from_bytes(drawn, "little") % PRIME, 2, PRIME)


@functools.lru_cache(maxsize=1)
def _powers() -> tuple[list[int], dict[int, int]]:
    """The first powers of the generator, and the exponent of each."""
    powers = [1]
    while len(powers) < STEPS:
        powers.append(powers[-1] * GENERATOR % PRIME)
    return powers, {power: exponent for exponent, power in enumerate(powers)}


def _raised(exponent: int) -> int:
    return _powers()[0][exponent] if 0 <= exponent < STEPS else pow(GENERATOR, exponent, PRIME)


def encrypt(number: int, secret: int, base: int) -> int:
    """Encrypt a number with a party's secret at a base; use each base once per secret."""
    go_on()
    return pow(base, secret, PRIME) * _raised(number) % PRIME


def weights_key(weights: Sequence[int], secrets: Sequence[int], least: int) -> int:
    """The key that decrypts the sum of weight times number.

    A PartyError if fewer than `least` parties, or fewer than 2, have a weight other than 0.
    """
    count = sum(weight != 0 for weight in weights)
    if count < max(2, least):
        raise PartyError(f"it gives no key for a sum of {count} parties; {max(2, least)} are the fewest")
    return sum(weight * secret for weight, secret in zip(weights, secrets, strict=True))


def decrypt(ciphertexts: Sequence[int], weights: Sequence[int], key: int, base: int, low: int, high: int) -> int:
    """The sum of weight times number, from `low` to `high`.

    A DataError if it lies outside, for example because the key is for other weights. Ciphertexts with weight 0 are
    ignored.
    """
    product = math.prod(_weighted(ciphertexts, weights)) % PRIME
    return logarithm(product * pow(base, -key, PRIME) * pow(GENERATOR, -low, PRIME) % PRIME, high - low) + low


def _weighted(ciphertexts: Sequence[int], weights: Sequence[int]) -> Iterator[int]:
    for text, weight in zip(ciphertexts, weights, strict=True):
        if weight:
            if not 0 < text < PRIME:
                raise DataError("a ciphertext is not an element of the group")
            yield text if weight == 1 else pow(text, weight, PRIME)


def logarithm(power: int, largest: int) -> int:
    """The exponent, 0 to `largest`, of a power of the generator, by baby steps and giant steps."""
    known = _powers()[1]
    stride = pow(GENERATOR, -STEPS, PRIME)
    for giant in range(largest // STEPS + 1):
        if power in known and giant * STEPS + known[power] <= largest:
            return giant * STEPS + known[power]
        power = power * stride % PRIME
    raise DataError(f"the sum is not between 0 and {largest}: the key is for other weights, or a number was too large")
