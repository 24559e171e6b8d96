"""Paillier's cryptosystem with the private key in shares: any `needed` of them decrypt, and fewer learn nothing.

Damgard and Jurik (2001), after Shoup (2000). n is a product of safe primes p = 2p' + 1 and q = 2q' + 1, m = p'q'. The
exponent d that is 0 modulo m and 1 modulo n decrypts; its shares s_i are the values at 1, 2, ... of a random polynomial
modulo n m with d at 0. A partial decryption is c_i = c^(2 D s_i), D the factorial of the number of shares, which makes
the coefficients of the interpolation whole numbers, and the exponent even, where squares have no part of small order.

Nobody is believed. v is an encryption of 1 that is hashed from n, so that nobody chooses it, and the dealer publishes
v_i = v^(D s_i) for every share. The v_i must be those of an exponent that opens v to 1 (`Dealing.check`), and the owner
of a share compares it with its v_i (`Share.check`). A partial decryption comes with a proof that the logarithm of
c_i^2 to the base c^4 is that of v_i to the base v (Shoup's, after Chaum and Pedersen 1992; a hash takes the verifier's
place, Fiat and Shamir 1986), so a wrong one is noticed, and whose it is. One proof is about a whole vector: about the
products of its ciphertexts and of its partial decryptions, each to a power of 128 bits drawn from the hash of all of
them (Bellare, Garay and Rabin 1998); the squares modulo n^2 have no part of small order in which an error could hide.

What the dealer can still do: it knows the key until it forgets it, and nobody checks that its primes are safe. With
others it could prove partial decryptions of its own that are wrong.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hansa.core.errors import DataError
from hansa.secure.numbers import Stream, from_rows, safe_prime, to_rows
from hansa.secure.paillier import Ciphertext, PublicKey, check_bits

PLACES = 256  # shares of a key, at most: the work with one grows with the factorial of their number
CHALLENGE, SPREAD, HIDING = (
    256,
    128,
    128,
)  # bits: of a proof's challenge, of a power in a product, of what hides a share


@dataclass(frozen=True)
class Dealing:
    """What everybody may know of a dealt key: how many shares decrypt, which party's is at which place (from 1 on), and
    the verification keys v_i by which their use is checked."""

    key: PublicKey
    needed: int
    owners: tuple[int, ...]
    checks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_numbers(self.needed, self.owners)
        if len(self.checks) != self.total:
            raise DataError(f"{len(self.checks)} verification keys are not for {self.total} shares")
        for value in self.checks:
            self.key.ciphertext(value)

    @property
    def total(self) -> int:
        return len(self.owners)

    @functools.cached_property
    def scale(self) -> int:
        """The factorial of the number of shares."""
        return math.factorial(self.total)

    @functools.cached_property
    def base(self) -> int:
        """An encryption of 1 that generates the squares modulo n^2."""
        return base_of(self.key)

    @functools.cached_property
    def name(self) -> bytes:
        """The hash of all of it: who says the same name means the same key, numbers and owners."""
        return _hashed(b"dealing", self.key.n, self.needed, self.total, *self.owners, *self.checks)

    def rows(self) -> Tensor:
        """The verification keys as rows of bytes."""
        return to_rows(self.checks, self.key.size)

    @classmethod
    def of_rows(cls, key: PublicKey, needed: int, owners: Sequence[int], rows: Tensor) -> Dealing:
        """A dealing whose verification keys come from elsewhere; a DataError where it cannot be one."""
        return cls(key, needed, tuple(owners), tuple(from_rows(rows)))

    def place(self, party: int) -> int:
        """The place of a party's share."""
        if party not in self.owners:
            raise DataError(f"party {party} has no share of the key")
        return self.owners.index(party) + 1

    def check(self) -> None:
        """Refuse verification keys that are not those of shares any `needed` of which decrypt.

        With the first `needed - 1` each other v_k must open v to 1. All of these equations hold if a random sum does.
        """
        first, square = list(range(1, self.needed)), self.key.square
        draws = Stream(b"hansa dealing" + self.name)
        powers, weight = dict.fromkeys(range(1, self.total + 1), 0), 0
        for last in range(self.needed, self.total + 1):
            random = draws.bits(SPREAD)
            weight += random
            for place, coefficient in self.at_zero([*first, last]).items():
                powers[place] += random * coefficient
        product = 1
        for place, power in powers.items():
            product = product * pow(self.checks[place - 1], 4 * power, square) % square
        if product != (1 + 4 * self.scale**2 * weight * self.key.n) % square:
            raise DataError("the verification keys of the dealt key do not belong together")

    def at_zero(self, places: Sequence[int]) -> dict[int, int]:
        """What the values at these places weigh, times the factorial, in the value at zero (Lagrange)."""
        out = {}
        for place in places:
            above, below = self.scale, 1
            for other in places:
                if other != place:
                    above, below = above * -other, below * (place - other)
            out[place] = above // below
        return out

    def proof_size(self) -> int:
        """The bytes of a proof."""
        return proof_size(self.key.bits, self.total)

    def proven(self, place: int, texts: Sequence[Ciphertext], partials: Sequence[int], proof: bytes) -> bool:
        """Whether a proof shows that these are the partial decryptions of a vector by the share at a place."""
        if len(texts) != len(partials) or len(proof) != self.proof_size():
            return False
        try:
            for value in partials:
                self.key.ciphertext(value)
        except DataError:
            return False
        square = self.key.square
        challenge = int.from_bytes(proof[: CHALLENGE // 8], "little")
        answer = int.from_bytes(proof[CHALLENGE // 8 :], "little")
        low, high = self._products(place, texts, partials)
        at_text = pow(low, answer, square) * pow(high, -challenge, square) % square
        at_base = pow(self.base, answer, square) * pow(self.checks[place - 1], -challenge, square) % square
        return challenge == self._challenge(place, low, high, at_text, at_base)

    def _products(self, place: int, texts: Sequence[Ciphertext], partials: Sequence[int]) -> tuple[int, int]:
        """The products of a vector's ciphertexts to the fourth and of its partial decryptions squared, each to a power
        that nobody chooses."""
        square, low, high = self.key.square, 1, 1
        about = _hashed(b"vector", self.name, place, *(text.value for text in texts), *partials)
        draws = Stream(b"hansa partials" + about)
        for text, partial in zip(texts, partials, strict=True):
            random = draws.bits(SPREAD)
            low, high = low * pow(text.value, random, square) % square, high * pow(partial, random, square) % square
        return pow(low, 4, square), pow(high, 2, square)

    def _challenge(self, place: int, *about: int) -> int:
        return int.from_bytes(_hashed(b"proof", self.name, place, *about), "little")


@dataclass(frozen=True)
class Share:
    """One of the shares of a dealt private key, that of a place."""

    dealing: Dealing
    place: int
    value: int

    @property
    def key(self) -> PublicKey:
        return self.dealing.key

    def check(self) -> None:
        """Refuse a share that is not the one which the dealing's verification keys are of."""
        self.dealing.check()
        if not 0 <= self.value < self.key.square:
            raise DataError("the share of the key is out of its range")
        if (
            pow(self.dealing.base, self.dealing.scale * self.value, self.key.square)
            != self.dealing.checks[self.place - 1]
        ):
            raise DataError("the share of the key is not the one that its verification key is of")

    def partial(self, ciphertext: Ciphertext) -> int:
        """This share's part in the decryption of a ciphertext."""
        if ciphertext.key != self.key:
            raise DataError("the ciphertext is under another key")
        return pow(ciphertext.value, 2 * self.dealing.scale * self.value, self.key.square)

    def prove(self, texts: Sequence[Ciphertext], partials: Sequence[int], secret: bytes) -> bytes:
        """A proof that these are this share's partial decryptions of a vector. `secret` is what nobody else knows."""
        dealing, square = self.dealing, self.key.square
        low, high = dealing._products(self.place, texts, partials)
        exponent = dealing.scale * self.value
        size = dealing.proof_size() - CHALLENGE // 8
        # The statement has a part in it: a random number that served two of them would give the share away.
        random = Stream(secret + _hashed(b"random", low, high)).bits(8 * size - 8)
        challenge = dealing._challenge(
            self.place, low, high, pow(low, random, square), pow(dealing.base, random, square)
        )
        answer = random + challenge * exponent
        return challenge.to_bytes(CHALLENGE // 8, "little") + answer.to_bytes(size, "little")


def proof_size(bits: int, total: int) -> int:
    """The bytes of a proof by one of so many shares of a key of so many bits."""
    exponent = 2 * bits + math.factorial(total).bit_length()
    return CHALLENGE // 8 + (exponent + CHALLENGE + HIDING + 7) // 8 + 1


def check_numbers(needed: int, owners: Sequence[int]) -> None:
    """Refuse numbers of shares that no key can have."""
    if not 2 <= needed <= len(owners) <= PLACES or len(set(owners)) != len(owners):
        raise DataError(f"a key cannot have {len(owners)} shares, {needed} of them needed: expected 2 to {PLACES}, of "
                        "different parties")  # fmt: skip


def deal(bits: int, owners: Sequence[int], needed: int, draws: Stream) -> list[Share]:
    """A new key in shares for these parties, any `needed` of which decrypt. The dealer knows the key until it forgets
    it."""
    check_bits(bits)
    check_numbers(needed, owners)
    p = safe_prime(draws, bits // 2)
    q = p
    while q == p:
        q = safe_prime(draws, bits // 2)
    return deal_with(p, q, owners, needed, draws)


def deal_with(p: int, q: int, owners: Sequence[int], needed: int, draws: Stream) -> list[Share]:
    """The same, given the safe primes."""
    check_numbers(needed, owners)
    n, m = p * q, (p // 2) * (q // 2)
    key = PublicKey(n)
    secret = m * pow(m, -1, n)  # 0 modulo m, 1 modulo n
    coefficients = [secret] + [draws.below(n * m) for _ in range(needed - 1)]
    values = [
        functools.reduce(lambda at, c: (at * place + c) % (n * m), coefficients[::-1])
        for place in range(1, len(owners) + 1)
    ]
    raised = pow(base_of(key), math.factorial(len(owners)), n * n)
    dealing = Dealing(key, needed, tuple(owners), tuple(pow(raised, value, n * n) for value in values))
    return [Share(dealing, place, value) for place, value in enumerate(values, 1)]


def base_of(key: PublicKey) -> int:
    """The encryption of 1 by whose powers shares are verified; its randomiser is a square that n is hashed to."""
    drawn = Stream(_hashed(b"base", key.n)).below(key.n)
    return (1 + key.n) * pow(drawn * drawn, key.n, key.square) % key.square


def combine(dealing: Dealing, partials: Mapping[int, int]) -> int:
    """The message of a ciphertext, from partial decryptions by the places of their shares; a DataError where they are
    too few or one of them is wrong."""
    if len(partials) < dealing.needed:
        raise DataError(f"{len(partials)} partial decryptions, and {dealing.needed} are needed")
    key, product = dealing.key, 1
    for place, coefficient in dealing.at_zero(sorted(partials)[: dealing.needed]).items():
        product = product * pow(partials[place], 2 * coefficient, key.square) % key.square
    if product % key.n != 1:
        raise DataError("the partial decryptions do not belong together: one of them is wrong")
    return (product - 1) // key.n * pow(4 * dealing.scale**2, -1, key.n) % key.n


def _hashed(purpose: bytes, *parts: int | bytes) -> bytes:
    """A hash of numbers and bytes, each with its length before it."""
    made = hashlib.sha256(b"hansa threshold " + purpose)
    for part in parts:
        data = part if isinstance(part, bytes) else part.to_bytes((part.bit_length() + 7) // 8 + 1, "little")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.digest()
