"""Synthetic(alpha, beta): logistic models and features that differ from party to party in a controlled way.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys
2020, section 5.1; after Shamir, Srebro and Zhang, ICML 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta

from hansa.core.applies import Applies, Unless
from hansa.core.quantities import Amount, Parties
from hansa.core.registry import register
from hansa.data.dataset import Data, Dataset

DIMENSIONS = 60
CLASSES = 10


@register("synthetic")
@dataclass(frozen=True)
class Synthetic(Dataset):
    """Synthetic(alpha, beta) of FedProx: 60 features, 10 classes, parties that differ in model and features.

    Li et al. 2020. Party k labels x by argmax(W x + b) with W, b ~ N(u, 1), u ~ N(0, alpha), and draws x ~ N(v, S)
    with S = diag(j^-1.2), v ~ N(B, 1), B ~ N(0, beta). The paper calls alpha and beta variances, its code uses
    them as standard deviations; we follow the code. Note that u is one number for all classes, so that it adds the
    same to every score: alpha changes the parameters of the models but no label. Parties differ because each draws its
    own W, b and v. A party has int(lognormal(4, 2)) + 50 samples, a fifth of which is in the test set. With `iid` all
    parties share one W, b ~ N(0, 1) and v = 0, whatever alpha and beta are.
    """

    alpha: Amount = 1.0
    beta: Amount = 1.0
    parties: Parties = 30
    seed: Annotated[int, Meta(ge=0)] = 0
    iid: bool = False
    applies: ClassVar[Applies] = {"alpha": Unless("iid", True), "beta": Unless("iid", True)}

    def load(self, data_dir: str | None = None) -> Data:
        shared = self._rng(0)
        weight, bias = shared.normal(size=(DIMENSIONS, CLASSES)), shared.normal(size=CLASSES)
        train, test, parties = [], [], []
        rows = 0
        for k in range(self.parties):
            rng = self._rng(k + 1)
            size = int(rng.lognormal(4, 2)) + 50
            mean = np.zeros(DIMENSIONS)
            if not self.iid:
                u, centre = rng.normal(0, self.alpha), rng.normal(0, self.beta)
                weight, bias = rng.normal(u, 1, (DIMENSIONS, CLASSES)), rng.normal(u, 1, CLASSES)
                mean = rng.normal(centre, 1, DIMENSIONS)
            deviation = np.arange(1, DIMENSIONS + 1) ** -0.6  # the root of the variance j^-1.2
            x = rng.normal(mean, deviation, (size, DIMENSIONS))
            y = np.argmax(x @ weight + bias, axis=1)
            cut = size - size // 5
            train.append((x[:cut], y[:cut]))
            test.append((x[cut:], y[cut:]))
            parties.append(np.arange(rows, rows + cut))
            rows += cut
        x, y = (np.concatenate(columns) for columns in zip(*train, strict=True))
        test_x, test_y = (np.concatenate(columns) for columns in zip(*test, strict=True))
        return Data(
            x=torch.from_numpy(x.astype(np.float32)),
            y=torch.from_numpy(y.astype(np.int64)),
            test=(torch.from_numpy(test_x.astype(np.float32)), torch.from_numpy(test_y.astype(np.int64))),
            parties=tuple(parties),
            party_names=tuple(f"party-{k}" for k in range(self.parties)),
            classes=CLASSES,
            loss="cross_entropy",
        )

    def _rng(self, stream: int) -> np.random.Generator:
        """A separate stream per party and one for shared values, so that a new party does not change the others."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, stream])))
