"""What the parties of split learning learn from activations and gradients: two attacks, measured in simulations.

- Labels from gradients: a party that gets gradients of its activations scores each person by the length of the gradient
  (norm attack, Li et al. 2022, "Label leakage and protection in two-party split learning") or by its direction (the
  first principal component of all gradients). The number is the AUC against the true labels, 0.5 for a guess.
- Features from activations: the party that joins the activations knows the columns of some people and fits ridge
  regression from their activations, and squares of them, to their columns. The number is the R2 of the other people.

    PYTHONPATH=src python benchmarks/split_leakage.py [--rounds 10] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hansa
from hansa import Split
from hansa.core.plain_data import from_config
from hansa.models.dense import TwoNN
from hansa.numerics import rng
from hansa.sim import runtime

KNOWN = 0.2  # of the people, whose columns the attacker knows
SEED = 0


def people() -> tuple[Tensor, Tensor]:
    """The standardised columns and the labels of a data set that comes with Hansa."""
    dataset: Any = from_config("dataset", "breast-cancer", where="dataset")
    data = dataset.load()
    x = data.x.double()
    return (x - x.mean(0)) / x.std(0), data.y


def heard(algorithm: Split, x: Tensor, y: Tensor, rounds: int, device: str) -> tuple[hansa.Result, list[Any]]:
    """Train with party 0 (half of the columns) and party 1 (the other half, and labels); return all messages."""
    half = x.shape[1] // 2
    ids = [f"{k:05d}" for k in range(len(x))]  # in the order of the rows
    task = hansa.Task(None, "cross_entropy", [(x[:, :half], None), (x[:, half:], y)], ids=[ids, ids])
    plain, messages = runtime.converse, list[Any]()

    def watched(talks: Any, check: Any) -> Any:
        def noted(sender: int, receiver: int, number: int, message: Any) -> Any:
            messages.append((sender, receiver, *next(iter(message.items()))))
            return check(sender, receiver, number, message)

        return plain(talks, noted)

    runtime.converse = watched  # type: ignore[attr-defined]
    try:
        return hansa.simulate(algorithm, task, rounds=rounds, seed=SEED, device=device), messages
    finally:
        runtime.converse = plain  # type: ignore[attr-defined]


def auc(scores: Tensor, y: Tensor) -> float:
    """The area under the ROC curve, of the better of the two directions."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = int(y.sum())
    area = float(ranks[y == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(y) - positive))
    return max(area, 1 - area)


def by_person(rows: list[Tensor], rounds: int, count: int, at: int) -> Tensor:
    """The messages of one round, with row k for person k."""
    per_round = len(rows) // rounds
    joined = torch.cat([each.cpu() for each in rows[at * per_round : (at + 1) * per_round]])
    order = torch.from_numpy(rng.shuffled(rng.key(SEED, "split batches", at, 0), count))
    out = torch.empty_like(joined)
    out[order] = joined
    return out


def labels_from(gradients: Tensor, y: Tensor) -> dict[str, float]:
    """The success of the norm attack and of the direction attack."""
    first = torch.linalg.svd(gradients, full_matrices=False)[2][0]
    return {"norm": auc(gradients.norm(dim=1), y), "direction": auc(gradients @ first, y)}


def columns_from(activations: Tensor, x: Tensor) -> float:
    """The R2 of columns that the attacker rebuilds, over the people whom it does not know."""
    known = torch.from_numpy(np.random.default_rng(SEED).permutation(len(x)) < KNOWN * len(x))
    inputs = torch.cat([torch.ones(len(x), 1), activations, activations**2], 1).double()
    inputs = inputs / inputs[known].std(0).clamp_min(1e-9).where(
        torch.arange(inputs.shape[1]) > 0, torch.ones(1).double()
    )
    ridge = 1e-2 * torch.eye(inputs.shape[1], dtype=torch.float64)
    fitted = torch.linalg.solve(inputs[known].T @ inputs[known] / int(known.sum()) + ridge,
                                inputs[known].T @ x[known] / int(known.sum()))  # fmt: skip
    rest = ~known
    errors = ((inputs[rest] @ fitted - x[rest]) ** 2).sum(0)
    return float((1 - errors / ((x[rest] - x[known].mean(0)) ** 2).sum(0)).mean())


def measured(name: str, rounds: int, device: str, **fields: Any) -> dict[str, Any]:
    """Run one configuration and both attacks on its last round."""
    x, y = people()
    own = {"bottoms": (TwoNN(hidden=32, outputs=16),), "match": "same", "lr": 0.1, "dtype": "float64", **fields}
    algorithm = Split(**own)
    result, messages = heard(algorithm, x, y, rounds, device)
    attacker = 0 if algorithm.middle is None else algorithm.middle_at
    gradients = [tensor for _, to, kind, tensor in messages if kind == "gradient" and to == attacker]
    sender = 0 if algorithm.middle is None else 1
    activations = [
        tensor for who, to, kind, tensor in messages if kind == "activations" and (who, to) == (sender, 1 - sender)
    ]
    half = x.shape[1] // 2
    seen = x[:, :half] if sender == 0 else x[:, half:]
    args = (rounds, len(x))
    first, last = (labels_from(by_person(gradients, *args, at), y) for at in (0, rounds - 1))
    rebuilt = columns_from(by_person(activations, *args, rounds - 1), seen)
    return {"case": name, "train_loss": round(float(result.history[-1]["train_loss"]), 4),
            "label_auc_first_round": {k: round(v, 3) for k, v in first.items()},
            "label_auc_last_round": {k: round(v, 3) for k, v in last.items()},
            "columns_r2": round(rebuilt, 3)}  # fmt: skip


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--rounds", type=int, default=10, help="Rounds of each run.")
    words.add_argument("--device", default="cpu", help="The device that trains: cpu or cuda.")
    given = words.parse_args()
    middle = {"middle": TwoNN(hidden=32, outputs=16), "middle_at": 0, "columns": (1,)}
    cases: dict[str, dict[str, Any]] = {
        "vertical": {},
        "vertical, clip 1": {"clip": 1.0},
        "vertical, clip 1, noise 0.1": {"clip": 1.0, "noise": 0.1},
        "vertical, clip 1, noise 1": {"clip": 1.0, "noise": 1.0},
        "u-shaped": middle,
    }
    for name, fields in cases.items():
        print(json.dumps(measured(name, given.rounds, given.device, **fields)), flush=True)


if __name__ == "__main__":
    main()
