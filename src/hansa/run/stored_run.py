"""Load runs and models from disk."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hansa.artifacts import saved_model
from hansa.artifacts.run_folder import EXPERIMENT, MODEL, SERVING, SUMMARY, RunFolder, beside, read_json
from hansa.plumbing.errors import ConfigError
from hansa.report.diagnosis import check_trained
from hansa.report.display import Displayed, totals


@dataclass(frozen=True, repr=False)
class StoredRun(Displayed):
    """A run loaded from its run folder: its record (`experiment`), its `history` and `summary`, and its model.

    A run that is not finished has the rounds so far, and no model. A notebook shows it as it shows a `Result`.
    """

    run_dir: Path
    experiment: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    stored_summary: dict[str, Any]

    @property
    def history(self) -> list[dict[str, Any]]:
        return list(self.lines)

    @property
    def summary(self) -> dict[str, Any]:
        return dict(self.stored_summary)

    @property
    def params(self) -> dict[str, Tensor]:
        """The trained model's tensors by name; none for methods that train no torch module."""
        params: dict[str, Tensor] = saved_model.tensors(self.run_dir).get("params", {})
        return params

    @property
    def columns(self) -> dict[str, str] | None:
        """The columns of a table that the model takes, with their kinds; None for a model of other samples."""
        columns = self._about().get("columns")
        return None if columns is None else dict(columns)

    @property
    def feature_names(self) -> list[str] | None:
        """The names of the features that are made of a table's columns; None for a model of other samples."""
        names: list[str] | None = self._about().get("feature_names")
        return names

    def _about(self) -> dict[str, Any]:
        """How the model is made, and what it takes."""
        about: dict[str, Any] = read_json(beside(self.run_dir) if self.run_dir.is_file() else self.run_dir / SERVING)
        return about

    def model(self, make: saved_model.Make | None = None, party: int | None = None) -> nn.Module:
        """The trained module, in evaluation mode; the module of `party` if each party has its own.

        `make` makes an untrained module, as the task's model did. It is needed only if the task's model was a lambda,
        or a function of a notebook or script.
        """
        return self._final(make).model(party)

    def predict(self, x: Any, make: saved_model.Make | None = None, party: int | None = None) -> Tensor:
        """Outputs (class scores, or values) for samples, the same as from `Result.predict`; `make` and `party` as for
        `model`."""
        return self._final(make).predict(x, party)

    def predict_file(self, samples: str | Path, out: str | Path, party: int | None = None, keep: Sequence[str] = (),
                     make: saved_model.Make | None = None) -> int:  # fmt: skip
        """Write predictions for a CSV, Parquet, NPY or NPZ file of samples, as `hansa predict` does; return the number
        of rows. `keep` names columns that are copied; `make` and `party` as for `model`."""
        from hansa.run.predictions import predict_file

        return predict_file(self._final(make), samples, out, party, keep)

    def export(self, out: str | Path, party: int | None = None, make: saved_model.Make | None = None) -> Path:
        """Write the model, with its preparation of samples, as a file that `torch.export.load` opens; `make` and
        `party` as for `model`."""
        from hansa.artifacts.torch_export import export

        return export(self._final(make), out, party)

    def fitted(self, x: Any, y: Any, make: saved_model.Make | None = None) -> saved_model.SavedModel:
        """The model for a new party with these samples and targets, as of `Result.fitted`; `make` as for `model`."""
        return self._final(make).fitted(x, y)

    def _final(self, make: saved_model.Make | None) -> saved_model.SavedModel:
        check_trained(self.history)
        record = self.experiment["experiment"] or {}
        return saved_model.load(self.run_dir, record.get("folder") or ".", make)


class StoredModel(StoredRun):
    """A model without its run: a model file that `hansa pull` has written, or a folder with one."""

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
                f"{self.run_dir} has no {about.name} next to it, which says how to make the model; pull the model "
                "again with `hansa pull`, or use its tensors: hansa.load(...).params"
            )
        return saved_model.load(self.run_dir, ".", make)


def load(path: str | Path) -> StoredRun:
    """Load a run folder that `hansa run`, `hansa.simulate(run_dir=...)` or `result.save(...)` has written, or a model
    file that `hansa pull` has written."""
    path = Path(path)
    root = path.parent if path.is_file() and path.name == MODEL else path
    if path.is_file() and not (root / EXPERIMENT).exists():
        saved_model.tensors(path)  # raises an error if it is not a model
        return StoredModel(path)
    if not (root / EXPERIMENT).exists() and (root / MODEL).exists():
        return StoredModel(root)
    folder = RunFolder(root)
    experiment, history = folder.experiment(), folder.history()
    finished = (folder.path / SUMMARY).exists()
    summary = read_json(folder.path / SUMMARY) if finished else totals(history)
    return StoredRun(folder.path, experiment, tuple(history), summary)
