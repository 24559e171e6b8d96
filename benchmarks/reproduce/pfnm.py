"""PFNM on MNIST: one-shot matching of 5 to 25 networks, against their mean and their ensemble.

    python benchmarks/reproduce/pfnm.py [--data-dir DATA] [--parties 5 10 15 20 25] [--seeds 0] [--device cpu]

Yurochkin et al. 2019, figures 2 and 3: one hidden layer of 100 units, Adam with the rate 0.01, 10 epochs in batches of
32; MNIST divided evenly, or by Dirichlet(0.5). The variances and gamma are those of the authors' grid that are most
accurate on 5,000 training images that no party has. The ensemble has the parties' networks side by side, so its size is
the sum of theirs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import grid
import numpy as np
import torch
from local_networks import accuracy, ensemble, mean_network, scores, trained
from matplotlib.figure import Figure
from torch import Tensor

import hansa
from hansa.data.dataset import Data
from hansa.experiment.config import parse
from hansa.experiment.tasks import load_data
from hansa.matching.beta_bernoulli import Process
from hansa.matching.pfnm import assemble
from hansa.matching.units import Network
from hansa.models import LayerChain

HIDDEN, HELD = 100, 5000
GRID = list(itertools.product((1.0, 0.1, 0.5), (1.0, 10.0), (1.0, 1e-3, 50.0)))  # sigma, sigma0, gamma
SPLITS: dict[str, dict[str, Any]] = {"even": {"name": "iid"}, "Dirichlet": {"name": "dirichlet", "alpha": 0.5}}


def matched(modules: list[Any], shares: list[Tensor], process: Process) -> tuple[Any, int]:
    """The matched network of one-shot PFNM, and its number of hidden units."""
    network = Network.of(modules[0])
    models = [network.read({n: p.detach().cpu() for n, p in module.named_parameters()}) for module in modules]
    layers, _ = assemble(models, shares, process, [HIDDEN * len(modules)], np.random.default_rng(0))
    found = network.resized([len(layers[0].bias)])
    chain = found.chain((784,))()
    chain.load_state_dict(found.write(layers))
    return chain.eval(), len(layers[0].bias)


def run(split: dict[str, Any], parties: int, seed: int, given: argparse.Namespace, data: Data,
        held: tuple[Tensor, Tensor]) -> dict[str, Any]:  # fmt: skip
    """Accuracies in one case, and the size of the matched network."""
    rows = hansa.build("partition", split["name"], parties=parties, **{k: v for k, v in split.items() if k != "name"})
    parts = [torch.from_numpy(part) for part in rows.split(data, seed)]
    pairs = [(data.x[part], data.y[part]) for part in parts]
    layers = ("flatten", f"linear 784 {HIDDEN}", "relu", f"linear {HIDDEN} 10")
    local = hansa.Adam(lr=0.01, epochs=given.epochs, batch=32, weight_decay=1e-6)
    modules = [m.cpu() for m in trained(LayerChain((1, 28, 28), 10, layers), pairs, local, seed, given.device)]
    counts = torch.stack([torch.bincount(y, minlength=10).double() for _, y in pairs])
    shares = list(counts / counts.sum(0).clamp(min=1))
    assert data.test is not None
    test, cases = data.test, []
    for sigma, sigma0, gamma in GRID:
        chain, size = matched(modules, shares, Process(sigma, sigma0, gamma, sweeps=5))
        cases.append((accuracy(scores(chain, held[0]), held[1]), accuracy(scores(chain, test[0]), test[1]), size,
                      (sigma, sigma0, gamma)))  # fmt: skip
    _, best, size, settings = max(cases, key=lambda case: case[0])
    own = [accuracy(scores(module, test[0]), test[1]) for module in modules]
    mean = mean_network(modules, [len(y) for _, y in pairs])
    return {"pfnm": best, "mean": accuracy(scores(mean, test[0]), test[1]), "ensemble": ensemble(modules, *test),
            "own": sum(own) / len(own), "units": size, "all units": HIDDEN * parties, "settings": settings}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parties", type=int, nargs="+", default=[5, 10, 15, 20, 25])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.data_dir is not None:
        os.environ["HANSA_DATA"] = str(Path(given.data_dir).resolve())
    data = load_data(parse({"task": {"dataset": "mnist", "model": "logistic"}}))
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))
    held, rest = (data.x[order[:HELD]], data.y[order[:HELD]]), order[HELD:]
    own = Data(data.x[rest], data.y[rest], data.test, None, None, 10, "cross_entropy")
    file = grid.RESULTS / "pfnm.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for (name, split), parties, seed in itertools.product(SPLITS.items(), given.parties, given.seeds):
        case, begun = f"{name} parties={parties} seed={seed} epochs={given.epochs}", time.perf_counter()
        if case not in known:
            known[case] = run(split, parties, seed, given, own, held)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(known) + "\n")
            print(f"  {case}: {time.perf_counter() - begun:.0f} s", flush=True)
    show(given, known)


METHODS = {"pfnm": "PFNM", "mean": "mean of weights", "ensemble": "ensemble", "own": "single network"}


def show(given: argparse.Namespace, known: dict[str, Any]) -> None:
    """Print the table and draw the figure."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    rows = []
    for panel, name in enumerate(SPLITS, 1):
        axes = figure.add_subplot(1, 2, panel)
        means = []
        for parties in given.parties:
            found = [known[f"{name} parties={parties} seed={s} epochs={given.epochs}"] for s in given.seeds]
            means.append({key: statistics.mean(case[key] for case in found) for key in (*METHODS, "units")})
            shown = [f"{means[-1][key]:.1%}" for key in METHODS]
            rows.append([name, parties, *shown, f"{means[-1]['units']:.0f} of {HIDDEN * parties}"])
        for (key, label), style in zip(METHODS.items(), ("o-", "x-.", "s--", "^:"), strict=True):
            axes.plot(given.parties, [mean[key] for mean in means], style, label=label)
        axes.set(title=f"MNIST, {name}", xlabel="parties", ylabel="test accuracy", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)
    grid.IMAGES.mkdir(exist_ok=True)
    figure.savefig(grid.IMAGES / "reproduce_pfnm.png", dpi=130)
    grid.table(["split", "parties", *METHODS.values(), "hidden units"], rows)


if __name__ == "__main__":
    main()
