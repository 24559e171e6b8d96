"""Is this aggregator, or this party, well? Exit status 0 if so, else 1 and one sentence.

    python healthcheck.py [--alive] [FOLDER]

FOLDER (by default the working directory) or a folder in it is a federation's, with federation.toml, or a party's state,
with party.json. An aggregator is well if its admin port says that it is ready, or, where it has none, if it answers on
its own machine with a certificate of its CA; with --alive it need not be ready. A party is well if it is enrolled and
reaches the aggregator. Only the standard library is imported: this runs every half minute.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT = 8.0  # seconds; below the image's own limit, so that the sentence is seen
ADMIN = "127.0.0.1:9464"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check(folder: Path, path: str = "readyz") -> None:
    """Raise OSError (urllib's and ssl's errors are) unless the aggregator or party of `folder` is well."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for place in (folder, *inside):
        # os.path, for it says no where it may not look: a volume's lost+found.
        if os.path.isfile(place / "federation.toml"):
            return _check_aggregator(place, path)
        if os.path.isfile(place / "party.json"):
            return _ask(json.loads((place / "party.json").read_text(encoding="utf-8"))["url"], _trusting(place))
    raise OSError(f"neither a federation.toml nor an enrolled party in {folder}")


def _check_aggregator(place: Path, path: str) -> None:
    serve = tomllib.loads((place / "federation.toml").read_text(encoding="utf-8")).get("serve", {})
    admin, _, port = serve.get("admin", ADMIN).rpartition(":")
    if admin and port != "0":
        at = LOOPBACK.get(admin.strip("[]"), admin.strip("[]"))
        return _ready(f"http://{f'[{at}]' if ':' in at else at}:{port}/{path}")
    host = LOOPBACK.get(serve.get("host", "0.0.0.0"), serve.get("host"))
    context = _trusting(place)
    context.check_hostname = False  # the certificate names the host that parties use, and this is the machine itself
    host = f"[{host}]" if ":" in str(host) else host
    _ask(f"https://{host}:{serve.get('port', 8443)}", context, urllib.request.ProxyHandler({}))


def _ready(url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT):
            pass
    except urllib.error.HTTPError as error:  # which says why
        raise OSError(" ".join(error.read(1000).decode(errors="replace").split())) from None


def _trusting(place: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=place / "ca.pem")  # this CA alone
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _ask(url: str, context: ssl.SSLContext, *handlers: urllib.request.BaseHandler) -> None:
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), *handlers)
    with opener.open(f"{url.rstrip('/')}/v1/ca", timeout=TIMEOUT):
        pass


if __name__ == "__main__":
    try:
        alive = sys.argv[1:2] == ["--alive"]
        check(Path((sys.argv[1 + alive :] or ["."])[0]), "healthz" if alive else "readyz")
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"not well: {error}")
