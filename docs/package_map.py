"""Draw the map of the packages from their imports: `python docs/package_map.py` updates docs/architecture.md.

The picture (docs/images/packages.svg) has one box per package. A line means "imports"; packages stand above all that
they import. Lines that follow from others are left out, as is every line to `BASE`, which nearly all packages import.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "hansa"
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "images" / "packages.svg"
TABLE = re.compile(r"(?s)(<!-- packages: written by docs/package_map.py -->\n).*?(<!-- end of packages -->)")
BOX, HEIGHT, GAP, ROW = 112, 30, 18, 78  # sizes in the picture, in pixels
SWEEPS = 30  # over the rows of the picture, until the boxes stand still

BASE = ("plumbing", "numerics", "holdings", "core", "replies")  # from the bottom; all other packages may import them
Graph = Mapping[str, frozenset[str]]


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module that a file imports, lazily or for types too, by its absolute name."""
    here = ["hansa", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
            yield module


def package_of(module: str) -> str | None:
    """The package of a module by its absolute name: "run", "net.party"; None for `hansa` itself and other projects."""
    first, *rest = module.split(".")
    if first != "hansa" or not rest or not (SOURCE / rest[0]).is_dir():
        return None
    if rest[0] == "net" and len(rest) > 1 and (SOURCE / "net" / rest[1]).is_dir():
        return f"net.{rest[1]}"
    return rest[0]


def graph(source: Path = SOURCE) -> Graph:
    """The packages that each package imports."""
    out: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        own = package_of(".".join(["hansa", *path.relative_to(source).with_suffix("").parts]))
        if own is not None:
            imported = map(package_of, imports(ast.parse(path.read_text()), path))
            out.setdefault(own, set()).update(name for name in imported if name not in (None, own))
    return {name: frozenset(out[name]) for name in sorted(out)}


def levels(packages: Graph) -> dict[str, int]:
    """How many packages each package stands on, one upon the other; a ValueError where imports form a cycle."""
    known: dict[str, int] = {}

    def level(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise ValueError(f"imports form a cycle: {' -> '.join([*path[path.index(name) :], name])}")
        if name not in known:
            known[name] = 1 + max((level(below, (*path, name)) for below in sorted(packages[name])), default=0)
            known[name] = BASE.index(name) - len(BASE) if name in BASE else max(known[name], 0)
        return known[name]

    for name in packages:
        level(name, ())
    return known


def drawn(packages: Graph) -> list[tuple[str, str]]:
    """The lines of the picture: imports that do not follow from other imports, without those of `BASE`."""
    reached: dict[str, set[str]] = {}

    def below(name: str) -> set[str]:
        if name not in reached:
            reached[name] = {*packages[name]}.union(*(below(other) for other in packages[name]))
        return reached[name]

    return [
        (name, other)
        for name in packages
        for other in sorted(packages[name] - (set() if name in BASE else {*BASE}))
        if not any(other in below(between) for between in packages[name] - {other})
    ]


def places(packages: Graph) -> tuple[dict[str, tuple[float, float]], int, int]:
    """Where the middle of each box stands, and the picture's width and height.

    Each box is drawn towards the mean of its neighbours in turn (Sugiyama's barycentre method), without overlaps.
    """
    rows: dict[int, list[str]] = {}
    for name, level in levels(packages).items():
        rows.setdefault(level, []).append(name)
    width = max(map(len, rows.values())) * (BOX + GAP) + GAP
    height = len(rows) * ROW + GAP
    near: dict[str, list[str]] = {name: [] for name in packages}
    for one, other in drawn(packages):
        near[one].append(other)
        near[other].append(one)
    x = {name: width * (at + 1) / (len(row) + 1) for row in rows.values() for at, name in enumerate(row)}
    step = BOX + GAP
    for _ in range(SWEEPS):
        for level in (*sorted(rows), *sorted(rows, reverse=True)):
            wanted = {name: sum(x[other] for other in near[name]) / len(near[name]) if near[name] else width / 2
                      for name in rows[level]}  # fmt: skip
            order = sorted(rows[level], key=lambda name: (wanted[name], name))
            at = -float("inf")
            for number, name in enumerate(order):  # from the left, leaving room for those that follow
                last = width - GAP - BOX / 2 - (len(order) - 1 - number) * step
                at = x[name] = min(max(wanted[name], at + step, GAP + BOX / 2), last)
    bottom = height - GAP - HEIGHT / 2 - len(BASE) * ROW
    return {name: (x[name], bottom - level * ROW) for level, row in rows.items() for name in row}, width, height


def picture(packages: Graph) -> str:
    """The map as SVG, readable on light and dark pages."""
    (place, width, height), lines = places(packages), drawn(packages)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
           f'font-size="13"><title>The packages of Hansa and their imports</title>',
           f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>']  # fmt: skip
    for one, other in lines:
        (x1, y1), (x2, y2) = place[one], place[other]
        y1, y2 = y1 + HEIGHT / 2, y2 - HEIGHT / 2
        middle = (y1 + y2) / 2
        out.append(f'<path d="M{x1:g} {y1:g} C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}" fill="none" '
                   f'stroke="#7a869a" stroke-width="1.2"/>')  # fmt: skip
    for name, (x, y) in sorted(place.items()):
        out.append(f'<rect x="{x - BOX / 2:g}" y="{y - HEIGHT / 2:g}" width="{BOX}" height="{HEIGHT}" rx="5" '
                   f'fill="#e8edf7" stroke="#33518f"/><text x="{x:g}" y="{y + 4.5:g}" text-anchor="middle" '
                   f'fill="#12213f">{name}</text>')  # fmt: skip
    return "\n".join([*out, "</svg>"]) + "\n"


def purpose(name: str) -> str:
    """The first sentence of a package's docstring."""
    text = ast.get_docstring(ast.parse((SOURCE / name.replace(".", "/") / "__init__.py").read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ").split(". ")[0].removesuffix(".")


def table(packages: Graph) -> str:
    """The packages as a table, those that import least first."""
    height = levels(packages)
    rows = ["| package | what it holds | imports (beside the five at the bottom) |", "|---|---|---|"]
    for name in sorted(packages, key=lambda name: (height[name], name)):
        shown = packages[name] if name in BASE else packages[name] - {*BASE}
        below = ", ".join(f"`{other}`" for other in sorted(shown)) or "nothing"
        rows.append(f"| `{name}` | {purpose(name)} | {below} |")
    return "\n".join(rows) + "\n"


def page(text: str, packages: Graph) -> str:
    """The page with its table replaced."""
    return TABLE.sub(lambda match: f"{match[1]}\n{table(packages)}\n{match[2]}", text)


if __name__ == "__main__":
    packages = graph()
    PICTURE.write_text(picture(packages))
    PAGE.write_text(page(PAGE.read_text(), packages))
    print(f"{len(packages)} packages: {PICTURE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
