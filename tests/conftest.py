"""Settings for all tests."""

from __future__ import annotations

import signal

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "hansa", deadline=None, database=None, derandomize=True, print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],  # which says how busy the machine is
)  # fmt: skip
settings.load_profile("hansa")
torch.set_num_threads(1)  # the models are tiny, and tests run side by side
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that the tests start would ignore it too
