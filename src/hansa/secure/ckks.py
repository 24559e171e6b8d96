"""Sums by CKKS encryption (Cheon, Kim, Kim and Song 2017), with the extra `ckks`: fast, and exact by rounding.

Numbers are sent as digits of 24 bits, 4096 digits per ciphertext. The error of CKKS is about 0.002 here, and the key
holder rounds the decrypted sums to integers. So sums are exact, and the holder does not reveal the noise of the
encryption, from which the key could be recovered (Li and Micciancio 2021). Ring dimension 8192 with a modulus of 120
bits is well inside the limit for 128-bit security (218 bits; Albrecht et al. 2018).

Keys and noise come from the library's random source. So a party that answers the same message twice sends two different
replies.
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

from hansa.core.algorithm import Problem
from hansa.core.ask import Ask, Reduced
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.entries import Entries, extended, stated
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Size
from hansa.core.registry import register
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.secure import child_process, payloads
from hansa.secure.byte_tensors import as_bytes, as_tensor
from hansa.secure.channel import CURIOUS, Encoded
from hansa.secure.encoding import Numbers
from hansa.secure.encrypted_channel import KeyHolderChannel, ask_one, declining, opening, rows_of, sort_out
from hansa.secure.paillier_sum import session
from hansa.secure.radix import Radix

DIMENSION, MODULUS, SCALE = 8192, [60, 60], 2.0**24
SLOTS = DIMENSION // 2  # numbers per ciphertext
DIGIT = 24  # bits of a digit
LARGEST = 2**34  # largest sum of digits: multiplied by the scale it must stay below 2^59
CIPHERTEXT = 2 * DIMENSION * 8 + 2**10  # bytes for a ciphertext, whose length varies a little
PUBLIC = 2 * CIPHERTEXT  # bytes of a public key
SECRET = "secure.ckks"


def _tenseal() -> Any:
    if importlib.util.find_spec("tenseal") is None:
        raise ConfigError("the secure sum 'ckks' needs TenSEAL; pip install 'hansa[ckks]'")
    return importlib.import_module("tenseal")


def _padded(data: bytes, size: int) -> Tensor:
    """Bytes in a tensor of fixed size, after their length in 8 bytes."""
    out = torch.zeros(size + 8, dtype=torch.uint8)
    out[: len(data) + 8] = as_tensor(len(data).to_bytes(8, "little") + data)
    return out


def _unpadded(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _read(noun: str, make: Any, *arguments: Any) -> Any:
    """The result of a function of the library; a DataError if it cannot read the received data."""
    try:
        return make(*arguments)
    except (ValueError, RuntimeError):
        raise DataError(f"received an invalid {noun}") from None


@register("secure-ckks-key")
@dataclass(frozen=True)
class CkksKey(Op):
    """Send the holder's public key; the key pair is made at the first ask and stays in the holder's memory."""

    serves: ClassVar[bool] = True
    entries = stated(session=payloads.IN_SESSION)

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
class CkksEncrypt(Encoded):
    """Send the inner op's reply in digits, encrypted with the public key in the payload's `secure`."""

    @property
    def entries(self) -> Entries | None:  # type: ignore[override]
        return extended(self.inner.entries, secure=payloads.ROW)

    def radix(self) -> Radix:
        """How a party's numbers are split into digits."""
        return Radix(self.bits + (self.max_weight - 1).bit_length(), DIGIT)

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "secure"}

    def checked(self, party: Party, payload: Payload, memory: Memory) -> Any:
        payloads.check_cohort(party, self.parties, "are asked")
        with declining():
            return _context(as_bytes(payloads.row(payload, "secure", PUBLIC + 8)))

    def hidden(self, party: Party, payload: Payload, reply: Reply, memory: Memory,
               checked: Any) -> tuple[Reply, Memory]:  # fmt: skip
        ts, key = _tenseal(), checked
        digits = self.radix().split(self.numbers(party, payload, reply)).reshape(-1)
        padded = np.zeros(self._ciphertexts(payload) * SLOTS)
        padded[: digits.size] = digits
        sealed = [ts.ckks_vector(key, row.tolist(), scale=SCALE).serialize() for row in padded.reshape(-1, SLOTS)]
        return Reply({"sealed": torch.stack([_padded(text, CIPHERTEXT) for text in sealed])}), memory

    def _ciphertexts(self, payload: Payload) -> int:
        return -(-self.encoding(payload).layout.length * self.radix().count // SLOTS)

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sealed": ((self._ciphertexts(payload), CIPHERTEXT + 8), torch.uint8)}


@register("secure-ckks-open")
@dataclass(frozen=True)
class CkksOpen(Op):
    """At the key holder: decrypt and round the sums of digits in the payload's `sealed`; one vector per `session`."""

    length: Size = 1
    serves: ClassVar[bool] = True
    entries = stated(session=payloads.IN_SESSION, sealed=payloads.MATRIX)

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        if SECRET not in memory:
            raise PartyError("it holds no key that could open the sum")
        sealed = payloads.matrix(payload, "sealed", CIPHERTEXT + 8)
        if len(sealed) != -(-self.length // SLOTS):
            raise PartyError(f"{len(sealed)} ciphertexts do not match {self.length} numbers")
        party.vault.once(f"ckks {party.round} {payloads.session(payload)}", codec.digest(sealed))
        key = _tenseal().context_from(as_bytes(memory[SECRET]))
        with declining():
            opened = [vector.decrypt() for vector in _vectors(key, sealed.numpy())]
        sums = np.concatenate([np.asarray(row) for row in opened])[: self.length]
        rounded = np.rint(sums)
        if len(rounded) != self.length or np.abs(sums - rounded).max() > 0.25:
            raise PartyError("the decrypted vector is not a sum of integers")
        return Reply({"sum": torch.from_numpy(rounded.astype(np.int64))}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((self.length,), torch.int64)}


@register("ckks")
@dataclass(frozen=True)
class CKKS(KeyHolderChannel):
    """Parties encrypt with the CKKS key of one party (Cheon et al. 2017), and that party decrypts the sum.

    Protects against an honest-but-curious aggregator that does not collude with `holder`, the party with the private
    key; both together can read every update. The holder rounds sums to integers, so they are exact. A party encrypts
    about 400,000 values per second and sends about 100 bytes for each; the holder decrypts two million values per
    second. Any party except the holder may be missing. Needs the extra `ckks` (TenSEAL).
    """

    against: ClassVar[str] = CURIOUS
    rate: ClassVar[float] = 400_000.0
    most: ClassVar[int | None] = LARGEST // 2**DIGIT

    hides: ClassVar[str | None] = "secure-ckks"

    @property
    def ops(self) -> DeclaredOps:
        return (OpenOp("secure-ckks-key"), OpenOp("secure-ckks"), OpenOp("secure-ckks-open"))

    def check(self, problem: Problem) -> None:
        _tenseal()
        super().check(problem)

    async def reduce(self, fed: Federation, ask: Ask, noise: float = 0.0) -> Reduced:
        op = CkksEncrypt(**self.settings(ask, noise))  # type: ignore[arg-type]
        holder, in_session = self.holder_of(ask), {"session": session(ask)}
        public = await ask_one(fed, CkksKey(), in_session, holder, "holds the key")
        payload = {**ask.payload, "secure": public.tensors["key"]}
        answer = await fed.gather(op, payload, parties=ask.parties, each=ask.each)
        with opening(f"party {holder} sent an invalid key"):
            total, wrong = child_process.run(added, as_bytes(public.tensors["key"]), rows_of(answer))
        count = self.summed(fed, ask, answer, wrong)
        code, radix = op.encoding(ask.payload), op.radix()
        opener = CkksOpen(code.layout.length * radix.count)
        opened = await ask_one(fed, opener, {"sealed": total, **in_session}, holder, "holds the key")
        sums: Numbers = opened.tensors["sum"].numpy().reshape(-1, radix.count)
        return code.decode(radix.join(sums, count), count)


def _context(data: bytes) -> Any:
    """A received public key, as a context of the library; a DataError if its parameters are not ours."""
    key = _read("key", _tenseal().context_from, _unpadded(data))
    if key.is_private() or not key.has_public_key():
        raise DataError("received a key that is not a public key")
    context = key.seal_context().data.key_context_data()
    if (context.parms().poly_modulus_degree(), context.total_coeff_modulus_bit_count()) != (DIMENSION, sum(MODULUS)):
        raise DataError(f"received a key without dimension {DIMENSION} and a modulus of {sum(MODULUS)} bits")
    return key


def _vectors(key: Any, rows: Any) -> list[Any]:
    """Received ciphertexts."""
    vectors = [_read("ciphertext", _tenseal().ckks_vector_from, key, _unpadded(row.tobytes())) for row in rows]
    if any(vector.size() != SLOTS for vector in vectors):
        raise DataError(f"received a ciphertext without {SLOTS} numbers")
    return vectors


def added(data: bytes, sent: Mapping[int, Any]) -> tuple[Tensor | None, dict[int, str]]:
    """The encrypted sum of the parties' vectors (None without any), and the parties that sent invalid ciphertexts.

    A DataError if the key is invalid.
    """
    key = _context(data)
    zero = [_tenseal().ckks_vector(key, [0.0] * SLOTS, scale=SCALE)]
    # A ciphertext of another scale or level can be read but not added, so each is added to zero as a trial.
    good, wrong = sort_out(sent, lambda rows: [_sum([*zero, vector]) and vector for vector in _vectors(key, rows)])
    rows = [_padded(_sum(column).serialize(), CIPHERTEXT) for column in zip(*good.values(), strict=True)]
    return torch.stack(rows) if rows else None, wrong


def _sum(vectors: Sequence[Any]) -> Any:
    """The encrypted sum of ciphertexts."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total = _read("ciphertext", total.add_, vector)
    return total
