"""Paillier's cryptosystem with the private key in shares: any so many of them decrypt, and fewer learn nothing.

Damgard and Jurik (2001), after Shoup (2000). n is a product of safe primes p = 2p' + 1 and q = 2q' + 1, m = p'q'. The
exponent d that is 0 modulo m and 1 modulo n decrypts; its shares are the values at 1, 2, ... of a random polynomial
modulo n m with d at 0. A partial decryption is c^(2 D s_i), D the factorial of the number of shares, which makes the
coefficients of the interpolation whole numbers, and the exponent even, where squares have no part of small order.
Partial decryptions carry no proof that they were made rightly: a wrong one is noticed, as no number comes out, and not
whose it was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hansa.core.errors import DataError
from hansa.secure.numbers import Stream, from_rows, safe_prime, to_rows
from hansa.secure.paillier import SMALLEST, Ciphertext, PublicKey, public_key


@dataclass(frozen=True)
class Share:
    """One of `total` shares of a private key, of which any `needed` decrypt; `place` says which, from 1 on."""

    key: PublicKey
    place: int
    total: int
    needed: int
    value: int

    def partial(self, ciphertext: Ciphertext) -> int:
        """This share's part in the decryption of a ciphertext."""
        if ciphertext.key != self.key:
            raise DataError("the ciphertext is under another key")
        return pow(ciphertext.value, 2 * math.factorial(self.total) * self.value, self.key.square)

    def tensor(self) -> Tensor:
        """The share as bytes, without the key."""
        size = self.key.size
        return to_rows([self.place | self.total << 32 | self.needed << 64 | self.value << 96], size + 12)[0]

    @classmethod
    def of_tensor(cls, key: PublicKey, data: Tensor) -> Share:
        """The share that `tensor` gave."""
        (whole,) = from_rows(data.view(1, -1))
        low = 2**32 - 1
        return cls(key, whole & low, whole >> 32 & low, whole >> 64 & low, whole >> 96)


def deal(bits: int, total: int, needed: int, draws: Stream) -> list[Share]:
    """A new key in so many shares, any `needed` of which decrypt. Whoever deals knows the key until it forgets it."""
    if bits < SMALLEST or bits % 16:
        raise DataError(f"a key has at least {SMALLEST} bits, in whole bytes a half, got {bits}")
    p = safe_prime(draws, bits // 2)
    q = p
    while q == p:
        q = safe_prime(draws, bits // 2)
    return deal_with(p, q, total, needed, draws)


def deal_with(p: int, q: int, total: int, needed: int, draws: Stream) -> list[Share]:
    """The same, given the safe primes."""
    if not 1 <= needed <= total:
        raise DataError(f"{needed} of {total} shares cannot be needed")
    n, m = p * q, (p // 2) * (q // 2)
    key = public_key(n, 2 + draws.below(n - 3))
    secret = m * pow(m, -1, n)  # 0 modulo m, 1 modulo n
    coefficients = [secret] + [draws.below(n * m) for _ in range(needed - 1)]
    return [
        Share(key, place, total, needed, functools.reduce(lambda at, c: (at * place + c) % (n * m), coefficients[::-1]))
        for place in range(1, total + 1)
    ]


def combine(key: PublicKey, partials: Mapping[int, int], total: int, needed: int) -> int:
    """The message of a ciphertext, from partial decryptions by the places of their shares; a DataError where they are
    too few or one of them is wrong."""
    if len(partials) < needed:
        raise DataError(f"{len(partials)} partial decryptions, and {needed} are needed")
    places = sorted(partials)[:needed]
    scale = math.factorial(total)
    product = 1
    for place in places:
        numerator, denominator = scale, 1
        for other in places:
            if other != place:
                numerator, denominator = numerator * -other, denominator * (place - other)
        product = product * pow(partials[place], 2 * (numerator // denominator), key.square) % key.square
    if product % key.n != 1:
        raise DataError("the partial decryptions do not belong together: one of them is wrong")
    return (product - 1) // key.n * pow(4 * scale * scale, -1, key.n) % key.n
