"""The fault proxy as a command.

    python tests/net/fault_proxy.py --listen 127.0.0.1:9443 --to 127.0.0.1:8443 --latency 200 --jitter 50 --loss 0.05 \\
        --rate 1000000 --reset 0.001 --partition 30:600 --seed 1

It prints one line per fault, with the seconds since the start. Ctrl-C ends it and prints the counts. Times are in
milliseconds; those of --partition are in seconds.
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

from tcp_proxy import Address, Faults, Proxy, parse_faults

from hansa.plumbing.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        print(f"{message} (--help says more)", file=sys.stderr)
        raise SystemExit(2)


def address(text: str) -> Address:
    """Parse HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"expected HOST:PORT, got {text[:80]!r}")
    return host.strip("[]"), int(port)


def spell(text: str) -> tuple[float, float]:
    """Parse BEGIN:SECONDS."""
    begin, _, seconds = text.partition(":")
    try:
        when = float(begin), float(seconds)
    except ValueError:
        when = math.nan, math.nan
    if not all(0 <= value < math.inf for value in when):
        raise ConfigError(f"--partition: expected BEGIN:SECONDS, such as 30:600, got {text!r}")
    return when


def parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where clients connect")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="server to forward connections to")
    for name, text in {
        "latency": "delay in ms, in each direction",
        "jitter": "additional random delay of at most N ms",
        "loss": "probability that a segment is lost, which stalls its direction",
        "rto": "duration of such a stall in ms, doubled when the segment is lost again",
        "rate": "bytes per second",
        "reset": "probability that a segment resets its connection",
        "silence": "probability that a segment leaves its connection half-open",
        "drip": "pause in ms after each byte",
    }.items():
        parser.add_argument(f"--{name}", metavar="N", help=text)
    parser.add_argument("--down", default="", metavar="NAME=N,...", help="other values for the way back to the client")
    parser.add_argument("--partition", action="append", default=[], metavar="BEGIN:SECONDS",
                        help="pass nothing from BEGIN seconds after the start; may be repeated")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of all random faults")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


def configured(options: argparse.Namespace) -> Proxy:
    """The proxy that the command line describes."""
    named = {name: getattr(options, name) for name in Faults.__dataclass_fields__ if getattr(options, name) is not None}
    faults = parse_faults(",".join(f"{name}={value}" for name, value in named.items()))
    began = time.monotonic()

    def tell(event: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - began, 3)
        if options.json:
            print(json.dumps({"seconds": seconds, **event}), flush=True)
        else:
            rest = " ".join(f"{name}={value}" for name, value in event.items() if name != "event")
            print(f"{seconds:9.3f}  {event['event']}  {rest}".rstrip(), flush=True)

    return Proxy(address(options.to), faults, options.seed, parse_faults(options.down, faults), address(options.listen),
                 [spell(text) for text in options.partition], tell)  # fmt: skip


async def serve(proxy: Proxy) -> None:
    """Run until SIGINT or SIGTERM."""
    done = asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, done.set)
    async with proxy:
        proxy.tell({"event": "listening", "port": proxy.port, "to": f"{proxy.to[0]}:{proxy.to[1]}", "seed": proxy.seed})
        await done.wait()
    proxy.tell({"event": "end", **{name.replace(" ", "_"): count for name, count in sorted(proxy.counts.items())}})


def main(words: Sequence[str] | None = None) -> None:
    """Run the proxy that the command line describes."""
    try:
        asyncio.run(serve(configured(parser().parse_args(words))))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
