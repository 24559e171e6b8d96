"""The command line. A mistake of the user gives one sentence on standard error and exit code 2, no traceback."""

from __future__ import annotations

import sys

from hansa.plumbing.errors import HansaError


def main() -> None:
    """Entry point of `hansa`."""
    from hansa.cli import approve, attack, audit, compare, network, new, predict, privacy  # noqa: F401 (they add their commands)
    from hansa.cli.app import app

    try:
        app()
    except (HansaError, OSError) as error:  # OSError: a full disk, a folder that cannot be written
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
