"""FLamby's Fed-Heart-Disease: pooled, local and federated training, and fine-tuning, on four hospitals.

    python benchmarks/reproduce/flamby_heart.py [--seeds 42 43 44 45 46] [--data FOLDER]

Ogier du Terrail et al. 2022, "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
Settings": logistic regression, batches of 4, 15 rounds of 100 local updates, five seeds. Preparation, split, rates and
the metric are those of its code (owkin/FLamby, datasets/fed_heart_disease and config_heart_disease.json). FOLDER has
UCI's processed.*.data files; by default the folder heart-disease of the environment variable HANSA_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.model_selection import train_test_split

import hansa
from hansa.algorithms.scaffold import Scaffold
from hansa.core.algorithm import Algorithm, State
from hansa.core.federation import Federation
from hansa.fusion import Fusion, WeightedMean
from hansa.local import SGD, Adam, Controlled, Proximal
from hansa.models import Logistic
from hansa.select.selector import Selector, SelectorState
from hansa.server.adaptive import Adagrad, ServerAdam, Yogi

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
ROUNDS, UPDATES, BATCH = 15, 100, 4
EPOCHS = 50  # of pooled and local training, by Adam
TUNING = 2  # epochs: 100 updates at the largest hospital
RESULTS = Path(__file__).resolve().parents[1] / "results" / "flamby_heart.json"
PUBLISHED = {"pooled": 0.7953, "FedAvg": 0.7480, "FedProx": 0.7480, "SCAFFOLD": 0.7480, "FedAdam": 0.7787,
             "SCAFFOLD, weighted": 0.7480, "FedYogi": 0.7787, "FedAdagrad": 0.7787, "cyclic": 0.7850,
             "cyclic, not passed on": 0.7850, "local cleveland": 0.7843,
             "local hungarian": 0.7268, "local switzerland": 0.4827, "local va": 0.6110}  # fmt: skip
Pair = tuple[torch.Tensor, torch.Tensor]


@hansa.register("cyclic")
@dataclass(frozen=True)
class Cyclic(Selector):
    """One party per round, in cycles; the order of each cycle is drawn at its start."""

    blind: ClassVar[bool] = True

    async def select(self, fed: Federation, algorithm: Algorithm, state: State,
                     own_state: SelectorState) -> tuple[tuple[int, ...], SelectorState]:  # fmt: skip
        left = own_state.get("left") or fed.rng("cycle").permutation(len(fed.parties)).tolist()
        return (left[0],), {"left": left[1:]}


@hansa.register("weighted-scaffold")
@dataclass(frozen=True)
class WeightedScaffold(Scaffold):
    """SCAFFOLD as in FLamby's code: parties weigh as their samples. With all parties in every round, c is the weighted
    mean of all c_i."""

    fusion: Fusion = WeightedMean()

    def __post_init__(self) -> None:
        """Accept the weights."""


class Hospitals:
    """The patients of the four hospitals, prepared and split as FLamby's dataset.py does."""

    def __init__(self, folder: Path) -> None:
        tables = [_read(folder / f"processed.{name}.data") for name in HOSPITALS]
        features = _dummies(np.concatenate([table[:, :-1] for table in tables]))
        labels = (np.concatenate([table[:, -1] for table in tables]) > 0).astype(np.float32)
        sizes = np.cumsum([0, *(len(table) for table in tables)])
        self.train, self.test = [], []
        for first, last in itertools.pairwise(sizes):
            y = labels[first:last]
            counts = [int((y == kind).sum()) for kind in (0, 1)]
            both = min(counts) > 2
            train, test = train_test_split(np.arange(len(y)), test_size=0.34, train_size=0.66, random_state=43,
                                           shuffle=True, stratify=y if both else None)  # fmt: skip
            self.train.append((features[first:last][train], y[train]))
            self.test.append((features[first:last][test], y[test]))

    def own(self, hospital: int) -> tuple[Pair, Pair]:
        """A hospital's training and test patients, scaled by its own training patients."""
        return self._scaled(self.train[hospital : hospital + 1], self.test[hospital : hospital + 1])

    def pooled(self) -> tuple[Pair, Pair]:
        """All training and test patients, scaled together."""
        return self._scaled(self.train, self.test)

    @staticmethod
    def _scaled(train: list[Any], test: list[Any]) -> tuple[Pair, Pair]:
        joined = [tuple(np.concatenate([pair[k] for pair in pairs]) for k in (0, 1)) for pairs in (train, test)]
        centre, spread = joined[0][0].mean(0), joined[0][0].std(0, ddof=1)
        return tuple(  # type: ignore[return-value]
            (torch.tensor((x - centre) / (spread + 1e-9), dtype=torch.float32), torch.tensor(y).reshape(-1, 1))
            for x, y in joined
        )


def _read(path: Path) -> np.ndarray[Any, Any]:
    """The rows without a missing value, without the three columns that are mostly missing (slope, ca, thal)."""
    rows = [line.split(",") for line in path.read_text().split()]
    kept = [[cell for k, cell in enumerate(row) if k not in (10, 11, 12)] for row in rows]
    return np.array([row for row in kept if "?" not in row], dtype=np.float64)


