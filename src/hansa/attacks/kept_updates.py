"""Attacks on the updates that a deployed job kept: samples, classes and members of a party.

Without the party's samples a rebuilt sample has no error. Its `match` says how well it explains the update: the cosine
of the update and of the gradient of the rebuilt samples. A match of 1 is no proof, because several samples may explain
one update. With the data of a party (`OwnerData`) its update is scored as in an attack on a run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hansa.attacks.gradient_leakage import (
    RECOVERED,
    Prior,
    Rebuilt,
    gradient_of,
    matched,
    output_bias,
    rebuild,
    success,
)
from hansa.attacks.kept_job import KeptJob, KeptUpdate, OwnerData
from hansa.attacks.leakage import BATCHES, ITERATIONS, REBUILT, record_error
from hansa.attacks.recipe import TrainedModel
from hansa.attacks.success import membership_success
from hansa.core.task import Pair
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params

PARTIES = 10  # most parties whose updates are attacked: those with the fewest samples
SAMPLES = 200  # most members, and as many others, whose gradients are compared with updates


def match(objective: Objective, params: Params, gradient: Tensor, rebuilt: Rebuilt) -> float:
    """The cosine of a seen gradient and of the gradient of rebuilt samples."""
    own = gradient_of(objective, params, rebuilt.x.to(objective.dtype), rebuilt.labels)
    return float(F.cosine_similarity(own.detach().double(), gradient.double(), dim=0))


def attack_kept(job: KeptJob, update: KeptUpdate, count: int | None) -> list[tuple[str, Rebuilt, float]]:
    """Rebuild samples from one update by every method that applies; `count` is None if the number is not known."""
    gradient, classes, prior = update.gradient(count), job.classes or 0, job.prior
    few = count is not None and count <= BATCHES[-1]
    methods = tuple(ITERATIONS) if few else ("inverting",)
    out = []
    for method in methods:
        if method == "inverting" and not np.isfinite(prior.high - prior.low):
            continue  # it moves within the range of the values, which nobody knows here
        rebuilt = rebuild(job.objective, update.start, gradient, prior, classes, count if few and count else REBUILT,
                          job.job.experiment.run.seed, method, ITERATIONS[method])  # fmt: skip
        if rebuilt is not None:
            out.append((method, rebuilt, match(job.objective, update.start, gradient, rebuilt)))
    return out


def kept_gradients(job: KeptJob) -> dict[str, Any]:
    """What the first kept update of each party reveals; with errors for the party that gave its data."""
    refused = _no_classes(job) or job.refused
    if refused:
        return {"refused": refused}
    rows: list[dict[str, Any]] = []
    pictures: dict[str, Any] | None = None
    for update in _chosen(job):
        owner = job.owner if job.owner is not None and job.owner.name == update.party else None
        count = len(owner.train[1]) if owner is not None else update.samples
        for method, rebuilt, cosine in attack_kept(job, update, count):
            row = {"party": update.party, "round": update.round + 1, "samples": count, "method": method,
                   "rebuilt": len(rebuilt.labels), "match": cosine, "labels": rebuilt.labels.tolist()}  # fmt: skip
            rows.append(row | ({} if owner is None else {"score": score(rebuilt, owner, job.prior)}))
            if job.prior.picture and (pictures is None or pictures["party"] == update.party):
                pictures = pictures or {"party": update.party, "truth": None, "rebuilt": {}}
                whole = owner is not None and len(owner.train[1]) == len(rebuilt.labels)
                x = matched(rebuilt.x, owner.train[0]) if owner is not None and whole else rebuilt.x
                pictures["truth"] = owner.train[0].tolist() if owner is not None and whole else None
                pictures["rebuilt"][method] = x.tolist()
    if not rows:
        return {"refused": "no method applies: the last layer has no bias, or the range of the values is not known"}
    scored = {} if job.owner is None else {"scored": job.owner.name, "replayed": job.owner.replayed(job.owned[0])}
    return {"kept": rows, "pictures": pictures, "left_out": _left_out(job, rows), **scored}


def _left_out(job: KeptJob, rows: list[dict[str, Any]]) -> str:
    """Which parties' updates were not attacked, and why; an empty text if all were."""
    attacked = {row["party"] for row in rows}
    unbounded = [update.party for update in _chosen(job) if update.party not in attacked]
    out = []
    if unbounded:
        why = f"updates of more than {BATCHES[-1]} samples need the range of the values, which is not known here"
        out.append(f"Not attacked: {', '.join(unbounded)}; {why}. A party's test samples (--data, --test) give it.")
    if len(job.updates) > PARTIES:
        out.append(f"Of {len(job.updates)} parties, the {PARTIES} with the fewest samples are attacked.")
    return " ".join(out)


def _chosen(job: KeptJob) -> list[KeptUpdate]:
    """The attacked updates: that of the party that gave its data, then those of the smallest parties."""
    name = None if job.owner is None else job.owner.name

    def place(update: KeptUpdate) -> tuple[bool, float]:
        return update.party != name, float("inf") if update.samples is None else update.samples

    return sorted(job.updates, key=place)[:PARTIES]


