"""Default hyper-parameters: the values of the papers, or our own where a paper names none."""

from __future__ import annotations

from typing import Any

import pytest

import hansa
from hansa.core.registry import registered

PUBLISHED: list[tuple[str, str, dict[str, Any], str]] = [
    ("server", "momentum", {"lr": 1.0, "beta": 0.9, "nesterov": False}, "Hsu et al. 2019, Reddi et al. 2021"),
    ("server", "adagrad", {"beta1": 0.0, "tau": 1e-3}, "Reddi et al. 2021"),
    ("server", "adam", {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "bias_correction": False}, "Reddi et al. 2021"),
    ("server", "yogi", {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "bias_correction": False}, "Reddi et al. 2021"),
    ("local", "adam", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "lr": 0.001}, "Kingma and Ba 2015"),
    ("local", "scaffold", {"option": "II", "momentum": 0.0}, "Karimireddy et al. 2020"),
    ("local", "overlap", {"alpha": 0.6}, "Wang, Liang and Joshi 2020"),
    ("algorithm", "overlap-sgd", {"server": hansa.build("server", "momentum", lr=1.0, beta=0.7)}, "the same"),
    ("algorithm", "easgd", {"beta": 0.9, "alpha": None}, "Zhang et al. 2015"),
    ("algorithm", "fedbuff", {"buffer": 10, "max_staleness": None, "refill": "arrival"}, "Nguyen et al. 2022"),
    ("algorithm", "fedasync", {"alpha": 0.8, "max_staleness": None}, "Xie et al. 2019"),
    ("staleness", "polynomial", {"a": 0.5}, "Xie et al. 2019"),
    ("staleness", "hinge", {"a": 10.0, "b": 4}, "Xie et al. 2019"),
    ("algorithm", "zeno++", {"gamma": 0.1, "rho": 0.001, "epsilon": 0.0, "refresh": 10, "max_staleness": 10},
     "Xie et al. 2020"),
    ("fusion", "zeno", {"b": None, "rho": 5e-4}, "Xie et al. 2019: gamma / 200 at gamma = 0.1"),
    ("select", "power-of-choice", {"d": None, "variant": "pow-d", "decay": None}, "Cho et al. 2020"),
    ("select", "tiers", {"tiers": 5, "policy": "uniform", "credits": None}, "Chai et al. 2020"),
    ("pace", "adacomm", {"interval": 60.0, "gamma": 0.5}, "Wang and Joshi 2019"),
    ("schedule", "step", {"decay": 0.1}, "Wang et al. 2020"),
    ("adversary", "gaussian", {"sigma": 200.0, "replace": True}, "Xie et al. 2018"),
    ("adversary", "omniscient", {"scale": 1e20}, "Xie et al. 2018"),
    ("adversary", "sign-flip", {"scale": 1.0}, "Xie et al. 2019"),
    ("adversary", "bit-flip", {"bits": (22, 30, 31, 32), "dims": 1000, "mode": "classic"}, "Xie et al. 2018"),
    ("adversary", "gambler", {"shards": 20, "factor": -1e20, "probability": 5e-4, "fraction": 0.05}, "Xie et al. 2018"),
    ("adversary", "alie", {"z": None, "knows": "honest"}, "Baruch et al. 2019"),
]  # fmt: skip
OURS: list[tuple[str, str, dict[str, Any]]] = [
    ("algorithm", "co-op", {"b_l": 1, "b_u": None}),
    ("fusion", "trimmed-mean", {"beta": 0.2}),
    ("fusion", "zeno", {"gamma": 1.0, "samples": 32}),
    ("fusion", "geometric-median", {"iterations": 300, "tolerance": 1e-6, "weighted": False}),
    ("fusion", "norm-clip", {"bound": None, "weighted": False}),
    ("local", "sgd", {"lr": 0.1, "epochs": 1, "steps": None, "batch": 32, "momentum": 0.0, "weight_decay": 0.0}),
    ("local", "proximal", {"mu": 0.1, "gamma": None}),
    ("local", "nova", {"mu": 0.0, "momentum": 0.0}),
    ("local", "fair", {"q": 1.0}),
    ("local", "fair-gradient", {"q": 1.0, "lr": 0.1}),
    ("select", "power-of-choice", {"batch": 32}),
    ("select", "tiers", {"profile_rounds": 5, "probe_steps": 10, "interval": 10, "timeout": None}),
    ("adversary", "ipm", {"epsilon": 0.5}),
    ("adversary", "free-rider", {"noise": 0.0}),
    ("adversary", "label-flip", {"share": 1.0, "fraction": 0.2}),
]
NEEDED: dict[tuple[str, str], dict[str, Any]] = {("pace", "adacomm"): {"tau0": 4}, ("schedule", "step"): {"at": (1,)}}


@pytest.mark.parametrize(("kind", "name", "fields"), [(k, n, f) for k, n, f, _ in PUBLISHED] + OURS)
def test_what_is_left_out_has_the_value_that_is_documented(kind: str, name: str, fields: dict[str, Any]) -> None:
    part = registered(kind)[name](**NEEDED.get((kind, name), {}))
    assert {field: getattr(part, field) for field in fields} == fields
