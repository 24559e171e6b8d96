"""Membership inference: was a sample among the training samples of the parties?

- `loss`: members have a smaller loss. Yeom et al. 2018, "Privacy risk in machine learning".
- `shadow`: a classifier per class, trained on the outputs of shadow models. Shokri et al. 2017.
- `lira`: the likelihood ratio of a sample's confidence among models with it and models without it. Carlini et al. 2022.
- `rmia`: how often a sample's likelihood ratio beats that of random samples. Zarifzadeh, Liu and Shokri 2024.

Reference models are trained as the run was, on random halves of all samples. They come in pairs with complementary
halves, so that n pairs give every sample n models with it and n models without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hansa.attacks.recipe import Recipe, Samples, TrainedModel
from hansa.attacks.success import membership_success

SAMPLES = 2000  # most members, and as many others, that an attack judges
LEAST = 1e-3  # smallest standard deviation of a confidence
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MemberPool:
    """Members and others, as many of each; members come first."""

    x: Tensor
    y: Tensor
    count: int
    rows: Tensor  # of the members, among all training samples

    @classmethod
    def of(cls, recipe: Recipe, most: int = SAMPLES) -> MemberPool:
        rows, others = recipe.balanced(most)
        x = torch.cat([recipe.members.x[rows], recipe.others[0][others]])
        return cls(x, torch.cat([recipe.members.y[rows], recipe.others[1][others]]), len(rows), rows)

    def success(self, scores: Any, among: int = 1) -> dict[str, Any]:
        """The success of scores that should be higher for members, as one of several attacks."""
        values = np.asarray(scores, dtype=np.float64)
        return membership_success(values[: self.count], values[self.count :], among)


@dataclass(frozen=True)
class References:
    """Reference models, and which samples of the pool each was trained with: inside[model, sample]."""

    models: Sequence[TrainedModel]
    inside: Array

    def take(self, pairs: int) -> References:
        """The first pairs of models."""
        return References(self.models[: 2 * pairs], self.inside[: 2 * pairs])


def confidence(model: TrainedModel, x: Tensor, y: Tensor) -> Array:
    """log(p / (1 - p)) of the probability of the target: close to normal over models (Carlini et al. 2022)."""
    losses = model.losses(x, y).clamp_min(1e-12)
    return (-losses - torch.log(-torch.expm1(-losses))).numpy()


def train_references(recipe: Recipe, pool: MemberPool, pairs: int) -> References:
    """Train pairs of reference models on complementary random halves of the pool.

    A party gets as many samples as in the run, on average half: members stay at their parties, and others go to a party
    drawn by the shares of their class, so that members and others differ only in their membership of the target.
    Training samples outside the pool are used by no reference.
    """
    draw = recipe.generator("references")
    party = np.concatenate([recipe.members.party[pool.rows.numpy()], _assigned(recipe, pool, draw)])
    models, inside = [], []
    for pair in range(pairs):
        half = np.zeros(len(pool.y), dtype=bool)
        half[draw.permutation(len(half))[: len(half) // 2]] = True
        for side, chosen in enumerate((half, ~half)):
            rows = torch.from_numpy(np.flatnonzero(chosen))
            samples = Samples.of(pool.x[rows], pool.y[rows], party[chosen], recipe.parties)
            models.append(recipe.trained(samples, f"reference {pair} {side}"))
            inside.append(chosen)
    return References(models, np.stack(inside))


def _assigned(recipe: Recipe, pool: MemberPool, draw: np.random.Generator) -> Array:
    """A party for each other sample: that of a random member of the same class, if there is one."""
    targets, owners = recipe.members.y, recipe.members.party
    whole = not targets.is_floating_point() and targets.dim() == 1
    known = targets.numpy() if whole else np.zeros(len(targets), dtype=np.int64)
    asked = pool.y[pool.count :].numpy() if whole else np.zeros(len(pool.y) - pool.count, dtype=np.int64)
    out = draw.choice(owners, size=len(asked))
    for label in np.unique(asked):
        same = owners[known == label]
        if len(same):
            out[asked == label] = draw.choice(same, size=int((asked == label).sum()))
    return out


def loss_scores(model: TrainedModel, pool: MemberPool) -> Array:
    """Minus the loss: Yeom et al. 2018, with every threshold at once."""
    return -model.losses(pool.x, pool.y).numpy()


def advantage(model: TrainedModel, pool: MemberPool) -> float:
    """True minus false positive rate of "a member has at most the mean training loss". Yeom et al. 2018.

    If the loss is 0 or B, this is the generalisation gap divided by B.
    """
    losses = model.losses(pool.x, pool.y)
    guessed = (losses <= losses[: pool.count].mean()).double()
    return float(guessed[: pool.count].mean() - guessed[pool.count :].mean())


def shadow_scores(model: TrainedModel, pool: MemberPool, references: References) -> Array:
    """The probability of membership by a classifier per class on the outputs of shadow models. Shokri et al. 2017."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    features = [_features(each, pool) for each in references.models]
    scaler = StandardScaler().fit(np.concatenate(features))
    known, inside = np.concatenate([scaler.transform(each) for each in features]), references.inside.reshape(-1)
    asked = scaler.transform(_features(model, pool))
    whole = not pool.y.is_floating_point() and pool.y.dim() == 1
    labels = pool.y.numpy() if whole else np.zeros(len(pool.y), dtype=np.int64)
    repeated, scores = np.tile(labels, len(features)), np.zeros(len(labels))
    for label in np.unique(labels):
        train, ask = repeated == label, labels == label
        if len(np.unique(inside[train])) < 2:
            continue
        fitted = LogisticRegression(max_iter=200).fit(known[train], inside[train])
        scores[ask] = fitted.predict_proba(asked[ask])[:, 1]
    return scores


