"""Paillier's cryptosystem (1999): the public key encrypts and adds, the private key decrypts.

g = n + 1. The randomiser is that of Damgard, Jurik and Nielsen (2010, section 4.2): h = -x^2 modulo n, and a ciphertext
is randomised by (h^n)^a modulo n^2 with a random exponent a of half the bits of n. x is derived from n by a hash. If h
were part of the key, the maker of the key could choose an h of small order, and everybody could read the ciphertexts.
The primes are 3 modulo 4 and gcd(p - 1, q - 1) = 2, so -x^2 generates all numbers of Jacobi symbol 1, except with
negligible probability.

Assumptions: the decisional composite residuosity assumption, as for Paillier's own randomiser, and in addition that
powers of h with exponents of half the length are indistinguishable from random ones. The base is fixed, so a table
holds its powers, and an exponentiation takes about two hundred products.

Several numbers share one plaintext (`Packing`). Each has enough bits for its largest possible sum.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import go_on
from hansa.secure.big_integers import FixedBase, power
from hansa.secure.byte_tensors import as_bytes, from_rows, to_rows
from hansa.secure.encoding import Numbers
from hansa.secure.primes import Stream, prime, small_product

SMALLEST, LARGEST = 1024, 4096  # bits of n: 2048 are considered safe, fewer are for tests, more take too long
TRIALS = 2**12  # n must have no prime factor below this number
WINDOW = 6  # bits of the exponent per product


@functools.lru_cache(maxsize=8)
def _randomiser(n: int) -> int:
    """h^n modulo n^2, with h = -x^2 and x a hash of n."""
    x = 2 + Stream(b"hansa paillier" + n.to_bytes((n.bit_length() + 7) // 8, "little")).below(n - 3)
    return power(-x * x % n, n, n * n)


@functools.lru_cache(maxsize=8)
def _randomisers(n: int) -> FixedBase:
    """The powers of h^n modulo n^2."""
    return FixedBase(_randomiser(n), n * n, WINDOW)


@dataclass(frozen=True)
class PublicKey:
    """The public key: the modulus n."""

    n: int

    def __post_init__(self) -> None:
        if not SMALLEST <= self.n.bit_length() <= LARGEST or self.n % 2 == 0:
            raise DataError(f"not a Paillier key: n has {self.n.bit_length()} bits; expected an odd number of "
                            f"{SMALLEST} to {LARGEST} bits")  # fmt: skip

    def check(self, bits: int) -> None:
        """Refuse a received key that has the wrong length, or whose n is easy to factor."""
        if self.bits != bits:
            raise DataError(f"the key has {self.bits} bits, expected {bits}")
        if math.gcd(self.n, small_product(TRIALS)) != 1 or math.isqrt(self.n) ** 2 == self.n:
            raise DataError("not a Paillier key: n has a small factor, or is a square")
        if pow(2, self.n - 1, self.n) == 1:
            raise DataError("not a Paillier key: n is a prime, and not the product of two")

    @functools.cached_property
    def square(self) -> int:
        return self.n * self.n

    @property
    def hn(self) -> int:
        """h^n modulo n^2, the base of all randomisers."""
        return _randomiser(self.n)

    @property
    def bits(self) -> int:
        return self.n.bit_length()

    @property
    def size(self) -> int:
        """The bytes of a ciphertext."""
        return 2 * ((self.bits + 7) // 8)

    def encrypt(self, message: int, draws: Stream) -> Ciphertext:
        """Encrypt a message from 0 to n - 1 with a randomiser from `draws`; `encode` maps negative numbers."""
        if not 0 <= message < self.n:
            raise DataError(
                f"a message must lie in 0 to n - 1; this one has {message.bit_length()} bits or is negative"
            )
        go_on()
        random = _randomisers(self.n).power(draws.bits(self.bits // 2))
        return Ciphertext(int((1 + message * self.n) * random % self.square), self)

    def encode(self, number: int) -> int:
        """A signed number as a message: its remainder modulo n. Its absolute value must be below n / 2."""
        if 2 * abs(number) >= self.n:
            raise DataError(f"a number of {number.bit_length()} bits does not fit a message; n has {self.bits} bits")
        return number % self.n

    def decode(self, message: int) -> int:
        """The signed number of a message."""
        return message - self.n if 2 * message > self.n else message

    def ciphertext(self, value: int) -> Ciphertext:
        """A received ciphertext; a DataError if it is invalid."""
        if not 0 < value < self.square or math.gcd(value, self.n) != 1:
            raise DataError("not a ciphertext under this key: it is not invertible modulo n^2")
        return Ciphertext(value, self)

    def ciphertexts(self, rows: Tensor) -> list[Ciphertext]:
        """Received ciphertexts, from rows of bytes."""
        return [self.ciphertext(value) for value in from_rows(rows)]

    def rows(self, ciphertexts: Iterable[Ciphertext]) -> Tensor:
        """Ciphertexts as rows of bytes."""
        return to_rows([text.value for text in ciphertexts], self.size)

    @property
    def name(self) -> str:
        """A short hash that identifies the key."""
        return hashlib.sha256(as_bytes(self.tensor())).hexdigest()[:32]

    def tensor(self) -> Tensor:
        """The key as bytes."""
        return to_rows([self.n], self.size // 2)[0]

    @classmethod
    def of_tensor(cls, data: Tensor) -> PublicKey:
        """The key that `tensor` encoded; a DataError if it is invalid."""
        return cls(*from_rows(data.view(1, -1)))


@dataclass(frozen=True)
class Ciphertext:
    """An encrypted number. Ciphertexts can be added, and multiplied by plain numbers."""

    value: int
    key: PublicKey

    def __add__(self, other: Ciphertext) -> Ciphertext:
        """The encrypted sum."""
        if other.key != self.key:
            raise DataError("ciphertexts under different keys cannot be added")
        return Ciphertext(self.value * other.value % self.key.square, self.key)

    def __mul__(self, factor: int) -> Ciphertext:
        """The encrypted product with a plain number."""
        return Ciphertext(pow(self.value, factor, self.key.square), self.key)


@dataclass(frozen=True)
class PrivateKey:
    """The private key: the two primes."""

    p: int
    q: int

    @classmethod
    def generate(cls, bits: int, draws: Stream) -> PrivateKey:
        """A new key whose n has `bits` bits."""
        check_bits(bits)
        p = prime(draws, bits // 2)
        q = p
        while math.gcd(p - 1, q - 1) != 2:
            q = prime(draws, bits // 2)
        return cls(p, q)

    @functools.cached_property
    def public(self) -> PublicKey:
        return PublicKey(self.p * self.q)

    def decrypt(self, ciphertext: Ciphertext) -> int:
        """The message, 0 to n - 1, by decryption modulo each prime (Chinese remainder theorem)."""
        if ciphertext.key != self.public:
            raise DataError("the ciphertext was made with another key")
        go_on()
        at_p, at_q = (self._modulo(prime, ciphertext.value) for prime in (self.p, self.q))
        return at_p + (at_q - at_p) * self._inverse % self.q * self.p

    @functools.cached_property
    def _inverse(self) -> int:
        return pow(self.p, -1, self.q)

    def _modulo(self, prime: int, value: int) -> int:
        """The message modulo a prime p: L(c^(p-1) mod p^2) / L(g^(p-1) mod p^2), with L(u) = (u - 1) / p.

        As g = n + 1, the divisor is -n/p modulo p.
        """
        raised = power(value, prime - 1, prime * prime)
        return (raised - 1) // prime * pow(-(self.p * self.q // prime), -1, prime) % prime

    def tensor(self) -> Tensor:
        """The key as bytes, for the memory of its holder."""
        return to_rows([self.p, self.q], self.public.size // 4).view(-1)

    @classmethod
    def of_tensor(cls, data: Tensor) -> PrivateKey:
        """The key that `tensor` encoded."""
        return cls(*from_rows(data.view(2, -1)))


def check_bits(bits: int) -> None:
    """Refuse key lengths that are too short, too long, or not whole bytes for each prime."""
    if not SMALLEST <= bits <= LARGEST or bits % 16:
        raise DataError(f"a key must have {SMALLEST} to {LARGEST} bits, a multiple of 16, got {bits}")


@dataclass(frozen=True)
class Packing:
    """Several numbers in one message, in slots of `width` bits (whole bytes) for the largest sum and its sign.

    A message is the sum over j of number j times 2^(j * width). The sum of messages is the message of the sums, as long
    as each sum fits its slot. Negative numbers borrow from the next slot; `unpack` adds an offset to undo that.
    """

    width: int
    slots: int

    @classmethod
    def of(cls, width: int, key_bits: int) -> Packing:
        """The packing with the most slots for a key of `key_bits` bits, such that sums stay below n / 2."""
        whole = -(-width // 8) * 8
        return cls(whole, (key_bits - 1) // whole)

    def messages(self, length: int) -> int:
        """The number of messages of a vector."""
        return -(-length // self.slots)

    @property
    def _offset(self) -> int:
        """2^(width - 1) in every slot."""
        return sum(1 << (self.width * slot + self.width - 1) for slot in range(self.slots))

    def pack(self, numbers: Numbers) -> list[int]:
        """A vector as messages, which may be negative."""
        if numbers.size and max(int(numbers.max()), -int(numbers.min())) >= 2 ** (self.width - 1):
            raise DataError(f"a number does not fit {self.width} bits")
        padded = np.zeros(self.messages(numbers.size) * self.slots, dtype="<i8")
        padded[: numbers.size] = numbers
        padded = padded.view("<u8") + np.uint64(1 << (self.width - 1))  # the overflow at 64 bits is intended
        data = padded.view(np.uint8).reshape(-1, self.slots, 8)[:, :, : self.width // 8]
        return [int.from_bytes(row.tobytes(), "little") - self._offset for row in data]

    def unpack(self, messages: Sequence[int], length: int) -> Numbers:
        """The vector of the packed messages."""
        size = self.slots * self.width // 8
        data = np.zeros((len(messages), self.slots, 8), dtype=np.uint8)
        for row, message in zip(data, messages, strict=True):
            shifted = message + self._offset
            if not 0 <= shifted < 1 << 8 * size:
                raise DataError("a sum overflows its slot: some party sent numbers that are too large")
            row[:, : self.width // 8] = np.frombuffer(shifted.to_bytes(size, "little"), np.uint8).reshape(
                self.slots, -1
            )
        whole = data.reshape(-1).view("<u8") - np.uint64(1 << (self.width - 1))
        return whole.view("<i8")[:length].astype(np.int64)


def add_up(vectors: Sequence[Sequence[Ciphertext]]) -> list[Ciphertext]:
    """The encrypted sum of vectors."""
    total = list(vectors[0])
    for vector in vectors[1:]:
        total = [ours + theirs for ours, theirs in zip(total, vector, strict=True)]
    return total
