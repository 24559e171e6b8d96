"""A tracker that prints one line per round, for logs without a terminal."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hansa.core.registry import register
from hansa.track.tracker import Line, Log, RunInfo, Say, Tracker

SHOWN = ("accuracy", "auc", "loss", "train_loss", "party_accuracy_worst_tenth")


@register("console")
@dataclass(frozen=True)
class ToConsole(Tracker):
    """One line per round, on standard error or in Hansa's log."""

    def open(self, info: RunInfo, state: dict[str, Any], say: Say) -> Log:
        return ConsoleLog(info, state)


class ConsoleLog(Log):
    """A run on the console."""

    def __init__(self, info: RunInfo, state: dict[str, Any]) -> None:
        self.info, self.state = info, state
        self._log = logging.getLogger("hansa")
        self._total = (info.record.get("run") or {}).get("rounds")
        self._last = 0

    def _print(self, text: str) -> None:
        if self._log.hasHandlers() and self._log.isEnabledFor(logging.INFO):
            self._log.info("%s", text)
        else:
            Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)

    def rounds(self, lines: list[Line]) -> None:
        for line in lines:
            if line["round"] > self._last:
                self._print(f"{self.info.run}: {sentence(line, self._total)}")
                self._last = line["round"]

    def finish(self, summary: dict[str, Any], folder: str) -> None:
        self._print(f"{self.info.run}: finished ({summary.get('stopped')})")

    def fail(self, reason: str) -> None:
        self._print(f"{self.info.run}: failed ({reason})")


def sentence(line: Line, total: int | None) -> str:
    """A round in one line."""
    words = [f"round {line['round']}" + (f" of {total}" if total else "")]
    words += [f"{name} {line[name]:.4f}" for name in SHOWN if line.get(name) is not None][:3]
    words += [f"{line['replies']}/{line['asked']} replies"] if "asked" in line else []
    words += [f"empty: {line['empty']}"] if "empty" in line else []
    return ", ".join(words)
