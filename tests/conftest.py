"""What holds for all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("hansa", deadline=None, database=None, derandomize=True, print_blob=False)
settings.load_profile("hansa")
torch.set_num_threads(1)  # the models are tiny, and tests run side by side
