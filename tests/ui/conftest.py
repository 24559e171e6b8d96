"""The live page's tests use the federations of `tests/net`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "net"))
