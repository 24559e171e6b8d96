"""Modules that the process of forked.py imports before it forks others."""

from __future__ import annotations

import aiohttp.web  # noqa: F401
import torch
import uvloop  # noqa: F401

import hansa
import hansa.cli.network
import hansa.net.aggregator.process
import hansa.net.operator

torch.set_num_threads(1)
x, y = torch.randn(8, 3), torch.arange(8) % 2
task = hansa.Task(lambda: torch.nn.Linear(3, 2), "cross_entropy", [(x, y)] * 2, classes=2, prepare=hansa.Standardise())
hansa.simulate(hansa.FedAvg(), task, rounds=1, engine="reference")  # torch's first calls take longer than a round
