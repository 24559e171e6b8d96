"""The hostile asks of tests/fuzz, whose seeds the requests of these tests start from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "fuzz")]
