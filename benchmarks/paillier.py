"""Values per second of encrypted sums: Hansa's channels compared with phe.

    python benchmarks/paillier.py [--bits 2048] [--repeats 3]

One core; times are processor times, so other load on the machine matters little. Values have 32 bits with weights up to
2^20 and ten parties, the defaults of the channels ('functional': 16 bits). Each row has the values per second that a
party encrypts, that the aggregator adds to a sum, and that are opened. For threshold Paillier the last is the work of
each party, for functional encryption that of the aggregator. phe has its own environment (created by
`make bench-paillier`) and encrypts every value separately, once with GMP's integers and once with Python's, as Hansa
does. The contestants take turns; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hansa.secure import functional
from hansa.secure.paillier import Packing, PrivateKey, add_up
from hansa.secure.primes import Stream
from hansa.secure.radix import Radix
from hansa.secure.threshold import Share, combine, deal

HERE = Path(__file__).resolve().parent
PHE = HERE / ".envs/phe/bin/python"
PARTIES, WEIGHT = 10, 2**20
Row = dict[str, float]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the process, and what came of them."""
    begin = time.process_time()
    out = work()
    return time.process_time() - begin, out


def numbers(count: int, bits: int) -> np.ndarray[Any, Any]:
    """What a party might send: weight times value."""
    largest = 2 ** (bits - 1) * WEIGHT // 4
    return np.random.default_rng(0).integers(-largest, largest, count)