def score(rebuilt: Rebuilt, owner: OwnerData, prior: Prior) -> dict[str, Any]:
    """The error of rebuilt samples; for a party with more samples than were rebuilt, that of the nearest record."""
    x, y = owner.train
    if len(y) == len(rebuilt.labels):
        return success(rebuilt, x, y, prior)
    errors = [record_error(each, x, prior) for each in (rebuilt.x, owner.others[0][:500])]
    shares = [float((error < RECOVERED).double().mean()) for error in errors]
    return {"error": float(errors[0].mean()), "recovered": shares[0], "strangers": shares[1]}


def class_shares(objective: Objective, start: Params, gradient: Tensor, classes: int, x: Tensor) -> Tensor | None:
    """The share of each class among a party's samples, from the last layer's bias; None without a bias.

    The bias gradient of class c is the mean probability of c minus its share (Zhao et al. 2020; Wainakh et al. 2022,
    "User-level label leakage from gradients in federated learning"). The mean probability is that of the model on `x`.
    """
    bias = output_bias(objective, gradient, classes)
    if bias is None:
        return None
    usual = torch.softmax(objective.outputs(start, x.to(objective.dtype)).double(), -1).mean(0)
    shares = (usual - bias.double()).clamp_min(0)
    return shares / shares.sum().clamp_min(1e-12)


def kept_properties(job: KeptJob) -> dict[str, Any]:
    """The classes that each party holds, by its first kept update; with the error for the party that gave its data."""
    refused = _no_classes(job) or job.refused
    if refused is None and job.updates[0].samples is None:
        refused = "updates are clipped for central differential privacy, so their length does not tell shares"
    if refused:
        return {"refused": refused}
    x = job.prior.mean[None] if job.owner is None else job.owner.others[0][:500]
    rows: list[dict[str, Any]] = []
    for update in _chosen(job):
        shares = class_shares(job.objective, update.start, update.gradient(), job.classes or 0, x)
        if shares is None:
            return {"refused": "the last layer has no bias, so the shares of classes are not found"}
        row: dict[str, Any] = {"party": update.party, "round": update.round + 1, "samples": update.samples,
                               "shares": shares.tolist()}  # fmt: skip
        if job.owner is not None and job.owner.name == update.party:
            row |= _shares_score(shares, job.owner, job.classes or 0)
        rows.append(row)
    return {"kept": rows}


def _shares_score(shares: Tensor, owner: OwnerData, classes: int) -> dict[str, Any]:
    """The total variation distance to the true shares, and that of a guess: the shares of the test samples."""
    true, guess = (torch.bincount(y, minlength=classes).double() / len(y) for y in (owner.train[1], owner.others[1]))
    return {"true": true.tolist(), "distance": float((shares - true).abs().sum() / 2),
            "guess": float((guess - true).abs().sum() / 2)}  # fmt: skip


def update_scores(
    objective: Objective, updates: list[KeptUpdate], x: Tensor, y: Tensor, count: int
) -> np.ndarray[Any, Any]:
    """The cosine of each sample's gradient and of a party's update, summed over rounds: members' are larger.

    Li, Li and Ribeiro 2023, "Effective passive membership inference attacks in federated learning against
    overparameterized models".
    """
    scores = np.zeros(len(y))
    for update in updates:
        seen = update.gradient(count).double()
        for at in range(len(y)):
            own = gradient_of(objective, update.start, x[at : at + 1], y[at : at + 1]).detach().double()
            scores[at] += float(F.cosine_similarity(own, seen, dim=0))
    return scores


def kept_membership(job: KeptJob) -> dict[str, Any]:
    """Membership of the party's records: by the loss of the final model, and by the updates that the party sent."""
    owner = job.owner
    if owner is None:
        return {"refused": "membership is a question about records, and the aggregator has none; a party can give its "
                           "own file (--data, --test)"}  # fmt: skip
    (x, y), count = _balanced(job, owner), min(len(owner.train[1]), len(owner.others[1]))
    if count < 2:
        return {"refused": f"membership needs at least 2 training and 2 test samples of {owner.name}; there are "
                           f"{len(owner.train[1])} and {len(owner.others[1])}"}  # fmt: skip
    model: TrainedModel = job.model
    losses = -model.losses(x, y).numpy()
    found: dict[str, Any] = {"loss": membership_success(losses[:count], losses[count:])}
    if job.owned:
        few = min(count, SAMPLES)
        rows = torch.cat([torch.arange(few), count + torch.arange(few)])
        scores = update_scores(job.objective, job.owned, x[rows], y[rows], len(owner.train[1]))
        found["updates"] = membership_success(scores[:few], scores[few:])
    return {**found, "references": 0, "rounds": len(job.owned)}


def _balanced(job: KeptJob, owner: OwnerData) -> Pair:
    """As many training as test samples of the party, in random order; training samples come first."""
    draw = rng.generator(job.job.experiment.run.seed, "attack", "balanced")
    count = min(len(owner.train[1]), len(owner.others[1]))
    rows = [torch.from_numpy(draw.permutation(len(y))[:count]) for _, y in (owner.train, owner.others)]
    pairs = (owner.train, owner.others)
    return tuple(torch.cat([pair[k][own] for pair, own in zip(pairs, rows, strict=True)]) for k in (0, 1))  # type: ignore[return-value]


def _no_classes(job: KeptJob) -> str | None:
    if job.classes is None or job.objective.loss != "cross_entropy":
        return "attacks on updates are measured for classifiers; the targets of this job are numbers"
    return None
