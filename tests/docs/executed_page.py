"""Executes a how-to page as one shell script, with the processes of a federation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from docs_pages import FILE, ROOT, blocks

from hansa.net.local import free_port

LIMIT = 900  # seconds that a page may take


def script(page: Path) -> str:
    """The page as a shell script: files are written, commands are run, in the page's order."""
    steps = ["set -e"]
    for block in blocks(page):
        file = FILE.match(block.text)
        if file is not None:
            steps.append(f"cat > {file['name']} <<'END OF FILE'\n{block.text}END OF FILE")
        elif block.language == "sh":
            steps.append(block.text)
    return "\n".join(steps)


def execute(page: Path, base: Path) -> Path:
    """Execute a page in a new folder, which has a link to the examples; its output is in the file `output` there."""
    home, commands = base / "home", base / "bin"
    home.mkdir()
    commands.mkdir()
    (home / "examples").symlink_to(ROOT / "examples")
    for name, arguments in (("hansa", " -m hansa.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (commands / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}  # fmt: skip
    with open(home / "output", "wb") as output:
        process = subprocess.Popen(["bash", "-c", script(page).replace("8443", str(free_port()))], cwd=home,
                                   env=environment, stdout=output, stderr=output, start_new_session=True)  # fmt: skip
    try:
        code = process.wait(timeout=LIMIT)
    finally:
        if process.poll() is None or process.returncode:
            os.killpg(process.pid, signal.SIGKILL)  # the aggregator and the parties too
    logs = "\n".join(path.read_text() for path in (home / "output", *home.glob("*.log")))
    assert code == 0, logs
    return home
