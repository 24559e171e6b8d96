"""The test kit by hand.

    python -m hansa.testing proxy --listen 127.0.0.1:9443 --to 127.0.0.1:8443 --latency 200 --jitter 50 --loss 0.05 \\
        --rate 1000000 --reset 0.001 --partition 30:600 --seed 1

Each fault is a line, with the seconds since the start; Ctrl-C ends it, with what was counted. Times are milliseconds;
those of --partition are seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from hansa.core.errors import ConfigError
from hansa.testing.proxy import Address, Faults, Proxy, parse_faults


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong."""

    def error(self, message: str) -> NoReturn:
        print(f"{message} (--help says more)", file=sys.stderr)
        raise SystemExit(2)


def address(text: str) -> Address:
    """HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"expected HOST:PORT, got {text[:80]!r}")
    return host.strip("[]"), int(port)


def spell(text: str) -> tuple[float, float]:
    """BEGIN:SECONDS."""
    begin, _, seconds = text.partition(":")
    try:
        when = float(begin), float(seconds)
    except ValueError:
        when = math.nan, math.nan
    if not all(0 <= value < math.inf for value in when):
        raise ConfigError(f"--partition: expected BEGIN:SECONDS, such as 30:600, got {text!r}")
    return when


def parser() -> Parser:
    """What can be said on the command line."""
    parser = Parser(prog="python -m hansa.testing", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    proxy = parser.add_subparsers(dest="command", required=True, metavar="proxy").add_parser(
        "proxy", help="a TCP proxy with faults"
    )
    proxy.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where clients connect")
    proxy.add_argument("--to", required=True, metavar="HOST:PORT", help="where their connections go on to")
    for name, text in {
        "latency": "ms that bytes are on their way, each way",
        "jitter": "ms more, at random up to this",
        "loss": "chance that a segment is lost: its direction stalls",
        "rto": "ms of such a stall, doubled when the segment is lost again",
        "rate": "bytes a second",
        "reset": "chance that a segment resets its connection",
        "silence": "chance that a segment leaves its connection half-open",
        "drip": "ms of pause after each byte",
    }.items():
        proxy.add_argument(f"--{name}", metavar="N", help=text)
    proxy.add_argument("--down", default="", metavar="NAME=N,...", help="what differs on the way back to the client")
    proxy.add_argument("--partition", action="append", default=[], metavar="BEGIN:SECONDS",
                       help="let nothing pass, from so many seconds after the start; may be repeated")  # fmt: skip
    proxy.add_argument("--seed", type=int, default=0, help="the same seed, the same fates")
    proxy.add_argument("--json", action="store_true", help="a JSON object a line")
    return parser


def configured(given: argparse.Namespace) -> Proxy:
    """The proxy that the command line describes."""
    named = {name: getattr(given, name) for name in Faults.__dataclass_fields__ if getattr(given, name) is not None}
    faults = parse_faults(",".join(f"{name}={value}" for name, value in named.items()))
    began = time.monotonic()

    def tell(event: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - began, 3)
        if given.json:
            print(json.dumps({"seconds": seconds, **event}), flush=True)
        else:
            rest = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
            print(f"{seconds:9.3f}  {event['event']}  {rest}".rstrip(), flush=True)

    return Proxy(address(given.to), faults, given.seed, parse_faults(given.down, faults), address(given.listen),
                 [spell(text) for text in given.partition], tell)  # fmt: skip


async def serve(proxy: Proxy) -> None:
    """Run until told to end."""
    done = asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, done.set)
    async with proxy:
        proxy.tell({"event": "listening", "port": proxy.port, "to": f"{proxy.to[0]}:{proxy.to[1]}", "seed": proxy.seed})
        await done.wait()
    proxy.tell({"event": "end", **{name.replace(" ", "_"): count for name, count in sorted(proxy.counts.items())}})


def main(words: Sequence[str] | None = None) -> None:
    """`python -m hansa.testing`."""
    try:
        asyncio.run(serve(configured(parser().parse_args(words))))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
