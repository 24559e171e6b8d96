"""Seconds and bytes of a masked sum: Hansa compared with Flower's SecAgg+, same sizes, one core.

    python benchmarks/secure_sum.py [--parties 100] [--values 1000000] [--dropouts 0 0.3] [--without-flower]
    python benchmarks/secure_sum.py --growth 10 50 100 [--values 100000]

The second form measures what protection against a lying aggregator costs by the number of parties. The timed party
checks the certificates and signatures of all others, as a deployed party does.

In the first form all parties share secrets with all, and the threshold is 0.67. Parties that drop out do so after
sharing their secrets, which gives the aggregator the most work. One party does the complete work and is timed,
including the serialisation of its reply. The others do the same for a single value and send noise of the right length,
which the aggregator cannot distinguish until the masks are removed: then it may refuse the weights, as the last step.
There is no training. The aggregator is timed from the first key to the sum, including the reading of replies. Times are
processor times on one core. First the script compares the sum with the plain sum on small vectors. Flower runs its
unchanged mod and workflow in its own environment (created by `make bench-secure`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from hansa.core.ask import Ask, Gathered, Reduced
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import Count
from hansa.core.vault import Vault
from hansa.holdings.gateway import SampleGateway
from hansa.net.party.peers import Peers
from hansa.net.transport import certificates, keys
from hansa.plumbing import codec
from hansa.plumbing.errors import RoundAborted
from hansa.secure import Masking, signatures
from hansa.secure.masking_ops import SecureMasked

HERE = Path(__file__).resolve().parent
FLOWER = HERE / ".envs/flower/bin/python"
CHANNELS = {
    "22 bits, uniform": (Masking(bits=22, range=8.0, active=False), True),  # what Flower sends by default
    "32 bits, weighted": (Masking(active=False), False),
    "32 bits, weighted, lying aggregator": (Masking(), False),  # the default
}


@dataclass(frozen=True)
class Update(Op):
    """An op that returns a prepared update."""

    size: Count
    name = "bench-update"
    update = "w"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"w": party.data.train("statistics")[0][: self.size]}, weight=100), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"w": ((self.size,), torch.float32)}


class CertifiedVault(Vault):
    """A vault that signs with a certificate of a federation, and checks the certificates of other parties."""

    def __init__(self, folder: Path, authority: tuple[Any, bytes], name: str) -> None:
        folder.mkdir()
        key = keys.new_key()
        certificate = certificates.issue(*authority, key.public_key(), name, "party", "bench", 9)
        for file, data in (("key.pem", keys.key_bytes(key)), ("cert.pem", certificate), ("ca.pem", authority[1]),
                           ("party.json", b'{"federation": "bench"}')):  # fmt: skip
            keys.write_private(folder / file, data)
        self._peers = Peers(folder, {})

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        return self._peers.sign(data)

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        return self._peers.known(certificate)


class Sum:
    """One masked sum, its parties in this process; `real` of them do the work of a whole vector."""

    def __init__(self, channel: Masking, uniform: bool, parties: int, values: int, dropouts: float, real: int,
                 vaults: Sequence[Vault] = ()) -> None:  # fmt: skip
        self.vaults = vaults or [Vault()] * parties
        self.channel, self.uniform, self.parties, self.values, self.real = channel, uniform, parties, values, real
        self.gone = set(range(parties - round(dropouts * parties), parties))
        make = torch.Generator().manual_seed(0)
        self.updates = [torch.randn(values if k < real else 1, generator=make) / 10 for k in range(parties)]
        self.memory: list[Memory] = [{} for _ in range(parties)]
        self.at_party = self.at_aggregator = 0.0
        self.up = self.down = 0

    def run(self) -> Reduced | None:
        fed = Federation(range(self.parties), 0, 0, self.parties, protocol=self.channel)
        asks = drive(fed.reduce(Update(self.values), uniform=self.uniform), "bench")
        answer = None
        while True:
            began = time.process_time()
            if isinstance(answer, list):  # masked replies are read from the bytes that came
                answer = Gathered(tuple(p for p, _ in answer), tuple(Reply.of_tree(codec.decode(b)) for _, b in answer))
            try:
                ask = asks.send(cast(Any, answer))
            except StopIteration as done:
                self.at_aggregator += time.process_time() - began
                return cast(Reduced, done.value)
            except RoundAborted:
                if self.real == self.parties:
                    raise
                self.at_aggregator += time.process_time() - began
                return None
            self.at_aggregator += time.process_time() - began
            answer = self.answers(ask)

    def answers(self, ask: Ask) -> Any:
        assert ask.op is not None
        here = [party for party in ask.parties if not (isinstance(ask.op, SecureMasked) and party in self.gone)]
        self.down += codec.size(ask.message(0))
        out, noise = [], b""
        for party in here:
            op = ask.op
            if isinstance(op, SecureMasked) and party >= self.real:
                op = SecureMasked(**{**vars(op), "inner": Update(1)})
            began = time.process_time()
            data = SampleGateway((self.updates[party], self.updates[party]))
            me = Party(party, cast(Any, None), data, 0, 0, b"", self.vaults[party])
            reply, self.memory[party] = op.run(me, ask.payload_of(party), self.memory[party])
            sent = codec.encode(reply.tree())
            if party == 0:
                self.at_party += time.process_time() - began
                self.up += len(sent)
                noise = sent
            out.append((party, noise if op is not ask.op else sent))
        if isinstance(ask.op, SecureMasked):
            return out
        return Gathered(tuple(p for p, _ in out), tuple(Reply.of_tree(codec.decode(b)) for _, b in out))


def compared(channel: Masking, uniform: bool) -> None:
    """Check that a small sum with three dropouts of ten parties equals the plain sum."""
    small = Sum(channel, uniform, 10, 50, 0.3, real=10)
    found = cast(Reduced, small.run()).sums["w"]
    plain = sum(update.double() * (1 if uniform else 100) for update in small.updates[:7])
    assert float((found - cast(Any, plain)).abs().max()) < 7 * 100 * 2.0**-17, "the masked sum is not the plain one"


def ours(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, (made, uniform) in CHANNELS.items():
        channel = made if made.active else dataclasses.replace(made, neighbours=2 * given.parties)  # all of them
        compared(channel, uniform)
        for dropouts in given.dropouts:
            one = Sum(channel, uniform, given.parties, given.values, dropouts, real=1)
            one.run()
            rows.append({"who": f"hansa, {name}", "dropouts": dropouts, "party": one.at_party,
                         "aggregator": one.at_aggregator, "up": one.up, "down": one.down})  # fmt: skip
    return rows


def growth(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The cost of a sum by the number of parties: for a curious aggregator with the default neighbours, and a lying
    one."""
    rows = []
    for parties in given.growth:
        with tempfile.TemporaryDirectory() as folder:
            authority = certificates.make_ca("bench")
            vaults = [CertifiedVault(Path(folder) / str(k), authority, f"p{k}") for k in range(parties)]
            for active in (False, True):
                signatures.verify.cache_clear()
                one = Sum(Masking(active=active), False, parties, given.values, 0.0, parties, vaults)
                one.run()
                rows.append({"parties": parties, "against": "lying" if active else "curious", "party": one.at_party,
                             "aggregator": one.at_aggregator, "up": one.up, "down": one.down})  # fmt: skip
    return rows


