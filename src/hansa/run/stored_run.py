"""A run's folder, read back: to look at it, to work on its numbers, to use its model."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hansa.artifacts import saved_model
from hansa.artifacts.run_folder import EXPERIMENT, MODEL, SERVING, SUMMARY, RunFolder, beside, read_json
from hansa.core.errors import ConfigError
from hansa.report.display import Displayed, totals


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
        found: dict[str, Tensor] = saved_model.tensors(self.run_dir).get("params", {})
        return found

    def model(self, make: saved_model.Make | None = None, party: int | None = None) -> nn.Module:
        """The trained module, in evaluation mode; a party's own where each has one. `make` gives an untrained one, as
        the task's model did; it is needed only where that was a lambda, or a function of a notebook or script."""
        return self._final(make).model(party)

    def predict(self, x: Any, make: saved_model.Make | None = None, party: int | None = None) -> Tensor:
        """Outputs (class scores, or values) for samples, as `Result.predict` gave them: prepared (imputed, scaled) as
        in training; `make` and `party` as for `model`."""
        return self._final(make).predict(x, party)

    def _final(self, make: saved_model.Make | None) -> saved_model.SavedModel:
        record = self.experiment["experiment"] or {}
        return saved_model.load(self.run_dir, record.get("folder") or ".", make)


class StoredModel(StoredRun):
    """The model of a finished job or run without its rounds: a file that `hansa pull` has written, or a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, {}, (), {})

    def __repr__(self) -> str:
        return f"<StoredModel in {self.run_dir}>"

    def _repr_html_(self) -> str:
        return html.escape(repr(self))

    def _final(self, make: saved_model.Make | None) -> saved_model.SavedModel:
        about = beside(self.run_dir) if self.run_dir.is_file() else self.run_dir / SERVING
        if not about.exists():
            raise ConfigError(
                f"{self.run_dir} needs {about.name} beside it, which says how its model is made; pull the model again "
                "with `hansa pull`, or work on its tensors: hansa.load(...).params"
            )
        return saved_model.load(self.run_dir, ".", make)


def load(path: str | Path) -> StoredRun:
    """Read the folder of a run that `hansa run`, `hansa.simulate(run_dir=...)` or `result.save(...)` has written, or
    the model that `hansa pull` has fetched, which is a file."""
    path = Path(path)
    place = path.parent if path.is_file() and path.name == MODEL else path
    if path.is_file() and not (place / EXPERIMENT).exists():
        saved_model.tensors(path)  # refused where it is no model
        return StoredModel(path)
    if not (place / EXPERIMENT).exists() and (place / MODEL).exists():
        return StoredModel(place)
    store = RunFolder(place)
    experiment, history = store.experiment(), store.history()
    done = (store.path / SUMMARY).exists()
    return StoredRun(
        store.path, experiment, tuple(history), read_json(store.path / SUMMARY) if done else totals(history)
    )
