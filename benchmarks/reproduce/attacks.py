"""Published figures of inference attacks, on MNIST and a CPU: labels from gradients, audited epsilon, few references.

- `idlg`: Zhao, Mopuri and Bilen 2020 find all labels of single MNIST samples; DLG (Zhu et al. 2019) finds 89.9%.
- `epsilon`: Privacy Meter audits a CIFAR-10 model in one run: 5.48 without privacy, 0.42 with differential privacy.
  Here a smaller twin: a perceptron on MNIST.
- `rmia`: Zarifzadeh et al. 2024 report AUCs of 68.6, 70.1 and 71.0 with 1, 2 and 4 reference models on CIFAR-10. Here a
  twin on MNIST that overfits; what is compared is the order.
- `documented`: the empirical epsilon of the configurations with differential privacy in the documentation.

    HANSA_DATA=... PYTHONPATH=src python benchmarks/reproduce/attacks.py [idlg] [epsilon] [rmia] [documented]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hansa
from hansa.attacks.canaries import audit_epsilon
from hansa.attacks.gradient_leakage import Prior, dlg, gradient_of, idlg_label
from hansa.attacks.membership import MemberPool, lira_scores, loss_scores, rmia_scores, train_references
from hansa.attacks.recipe import recipe_of
from hansa.core.plain_data import from_config
from hansa.experiment.config import parse, read
from hansa.local import DPSGD, SGD
from hansa.models.dense import TwoNN
from hansa.numerics.objective import Objective
from hansa.privacy.accounting import calibrate
from hansa.run.resume import execute

EXAMPLES = Path(__file__).parents[2] / "examples"
CENTRAL = {  # as in docs/experiments.md
    "task": {"dataset": "digits", "model": "logistic"}, "partition": {"name": "iid", "parties": 100},
    "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.5, "epochs": 5, "batch": 10}},
    "privacy": {"dp": {"kind": "central", "epsilon": 3, "delta": 1e-5, "clip": 1.0}}, "run": {"rounds": 20},
}  # fmt: skip


def mnist() -> tuple[torch.Tensor, torch.Tensor]:
    """All MNIST training samples."""
    dataset: Any = from_config("dataset", "mnist", where="dataset")
    data = dataset.load()
    return data.x, data.y


def lenet() -> nn.Module:
    """The network of DLG: convolutions of 5x5 with sigmoids, and large random weights."""
    module = nn.Sequential(
        nn.Conv2d(1, 12, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, 1, 2),
        nn.Sigmoid(), nn.Flatten(), nn.Linear(588, 10))  # fmt: skip
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return module


def idlg(samples: int = 1000, matched: int = 40) -> dict[str, Any]:
    """The share of labels that iDLG reads off, and that DLG finds by matching gradients."""
    x, y = mnist()
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(y))[:samples])
    prior = Prior.of(x[:5000])
    read_off = by_matching = 0
    for at, row in enumerate(rows.tolist()):
        objective = Objective(lenet, "cross_entropy", at % 20)
        gradient = gradient_of(objective, objective.initial, x[row : row + 1], y[row : row + 1]).detach()
        read_off += idlg_label(objective, gradient, 10) == int(y[row])
        if at < matched:
            rebuilt = dlg(objective, objective.initial, gradient, prior, None, 10, 1, at, 300)
            by_matching += int(rebuilt.labels[0]) == int(y[row])
    return {"idlg": read_off / samples, "idlg_samples": samples, "dlg": by_matching / matched, "dlg_samples": matched}


def small_task(size: int, parties: int, held: int) -> hansa.Task:
    """A few MNIST samples for the parties, and others that nobody trains with."""
    x, y = mnist()
    rows = torch.from_numpy(np.random.default_rng(1).permutation(len(y))[: size + held])
    x, y = x[rows], y[rows]
    pairs = [(x[:size][k::parties], y[:size][k::parties]) for k in range(parties)]
    return hansa.Task(TwoNN(), "cross_entropy", pairs, test=(x[size:], y[size:]), classes=10)


def epsilon(canaries: int = 1000) -> dict[str, Any]:
    """The audited epsilon of one run with canaries, without privacy and with DP-SGD of epsilon 4."""
    task, rounds, batch = small_task(1000, 5, 2000), 60, 50
    steps = rounds * -(-(200 + canaries // 10) // batch)
    sigma = calibrate(4.0, 1e-5, batch / (200 + canaries // 10), steps)
    out = {}
    for name, local in (("none", SGD(lr=0.1, epochs=2, batch=10)),
                        ("dp-sgd", DPSGD(lr=0.5, batch=batch, clip=1.0, sigma=sigma, delta=1e-5))):  # fmt: skip
        result = hansa.simulate(hansa.FedAvg(local), task, rounds=rounds, eval_every=rounds, progress=False)
        found = audit_epsilon(recipe_of(result), canaries)
        out[name] = {**found, "accuracy": result.history[-1]["accuracy"]}
    return out


def rmia(seeds: int = 3) -> dict[str, Any]:
    """AUCs with 1, 2 and 4 reference models without each sample (and as many with it), means over targets."""
    rows: dict[str, list[float]] = {}
    for seed in range(seeds):
        result = hansa.simulate(hansa.FedAvg(SGD(lr=0.1, epochs=2, batch=10)), small_task(500, 5, 500), rounds=20,
                                eval_every=20, seed=seed, progress=False)  # fmt: skip
        recipe = recipe_of(result)
        pool = MemberPool.of(recipe)
        references = train_references(recipe, pool, 4)
        rows.setdefault("loss", []).append(pool.success(loss_scores(recipe.model, pool))["auc"])
        for pairs in (1, 2, 4):
            some = references.take(pairs)
            for name, scores in (("rmia offline", rmia_scores(recipe.model, pool, some, offline=True)),
                                 ("rmia", rmia_scores(recipe.model, pool, some)),
                                 ("lira", lira_scores(recipe.model, pool, some))):  # fmt: skip
                rows.setdefault(f"{name}, {pairs}", []).append(pool.success(scores)["auc"])
    return {name: round(float(np.mean(values)), 4) for name, values in rows.items()}


def documented() -> dict[str, Any]:
    """The empirical and the claimed epsilon of each configuration of the documentation that claims one."""
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, experiment in (("examples/private.toml", read(EXAMPLES / "private.toml")),
                                 ("examples/private-parties.toml", read(EXAMPLES / "private-parties.toml")),
                                 ("docs/experiments.md, central", parse(CENTRAL))):  # fmt: skip
            place = Path(folder) / str(len(out))
            execute(dataclasses.replace(experiment, track=()), place)
            found = audit_epsilon(recipe_of(place))
            out[name] = {key: found[key] for key in ("unit", "epsilon", "claimed", "canaries", "correct", "guesses")}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"idlg": idlg, "epsilon": epsilon, "rmia": rmia, "documented": documented}
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="default: all")
    for name in parser.parse_args().parts or list(parts):
        began = time.monotonic()
        print(json.dumps({"part": name, **parts[name](), "seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
