"""Seconds per epoch of encrypted logistic regression over columns, beside a plain Paillier loop in the same run.

    PYTHONPATH=src python benchmarks/vertical_linear.py --data-dir DIR [--people 1024] [--whole] [--python-integers]

Adult is divided by theme between an employer, a tax office (labels) and a census; a fourth party is the coordinator.
All roles run in one process, so that the seconds are the work of all parties together, as processor time. The plain
loop does the same protocol as most descriptions have it: Paillier with one random power per encryption, one power per
number of the table, one ciphertext per weight. Both use the same integers: GMP's if gmpy2 is installed, and Python's
with `--python-integers`. Both gradients are compared with the centralised one. `--whole` adds an epoch over all people,
`--fedv` an epoch of FedV.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from typing import Any

import numpy as np

if "--python-integers" in sys.argv:
    sys.modules["gmpy2"] = None  # type: ignore[assignment]

import hansa
from hansa.core.plain_data import build
from hansa.secure.big_integers import GMP, big
from hansa.secure.paillier import PrivateKey
from hansa.secure.primes import Stream
from hansa.vertical.linear_model import WEIGHTS

THEMES = {
    "employer": ("workclass", "occupation", "hours-per-week", "education-num"),
    "tax": ("capital-gain", "capital-loss"),
    "census": ("age", "marital-status", "relationship", "race", "sex", "native-country"),
}
HOLDER, BITS, RATE = 1, 2048, 0.5
Array = np.ndarray[Any, Any]


def columns(data_dir: str | None, people: int | None) -> tuple[list[Array], Array]:
    """The standardised columns of each party, and the labels."""
    data = build("dataset", "adult").load(data_dir)
    names, x = list(data.header[1:]), np.asarray(data.x, dtype=np.float64)
    rows = np.random.default_rng(0).permutation(len(x))[:people]
    x, y = x[rows], np.asarray(data.y)[rows]
    deviation = x.std(0)
    x = (x - x.mean(0)) / np.where(deviation > 0, deviation, 1.0)
    return [x[:, [k for k, name in enumerate(names) if name.split("=")[0] in theme]] for theme in THEMES.values()], y


def descended(parts: list[Array], y: Array) -> Array:
    """One step of full-batch gradient descent from 0 in one place: all columns in order, then the intercept."""
    x = np.concatenate([*parts, np.ones((len(y), 1))], 1)
    return RATE * 0.5 * (2.0 * y - 1) @ x / len(y)  # type: ignore[no-any-return]


class PlainLoop:
    """Hardy's protocol with textbook Paillier, number by number."""

    def __init__(self) -> None:
        key = PrivateKey.generate(BITS, Stream(b"benchmark"))
        self.p, self.q = big(key.p), big(key.q)
        self.n = self.p * self.q
        self.square = self.n * self.n
        self.lam = (self.p - 1) * (self.q - 1)
        self.inverse = pow(self.lam, -1, self.n)

    def encrypt(self, number: int) -> Any:
        draw = big(secrets.randbelow(int(self.n) - 1) + 1)
        return (1 + number % self.n * self.n) * pow(draw, self.n, self.square) % self.square

    def decrypt(self, text: Any) -> int:
        number = (pow(text, self.lam, self.square) - 1) // self.n * self.inverse % self.n
        return int(number - self.n if 2 * number > self.n else number)

    def epoch(self, parts: list[Array], y: Array) -> Array:
        """One full-batch step from the weights 0; returns the weights in the order of `descended`."""
        parts = [np.column_stack([part, np.ones(len(y))]) if at == HOLDER else part for at, part in enumerate(parts)]
        weights = [np.zeros(part.shape[1]) for part in parts]
        total = None
        for at, (part, w) in enumerate(zip(parts, weights, strict=True)):
            scores = part @ w - (2 * (2.0 * y - 1) if at == HOLDER else 0.0)
            sealed = [self.encrypt(int(v)) for v in np.rint(scores * 2.0**24)]
            total = sealed if total is None else [a * b % self.square for a, b in zip(total, sealed, strict=True)]
        assert total is not None
        for part, w in zip(parts, weights, strict=True):
            for j, column in enumerate(np.rint(part * 2.0**16).astype(np.int64).T.tolist()):
                mask = secrets.randbits(200)
                product = self.encrypt(mask)
                for text, value in zip(total, column, strict=True):
                    product = product * pow(text, value, self.square) % self.square
                w[j] -= RATE * 0.25 * (self.decrypt(product) - mask) / 2.0**40 / len(y)
        return np.concatenate([weights[0], weights[1][:-1], weights[2], weights[1][-1:]])


