"""Non-interference of a party: what leaves it depends on one record only through a release or a booking.

    python tests/interference/interfere.py --minutes 10 --seed 1
    python tests/interference/interfere.py --case finetune/secure/17         one request, with all that was answered

Twins (`twins`) are sent the same requests (`twin_requests`), under each floor; releases are replayed (`releases`). It
finds:

- raised: an exception left the worker.
- unread: no reading was booked, and the answers differ.
- words: both refuse, in other words.
- outcome: one twin replies and the other refuses, or their replies have other shapes, and there is a privacy floor.
- reply: under differential privacy, the replies differ although all releases were equal.
- booked: the twins booked different readings or releases.
- sensitivity, release, noise: see `releases.Tape`.

The first three are no findings if one of the twins booked a decline, which a privacy floor limits.

Every fourth pass scales one number of a request over 600 decades and bisects where the answer changes. Processor times
of refusals and replies are printed by op, and decide nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fuzz"), str(HERE.parent)]

import torch  # noqa: E402
from releases import Tape, Watch, watched  # noqa: E402
from twin_requests import Request, at_place, brief, make, places, replaced, seeds  # noqa: E402
from twins import FLOORS, Answered, Twin, masked_sum  # noqa: E402

from hansa.core.ask import op_of  # noqa: E402
from hansa.core.registry import registered  # noqa: E402
from hansa.core.route_op import ROUTE  # noqa: E402
from hansa.plumbing.errors import HansaError  # noqa: E402
from hansa.secure.masking import Masking  # noqa: E402

UNSENDABLE = (HansaError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
RUNGS = (-300, -200, -150, -100, -40, -8, -3, 0, 3, 8, 20, 37, 60, 100, 148, 152, 156, 200, 250, 295, 303, 307)
SLOW = ("takes longer", "limits.memory", "raised Halted")  # refusals that depend on the machine's load
Finding = tuple[str, str]  # code, sentence


@dataclass
class Case:
    """What became of one request."""

    request: Request
    findings: list[Finding] = field(default_factory=list)
    forms: list[tuple[str, str]] = field(default_factory=list)
    accepted: bool = False
    times: list[tuple[bool, float]] = field(default_factory=list)


def compared(floor: str, variant: str, one: Answered, two: Answered,
             before: frozenset[str] = frozenset()) -> list[Finding]:  # fmt: skip
    """What is wrong with the answers of twins to the same ask; `before` are readings that were booked for it before."""
    pair = (one, two)
    if any(not each.replied and any(word in each.form for word in SLOW) for each in pair):
        return []
    found = [("raised", each.form) for each in pair if each.form.startswith("raised ")]
    readings = one.readings | two.readings | before
    tests = variant == "ulabel" or (variant[0] == "t" and variant != "text")
    how = " / ".join(each.form[:160] for each in pair)
    if "ckks" in one.op:  # its keys are drawn by a library
        return found
    counted = one.declined != two.declined and all(each.declined <= (not each.replied) for each in pair)
    if not readings:
        return found + ([("unread", how)] if one.bytes != two.bytes and not counted else [])
    if not one.replied and not two.replied:
        found += [("words", how)] if one.form != two.form and not counted else []
    elif one.form != two.form and floor != "budget" and readings != {"describe"}:
        found += [] if counted else [("outcome", how)]
    elif (floor == "dp" and one.replied and two.replied and one.bytes != two.bytes and readings != {"describe"}
          and not (readings == {"evaluate"} and tests)):  # fmt: skip
        found.append(("reply", how))
    if one.booked != two.booked and not (one.declined or two.declined):
        found.append(("booked", f"{one.booked} / {two.booked}"))
    return found


class Pair:
    """Twins that are sent the same requests."""

    def __init__(self, floor: str, kind: str, variant: str, records: int = 2) -> None:
        self.floor, self.variant, self.records = floor, variant, records
        self.twins = [Twin(floor, kind, variant, changed) for changed in (False, True)]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for twin in self.twins:
            twin.close()

    def send(self, request: Request, case: Case, job: str) -> None:
        """Send a request, and what follows it in the same job, to both twins; add to the case what was found."""
        both = []
        Watch.tape = tape = Tape(self.records)
        for turn, twin in enumerate(self.twins):
            if turn:
                tape.rewind()
            torch.manual_seed(0)
            both.append(self._sum(twin, request, job) if request.sum else self._alone(twin, request, job))
        before: dict[str, frozenset[str]] = defaultdict(frozenset)  # a repeated ask is booked once
        for one, two in zip(*both, strict=False):
            if not case.findings:
                case.findings += compared(self.floor, self.variant, one, two, before[one.message])
            before[one.message] |= one.readings | two.readings
            case.forms.append((one.form, two.form))
            if not any(name in one.op for name in ("secure-keys", "secure-shares")):
                case.accepted |= one.replied
                case.times += [(each.replied, each.seconds) for each in (one, two) if each.readings]
            if one.declined or two.declined:
                break
        if len(both[0]) != len(both[1]) and not case.findings and not any(one.declined for one in both[0] + both[1]):
            case.findings.append(("outcome", f"{len(both[0])} and {len(both[1])} exchanges"))
        if self.floor == "dp":
            case.findings += dict.fromkeys(tape.problems)

    def _alone(self, twin: Twin, request: Request, job: str) -> list[Answered]:
        out: list[Answered] = []
        tip = None
        for turn, payload in enumerate((request.payload, *request.again)):
            message = {"op": request.op, "payload": payload, "round": 0}
            answered, work = twin.ask(message, request.tree, job, number=turn, tip=tip)
            out.append(answered)
            tip = work.ask if answered.replied else tip
        return out

    def _sum(self, twin: Twin, request: Request, job: str) -> list[Answered]:
        def meddle(message: Any) -> list[Any]:
            secure = message["payload"].get("secure")
            hidden = {} if secure is None else {"secure": secure}
            return [message, *({**message, "payload": {**payload, **hidden}} for payload in request.again)]

        channel, op = Masking(**request.channel), op_of(request.op, where="ask")
        payload = {name: value for name, value in request.payload.items() if name not in ("secure", ROUTE)}
        return masked_sum(twin, op, payload, request.tree, request.kind, channel, job, request.uniform, meddle)[0]


def run(name: str, floor: str, number: int) -> Case | None:
    """Send one request to twins; None if an aggregator cannot send it."""
    request = make(name, floor, number)
    case = Case(request)
    with watched(), Pair(floor, request.kind, request.variant) as pair:
        try:
            pair.send(request, case, "job-1")
        except UNSENDABLE:
            return None
    return case


def scaled(value: Any, decades: float, ones: bool) -> Any:
    """A number, or a tensor of them, times a power of ten."""
    factor = 10.0 ** min(decades, 308)
    if isinstance(value, float):
        return min(max((value or 1.0) * factor, -1.7e308), 1.7e308)
    return ((torch.ones_like(value, dtype=torch.float64) if ones else value.double()) * factor).to(value.dtype)


def run_boundary(name: str, floor: str, number: int) -> Case | None:
    """Scale one number of a request; where the first twin's answer changes, look for the place by bisection."""
    r = random.Random(f"boundary/{name}/{floor}/{number}")
    request = make(name, floor, number)
    request.again = []
    if request.variant[0] == "t" or request.variant in ("ulabel", "newclass", "id", "weight"):
        request.variant = r.choice(("x3", "x1e3", "x1e10", "one1e8", "label"))
    if request.payload.get("model") is not None and r.random() < 0.3:
        request.payload = {**request.payload, "work": {"lr": 0.1}}
    spots = [path for path in places(request.payload) if _scales(at_place(request.payload, path))]
    if not spots:
        return None
    path, ones, case, used = r.choice(spots), r.random() < 0.5, Case(request), 0
    with watched(), Pair(floor, request.kind, request.variant) as pair:

        def answer(decades: float) -> str:
            nonlocal used
            used += 1
            value = scaled(at_place(request.payload, path), decades, ones)
            part = Case(request)
            pair.send(dataclasses.replace(request, payload=replaced(request.payload, path, value)), part, f"job-{used}")
            place = ".".join(map(str, path))
            case.findings += [(code, f"{text} at {place} * 1e{decades:.6g}") for code, text in part.findings]
            case.accepted |= part.accepted
            case.forms += part.forms
            return part.forms[-1][0] if part.forms else ""

        try:
            rungs = [(decades, answer(decades)) for decades in RUNGS]
            for (low, before), (high, after) in itertools.pairwise(rungs):
                for _ in range(9 if before != after else 0):
                    middle = (low + high) / 2
                    same = answer(middle) == before
                    low, high = (middle, high) if same else (low, middle)
        except UNSENDABLE:
            return None
    return case


