"""Predictions of a saved model for a file of samples: one row of predictions per sample, in the same order.

Samples are read and predictions are written block by block, so files may be larger than memory.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.artifacts.saved_model import SavedModel
from hansa.data.feature_blocks import WantedFeatures, feature_blocks
from hansa.plumbing.errors import ConfigError, DataError

Columns = dict[str, Any]  # arrays or lists by column name, one entry per row
Write = Callable[[Columns], None]


def predict_file(model: SavedModel, samples: str | Path, out: str | Path, party: int | str | None = None,
                 keep: Sequence[str] = ()) -> int:  # fmt: skip
    """Write the predictions for a file of samples to a CSV or Parquet file; return the number of rows.

    `party` says whose model, if each party has its own. `keep` names columns that are copied to the predictions. If an
    error occurs, `out` is not written.
    """
    about, out, rows = model.about, Path(out), 0
    model.check_party(party)
    if out.exists() and Path(samples).exists() and out.samefile(samples):
        raise ConfigError(f"--out: {out} has the samples; name another file for the predictions")
    if twice := sorted({name for name in keep if list(keep).count(name) > 1}):
        raise ConfigError(f"--keep names the column {twice[0]!r} twice")
    header, raw = tuple(about.get("header", ())), "columns" in about
    if raw:  # (name, kind) of each column that the model's preparation reads
        header = ("", *(name for name, _ in about["columns"]))
    wanted = WantedFeatures(tuple(about["shape"]), header, about["features"].startswith(("int", "uint")),
                            model.preparation is not None, raw)  # fmt: skip
    with writer(out) as write:
        for block in feature_blocks(samples, wanted, keep):
            predicted = prediction_columns(model, model.predict(block.x, party))
            if taken := [name for name in keep if name in predicted]:
                raise ConfigError(f"--keep: the predictions have a column {taken[0]!r} too; rename that of {samples}")
            write({**block.copied, **predicted})
            rows += block.rows
    return rows


def prediction_columns(model: SavedModel, outputs: Tensor) -> Columns:
    """The columns that describe a model's outputs, by its loss.

    For classes: `class`, and the probability of each class (a score of each class, where scores are no probabilities).
    For the loss `bce`: `class` and `probability`. For numbers: `value`. With a loss of the user's own: the outputs.
    """
    loss, classes = model.about["loss"], model.about["classes"]
    if outputs.dim() > 2:
        raise ConfigError(
            f"the model has outputs of the shape {tuple(outputs.shape[1:])} for a sample, which no table can hold; use "
            "hansa.load(...).predict(x) in Python"
        )
    rows = outputs.cpu().reshape(len(outputs), -1)
    if loss == "cross_entropy" or (loss != "bce" and classes is not None and rows.shape[1] == classes):
        names, values = "score", rows
        if loss == "cross_entropy" and model.predictor.probable(model.payload):
            names, values = "probability", torch.softmax(rows, 1)
        return {"class": rows.argmax(1).numpy()} | _numbered(f"{names}_", values)
    if loss == "bce":
        sure = torch.sigmoid(rows)
        if rows.shape[1] == 1:
            return {"class": (rows[:, 0] > 0).long().numpy(), "probability": sure[:, 0].numpy()}
        return _numbered("probability_", sure)
    name = "output" if loss is None else "value"
    return {name: rows[:, 0].numpy()} if rows.shape[1] == 1 else _numbered(f"{name}_", rows)


def _numbered(prefix: str, values: Tensor) -> Columns:
    return {f"{prefix}{at}": column.numpy() for at, column in enumerate(values.T)}


@contextmanager
def writer(out: Path) -> Iterator[Write]:
    """A function that appends rows to a file beside `out`, which replaces `out` at the end."""
    if out.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--out: {out} must end in .csv or .parquet")
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; name a file in it")
    part = out.with_name(out.name + ".part")
    try:
        with _csv(part) if out.suffix == ".csv" else _parquet(part) as write:
            yield write
        part.replace(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")

        def write(columns: Columns) -> None:
            if file.tell() == 0:
                lines.writerow(columns)
            texts = [column.astype("U") if isinstance(column, np.ndarray) else column for column in columns.values()]
            lines.writerows(zip(*texts, strict=True))

        yield write


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("--out: Parquet files need the package pyarrow; install it, or write a CSV file") from None
    writers: list[Any] = []

    def write(columns: Columns) -> None:
        table = pyarrow.table(columns)
        if not writers:
            writers.append(pyarrow.parquet.ParquetWriter(path, table.schema))
        try:
            writers[0].write_table(table.cast(writers[0].schema))
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"a column cannot be copied: {error}") from None

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()
