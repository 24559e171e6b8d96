"""`hansa new`: an experiment file for a CSV file, with guesses that its comments explain."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hansa.cli.app import Json, app

TARGETS = ("target", "label", "class", "y", "outcome", "diagnosis", "response")  # usual names of the target's column
CLASSES = 20  # a target with at most this many different values is taken for classes
CATEGORIES = 256  # a text with more different values is no feature, as the preparation "table" sees it
MISSING = ("", "?", "nan")


@dataclass(frozen=True)
class GuessedColumn:
    """What the cells of a column look like."""

    name: str
    cells: list[str]

    @property
    def values(self) -> set[str]:
        """The different values, without missing ones."""
        return {cell for cell in self.cells if cell.lower() not in MISSING}

    @property
    def is_number(self) -> bool:
        return all(_finite(value) for value in self.values)

    @property
    def is_feature(self) -> bool:
        """Whether the cells are numbers, dates, or texts of few kinds."""
        from hansa.data.table import column_of, guess

        few = len(self.values) <= min(CATEGORIES, max(CLASSES, len(self.cells) // 4))
        return self.is_number or guess(column_of(self.cells)) != "text" or few

    @property
    def is_whole(self) -> bool:
        return self.is_number and all(float(value).is_integer() for value in self.values)

    def reason_to_drop(self, rows: int) -> str | None:
        """Why the column is no feature; None if it is one."""
        if len(self.values) < 2:
            return "constant"
        if self.is_whole and len(self.values) == rows and "id" in self.name.lower().replace("-", "_").split("_"):
            return "an id"
        return None if self.is_feature else f"text, with {len(self.values)} different values"


@app.command()
def new(
    data: Annotated[Path, typer.Argument(help="CSV file with a header.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Column to predict. Default: one with a usual name, or the last one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Experiment file to write. Default: the name of the data, with .toml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an experiment file for a CSV file. Its comments say what was guessed; it runs at once."""
    from hansa.plumbing.errors import ConfigError

    path = out or Path(data.name.split(".")[0] + ".toml")
    if path.exists():
        raise ConfigError(f"{path} exists already; name another file with --out")
    columns = read_columns(data)
    text = experiment_text(columns, chosen(columns, target, data), os.path.relpath(data, path.parent or "."))
    path.write_text(text)
    if as_json:
        typer.echo(json.dumps({"experiment": str(path)}))
    else:
        typer.echo(f"wrote {path}; its comments say what was guessed. Run it with: hansa run {path}")


def read_columns(path: Path) -> list[GuessedColumn]:
    """The columns of a CSV file."""
    from hansa.data.party_files import check_header, csv_lines
    from hansa.plumbing.errors import DataError

    if not path.is_file():
        raise DataError(f"there is no file {path}; give a CSV file with a header")
    lines = csv_lines(path)
    header = next(lines)[1]
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and separator in header[0]:
            raise DataError(f"{path}: its columns are separated by {name}; separate them by commas")
    check_header(header, path, "at least one feature and the target")
    rows = [[cell.strip() for cell in cells] for _, cells in lines]
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    return [GuessedColumn(name, [row[at] for row in rows]) for at, name in enumerate(header)]


def chosen(columns: list[GuessedColumn], target: str | None, path: Path) -> tuple[GuessedColumn, str]:
    """The target's column, and why it was chosen."""
    from hansa.plumbing.errors import DataError, nearest

    names = [column.name for column in columns]
    if target is not None:
        if target not in names:
            raise DataError(f"--target: {path} has no column {target!r}{nearest(target, names)}")
        return columns[names.index(target)], "as --target says"
    for column in columns:
        if column.name.lower() in TARGETS:
            return column, "guessed by its name; --target names another"
    return columns[-1], "guessed: the last column; --target names another"


def experiment_text(columns: list[GuessedColumn], target: tuple[GuessedColumn, str], file: str) -> str:
    """The text of an experiment file."""
    from hansa.plumbing.errors import DataError

    wanted, why = target
    rows, values = len(wanted.cells), wanted.values
    if any(cell.lower() in MISSING for cell in wanted.cells):
        raise DataError(f"the target {wanted.name!r} is missing in some rows; leave these rows out, or use --target")
    classes = not wanted.is_number or (len(values) <= CLASSES and wanted.is_whole)
    if not wanted.is_number and len(values) > max(CLASSES, rows // 10):
        raise DataError(
            f"the target {wanted.name!r} has {len(values)} different texts in {rows} rows, which are hardly classes; "
            "name another column with --target"
        )
    if len(values) < 2:
        raise DataError(f"the target {wanted.name!r} has one value only; name another column with --target")
    others = [column for column in columns if column is not wanted]
    dropped = {column.name: reason for column in others if (reason := column.reason_to_drop(rows)) is not None}
    if len(dropped) == len(others):
        raise DataError(
            f"no column but the target {wanted.name!r} could be a feature: each is constant, an id or a text"
        )
    raw = any(not column.is_number for column in others if column.name not in dropped)
    missing = sum(any(cell.lower() in MISSING for cell in column.cells) for column in others)
    parties = max(2, min(5, rows // 20))
    shown = ", ".join(map(json.dumps, sorted(values)[:4])) + (", ..." if len(values) > 4 else "")
    predicts = f'"classes"      # guessed: {len(values)} different values ({shown})' if classes else (
        '"numbers"      # guessed: many different numbers; "classes" would number its values'
    )  # fmt: skip
    prepare = (
        f'prepare = "table"      # scales numbers; one feature per category of a text; gaps in {missing} columns' if raw
        else f'prepare = "standardise"      # scales features; missing values, in {missing} columns, become the mean'
    )  # fmt: skip
    lines = [
        f"# {rows} rows, {len(others) - len(dropped)} features. Run it with: hansa run THIS_FILE",
        "[task]",
        *(['model = "logistic"      # or "2nn"; see: hansa models'] if classes else []),
        prepare,
        "",
        "[task.dataset]",
        'name = "csv-file"',
        f"file = {json.dumps(file)}",
        f"target = {json.dumps(wanted.name)}      # {why}",
        f"predicts = {predicts}",
        f"drop = {json.dumps(list(dropped))}      # columns that are no features, by guess:",
        *(f"#   {json.dumps(name)}: {reason}" for name, reason in dropped.items()),
        *(["raw = true      # keep texts and dates, for prepare = \"table\""] if raw else []),
        "test = 0.2      # share of the rows in the central test set",
        "",
        "[partition]      # the file is divided among simulated parties",
        *(['name = "dirichlet"      # unequal shares of the classes; "iid" divides evenly', "alpha = 1.0"] if classes
          else ['name = "iid"']),
        f"parties = {parties}",
        "",
        "[algorithm]",
        *(['name = "fedavg"', "local = { lr = 0.1, batch = 32 }"] if classes
          else ['name = "least-squares"      # exact: the model of all rows together', "ridge = 0.001"]),
        "",
        "[run]",
        f"rounds = {20 if classes else 5}",
        "seed = 0",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _finite(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False