def _scales(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel())


def names() -> list[str]:
    """The ops and local solvers of Hansa, by name."""
    parts = {**registered("op"), **registered("local")}
    return [name for name, part in parts.items() if part.__module__.startswith("hansa.") and name in seeds()]


@dataclass
class Campaign:
    """Requests until a time, passes over all ops and floors. An op whose valid requests a floor refuses is rare."""

    ops: list[str]
    floors: list[str]
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    found: Counter[tuple[str, ...]] = field(default_factory=Counter)
    where: dict[tuple[str, ...], str] = field(default_factory=dict)
    times: dict[tuple[str, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    reached: Counter[tuple[str, str]] = field(default_factory=Counter)

    def run(self, until: float, passes: int = 10**9) -> None:
        for turn in range(passes):
            for name in self.ops:
                for floor in self.floors:
                    if time.monotonic() > until:
                        return
                    if turn < 2 or self.reached[name, floor] or turn % 10 == 0:
                        self.one(name, floor, turn if turn < 2 else self.seed * 100_000 + turn + 1, turn % 4 == 3)

    def one(self, name: str, floor: str, number: int, boundary: bool) -> None:
        case = (run_boundary if boundary else run)(name, floor, number)
        if case is None:
            self.counts["unsendable"] += 1
            return
        asked = max(len(case.forms), 1) if boundary else 1
        self.counts["requests"] += asked
        self.counts["accepted"] += case.accepted if not boundary else sum(one[:1] == "{" for one, _ in case.forms)
        self.reached[name, floor] += case.accepted
        for replied, seconds in case.times:
            self.times[name, replied].append(seconds)
        for code, text in case.findings:
            key = (code, name, floor, re.sub(r"[0-9][0-9.e+-]*", "#", text)[:110])
            self.found[key] += 1
            if key not in self.where:
                self.where[key] = f"{name}/{floor}/{number}{'/boundary' if boundary else ''}: {text[:400]}"
                print(f"found {code}: --case {self.where[key]}", flush=True)

    def report(self) -> int:
        for key, count in sorted(self.found.items()):
            print(f"{key[0]:12} {count:5}  --case {self.where[key].partition(':')[0]}")
        for name in sorted({name for name, _ in self.times}):
            refused, replied = (self.times.get((name, is_reply), []) for is_reply in (False, True))
            if len(refused) > 4 and len(replied) > 4:
                spent = [1000 * statistics.median(each) for each in (refused, replied)]
                print(f"times        {name:22} refused after a reading {spent[0]:.1f} ms, replied {spent[1]:.1f} ms")
        share = self.counts["accepted"] / max(self.counts["requests"], 1)
        print(f"{'FAILED' if self.found else 'ok'}: {len(self.found)} findings in {self.counts['requests']} requests, "
              f"{share:.0%} accepted, {self.counts['unsendable']} not sendable, {len(self.ops)} ops")  # fmt: skip
        return 1 if self.found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", help="names, separated by commas")
    parser.add_argument("--floors", default=",".join(FLOORS))
    parser.add_argument("--case", help="OP/FLOOR/NUMBER or OP/FLOOR/NUMBER/boundary: run this request only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case:
        name, floor, number, *boundary = given.case.split("/")
        case = (run_boundary if boundary else run)(name, floor, int(number))
        print("not sendable" if case is None else json.dumps(brief(case), indent=1, default=str))
        return 1 if case is not None and case.findings else 0
    campaign = Campaign(given.ops.split(",") if given.ops else names(), given.floors.split(","), given.seed)
    campaign.run(time.monotonic() + 60 * given.minutes)
    return campaign.report()


if __name__ == "__main__":
    sys.exit(main())
