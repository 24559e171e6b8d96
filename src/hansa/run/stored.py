"""A run's folder, read back: to look at it, to work on its numbers, to use its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hansa.core import codec
from hansa.core.errors import ConfigError, DataError
from hansa.core.federation import op_of
from hansa.core.op import DataOp
from hansa.core.params import ParamSpec
from hansa.run.display import Displayed, totals
from hansa.run.resume import stored_experiment
from hansa.run.store import MODEL, SUMMARY, Store, read_json

Make = Callable[[], nn.Module]


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
        found: dict[str, Tensor] = self._saved().get("params", {})
        return found

    def model(self, make: Make | None = None) -> nn.Module:
        """The trained module, in evaluation mode. `make` gives an untrained one, as the task's model did; it is not
        needed where the run was made from an experiment file, which says what the model is."""
        params = self.params
        if not params:
            raise ConfigError(f"{self.run_dir} holds no single torch module: {self._algorithm} trains none")
        module = (make or self._recorded())()
        spec = ParamSpec.of(module)
        wanted = {entry.name: entry.shape for entry in (*spec.weights, *spec.stats, *spec.counts)}
        saved = {name: tuple(tensor.shape) for name, tensor in params.items()}
        for name in sorted({*wanted, *saved}):
            if wanted.get(name) != saved.get(name):
                raise ConfigError(
                    f"the model of {self.run_dir} is not the one that make() gives: {name} is "
                    f"{saved.get(name, 'not there')} in the folder and {wanted.get(name, 'not there')} in the module"
                )
        module.load_state_dict(params, strict=False)  # tensors that layers share are saved once
        return module.eval()

    def predict(self, x: Any, make: Make | None = None) -> Tensor:
        """Outputs (class scores, or values) of the trained module for samples, prepared (imputed, scaled) as in
        training; `make` as for `model`."""
        module = self.model(make)
        samples = torch.as_tensor(x)
        if samples.is_floating_point():
            samples = samples.to(next(module.parameters()).dtype)
        prepared = self._saved().get("preparation")
        if prepared is not None:
            op = op_of(prepared["op"], "preparation")
            assert isinstance(op, DataOp)
            samples = op.transform(samples, prepared["payload"])
        with torch.no_grad():
            outputs: Tensor = module(samples)
        return outputs

    def _recorded(self) -> Make:
        """What makes the model that the run's experiment file names."""
        if self.experiment["experiment"] is None:
            raise ConfigError(
                f"{self.run_dir} was made from Python, so its model is not recorded; give the function that makes it, "
                "as in model(make_model)"
            )
        make = stored_experiment(self.run_dir).build_task().model
        assert make is not None
        return make

    def _saved(self) -> dict[str, Any]:
        path = self.run_dir / MODEL
        if not path.exists():
            raise ConfigError(
                f"{self.run_dir} has no model yet: the run is not finished; `hansa resume` goes on with it"
            )
        try:
            saved: dict[str, Any] = codec.decode(path.read_bytes())
        except DataError as error:
            raise DataError(f"{path} is damaged: {error}") from None
        return saved


def load(run_dir: str | Path) -> StoredRun:
    """Read the folder of a run that `hansa run`, `hansa.simulate(run_dir=...)` or `result.save(...)` has written."""
    store = Store(run_dir)
    experiment, history = store.experiment(), store.history()
    done = (store.path / SUMMARY).exists()
    return StoredRun(
        store.path, experiment, tuple(history), read_json(store.path / SUMMARY) if done else totals(history)
    )
