"""The table `[serve]` of `federation.toml`: addresses, patience and capacity of an aggregator."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
from dataclasses import dataclass

from hansa.core.plain_data import check_numbers
from hansa.core.quantities import AnyCount, Count, Port, Seconds
from hansa.plumbing.errors import ConfigError

ADMIN = 9464  # the admin port beside port 8443


@dataclass(frozen=True)
class Serve:
    """The table `[serve]`."""

    host: str = "0.0.0.0"
    port: Port = 8443
    absent_after: Seconds = 300.0
    poll: Seconds = 300.0
    lease: Seconds = 60.0
    jobs: Count = 4
    functions: tuple[str, ...] = ()
    min_free: AnyCount = 2**28
    evidence: tuple[str, ...] = ()
    admin: str = f"127.0.0.1:{ADMIN}"
    admin_open: bool = False
    admin_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.admin:
            host, port = self.admin_at
            if not self.admin_open and not _is_loopback(host):
                raise ConfigError(
                    f"admin: other machines could reach {host}:{port}, where there is no TLS and no certificate; use "
                    "127.0.0.1, or set admin_open = true if the network is closed to strangers"
                )

    @property
    def admin_at(self) -> tuple[str, int]:
        """Host and port of the admin listener."""
        host, port = _address(self.admin, None) or ("", None)
        if not host or port is None:
            raise ConfigError(
                f'admin: expected HOST:PORT as in 127.0.0.1:{ADMIN}, or "" for none; got {self.admin[:80]!r}'
            )
        return host, port

    def listening(self, listen: str | None = None, admin: str | None = None) -> Serve:
        """The table with other addresses: ADDRESS or ADDRESS:PORT for parties, HOST:PORT for the admin port."""
        address = (self.host, self.port) if listen is None else _address(listen, self.port)
        if address is None or address[1] is None:
            raise ConfigError(
                f"--listen: expected ADDRESS or ADDRESS:PORT of this machine, as in 10.0.0.5, 127.0.0.1:8443 or "
                f"[::]:8443; got {str(listen)[:80]!r}"
            )
        return dataclasses.replace(self, host=address[0], port=address[1], admin=self.admin if admin is None else admin)


def _address(text: str, port: int | None) -> tuple[str, int | None] | None:
    """The host and port of HOST:PORT, [HOST]:PORT or HOST (with the default `port`); None for an invalid address."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text)), port  # an IPv6 address without a port needs no brackets
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::([0-9]{1,5}))?", text)
    if match is None or int(match[3] or 0) > 65535:
        return None
    return match[1] or match[2], port if match[3] is None else int(match[3])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
