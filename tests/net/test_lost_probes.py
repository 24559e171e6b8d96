"""TCP keep-alive with packet loss, in a network namespace: one lost probe is tolerated, a dead peer is detected."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

CHILD = """
import fcntl, json, socket, struct, time
from hansa.net.transport.listener import _set_options
from hansa.net.transport.limits import Limits

def loopback(up):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        name = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(ask, 0x8913, name))[1]  # SIOCGIFFLAGS, and below SIOCSIFFLAGS
        fcntl.ioctl(ask, 0x8914, struct.pack("16sh14x", b"lo", flags | 1 if up else flags & ~1))

def there(line):
    try:
        return line.recv(1) == b"x"
    except BlockingIOError:
        return True
    except OSError:
        return False

class Stalled(Exception):
    pass

def sleep(seconds, late):
    began = time.monotonic()
    time.sleep(seconds)
    if time.monotonic() - began > seconds + late:
        raise Stalled

def attempt():
    loopback(True)
    with socket.create_server(("127.0.0.1", 0)) as door:
        far = socket.create_connection(door.getsockname())
        near, _ = door.accept()
    with far, near:
        _set_options(near, Limits(stall=2.0))
        idle, each, count = (near.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
                             for name in ("IDLE", "INTVL", "CNT"))
        far.send(b"x")
        sleep(idle - 0.5, 0.4)  # just before the first probe
        began = there(near)
        loopback(False)
        sleep(1.0, 0.4)
        loopback(True)
        sleep(each + 0.5, 600)  # after the second
        kept = there(near)
        if kept:
            far.send(b"x")
            sleep(0.1, 600)
        loopback(False)
        since = time.monotonic()
        while kept and there(near) and time.monotonic() - since < 60:
            sleep(0.05, 2.0)
        return {"began": began, "kept": kept, "gone": time.monotonic() - since, "most": idle + count * each + 5}

while True:  # until this machine was not stopped meanwhile
    try:
        found = attempt()
    except Stalled:
        continue
    break
print(json.dumps(found))
"""


def apart() -> list[str]:
    """The command prefix for a separate network namespace; empty if the system does not allow one."""
    found = shutil.which("unshare")
    words = [found, "--map-root-user", "--net"] if found else []
    return words if words and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0 else []


@pytest.mark.slow
def test_one_lost_probe_ends_no_connection_and_a_peer_that_has_gone_does() -> None:
    words = apart()
    if not words:
        pytest.skip("a network of one's own takes unshare, and leave to use it")
    done = subprocess.run(
        [*words, sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=600
    )
    found = json.loads(done.stdout)
    assert found["began"] and found["kept"]
    assert 1 < found["gone"] < found["most"]
