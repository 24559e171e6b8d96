"""Additive homomorphic encryption: the cryptosystem of Okamoto and Uchiyama (1998).

n = p^2 q. g is derived from n by a hash, and h = g^n. A ciphertext of m is g^m h^r modulo n, and the product of
ciphertexts is a ciphertext of the sum. It is semantically secure under the p-subgroup assumption; as in the Paillier
channel, the exponent r is short (Coron, Naccache and Paillier 1999: 224 bits for n of 2048 bits, 256 bits for longer
ones), which adds the assumption that such powers of h look random. A ciphertext has the length of n, half as much as
Paillier's, and its arithmetic is modulo n and not n^2. That makes this scheme several times as fast.

Its known weakness: a decryption that wraps around p reveals p. If somebody encrypts a number m above p and learns
m mod p, then gcd(n, m - (m mod p)) is p. So nobody may learn the decryption of a number that is out of range.
`AdditivePrivateKey.decrypt` therefore has a limit, at least `SLACK` bits below p, and refuses everything outside it
without giving the number. A sender that does not know p hits the range with a probability of 2^-SLACK at each attempt,
so the refusals do not reveal p either.

A sum of ciphertexts carries the sum of their random exponents, which the maker of the ciphertexts knows. Whoever
returns sums to the key holder must apply `AdditivePublicKey.hidden` first: then they are ciphertexts like any other of
the same sum, and do not tell which ciphertexts were added.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from torch import Tensor

from hansa.core.quantities import KEY_BITS
from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import go_on
from hansa.secure.big_integers import FixedBase, big, product
from hansa.secure.byte_tensors import as_bytes, from_rows, to_rows
from hansa.secure.primes import Stream, prime, small_product

SMALLEST, LARGEST = 1024, 4096  # bits of n: 2048 are considered safe, fewer are for tests
AdditiveKeyBits = Annotated[int, Meta(ge=SMALLEST, le=LARGEST, multiple_of=8), KEY_BITS]
SLACK = 80  # bits between the largest number and p
TRIALS = 2**12  # n must have no prime factor below this number
WINDOW, OWN_WINDOW = 8, 8  # bits of an exponent per product; for the key holder, who encrypts most


@functools.lru_cache(maxsize=8)
def _generator(n: int) -> int:
    """g: a hash of n."""
    return 2 + Stream(b"hansa okamoto-uchiyama" + n.to_bytes((n.bit_length() + 7) // 8, "little")).below(n - 3)


@functools.lru_cache(maxsize=8)
def _bases(n: int) -> tuple[FixedBase, FixedBase, FixedBase]:
    """The powers of g, of 1 / g and of h modulo n."""
    g, modulus = big(_generator(n)), big(n)
    return (FixedBase(g, n, WINDOW), FixedBase(pow(g, -1, modulus), n, WINDOW),
            FixedBase(pow(g, modulus, modulus), n, WINDOW))  # fmt: skip


@functools.lru_cache(maxsize=8)
def _own_bases(p: int, q: int) -> tuple[FixedBase, FixedBase]:
    """The powers of h modulo p^2 and modulo q."""
    n = p * p * q
    one, other = (FixedBase(pow(big(_generator(n)), big(n), big(m)), m, OWN_WINDOW) for m in (p * p, q))
    return one, other


@dataclass(frozen=True)
class AdditivePublicKey:
    """The public key: the modulus n. Ciphertexts are integers modulo n."""

    n: int

    def __post_init__(self) -> None:
        if not SMALLEST <= self.n.bit_length() <= LARGEST or self.n % 2 == 0:
            raise DataError(f"not a key for sums: n has {self.n.bit_length()} bits; expected an odd number of "
                            f"{SMALLEST} to {LARGEST} bits")  # fmt: skip

    def check(self, bits: int) -> None:
        """Refuse a received key that has the wrong length, or whose n is easy to factor."""
        if self.bits != bits:
            raise DataError(f"the key has {self.bits} bits, expected {bits}")
        if math.gcd(self.n, small_product(TRIALS)) != 1 or math.isqrt(self.n) ** 2 == self.n:
            raise DataError("not a key for sums: n has a small factor, or is a square")
        if pow(big(2), big(self.n - 1), big(self.n)) == 1:
            raise DataError("not a key for sums: n is a prime, and not a product")

    @property
    def bits(self) -> int:
        return self.n.bit_length()

    @property
    def size(self) -> int:
        """The bytes of a ciphertext."""
        return (self.bits + 7) // 8

    @property
    def capacity(self) -> int:
        """Every number, and every sum that is decrypted, must be below 2^capacity in absolute value."""
        return capacity_of(self.bits)

    @property
    def random_bits(self) -> int:
        """The bits of a random exponent."""
        return 224 if self.bits < 3072 else 256

    @functools.cached_property
    def modulus(self) -> int:
        """n, as a number of the fastest type."""
        return big(self.n)  # type: ignore[no-any-return]

    def encrypt(self, numbers: Iterable[int], draws: Stream) -> list[int]:
        """Encrypt signed numbers below 2^capacity in absolute value."""
        up, down, h = _bases(self.n)
        out = []
        for number in numbers:
            go_on()
            self.check_number(number)
            power = up.power(number) if number >= 0 else down.power(-number)
            out.append(power * h.power(draws.bits(self.random_bits)) % self.modulus)
        return out

    def check_number(self, number: int) -> None:
        """Refuse a number that is too large to be encrypted."""
        if abs(number) >> self.capacity:
            raise DataError(f"a number of {number.bit_length()} bits is too large; a key of {self.bits} bits encrypts "
                            f"numbers below 2^{self.capacity}")  # fmt: skip

    def add(self, first: int, second: int) -> int:
        """The encrypted sum of two numbers."""
        return first * second % self.modulus

    def total(self, ciphertexts: Sequence[int]) -> int:
        """The encrypted sum of many numbers; of none, a ciphertext of 0 that is not hidden."""
        return product(ciphertexts, self.n)

    def minus(self, first: int, second: int) -> int:
        """The encrypted difference of two numbers."""
        return first * pow(big(second), -1, self.modulus) % self.modulus  # type: ignore[no-any-return]

    def times(self, ciphertext: int, factor: int) -> int:
        """The encrypted product with a plain number, which may be negative."""
        return pow(big(ciphertext), big(factor), self.modulus)  # type: ignore[no-any-return]

    def hidden(self, ciphertexts: Iterable[int], draws: Stream) -> list[int]:
        """The same numbers in fresh ciphertexts, which do not tell how they were computed, not even to the key holder.

        The random exponents are `SLACK` bits longer than the order of h, which divides (p - 1)(q - 1): the result is
        within 2^-SLACK of a uniform ciphertext of the number.
        """
        h, out, length = _bases(self.n)[2], [], prime_bits(self.bits) * 2 + SLACK
        for ciphertext in ciphertexts:
            go_on()
            out.append(ciphertext * h.power(draws.bits(length)) % self.modulus)
        return out

    def rows(self, ciphertexts: Sequence[int]) -> Tensor:
        """Ciphertexts as rows of `size` bytes."""
        return to_rows([int(value) for value in ciphertexts], self.size)

    def ciphertexts(self, rows: Tensor) -> list[int]:
        """Received ciphertexts, from rows of bytes; a DataError if any is not a number that has an inverse modulo n."""
        if rows.dim() != 2 or rows.shape[1] != self.size:
            raise DataError(f"a ciphertext under this key has {self.size} bytes, and the message has the shape "
                            f"{tuple(rows.shape)}")  # fmt: skip
        values = [big(value) for value in from_rows(rows)]
        if not all(0 < value < self.modulus for value in values) or math.gcd(int(self.total(values)), self.n) != 1:
            raise DataError("received a number that is not a ciphertext: it has no inverse modulo n")
        return values

    @property
    def name(self) -> str:
        """A short hash that identifies the key."""
        return hashlib.sha256(as_bytes(self.tensor())).hexdigest()[:32]

    def tensor(self) -> Tensor:
        """The key as bytes."""
        return to_rows([self.n], self.size)[0]

    @classmethod
    def of_tensor(cls, data: Tensor) -> AdditivePublicKey:
        """The key that `tensor` encoded; a DataError if it is invalid."""
        return cls(*from_rows(data.view(1, -1)))


@dataclass(frozen=True)
class AdditivePrivateKey:
    """The private key: the two primes of n = p^2 q."""

    p: int
    q: int

    @classmethod
    def generate(cls, bits: int, draws: Stream) -> AdditivePrivateKey:
        """A new key whose n has `bits` bits."""
        check_bits(bits)
        length = prime_bits(bits)
        while True:
            p, q = prime(draws, length), prime(draws, bits - 2 * length)
            n = p * p * q
            apart = p != q and math.gcd(p - 1, q) == 1 and math.gcd(q - 1, p) == 1
            if n.bit_length() == bits and apart and pow(_generator(n), p - 1, p * p) != 1:
                return cls(p, q)

    @functools.cached_property
    def public(self) -> AdditivePublicKey:
        return AdditivePublicKey(self.p * self.p * self.q)

    @functools.cached_property
    def _square(self) -> int:
        return big(self.p * self.p)  # type: ignore[no-any-return]

    @functools.cached_property
    def _logarithm(self) -> int:
        """The number by which the logarithm of c^(p - 1) to the base 1 + p is multiplied to give the message."""
        power = pow(big(_generator(self.public.n)), big(self.p - 1), self._square)
        return pow((power - 1) // self.p, -1, big(self.p))  # type: ignore[no-any-return]

    @functools.cached_property
    def _one(self) -> int:
        """The element u of order p, which is 1 modulo q and has the message 1, as a multiple of p: u = 1 + _one."""
        inverse = pow(big(self.p - 1) * self._logarithm % self.p, -1, big(self.p))
        return inverse * self.p  # type: ignore[no-any-return]

    @functools.cached_property
    def _join(self) -> int:
        """1 / p^2 modulo q."""
        return pow(self._square, -1, big(self.q))  # type: ignore[no-any-return]

    def encrypt(self, numbers: Iterable[int], draws: Stream) -> list[int]:
        """Encrypt as with the public key, and faster: modulo p^2 and q (Chinese remainder theorem).

        Instead of g^m the ciphertext has the element of order p with the same message. The two differ by a power of h,
        which the random exponent hides.
        """
        numbers, bases = list(numbers), _own_bases(self.p, self.q)
        at_square, at_q = (base.rows(self.public.random_bits) for base in bases)
        square, q, one, join = self._square, big(self.q), self._one, self._join
        for number in (min(numbers, default=0), max(numbers, default=0)):
            self.public.check_number(number)
        out = []
        for at, digits in enumerate(draws.digits(len(numbers), len(at_q), OWN_WINDOW)):
            if at % 64 == 0:
                go_on()
            low, high = 1 + numbers[at] * one, big(1)
            for row, other, digit in zip(at_square, at_q, digits, strict=True):
                low = low * row[digit] % square
                high = high * other[digit] % q
            out.append(low + (high - low) * join % q * square)
        return out

    def decrypt(self, ciphertexts: Iterable[int], limit: int) -> list[int]:
        """The signed numbers; a DataError if one exceeds `limit` in absolute value, without telling which number."""
        if limit >> self.public.capacity:
            raise DataError(f"the limit has {limit.bit_length()} bits; a key of {self.public.bits} bits decrypts "
                            f"numbers below 2^{self.public.capacity}")  # fmt: skip
        p, square, exponent, out = big(self.p), self._square, big(self.p - 1), []
        for ciphertext in ciphertexts:
            go_on()
            message = (pow(ciphertext % square, exponent, square) - 1) // p * self._logarithm % p
            number = message - p if 2 * message > p else message
            if abs(number) > limit:
                raise DataError("a decrypted number is out of range: some sender overflowed its sums")
            out.append(int(number))
        return out

    def tensor(self) -> Tensor:
        """The key as bytes, for the memory of its holder."""
        return to_rows([self.p, self.q], (prime_bits(self.public.bits) + 7) // 8).view(-1)

    @classmethod
    def of_tensor(cls, data: Tensor) -> AdditivePrivateKey:
        """The key that `tensor` encoded."""
        return cls(*from_rows(data.view(2, -1)))


def prime_bits(bits: int) -> int:
    """The bits of p, for n = p^2 q of `bits` bits."""
    return -(-bits // 3)


def capacity_of(bits: int) -> int:
    """The bits of the largest number, for a key of `bits` bits."""
    return prime_bits(bits) - 1 - SLACK


def check_bits(bits: int) -> None:
    """Refuse key lengths that are too short, too long, or not whole bytes."""
    if not SMALLEST <= bits <= LARGEST or bits % 8:
        raise DataError(f"a key must have {SMALLEST} to {LARGEST} bits, a multiple of 8, got {bits}")
