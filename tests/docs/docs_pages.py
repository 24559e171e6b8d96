"""Runs the code on pages of the documentation, in order and page by page, each page in its own folder.

    python tests/docs/docs_pages.py FOLDER PAGE ...

A block of Python is executed. A block whose first line is `# name.py` or `# name.toml` is written to that file, and
Python files are imported. In a block without a language, the lines that begin with `hansa` are run. The output of each
block and the first error of a page are printed as one JSON object per page. All pages run in one process, because
importing torch takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (?P<name>[\w-]+\.(?:py|toml))\n")
# Commands that need no federation.
SIMULATED = ("run", "show", "algorithms", "parts", "partition", "explain", "predict", "export")


class Block(NamedTuple):
    """A block of code: its language ("" for none), its text, the line at which it begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        inside = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield Block(found["language"], inside, text.count("\n", 0, found.start()) + 1)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of the lines of a block that are `hansa` commands."""
    if block.language in ("", "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith("hansa "):
                yield shlex.split(line, comments=True)[1:]


def console() -> Any:
    """The command `hansa` with all its subcommands."""
    import typer

    from hansa import cli
    from hansa.cli.app import app

    for module in pkgutil.iter_modules(cli.__path__):  # importing them adds their commands
        if module.name != "__main__":
            importlib.import_module(f"hansa.cli.{module.name}")
    return typer.main.get_command(app)


def command(words: list[str], refused: bool) -> None:
    """Run `hansa WORDS` as the console would; `refused` says that the page shows a refusal."""
    from hansa.cli import main

    sys.argv = ["hansa", *words]
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    if code != (2 if refused else 0):
        raise RuntimeError(f"hansa {shlex.join(words)} ended with {code}")


def run(block: Block, names: dict[str, Any], page: Path, refused: bool = False) -> None:
    file = FILE.match(block.text)
    if file is not None and block.language in ("python", "toml"):
        Path(file["name"]).write_text(block.text)
        if block.language == "python":
            importlib.import_module(Path(file["name"]).stem)
    elif block.language == "python":
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
    else:
        for words in commands(block):
            if words[0] in SIMULATED:
                command(words, refused)


def perform(page: Path, folder: Path) -> dict[str, Any]:
    """Run a page's blocks; returns their output by line, and the first error."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("notebooks"))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: dict[int, str] = {}
    error = None
    found = list(blocks(page))
    for block, after in zip(found, [*found[1:], None], strict=True):
        refused = after is not None and after.language == "text" and after.text.startswith("error:")
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                run(block, names, page, refused)
        except Exception:
            error = f"{page.name}, the block at line {block.line}:\n{traceback.format_exc(limit=-4)}{out.getvalue()}"
            break
        printed[block.line] = out.getvalue()
    sys.path.remove(str(folder))
    return {"printed": printed, "error": error}


def main() -> None:
    base, *pages = sys.argv[1:]
    for number, page in enumerate(pages):
        folder = Path(base).resolve() / str(number)
        folder.mkdir()
        print(json.dumps({"page": page, **perform(ROOT / page, folder)}), flush=True)


if __name__ == "__main__":
    main()
