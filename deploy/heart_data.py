"""Write the four hospitals of UCI Heart Disease as one CSV file each: data to try a federation with.

python deploy/heart_data.py FOLDER
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

from hansa.data.heart import HEART_FEATURES, Heart


def write(folder: Path) -> list[Path]:
    """The files, in the order of the parties. The target is the last column; a value that is missing is left empty."""
    data = Heart().load()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, rows in zip(data.party_names, data.parties, strict=True):
        files.append(folder / f"{name}.csv")
        with files[-1].open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow([*HEART_FEATURES, "disease"])
            for row in rows:
                lines.writerow(
                    ["" if math.isnan(value) else value for value in data.x[row].tolist()] + [int(data.y[row])]
                )
    return files


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        print(path)
