"""Cost of a round of each method, as a ratio to FedAvg on the same path of the engine.

    python benchmarks/methods.py [--cores 1] [--rounds 8] [--repeats 5] [--only NAME ...]

The workload of `workload.py` with the 2NN. The engine takes a plain step inside the backward pass, and also a step with
a proximal term, a control variate or weight decay ("direct"); a solver with its own step receives the gradient
("general"). A method on the general path is compared with FedAvg on that path, q-FedSGD with FedSGD. The table names
the evaluations of a method beyond FedAvg's gradients; a method without additional gradients or models should cost at
most 1.3 times as much.

An asynchronous method whose rounds are single arrivals is timed over 10 of them, as many as a cohort has parties. A
method that does its work in one round is timed from the start of the run to the end of that round.
Methods in which all parties take part run with the first 10 parties alone ("ten"). Classical models run on a table of
20 columns, 10 parties with 6,000 rows each, and are compared with FedAvg with a logistic regression there ("table"):
they do other work, so there is no expectation. Every registered algorithm has a row, except those over columns
(`VERTICAL`), which have benchmarks of their own, since FedAvg cannot train on columns.

All methods run in turn, in this process, `--repeats` times; a ratio is the median over the repeats of the ratio of the
medians. On one core, times are processor times, which other load disturbs little; on several cores, where processes
share the work, times are wall-clock times. Bytes are those of a message and of a party's memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import nn
from workload import BATCH, COHORT, PARTIES, RATE, SAMPLES, SIDE, population

import hansa
from hansa.core.algorithm import Algorithm
from hansa.core.registry import register, registered
from hansa.models import TwoNN

LIMIT = 1.3
DIRECT, GENERAL, ONE_GRADIENT = "fedavg", "fedavg, general", "fedsgd"
TWO_EPOCHS = "fedavg, general, 2 epochs"
FULL_GRADIENT, FULL_LOSS = "a gradient on all samples", "the loss on all samples"
TWO_LOSSES = "the losses of 2 models on all samples"
CENTRE, SECOND_MODEL = "a centre of all 100 parties' models", "a gradient of a second model at each step"
SEVERAL = "gradients of 3 models at each step"
SERVER_GRADIENT, MATCHING = "a gradient at the server per arrival", "matching of the units"
LAYER, CENTRAL = "matching of the units of one layer", "the training takes place at both ends of a link"
SCORES = "scores of 320 public samples, and training on them"
INTERPOLATED, OTHER = "training on public samples too, for 3 weights", "another model"
# What may cost more than the limit.
MORE = (FULL_GRADIENT, TWO_LOSSES, CENTRE, SECOND_MODEL, SEVERAL, SERVER_GRADIENT, MATCHING, LAYER, CENTRAL, SCORES,
        INTERPOLATED, OTHER)  # fmt: skip
TEN, TEN_GENERAL, TABLE = "fedavg, ten", "fedavg, general, ten", "fedavg, table"
PUBLIC, COLUMNS, ROWS = 320, 20, 6000
VERTICAL = {"psi", "linkage", "vertical-linear", "fedv", "secureboost", "column-forest", "split"}


@register("benchmark-general")
@dataclass(frozen=True)
class General(hansa.SGD):
    """SGD that asks the engine for gradients and takes its steps itself."""

    @property
    def step_rule(self) -> None:
        return None


@dataclass(frozen=True)
class Method:
    """An algorithm, its reference, its additional evaluations, its selector and its task.

    `arrivals` rounds count as one. A method with `one_shot` ends after its first round, or does its work in it.
    """

    algorithm: Algorithm
    against: str = DIRECT
    extra: str = ""
    select: dict[str, object] = field(default_factory=lambda: {"name": "uniform"})
    task: str = "images"
    arrivals: int = 1
    one_shot: bool = False


def methods() -> dict[str, Method]:
    """All methods, by name; those that others are compared with come first."""
    work = {"lr": RATE, "batch": BATCH}
    slow = {**work, "lr": 0.01}  # where momentum multiplies the steps

    def build(name: str, **fields: object) -> Algorithm:
        algorithm: Algorithm = hansa.build("algorithm", name, **fields)
        return algorithm

    def local(name: str, **more: object) -> dict[str, object]:
        return {"name": name, **work, **more}

    plain = local("sgd")
    once = {**plain, "epochs": 1}  # for algorithms whose own default is another number of epochs
    epoch = {**plain, "steps": -(-SAMPLES // BATCH)}  # for algorithms whose own default is one step

    def choice(variant: str, extra: str = "") -> Method:
        return Method(build("fedavg", local=plain), extra=extra, select={"name": "power-of-choice", "variant": variant})

    def ten(name: str, against: str = TEN, extra: str = "", task: str = "ten", once: bool = False,
            **fields: object) -> Method:  # fmt: skip
        return Method(build(name, **fields), against, extra, task=task, one_shot=once)

    def table(name: str, once: bool = False, **fields: object) -> Method:
        return Method(build(name, **fields), TABLE, OTHER, task="table", one_shot=once)

    ring = {"topology": {"name": "ring"}}

    return {
        DIRECT: Method(build("fedavg", local=plain)),
        GENERAL: Method(build("fedavg", local=local("benchmark-general")), GENERAL),
        TWO_EPOCHS: Method(build("fedavg", local=local("benchmark-general", epochs=2)), TWO_EPOCHS),
        ONE_GRADIENT: Method(build("fedsgd"), ONE_GRADIENT),
        "fedavgm": Method(build("fedavgm", local=plain)),
        "fedadagrad": Method(build("fedadagrad", local=plain)),
        "fedadam": Method(build("fedadam", local=plain)),
        "fedyogi": Method(build("fedyogi", local=plain)),
        "fedavg, weight decay": Method(build("fedavg", local=local("sgd", weight_decay=1e-4))),
        "fedprox": Method(build("fedprox", local=local("proximal", mu=0.1))),
        "scaffold II": Method(build("scaffold", local=local("scaffold"))),
        "scaffold I": Method(build("scaffold", local=local("scaffold", option="I")), extra=FULL_GRADIENT),
        "fednova": Method(build("fednova", local=local("nova"))),
        "fednova, proximal": Method(build("fednova", local=local("nova", mu=0.1))),
        "qfedavg": Method(build("qfedavg", local=local("fair")), extra=FULL_LOSS),
        "fedper": Method(build("fedper", local=plain)),
        "hypcluster": Method(build("hypcluster", local=plain), extra=TWO_LOSSES),
        "hypcluster, sums": Method(build("hypcluster", local=plain, hidden=True), extra=TWO_LOSSES),
        "ifca": Method(build("ifca", local=plain), extra=TWO_LOSSES),
        "lg-fedavg": Method(build("lg-fedavg", local=plain)),
        "fedrep": Method(build("fedrep", local=plain, head_epochs=1), TWO_EPOCHS),
        "apfl": Method(build("apfl", local=plain), GENERAL, SECOND_MODEL),
        "optimal-averaging": Method(build("optimal-averaging", local=local("halves")), GENERAL, SECOND_MODEL),
        "mapper": Method(build("mapper", local=local("mapper", grid=[0.5])), GENERAL, FULL_LOSS),
        "mapper, grid of 3": Method(build("mapper", local=local("mapper")), GENERAL, SEVERAL),
        "prunefl": Method(build("prunefl", local=plain)),
        "prunefl, a new mask each round": Method(build("prunefl", local=plain, interval=1), extra=FULL_GRADIENT),
        "adaptive-top-k": Method(build("adaptive-top-k", local=plain), extra="three losses on one sample"),
        "fedavg, legato": Method(build("fedavg", local=plain, fusion="legato")),
        "overlap-sgd": Method(build("overlap-sgd", local=local("overlap"))),
        "fedavg+": Method(build("fedavg+", local=plain)),
        "fedgeomed+": Method(build("fedgeomed+", local=plain), extra=CENTRE),
        "fedcomed+": Method(build("fedcomed+", local=plain), extra=CENTRE),
        "admm": Method(build("admm", local=plain)),
        "ditto": Method(build("ditto", local=plain), extra=SECOND_MODEL),
        "ditto, general": Method(build("ditto", local=plain), GENERAL, extra=SECOND_MODEL),
        "fedavg, momentum": Method(build("fedavg", local=local("sgd", **slow, momentum=0.9)), GENERAL),
        "fedavg, adam": Method(build("fedavg", local=local("adam", lr=0.001)), GENERAL),
        "fednova, momentum": Method(build("fednova", local=local("nova", **slow, momentum=0.9)), GENERAL),
        "easgd": Method(build("easgd", local=local("elastic")), GENERAL),
        "qfedsgd": Method(build("qfedsgd"), ONE_GRADIENT),
        "power-of-choice": choice("pow-d", "20 candidates' losses on all samples"),
        "power-of-choice, a batch": choice("cpow-d", "20 candidates' losses on a batch"),
        "power-of-choice, last losses": choice("rpow-d"),
        "merit": Method(build("fedavg", local=plain), select={"name": "merit"}),
        "fedbuff": Method(build("fedbuff", local=plain, buffer=COHORT)),
        "fedasync": Method(build("fedasync", local=local("proximal", mu=0.1)), arrivals=COHORT),
        "co-op": Method(build("co-op", local=plain), arrivals=COHORT),
        "zeno++": Method(build("zeno++", local=epoch), extra=SERVER_GRADIENT, task="trusted", arrivals=COHORT),
        TEN: ten("fedavg", local=plain),
        TEN_GENERAL: ten("fedavg", TEN_GENERAL, local=local("benchmark-general")),
        "d-psgd": ten("d-psgd", local=epoch, **ring),
        "push-sum": ten("push-sum", local=epoch, **ring),
        "self-aggregation": ten("self-aggregation", local=plain, **ring),
        "fsvrg": ten("fsvrg", TEN_GENERAL, FULL_GRADIENT, local={"name": "svrg", "h": RATE, "batch": BATCH}),
        "dapper": ten("dapper", TEN_GENERAL, INTERPOLATED, "public", once=True),
        "fedmd": ten("fedmd", TEN_GENERAL, SCORES, "public", local=once, private_epochs=1),
        "pfnm": ten("pfnm", TEN_GENERAL, MATCHING, once=True, local=once),
        "fedma": ten("fedma", TEN_GENERAL, LAYER, once=True, local=once),
        "split-sequential": ten("split-sequential", TEN_GENERAL, CENTRAL),
        TABLE: Method(build("fedavg", local=plain), TABLE, task="table"),
        "bayesian-gossip": table("bayesian-gossip", **ring),
        "naive-bayes": table("naive-bayes", once=True),
        "least-squares": table("least-squares", once=True),
        "logistic-regression": table("logistic-regression"),
        "linear-svm": table("linear-svm"),
        "kernel-svm": table("kernel-svm"),
        "id3": table("id3", once=True),
        "random-forest": table("random-forest", per_round=1),
        "boosting": table("boosting"),
        "spahm": table("spahm", once=True),
    }


def tasks() -> dict[str, hansa.Task]:
    """The 100 parties of the workload, the first 10 of them with public samples, and a table."""
    x, y = population()
    x = x.reshape(-1, 1, SIDE, SIDE)
    sizes = np.arange(0, PARTIES * SAMPLES + 1, SAMPLES)
    rest = slice(COHORT * SAMPLES, COHORT * SAMPLES + PUBLIC)
    few = (x[: sizes[COHORT]], y[: sizes[COHORT]], sizes[: COHORT + 1])
    draws = np.random.default_rng(4)
    numbers = draws.normal(size=(COHORT * ROWS, COLUMNS)).astype(np.float32)
    labels = (numbers @ draws.normal(size=COLUMNS) + draws.normal(size=len(numbers)) > 0).astype(np.int64)
    return {
        "images": hansa.Task(TwoNN(), "cross_entropy", (x, y, sizes)),
        "trusted": hansa.Task(TwoNN(), "cross_entropy", (x, y, sizes), trusted=(x[:PUBLIC], y[:PUBLIC])),
        "ten": hansa.Task(TwoNN(), "cross_entropy", few),
        "public": hansa.Task(TwoNN(), "cross_entropy", few, public=(x[rest], y[rest])),
        "table": hansa.Task(lambda: nn.Linear(COLUMNS, 2), "cross_entropy",
                            (numbers, labels, np.arange(0, len(numbers) + 1, ROWS))),
    }  # fmt: skip


@dataclass
class Found:
    """Results of a method: seconds per round in each repeat, and bytes."""

    repeats: list[list[float]] = field(default_factory=list)
    down: int = 0
    up: int = 0
    remembered: int = 0

    @property
    def medians(self) -> list[float]:
        return [statistics.median(repeat) for repeat in self.repeats]


def run(method: Method, task: hansa.Task, rounds: int, clock: str, found: Found) -> None:
    """One run, its rounds after the first timed."""
    now = time.process_time if clock == "processor" else time.perf_counter
    ticks: list[float] = []
    count = 1 if method.one_shot else (rounds + 1) * method.arrivals
    begun = now()
    result = hansa.simulate(
        method.algorithm, task, rounds=count, cohort=COHORT / PARTIES if method.task in ("images", "trusted") else 1.0,
        engine="stacked", eval_every=count, select=method.select, on_round=lambda _: ticks.append(now()),
    )  # fmt: skip
    each = ticks[method.arrivals - 1 : -1 : method.arrivals]  # the last round is followed by a test
    found.repeats.append([b - a for a, b in itertools.pairwise([begun, ticks[0]] if method.one_shot else each)])
    line = result.history[-1]
    found.down, found.up = line["bytes_down"] // line["asked"], line["bytes_up"] // line["replies"]
    kept = [sum(value.nbytes for value in memory.values()) for memory in dict(result.memories).values()]
    found.remembered = max(kept, default=0)


def main() -> None:
    known = methods()
    left_out = set(registered("algorithm")) - {method.algorithm.name for method in known.values()} - VERTICAL
    if left_out:
        sys.exit(f"these algorithms have no row: {', '.join(sorted(left_out))}. Add them to methods().")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(known), metavar="NAME")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    clock = "processor" if given.cores == 1 else "wall"
    if given.only:
        wanted = {*given.only, *(known[name].against for name in given.only)}
        known = {name: method for name, method in known.items() if name in wanted}
    given_tasks = tasks()
    results = {name: Found() for name in known}
    for repeat in range(given.repeats):
        for name, method in known.items():
            run(method, given_tasks[method.task], given.rounds, clock, results[name])
        print(f"  repeat {repeat + 1} of {given.repeats}", file=sys.stderr, flush=True)
    print(f"{given.cores} core(s), {clock} time, {given.repeats} repeats of {given.rounds} rounds\n")
    print("| method | path | beyond FedAvg's gradients | ms per round | ratio | range | bytes down | up | remembered |")
    print("|---|---|---|---|---|---|---|---|---|")
    record, dear = {}, []
    for name, method in known.items():
        found = results[name]
        base = results[method.against]
        ratios = [a / b for a, b in zip(found.medians, base.medians, strict=True)]
        ratio = statistics.median(ratios)
        path = "direct" if method.against in (DIRECT, TEN) else "table" if method.against == TABLE else "general"
        if method.extra not in MORE and ratio > LIMIT:
            dear.append(f"{name} ({ratio:.2f})")
        cells = [
            name, path, method.extra, f"{1e3 * statistics.median(found.medians):.1f}", f"{ratio:.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}", f"{found.down:,}", f"{found.up:,}", f"{found.remembered:,}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")
        record[name] = {**vars(found), "against": method.against, "extra": method.extra, "ratio": ratio}
    print(f"\nOver {LIMIT} without another gradient: {', '.join(dear) or 'none'}")
    folder = Path(__file__).resolve().parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"methods_{given.cores}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
