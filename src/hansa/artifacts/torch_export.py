"""Export a saved model for plain PyTorch: a file that `torch.export.load` opens, with any batch size.

The file contains the preparation of samples (scaling and the like), so its inputs are samples as the parties have them,
and its outputs are those of `SavedModel.predict`.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hansa.artifacts.run_folder import write_atomic
from hansa.artifacts.saved_model import SavedModel
from hansa.core.own_model import OwnModelPredictor
from hansa.core.predictor import NetworkPredictor
from hansa.plumbing.errors import ConfigError

BATCHES = (2, 5, 1)  # sizes of the batches by which an export is compared with the model
CLOSE = 1e-5  # the largest difference to the model's outputs, relative to the largest of them


class Prepared(nn.Module):
    """Samples as the parties have them -> outputs: the preparation, then the network or the predictor."""

    def __init__(self, model: SavedModel, party: int | str | None) -> None:
        super().__init__()
        self.saved = model
        self.objective, self.payload = model.objective_of(party), model.payload_of(party)
        networks = (NetworkPredictor, OwnModelPredictor)
        self.network = model.model(party) if isinstance(model.predictor, networks) else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.saved.prepared(x, self.objective)
        if self.network is None:
            return self.saved.predictor.outputs(self.objective, self.payload, x)
        out: Tensor = self.network(x)
        return out


def export(model: SavedModel, out: str | Path, party: int | str | None = None) -> Path:
    """Write a model as a file for `torch.export.load`; a ConfigError says why a model cannot be exported.

    `party` says whose model, if each party has its own. Before the file is written, the exported program is compared
    with the model, for batches of several sizes.
    """
    out = Path(out)
    if out.suffix != ".pt2":
        raise ConfigError(f"--torch: {out} must end in .pt2, as files of torch.export do")
    model.check_party(party)
    if model.about["bf16"]:
        raise ConfigError(
            "a model that computes in bfloat16 (run.precision = 'bf16') cannot be exported by torch.export"
        )
    if "columns" in model.about:
        raise ConfigError("a model of a table takes texts and dates too, which torch.export cannot take")
    samples = _samples(model)
    module = Prepared(model, party).eval().requires_grad_(False)
    name = model.predictor.name if module.network is None else type(module.network).__name__
    try:
        with _quiet(), torch.no_grad():
            batch = torch.export.Dim("batch", min=1)
            program = torch.export.export(module, (samples[: BATCHES[0]],), dynamic_shapes=({0: batch},))
    except Exception as error:  # what torch cannot export it says by many kinds of errors
        raise ConfigError(f"torch.export cannot export the model ({name}): {_reason(error)}") from None
    for size in BATCHES:
        wanted, found = model.predict(samples[:size], party), program.module()(samples[:size])
        apart = float((wanted - found).abs().max())
        if not apart <= CLOSE * max(1.0, float(wanted.abs().max())):
            raise ConfigError(
                f"the exported model ({name}) does not give the outputs of the model: for {size} samples they differ "
                f"by {apart:.3g}; use hansa.load(...).predict(x)"
            )
    packed = io.BytesIO()
    torch.export.save(program, packed)
    try:
        write_atomic(out, packed.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    return out


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing what it thinks of a model; its error is told in one sentence."""
    before = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        ignored = io.StringIO()
        with warnings.catch_warnings(), redirect_stdout(ignored), redirect_stderr(ignored):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _samples(model: SavedModel) -> Tensor:
    """Samples to trace and to compare the model by."""
    shape, kind = tuple(model.about["shape"]), getattr(torch, model.about["features"])
    count = max(BATCHES)
    if not kind.is_floating_point:
        return torch.arange(count * math.prod(shape)).reshape(count, *shape) % 2
    drawn: Any = torch.linspace(-1, 1, count * math.prod(shape), dtype=torch.float64).sin()
    return drawn.reshape(count, *shape).to(kind)  # type: ignore[no-any-return]


def _reason(error: Exception) -> str:
    if "DataDependent" in type(error).__name__:
        return "the way of a sample through it depends on the sample's values"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