def _dummies(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Chest pain (2) and ECG (6) as indicators of all values but the first, after the other columns."""
    rest = [x[:, k] for k in range(x.shape[1]) if k not in (2, 6)]
    indicators = [x[:, k] == value for k in (2, 6) for value in np.unique(x[:, k])[1:]]
    return np.stack([*rest, *indicators], axis=1).astype(np.float32)


def methods() -> dict[str, tuple[Algorithm, dict[str, Any]]]:
    """The federated methods with the rates of config_heart_disease.json."""

    def sgd(lr: float) -> dict[str, Any]:
        return {"lr": lr, "steps": UPDATES, "batch": BATCH}

    adaptive: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "tau": 1e-8}
    return {
        "FedAvg": (hansa.FedAvg(local=SGD(**sgd(0.001))), {}),
        "FedProx": (hansa.FedProx(local=Proximal(**sgd(0.001), mu=0.01)), {}),
        "SCAFFOLD": (hansa.Scaffold(local=Controlled(**sgd(0.001))), {}),
        "SCAFFOLD, weighted": (WeightedScaffold(local=Controlled(**sgd(0.001))), {}),
        "FedAdam": (hansa.FedAvg(local=SGD(**sgd(0.01)), server=ServerAdam(lr=0.01, **adaptive)), {}),
        "FedYogi": (hansa.FedAvg(local=SGD(**sgd(0.003162)), server=Yogi(lr=0.01, **adaptive)), {}),
        "FedAdagrad": (
            hansa.FedAvg(local=SGD(**sgd(0.003162)), server=Adagrad(lr=0.316228, beta1=0.9, tau=1e-8)), {},
        ),
        "cyclic": (hansa.FedAvg(local=SGD(**sgd(0.01))), {"select": Cyclic(), "cohort_size": 1}),
    }  # fmt: skip


def run(hospitals: Hospitals, seed: int) -> dict[str, float]:
    """The accuracy of every method on the pooled test patients; of fine-tuning, the mean over the hospitals' own."""
    own, (pooled, test) = [hospitals.own(k) for k in range(len(HOSPITALS))], hospitals.pooled()
    model = Logistic(inputs=(13,), outputs=1)

    def accuracy(algorithm: Algorithm, parties: list[Pair], **settings: Any) -> float:
        task = hansa.Task(model, "bce", parties, test)
        done = hansa.simulate(algorithm, task, seed=seed, engine="reference", **settings)
        return float(done.summary["accuracy"])

    alone = hansa.FedAvg(local=Adam(lr=0.001, epochs=EPOCHS, batch=BATCH))
    out = {"pooled": accuracy(alone, [pooled], rounds=1)}
    for name, (train, _) in zip(HOSPITALS, own, strict=True):
        out[f"local {name}"] = accuracy(alone, [train], rounds=1)
    parties, tests = [train for train, _ in own], [each for _, each in own]
    for name, (algorithm, settings) in methods().items():
        out[name] = accuracy(algorithm, parties, rounds=ROUNDS, eval_every=ROUNDS, **settings)
    # FLamby's cyclic strategy copies the model for each party, passes no copy on, and tests that of the first party.
    visits = hansa.FedAvg(local=SGD(lr=0.01, steps=UPDATES, batch=BATCH))
    out["cyclic, not passed on"] = accuracy(visits, parties[:1], rounds=4, eval_every=4)
    tuned = hansa.simulate(
        methods()["FedAvg"][0], hansa.Task(model, "bce", parties, party_tests=tests), rounds=ROUNDS, seed=seed,
        eval_every=ROUNDS, engine="reference", finetune={"epochs": TUNING, "lr": 0.001, "batch": BATCH},
    ).summary["finetuned"]  # fmt: skip
    return out | {f"FedAvg, {when} fine-tuning": tuned[when]["party_accuracy_mean"] for when in ("before", "after")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HANSA_DATA", ".")) / "heart-disease")
    given = parser.parse_args()
    hospitals = Hospitals(given.data)
    sizes = [(len(train[1]), len(test[1])) for train, test in zip(hospitals.train, hospitals.test, strict=True)]
    print("training and test patients:", dict(zip(HOSPITALS, sizes, strict=True)))
    runs = [run(hospitals, seed) for seed in given.seeds]
    rows = {name: [each[name] for each in runs] for name in runs[0]}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"seeds": given.seeds, "accuracy": rows, "published": PUBLISHED}, indent=1) + "\n")
    print("| method | accuracy | seeds | FLamby |\n|---|---|---|---|")
    for name, found in rows.items():
        published = f"{PUBLISHED[name]:.4f}" if name in PUBLISHED else ""
        print(f"| {name} | {mean(found):.4f} | {min(found):.4f} to {max(found):.4f} | {published} |")


if __name__ == "__main__":
    main()