def task(parts: list[Array], y: Array) -> hansa.Task:
    pairs: list[Any] = [(part, y if at == HOLDER else None) for at, part in enumerate(parts)]
    ids = [[f"P{k:05d}" for k in range(len(y))]] * 4
    return hansa.Task(None, "cross_entropy", [*pairs, (np.zeros((len(y), 1)), None)], ids=ids)


def simulated(algorithm: Any, parts: list[Array], y: Array) -> tuple[float, Array, int]:
    """The processor seconds of the second round, the weights after the first, and the bytes of the second round.

    The first round also matches people and makes the key and its tables.
    """
    marks, first = list[float](), dict[int, Array]()

    def note(line: dict[str, Any], result: Any) -> None:
        marks.append(time.process_time())
        if len(marks) == 1:
            memories = result.memories.items()
            first.update({party: memory[WEIGHTS].numpy() for party, memory in memories if WEIGHTS in memory})

    result = hansa.simulate(algorithm, task(parts, y), rounds=2, seed=0, progress=False, callbacks=[note])
    w = np.concatenate([first[0], first[1][:-1], first[2], first[1][-1:]])
    return marks[1] - marks[0], w, int(result.history[-1]["bytes_up"])


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--data-dir")
    words.add_argument("--people", type=int, default=1024, help="People of the comparison.")
    words.add_argument("--whole", action="store_true", help="Also an epoch over all people of Adult.")
    words.add_argument("--fedv", action="store_true", help="Also an epoch of FedV.")
    words.add_argument("--batch", type=int, default=1024, help="People per batch of the whole epoch.")
    words.add_argument("--python-integers", action="store_true", help="Do not use gmpy2.")
    options = words.parse_args()
    parts, y = columns(options.data_dir, options.people)
    expected, seconds = descended(parts, y), dict[str, float]()
    widths = [part.shape[1] for part in parts]
    print(f"{len(y)} people, {widths} columns, keys of {BITS} bits, {'GMP' if GMP else 'Python'} integers", flush=True)

    def row(name: str, spent: float, weights: Array | None = None, count: int | None = None) -> None:
        seconds[name] = spent
        error = "" if weights is None else f"   largest error of a weight {abs(weights - expected).max():.1e}"
        print(f"{name:34}{spent:9.2f} s per epoch{error}" + (f"   {count} bytes" if count else ""), flush=True)

    full = {"match": "same", "batch": len(y), "lr": RATE}
    row("vertical-linear, one batch", *simulated(hansa.VerticalLinear(**full), parts, y))  # type: ignore[arg-type]
    if options.fedv:
        row("fedv, one batch", *simulated(hansa.FedV(**full), parts, y))  # type: ignore[arg-type]
    loop, begin = PlainLoop(), time.process_time()
    weights = loop.epoch(parts, y)
    row("plain Paillier loop, one batch", time.process_time() - begin, weights)
    if options.whole:
        parts, y = columns(options.data_dir, None)
        spent, _, count = simulated(hansa.VerticalLinear(match="same", batch=options.batch, lr=RATE), parts, y)
        row(f"vertical-linear, {len(y)} people", spent, None, count)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