def _features(model: TrainedModel, pool: MemberPool) -> Array:
    """What a shadow classifier sees: the confidence in the target, and the three largest class probabilities."""
    columns = [torch.from_numpy(confidence(model, pool.x, pool.y))]
    outputs = model.outputs(pool.x)
    if outputs.dim() == 2 and outputs.shape[1] > 1:
        largest = torch.softmax(outputs.double(), 1).topk(min(3, outputs.shape[1]), 1).values
        columns += list(torch.logit(largest, eps=1e-6).T)
    return torch.stack(columns, 1).numpy()


def lira_scores(model: TrainedModel, pool: MemberPool, references: References) -> Array:
    """The logarithm of the likelihood ratio of a sample's confidence, with it and without it. Carlini et al. 2022.

    The variances are shared by all samples, as the paper does with few models.
    """
    seen = np.stack([confidence(each, pool.x, pool.y) for each in references.models])
    asked = confidence(model, pool.x, pool.y)
    scores = np.zeros(len(asked))
    for inside, sign in ((references.inside, 1.0), (~references.inside, -1.0)):
        count = inside.sum(0)
        mean = np.where(inside, seen, 0.0).sum(0) / count
        spread = np.where(inside, seen - mean, 0.0)
        freedom = max(int(inside.sum()) - len(asked), 0)
        # one model per sample has no spread of its own: that of confidences over samples bounds it
        deviation = max(np.sqrt((spread**2).sum() / freedom) if freedom else float(mean.std()), LEAST)
        deviation = deviation * np.sqrt(1 + 1 / count)
        scores += sign * stats.norm.logpdf(asked, mean, deviation)
    return scores


def rmia_scores(model: TrainedModel, pool: MemberPool, references: References, gamma: float = 2.0, a: float = 0.3,
                offline: bool = False) -> Array:  # fmt: skip
    """The share of samples z with [p(x | model) / p(x)] / [p(z | model) / p(z)] of at least gamma.

    Zarifzadeh, Liu and Shokri 2024, "Low-cost high-power membership inference attacks". p(x) is the mean over reference
    models with and without x. `offline` uses those without x alone, and corrects p(x) by `a`: ((1 + a) p + 1 - a) / 2.
    """
    chances = np.stack([each.chance(pool.x, pool.y).numpy() for each in references.models])
    out = np.where(~references.inside, chances, 0.0).sum(0) / (~references.inside).sum(0)
    within = np.where(references.inside, chances, 0.0).sum(0) / references.inside.sum(0)
    usual = ((1 + a) * out + 1 - a) / 2 if offline else (out + within) / 2
    ratio = model.chance(pool.x, pool.y).numpy() / np.maximum(usual, 1e-30)
    ordered = np.sort(ratio)
    return np.asarray(np.searchsorted(ordered, ratio / gamma, side="right") / len(ordered) + 1e-9 * ratio)


def membership(recipe: Recipe, pool: MemberPool, references: References | None) -> dict[str, Any]:
    """The success of all membership attacks on the final model, by name."""
    scores = {"loss": loss_scores(recipe.model, pool)}
    if references is not None:
        for name, score in (("shadow", shadow_scores), ("lira", lira_scores), ("rmia", rmia_scores)):
            scores[name] = score(recipe.model, pool, references)
    found = {name: pool.success(values, len(scores)) for name, values in scores.items()}
    found["loss"]["advantage"] = advantage(recipe.model, pool)
    return found