def flower(given: argparse.Namespace) -> list[dict[str, Any]]:
    if given.without_flower or not FLOWER.exists():
        print("Flower is left out: `make bench-secure` creates its environment", file=sys.stderr)
        return []
    out = subprocess.run([str(FLOWER), str(HERE / "peers/flower/secure_sum.py"), str(given.parties), str(given.values),
                          *map(str, given.dropouts)], check=True, capture_output=True, text=True)  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(out.stdout.splitlines()[-1])
    return rows


def expansion(parties: int, values: int, bits: int, neighbours: int | None) -> float:
    """The bytes that a party sends over those of its numbers in the clear: 2^10 parties, 2^20 values of 16 bits are
    the setting for which Bonawitz et al. (2017) give 1.73."""
    from hansa.secure.masking_ops import CHECKS, SEALED
    from hansa.secure.masking_terms import CHECK, Terms
    from hansa.secure.shamir import SHARE

    channel = Masking(bits=bits, neighbours=neighbours, active=False)
    terms: Terms = channel.terms(parties)
    op = SecureMasked(Update(values), bits=bits, max_weight=1, parties=parties, uniform=True)
    masked = op.expects({})["masked"][0][0]
    shares = terms.neighbours * SEALED + (terms.neighbours + 1) * CHECKS + CHECK
    return (64 + shares + masked + terms.neighbours + (terms.neighbours + 1) * SHARE) / (values * bits / 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", type=int, default=100)
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.3])
    parser.add_argument("--without-flower", action="store_true")
    parser.add_argument("--growth", type=int, nargs="+", help="numbers of parties to compare instead")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    rows = growth(given) if given.growth else ours(given) + flower(given)
    if given.json:
        print(json.dumps(rows))
        return
    if given.growth:
        print("| parties | aggregator | ms per party | ms at the aggregator | KB sent by a party | KB received |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            print(f"| {row['parties']} | {row['against']} | {1e3 * row['party']:.0f} | {1e3 * row['aggregator']:.0f} | "
                  f"{row['up'] / 1e3:.0f} | {row['down'] / 1e3:.0f} |")  # fmt: skip
        return
    print(f"{given.parties} parties, {given.values:,} values, threshold 0.67, all share with all; one core\n")
    print("| | dropouts | seconds per party | seconds at the aggregator | MB sent by a party | relative to float32 |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['who']} | {row['dropouts']:.0%} | {row['party']:.2f} | {row['aggregator']:.1f} | "
              f"{row['up'] / 1e6:.2f} | {row['up'] / (4 * given.values):.2f} x |")  # fmt: skip
    every, some = (expansion(2**10, 2**20, 16, k) for k in (2**10, None))
    print("\n2^10 parties, 2^20 values of 16 bits, calculated: bytes sent by a party over those in the clear: ")
    print(f"{every:.2f} if all share with all, {some:.2f} with the default neighbours; the paper says 1.73.")


if __name__ == "__main__":
    main()
