"""Sums by CKKS encryption (Cheon, Kim, Kim and Song 2017), from the extra `ckks`: fast, and made exact by rounding.

Numbers travel as digits of 24 bits, 4096 in a ciphertext. CKKS computes to some 0.002 of a digit here, and the holder
of the key rounds what it opens to whole numbers: the sum is exact, as of the other channels, and what leaves the holder
shows nothing of the encryption's noise, from which the key could be found (Li and Micciancio 2021). Ring dimension 8192
and a modulus of 120 bits are well inside what is thought to take 2^128 steps to break (Albrecht et al. 2018: 218 bits).

Keys and noise come from the library's own random source. So a party that answers a message again answers otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.core import codec
from hansa.core.algorithm import Problem
from hansa.core.errors import ConfigError, DataError, PartyError
from hansa.core.federation import Ask, Federation, Reduced
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.registry import register
from hansa.secure import apart, told
from hansa.secure.channel import Encoded
from hansa.secure.digits import Digits
from hansa.secure.encoding import Numbers
from hansa.secure.holder import Held, declining, one, opening, rows_of, sort_out
from hansa.secure.numbers import as_bytes, as_tensor
from hansa.secure.paillier_sum import session

DIMENSION, MODULUS, SCALE = 8192, [60, 60], 2.0**24
SLOTS = DIMENSION // 2  # numbers of a ciphertext
DIGIT = 24  # bits of a digit
LARGEST = 2**34  # a sum of digits: times the scale it must stay below the half of 2^60
BOX = 2 * DIMENSION * 8 + 2**10  # bytes of a ciphertext; its own length varies by a few
PUBLIC = 2 * BOX  # bytes of a public key
SECRET = "secure.ckks"


def _tenseal() -> Any:
    if importlib.util.find_spec("tenseal") is None:
        raise ConfigError("the secure sum 'ckks' needs TenSEAL; pip install 'hansa[ckks]'")
    return importlib.import_module("tenseal")


def _padded(data: bytes, size: int) -> Tensor:
    """Bytes in a tensor of fixed size, their length before them."""
    out = torch.zeros(size + 8, dtype=torch.uint8)
    out[: len(data) + 8] = as_tensor(len(data).to_bytes(8, "little") + data)
    return out


def _unpadded(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _read(what: str, make: Any, *given: Any) -> Any:
    """Something from the wire, as the library reads it; a DataError where it cannot."""
    try:
        return make(*given)
    except (ValueError, RuntimeError):
        raise DataError(f"{what} from the wire is none") from None


@register("secure-ckks-key")
@dataclass(frozen=True)
class Key(Op):
    """The public key of the party that holds the private one, which is made at the first ask and kept in its memory."""

    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        ts = _tenseal()
        if SECRET in memory:
            key = ts.context_from(as_bytes(memory[SECRET]))
        else:
            key = ts.context(ts.SCHEME_TYPE.CKKS, DIMENSION, coeff_mod_bit_sizes=MODULUS)
            memory = {**memory, SECRET: as_tensor(_serial(key, secret=True))}
        return Reply({"key": _padded(_serial(key, secret=False), PUBLIC)}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"key": ((PUBLIC + 8,), torch.uint8)}


def _serial(key: Any, secret: bool) -> bytes:
    data: bytes = key.serialize(save_public_key=True, save_secret_key=secret, save_galois_keys=False,
                                save_relin_keys=False)  # fmt: skip
    return data


@register("secure-ckks")
@dataclass(frozen=True)
class Encrypted(Encoded):
    """The inner op's reply in digits, encrypted under the key in the payload's `secure`."""

    def digits(self) -> Digits:
        """How a party's numbers are taken apart."""
        return Digits(self.bits + (self.max_weight - 1).bit_length(), DIGIT)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "secure"}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        told.check_cohort(party, self.parties, "are asked")
        ts = _tenseal()
        with declining():
            key = _context(as_bytes(told.row(payload, "secure", PUBLIC + 8)))
        digits = self.digits().split(self.numbers(party, payload, reply)).reshape(-1)
        whole = np.zeros(self._boxes(payload) * SLOTS)
        whole[: digits.size] = digits
        sealed = [ts.ckks_vector(key, row.tolist(), scale=SCALE).serialize() for row in whole.reshape(-1, SLOTS)]
        return Reply({"sealed": torch.stack([_padded(box, BOX) for box in sealed])}), memory

    def _boxes(self, payload: Payload) -> int:
        return -(-self.encoding(payload).layout.length * self.digits().count // SLOTS)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sealed": ((self._boxes(payload), BOX + 8), torch.uint8)}


@register("secure-ckks-open")
@dataclass(frozen=True)
class Opened(Op):
    """The sums of digits in the payload's `sealed`, opened and rounded by the party that holds the key.

    One vector is opened for each `session`.
    """

    length: int = 1
    serves: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if SECRET not in memory:
            raise PartyError("it holds no key that could open the sum")
        sealed = told.matrix(payload, "sealed", BOX + 8)
        if len(sealed) != -(-self.length // SLOTS):
            raise PartyError(f"{len(sealed)} ciphertexts are not for {self.length} numbers")
        party.vault.once(f"ckks {party.round} {told.session(payload)}", codec.digest(sealed))
        key = _tenseal().context_from(as_bytes(memory[SECRET]))
        with declining():
            opened = [vector.decrypt() for vector in _vectors(key, sealed.numpy())]
        sums = np.concatenate([np.asarray(row) for row in opened])[: self.length]
        whole = np.rint(sums)
        if len(whole) != self.length or np.abs(sums - whole).max() > 0.25:
            raise PartyError("what it opened is no sum of whole numbers")
        return Reply({"sum": torch.from_numpy(whole.astype(np.int64))}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((self.length,), torch.int64)}


@register("ckks")
@dataclass(frozen=True)
class CKKS(Held):
    """Parties encrypt under one party's CKKS key (Cheon et al. 2017), the aggregator adds, that party opens the sum.

    Against an aggregator that is curious and does not work together with `holder`, the party whose key it is; the two
    together see every update. Sums are rounded to whole numbers by the holder, and exact. A party encrypts some 400,000
    values a second and sends about 100 bytes for each; the holder opens two million a second. Any party but the holder
    may be missing. Needs the extra `ckks` (TenSEAL).
    """

    rate: ClassVar[float] = 400_000.0

    def check(self, problem: Problem) -> None:
        _tenseal()
        super().check(problem)
        if problem.cohort_size * 2**DIGIT > LARGEST:
            raise ConfigError(
                f"the secure sum 'ckks' adds up to {LARGEST // 2**DIGIT} parties exactly, and a round asks "
                f"{problem.cohort_size}; use 'masking'"
            )

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        op = Encrypted(**self.settings(ask, noise))  # type: ignore[arg-type]
        holder, about = self.holder_of(ask), {"session": session(ask)}
        given = await one(fed, Key(), about, holder, "holds the key")
        payload = {**ask.payload, "secure": given.tensors["key"]}
        answer = await fed.gather(op, payload, parties=ask.parties, each=ask.each)
        with opening(f"party {holder} holds no key"):
            total, wrong = apart.run(added, as_bytes(given.tensors["key"]), rows_of(answer))
        count = self.summed(fed, ask, answer, wrong)
        code, digits = op.encoding(ask.payload), op.digits()
        opener = Opened(code.layout.length * digits.count)
        opened = await one(fed, opener, {"sealed": total, **about}, holder, "holds the key")
        sums: Numbers = opened.tensors["sum"].numpy().reshape(-1, digits.count)
        return code.decode(digits.join(sums, count), count)


def _context(data: bytes) -> Any:
    """A public key from the wire: the library's context, of the parameters that all keys here have."""
    key = _read("a key", _tenseal().context_from, _unpadded(data))
    if key.is_private() or not key.has_public_key():
        raise DataError("a key from the wire is not a public one")
    made = key.seal_context().data.key_context_data()
    if (made.parms().poly_modulus_degree(), made.total_coeff_modulus_bit_count()) != (DIMENSION, sum(MODULUS)):
        raise DataError(f"a key from the wire is not of dimension {DIMENSION} with a modulus of {sum(MODULUS)} bits")
    return key


def _vectors(key: Any, boxes: Any) -> list[Any]:
    """Ciphertexts from the wire."""
    vectors = [_read("a ciphertext", _tenseal().ckks_vector_from, key, _unpadded(box.tobytes())) for box in boxes]
    if any(vector.size() != SLOTS for vector in vectors):
        raise DataError(f"a ciphertext from the wire has not {SLOTS} numbers")
    return vectors


def added(data: bytes, sent: Mapping[int, Any]) -> tuple[Tensor | None, dict[int, str]]:
    """The encrypted sum of parties' vectors, None where there are none; and whose are no ciphertexts, and why. A
    DataError where the key is none."""
    key = _context(data)
    zero = [_tenseal().ckks_vector(key, [0.0] * SLOTS, scale=SCALE)]
    # A ciphertext of another scale or level can be read and not be added: it is tried on one that can.
    good, wrong = sort_out(sent, lambda boxes: [_sum([*zero, vector]) and vector for vector in _vectors(key, boxes)])
    rows = [_padded(_sum(column).serialize(), BOX) for column in zip(*good.values(), strict=True)]
    return torch.stack(rows) if rows else None, wrong


def _sum(vectors: Sequence[Any]) -> Any:
    """The encrypted sum of ciphertexts."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total = _read("a ciphertext", total.add_, vector)
    return total