class Paillier:
    """One key holder, and the same ciphertexts opened by shares."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.seconds, self.key = timed(lambda: PrivateKey.generate(bits, Stream(b"benchmark")))
        self.public = self.key.public
        self.packing = Packing.of(32 + 20 + 4, bits)
        self.public.encrypt(0, Stream(b"table"))  # the table is made once for a key

    def measure(self) -> Row:
        vector = numbers(20 * self.packing.slots, 32)
        draws = Stream(b"draws")
        encrypting, sealed = timed(lambda: [self.public.encrypt(self.public.encode(m), draws)
                                            for m in self.packing.pack(vector)])  # fmt: skip
        adding, total = timed(lambda: add_up([sealed, sealed]))
        opening, opened = timed(
            lambda: self.packing.unpack([self.public.decode(self.key.decrypt(c)) for c in total], vector.size)
        )
        assert np.array_equal(opened, 2 * vector)
        return {"encrypt": vector.size / encrypting, "add": vector.size / adding, "open": vector.size / opening,
                "bytes": self.public.size / self.packing.slots, "key": self.seconds}  # fmt: skip


class Threshold:
    """Seven shares of ten open a sum."""

    def __init__(self, bits: int) -> None:
        self.seconds, self.shares = timed(lambda: deal(bits, range(PARTIES), 7, Stream(b"benchmark")))
        self.key = self.shares[0].key
        self.packing = Packing.of(32 + 20 + 4, bits)
        self.key.encrypt(0, Stream(b"table"))

    def measure(self) -> Row:
        vector = numbers(32 * self.packing.slots, 32)
        draws = Stream(b"draws")
        encrypting, sealed = timed(lambda: [self.key.encrypt(self.key.encode(m), draws)
                                            for m in self.packing.pack(vector)])  # fmt: skip
        adding, total = timed(lambda: add_up([sealed, sealed]))

        def partials(share: Share) -> tuple[list[int], bytes]:
            values = [share.partial(c) for c in total]
            return values, share.prove(total, values, b"secret")

        def messages() -> list[int]:
            for share, (values, proof) in zip(self.shares[:7], sent, strict=True):
                assert share.dealing.proven(share.index, total, values, proof)
            parts = [{share.index: values[k] for share, (values, _) in zip(self.shares[:7], sent, strict=True)}
                     for k in range(len(total))]  # fmt: skip
            dealing = self.shares[0].dealing
            return [self.key.decode(combine(dealing, c, some)) for c, some in zip(total, parts, strict=True)]

        opening, first = timed(lambda: partials(self.shares[0]))
        sent = [first, *(partials(share) for share in self.shares[1:7])]
        combining, found = timed(messages)
        assert np.array_equal(self.packing.unpack(found, vector.size), 2 * vector)
        return {"encrypt": vector.size / encrypting, "add": vector.size / adding, "open": vector.size / opening,
                "combine": vector.size / combining, "bytes": self.key.size / self.packing.slots,
                "key": self.seconds}  # fmt: skip


class Functional:
    """Values in digits of 12 bits; ten parties in the sum."""

    def measure(self) -> Row:
        radix = Radix(16 + 20, 12)
        vector = numbers(20, 16)
        flat = radix.split(vector).reshape(-1).tolist()
        secrets = [Stream(bytes([k])).bits(functional.EXPONENT) for k in range(PARTIES)]
        bases = [functional.base(b"label", j) for j in range(len(flat))]
        functional.encrypt(0, secrets[0], bases[0])
        encrypting, first = timed(
            lambda: [functional.encrypt(d, secrets[0], at) for d, at in zip(flat, bases, strict=True)]
        )
        others = [[functional.encrypt(d, s, at) for d, at in zip(flat, bases, strict=True)] for s in secrets[1:]]
        key = functional.weights_key([1] * PARTIES, secrets, 2)
        columns = list(zip(first, *others, strict=True))
        opening, sums = timed(lambda: [functional.decrypt(column, [1] * PARTIES, key, at, 0, PARTIES * 4095)
                                       for column, at in zip(columns, bases, strict=True)])  # fmt: skip
        total = radix.join(np.array(sums).reshape(-1, radix.count), PARTIES)
        assert np.array_equal(total, PARTIES * vector)
        return {"encrypt": vector.size / encrypting, "open": vector.size / opening,
                "bytes": functional.SIZE * radix.count}  # fmt: skip


class CKKS:
    """Values in three digits of 24 bits."""

    def __init__(self) -> None:
        import tenseal

        from hansa.secure import ckks

        self.ts, self.ckks = tenseal, ckks
        self.seconds, self.context = timed(
            lambda: tenseal.context(tenseal.SCHEME_TYPE.CKKS, ckks.DIMENSION, 1, ckks.MODULUS, n_threads=1)
        )

    def measure(self) -> Row:
        radix = Radix(32 + 20, self.ckks.DIGIT)
        vector = numbers(8 * self.ckks.SLOTS // radix.count, 32)
        flat = np.zeros((8, self.ckks.SLOTS))
        flat.reshape(-1)[: vector.size * radix.count] = radix.split(vector).reshape(-1)
        encrypting, sealed = timed(
            lambda: [self.ts.ckks_vector(self.context, row.tolist(), scale=self.ckks.SCALE) for row in flat]
        )
        adding, total = timed(lambda: [a + b for a, b in zip(sealed, sealed, strict=True)])
        opening, opened = timed(lambda: np.concatenate([np.rint(row.decrypt()) for row in total]))
        sums = opened[: vector.size * radix.count].astype(np.int64).reshape(-1, radix.count)
        assert np.array_equal(radix.join(sums, 2), 2 * vector)
        return {"encrypt": vector.size / encrypting, "add": vector.size / adding, "open": vector.size / opening,
                "bytes": self.ckks.CIPHERTEXT * radix.count / self.ckks.SLOTS, "key": self.seconds}  # fmt: skip


def phe(bits: int) -> dict[str, Any]:
    command = [str(PHE), str(HERE / "peers/phe/paillier.py"), str(bits), "20"]
    out: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=int, default=2048, help="of n; 2048 is what is thought safe")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    ours: dict[str, Any] = {"paillier": Paillier(given.bits), "threshold-paillier": Threshold(given.bits),
                            "functional": Functional()}  # fmt: skip
    try:
        ours["ckks"] = CKKS()
    except ImportError:
        print("ckks is left out: TenSEAL is not installed")
    rows: dict[str, list[Row]] = {}
    version = ""
    for _ in range(given.repeats):
        for name, contestant in ours.items():
            rows.setdefault(name, []).append(contestant.measure())
        if PHE.exists():
            theirs = phe(given.bits)
            version = theirs.pop("version")
            for name, row in theirs.items():
                rows.setdefault(f"phe, {name}", []).append(row)
    print(f"\n{given.bits} bits, values a second on one core, medians of {given.repeats}"
          + (f"; phe {version}" if version else ""))  # fmt: skip
    print("| | encrypted | added | opened | bytes a value | seconds for a key |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, found in rows.items():
        cells = []
        for column in ("encrypt", "add", "open", "bytes", "key"):
            values = [row[column] for row in found if column in row]
            shown = ".2f" if column == "key" else ",.0f"
            cells.append(format(statistics.median(values), shown) if values else "")
        print(f"| {name} | {' | '.join(cells)} |")
    if version:
        ratio = statistics.median(
            a["encrypt"] / b["encrypt"] for a, b in zip(rows["paillier"], rows["phe, with GMP"], strict=True)
        )
        print(f"\nPacked, Hansa encrypts {ratio:.0f} times as many values a second as phe with GMP.")


if __name__ == "__main__":
    main()
