"""phe: each number is a message of its own; with GMP's integers, and with Python's own."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import phe
from phe import paillier, util


def timed(work: Any) -> tuple[float, Any]:
    begin = time.process_time()
    out = work()
    return time.process_time() - begin, out


def measure(bits: int, values: list[float]) -> dict[str, float]:
    """Numbers a second to encrypt, to add and to decrypt."""
    seconds, (public, private) = timed(lambda: paillier.generate_paillier_keypair(n_length=bits))
    encrypting, sealed = timed(lambda: [public.encrypt(value) for value in values])
    adding, total = timed(lambda: [a + b for a, b in zip(sealed, sealed, strict=True)])
    opening, opened = timed(lambda: [private.decrypt(number) for number in total])
    assert max(abs(a - 2 * b) for a, b in zip(opened, values, strict=True)) < 1e-9
    count, size = len(values), bits // 4
    return {"encrypt": count / encrypting, "add": count / adding, "open": count / opening, "bytes": size,
            "key": seconds}  # fmt: skip


def main() -> None:
    bits, count = int(sys.argv[1]), int(sys.argv[2])
    values = [0.001 * k - 0.01 for k in range(count)]
    out = {"version": phe.__version__}
    assert util.HAVE_GMP
    with_gmp = measure(bits, values)
    util.HAVE_GMP = util.HAVE_CRYPTO = False
    out |= {"with GMP": with_gmp, "Python's integers": measure(bits, values)}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
