"""Threshold Paillier encryption: any `needed` shares of the private key decrypt, fewer shares reveal nothing.

n is a product of safe primes p = 2p' + 1 and q = 2q' + 1, and m = p'q'. A ciphertext is c = (1 + n)^x r^n modulo n^2,
so c modulo n is r^n: who takes its n-th root learns r, and with r the message x. The root is a threshold RSA signature
of c with the exponent n (Shoup 2000), in numbers of half the length that threshold decryption modulo n^2 needs
(Damgard and Jurik 2001), and with exponents of half the length. The shares s_i are the values at 1, 2, ... of a random
polynomial modulo m whose value at 0 is the inverse of n. A partial decryption is c_i = c^(2 D s_i) modulo n, where D
is the factorial of the number of shares. D makes the coefficients of the interpolation integers; the even exponent
keeps to the squares, which have no subgroup of small order. The interpolation gives w = r^(4 D^2), and c^(4 D^2) w^-n
is 1 + 4 D^2 x n modulo n^2.

What opening reveals beside x is the randomiser r. In a sum it is the product of all parties' randomisers. With two
honest parties it tells nothing about the numbers of one of them: multiply one ciphertext and divide the other by the
same n-th residue z; sum and r stay as they are. If z is any number modulo n^2, which the decisional composite
residuosity assumption says nobody can tell, the two ciphertexts have random messages with the same sum. A ciphertext
of a single party must not be opened in this way, nor is its message secret then.

Dealer and share owners are not trusted. v is a square modulo n that is derived from n by a hash, so nobody chooses it.
The dealer publishes the verification key v_i = v^(D s_i) of every share. The v_i must give the n-th root of v
(`Dealing.check`), and the owner of a share compares it with its v_i (`Share.check`). A partial decryption comes with a
proof that the logarithm of c_i^2 to the base c^4 equals that of v_i to the base v (Shoup's, after Chaum and Pedersen
1992, made non-interactive by a hash, Fiat and Shamir 1986). So a wrong partial decryption is detected and attributed
to its sender. One proof covers a whole vector: it is about the products of the ciphertexts and of the partial
decryptions, each raised to a power of 128 bits drawn from the hash of all of them (Bellare, Garay and Rabin 1998). The
squares modulo n have no subgroup of small order in which an error could hide.

Limits: the dealer knows the private key until it deletes it, and nobody verifies that its primes are safe. With other
primes the dealer could prove wrong partial decryptions of its own; `combine` notices a root that is none.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hansa.plumbing.errors import DataError
from hansa.plumbing.stopping import go_on
from hansa.secure.big_integers import power, product_of_powers
from hansa.secure.byte_tensors import from_rows, to_rows
from hansa.secure.paillier import Ciphertext, PublicKey, check_bits
from hansa.secure.primes import Stream, safe_prime

MAX_SHARES = 256  # of a key: the exponents grow with the factorial of the number of shares
CHALLENGE = 256  # bits of a proof's challenge
SPREAD = 128  # bits of the random powers in a product
HIDING = 128  # bits by which the random number of a proof is longer than the secret exponent it hides


@dataclass(frozen=True)
class Dealing:
    """The public part of a dealt key: shares needed, owner of each share (index from 1), and verification keys v_i."""

    key: PublicKey
    needed: int
    owners: tuple[int, ...]
    checks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_numbers(self.needed, self.owners)
        if len(self.checks) != self.total:
            raise DataError(f"{len(self.checks)} verification keys do not match {self.total} shares")
        for value in self.checks:
            check_unit(self.key, value)

    @property
    def total(self) -> int:
        return len(self.owners)

    @functools.cached_property
    def scale(self) -> int:
        """The factorial of the number of shares."""
        return math.factorial(self.total)

    @functools.cached_property
    def base(self) -> int:
        """A generator of the squares modulo n."""
        return base_of(self.key)

    @functools.cached_property
    def name(self) -> bytes:
        """The hash of the key, its numbers, owners and verification keys."""
        return _hashed(b"dealing", self.key.n, self.needed, self.total, *self.owners, *self.checks)

    def rows(self) -> Tensor:
        """The verification keys as rows of bytes."""
        return to_rows(self.checks, self.key.size // 2)

    @classmethod
    def of_rows(cls, key: PublicKey, needed: int, owners: Sequence[int], rows: Tensor) -> Dealing:
        """A dealing from received verification keys; a DataError if it is invalid."""
        return cls(key, needed, tuple(owners), tuple(from_rows(rows)))

    def index_of(self, party: int) -> int:
        """The index of a party's share."""
        if party not in self.owners:
            raise DataError(f"party {party} has no share of the key")
        return self.owners.index(party) + 1

    def check(self) -> None:
        """Refuse verification keys unless any `needed` of their shares decrypt.

        Together with the first `needed - 1` verification keys, every other v_k must give the n-th root of v. All these
        equations hold, except with negligible probability, if a random linear combination of them holds.
        """
        first, n = list(range(1, self.needed)), self.key.n
        draws = Stream(b"hansa dealing" + self.name)
        powers, weight = dict.fromkeys(range(1, self.total + 1), 0), 0
        for last in range(self.needed, self.total + 1):
            random = draws.bits(SPREAD)
            weight += random
            for index, coefficient in self.at_zero([*first, last]).items():
                powers[index] += random * coefficient
        root = 1
        for index, exponent in powers.items():
            root = root * power(self.checks[index - 1], 4 * exponent, n) % n
        if power(root, n, n) != power(self.base, 4 * self.scale**2 * weight, n):
            raise DataError("the verification keys of the dealt key are inconsistent")

    def at_zero(self, indices: Sequence[int]) -> dict[int, int]:
        """The Lagrange coefficients of these indices for the value at zero, times the factorial."""
        out = {}
        for index in indices:
            above, below = self.scale, 1
            for other in indices:
                if other != index:
                    above, below = above * -other, below * (index - other)
            out[index] = above // below
        return out

    def proof_size(self) -> int:
        """The bytes of a proof."""
        return proof_size(self.key.bits, self.total)

    def proven(self, index: int, texts: Sequence[Ciphertext], partials: Sequence[int], proof: bytes) -> bool:
        """Whether the proof shows that these are the partial decryptions of a vector by the share at an index."""
        if len(texts) != len(partials) or len(proof) != self.proof_size():
            return False
        try:
            for value in partials:
                check_unit(self.key, value)
        except DataError:
            return False
        n = self.key.n
        challenge = int.from_bytes(proof[: CHALLENGE // 8], "little")
        answer = int.from_bytes(proof[CHALLENGE // 8 :], "little")
        low, high = self._products(index, texts, partials)
        at_text = power(low, answer, n) * power(high, -challenge, n) % n
        at_base = power(self.base, answer, n) * power(self.checks[index - 1], -challenge, n) % n
        return challenge == self._challenge(index, low, high, at_text, at_base)

    def _products(self, index: int, texts: Sequence[Ciphertext], partials: Sequence[int]) -> tuple[int, int]:
        """The products of a vector's ciphertexts (to the fourth power) and of its partial decryptions (squared).

        Each factor has a random exponent from the hash of all of them.
        """
        n = self.key.n
        digest = _hashed(b"vector", self.name, index, *(text.value for text in texts), *partials)
        draws = Stream(b"hansa partials" + digest)
        random = [draws.bits(SPREAD) for _ in texts]
        low = product_of_powers([text.value % n for text in texts], random, n)
        return power(low, 4, n), power(product_of_powers(partials, random, n), 2, n)

    def _challenge(self, index: int, *values: int) -> int:
        return int.from_bytes(_hashed(b"proof", self.name, index, *values), "little")


@dataclass(frozen=True)
class Share:
    """The share of a dealt private key at an index."""

    dealing: Dealing
    index: int
    value: int

    @property
    def key(self) -> PublicKey:
        return self.dealing.key

    def check(self) -> None:
        """Refuse a share that does not match its verification key."""
        self.dealing.check()
        if not 0 <= self.value < self.key.n:
            raise DataError("the share of the key is out of its range")
        exponent = self.dealing.scale * self.value
        if power(self.dealing.base, exponent, self.key.n) != self.dealing.checks[self.index - 1]:
            raise DataError("the share of the key does not match its verification key")

    def partial(self, ciphertext: Ciphertext) -> int:
        """The partial decryption of a ciphertext by this share."""
        if ciphertext.key != self.key:
            raise DataError("the ciphertext was made with another key")
        go_on()
        return power(ciphertext.value, 2 * self.dealing.scale * self.value, self.key.n)

    def prove(self, texts: Sequence[Ciphertext], partials: Sequence[int], secret: bytes) -> bytes:
        """A proof that these are this share's partial decryptions of a vector; nobody else may know `secret`."""
        dealing, n = self.dealing, self.key.n
        low, high = dealing._products(self.index, texts, partials)
        exponent = dealing.scale * self.value
        size = dealing.proof_size() - CHALLENGE // 8
        # The random number depends on the statement: one that served two statements would reveal the share.
        random = Stream(secret + _hashed(b"random", low, high)).bits(8 * size - 8)
        challenge = dealing._challenge(self.index, low, high, power(low, random, n), power(dealing.base, random, n))
        answer = random + challenge * exponent
        return challenge.to_bytes(CHALLENGE // 8, "little") + answer.to_bytes(size, "little")


def proof_size(bits: int, total: int) -> int:
    """The bytes of a proof, for a key of `bits` bits with `total` shares."""
    exponent = bits + math.factorial(total).bit_length()
    return CHALLENGE // 8 + (exponent + CHALLENGE + HIDING + 7) // 8 + 1


def check_numbers(needed: int, owners: Sequence[int]) -> None:
    """Refuse impossible numbers of shares."""
    if not 2 <= needed <= len(owners) <= MAX_SHARES or len(set(owners)) != len(owners):
        raise DataError(f"a key cannot have {len(owners)} shares, {needed} of them needed: expected 2 to {MAX_SHARES}, "
                        "of different parties")  # fmt: skip


def deal(bits: int, owners: Sequence[int], needed: int, draws: Stream) -> list[Share]:
    """A new key in one share per owner, any `needed` of which decrypt. The dealer knows the key."""
    check_bits(bits)
    check_numbers(needed, owners)
    p = safe_prime(draws, bits // 2)
    q = p
    while q == p:
        q = safe_prime(draws, bits // 2)
    return deal_with(p, q, owners, needed, draws)


def deal_with(p: int, q: int, owners: Sequence[int], needed: int, draws: Stream) -> list[Share]:
    """Like `deal`, with given safe primes."""
    check_numbers(needed, owners)
    n, m = p * q, (p // 2) * (q // 2)
    key = PublicKey(n)
    coefficients = [pow(n, -1, m)] + [draws.below(m) for _ in range(needed - 1)]
    values = [
        functools.reduce(lambda at, c: (at * index + c) % m, coefficients[::-1]) for index in range(1, len(owners) + 1)
    ]
    raised = power(base_of(key), math.factorial(len(owners)), n)
    dealing = Dealing(key, needed, tuple(owners), tuple(power(raised, value, n) for value in values))
    return [Share(dealing, index, value) for index, value in enumerate(values, 1)]


def base_of(key: PublicKey) -> int:
    """The square whose powers verify shares, derived from n by a hash."""
    return pow(Stream(_hashed(b"base", key.n)).below(key.n), 2, key.n)


def check_unit(key: PublicKey, value: int) -> None:
    """Refuse a received number that is not invertible modulo n."""
    if not 0 < value < key.n or math.gcd(value, key.n) != 1:
        raise DataError("a number of the dealt key is not invertible modulo n")


def combine(dealing: Dealing, text: Ciphertext, partials: Mapping[int, int]) -> int:
    """The message of a ciphertext, from its partial decryptions by share index.

    A DataError if there are too few, or if one of them is wrong.
    """
    if len(partials) < dealing.needed:
        raise DataError(f"there are {len(partials)} partial decryptions, and {dealing.needed} are needed")
    go_on()
    key, root, raised = dealing.key, 1, 4 * dealing.scale**2
    for index, coefficient in dealing.at_zero(sorted(partials)[: dealing.needed]).items():
        root = root * power(partials[index], 2 * coefficient, key.n) % key.n
    message = power(text.value, raised, key.square) * power(root, -key.n, key.square) % key.square
    if message % key.n != 1:
        raise DataError("the partial decryptions are inconsistent: one of them is wrong")
    return (message - 1) // key.n * pow(raised, -1, key.n) % key.n


def _hashed(purpose: bytes, *parts: int | bytes) -> bytes:
    """A hash of integers and bytes, each preceded by its length."""
    digest = hashlib.sha256(b"hansa threshold " + purpose)
    for part in parts:
        data = part if isinstance(part, bytes) else part.to_bytes((part.bit_length() + 7) // 8 + 1, "little")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
