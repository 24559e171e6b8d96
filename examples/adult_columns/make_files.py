"""Write a CSV file each for an employer, a tax office and a census: different columns of partly the same people.

With `--data adult` (its files in the folder HANSA_DATA, or in --data-dir) the columns are divided by theme. Without it
the built-in breast cancer data are divided in three blocks: nothing has to be fetched. A fourth file is for a notary,
who holds keys and no columns: it has some ids of its own, and one column of zeros.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from hansa.core.plain_data import build

THEMES = {
    "employer": ("workclass", "occupation", "hours-per-week", "education-num"),
    "tax": ("capital-gain", "capital-loss"),
    "census": ("age", "marital-status", "relationship", "race", "sex", "native-country"),
}
HOLDER = "tax"  # the party with the labels
IDS, TARGET = "person", "income"


def columns_of(names: list[str], dataset: str) -> dict[str, list[int]]:
    """The numbers of each party's columns. A category such as `sex=Male` belongs to its column."""
    if dataset != "adult":
        return dict(zip(THEMES, (part.tolist() for part in np.array_split(np.arange(len(names)), 3)), strict=True))
    return {
        party: [k for k, name in enumerate(names) if name.split("=")[0] in theme] for party, theme in THEMES.items()
    }


def write(folder: Path, dataset: str, data_dir: str | None, people: int | None, overlap: float, seed: int) -> None:
    """Write the files. The share `overlap` of the people is at all parties; each other person is at one of them."""
    data, draw = build("dataset", dataset).load(data_dir), np.random.default_rng(seed)
    names = list(data.header[1:]) or [f"x{k}" for k in range(data.x.shape[1])]
    chosen = draw.permutation(len(data.y))[:people]
    alone = draw.integers(0, 3, len(chosen))
    alone[: round(overlap * len(chosen))] = -1
    folder.mkdir(parents=True, exist_ok=True)
    for number, (party, columns) in enumerate(columns_of(names, dataset).items()):
        rows = draw.permutation(np.flatnonzero((alone == -1) | (alone == number)))
        header = [IDS, *([TARGET] if party == HOLDER else []), *(names[k].replace(",", " ") for k in columns)]
        with open(folder / f"{party}.csv", "w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(header)
            for row in rows:
                sample = chosen[row]
                label = [int(data.y[sample])] if party == HOLDER else []
                lines.writerow([f"P{sample:05d}", *label, *(f"{float(data.x[sample, k]):g}" for k in columns)])
        print(f"{folder / party}.csv: {len(rows)} people, {len(columns)} columns")
    lines = "".join(f"N{number:05d},0\n" for number in range(20))
    (folder / "notary.csv").write_text(f"{IDS},none\n{lines}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", choices=["breast-cancer", "adult"], default="breast-cancer")
    parser.add_argument("--data-dir")
    parser.add_argument("--people", type=int, help="people in all; default: all of the data set")
    parser.add_argument("--overlap", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, options.data, options.data_dir, options.people, options.overlap, options.seed)
