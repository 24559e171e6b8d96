"""A run's folder, read back: to look at it, to work on its numbers, to use its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hansa.run import saved
from hansa.run.display import Displayed, totals
from hansa.run.store import SUMMARY, Store, read_json


@dataclass(frozen=True, repr=False)
class StoredRun(Displayed):
    """What a run left in its folder: its record (`experiment`), its `history` and `summary`, and its model. A run that
    is not finished has the rounds that it has, and no model yet. It shows itself as a `Result` does."""

    run_dir: Path
    experiment: dict[str, Any]
    rounds: tuple[dict[str, Any], ...]
    summed: dict[str, Any]

    @property
    def history(self) -> list[dict[str, Any]]:
        return list(self.rounds)

    @property
    def summary(self) -> dict[str, Any]:
        return dict(self.summed)

    @property
    def params(self) -> dict[str, Tensor]:
        """The trained model's tensors by name; none for methods that train no torch module."""
        found: dict[str, Tensor] = saved.tensors(self.run_dir).get("params", {})
        return found

    def model(self, make: saved.Make | None = None, party: int | None = None) -> nn.Module:
        """The trained module, in evaluation mode; a party's own where each has one. `make` gives an untrained one, as
        the task's model did; it is needed only where that was a lambda, or a function of a notebook or script."""
        return self._final(make).model(party)

    def predict(self, x: Any, make: saved.Make | None = None, party: int | None = None) -> Tensor:
        """Outputs (class scores, or values) for samples, as `Result.predict` gave them: prepared (imputed, scaled) as
        in training; `make` and `party` as for `model`."""
        return self._final(make).predict(x, party)

    def _final(self, make: saved.Make | None) -> saved.Saved:
        record = self.experiment["experiment"] or {}
        return saved.load(self.run_dir, record.get("folder") or ".", make)


def load(run_dir: str | Path) -> StoredRun:
    """Read the folder of a run that `hansa run`, `hansa.simulate(run_dir=...)` or `result.save(...)` has written."""
    store = Store(run_dir)
    experiment, history = store.experiment(), store.history()
    done = (store.path / SUMMARY).exists()
    return StoredRun(
        store.path, experiment, tuple(history), read_json(store.path / SUMMARY) if done else totals(history)
    )
