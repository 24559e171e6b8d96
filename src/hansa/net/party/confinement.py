"""What a worker process may do: limits of the operating system that the work of an ask cannot lift.

On every Unix: CPU time, memory (`Workload.confine`), open files, no core files. On Linux in addition: the worker dies
with its parent, other processes cannot read its memory, and a filter of system calls (seccomp, x86-64 and AArch64)
refuses sockets, new processes, new programs, and the memory of other processes. A refused call fails with EPERM, so an
ask that needs it fails and the worker goes on.

A network namespace would also cut the network off, but a process with several threads cannot enter one, and the worker
needs the network until the owner's samples are read (they may come from a database). Many systems and containers also
forbid new namespaces. A filter needs no privileges and can be installed at any time, for all threads.

The filter does not restrict files: a worker runs as the party's user.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import re
import resource
import signal
import socket
import struct
import sys

FILES = 4096  # the most open files
SPARE_SECONDS = 60.0  # CPU seconds beyond `limits.seconds`: only work that the other limits did not stop gets there
SECRET = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|PROXY|DSN", re.IGNORECASE)  # in names of variables

_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38  # of prctl
_THREAD = 0x10000  # CLONE_THREAD
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the filter
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in the data that a filter reads (little endian)
_REFUSED = ("socket", "execve", "execveat", "fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev",
            "pidfd_getfd", "io_uring_setup", "unshare", "setns", "mount", "bpf", "perf_event_open", "userfaultfd",
            "add_key", "request_key", "keyctl", "open_by_handle_at")  # fmt: skip
_CALLS = {
    "x86_64": (0xC000003E, {
        "socket": 41, "execve": 59, "execveat": 322, "fork": 57, "vfork": 58, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "pidfd_getfd": 438, "io_uring_setup": 425, "unshare": 272, "setns": 308,
        "mount": 165, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249,
        "keyctl": 250, "open_by_handle_at": 304, "clone": 56, "clone3": 435, "seccomp": 317,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "execve": 221, "execveat": 281, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "pidfd_getfd": 438, "io_uring_setup": 425, "unshare": 97, "setns": 268, "mount": 40,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217, "request_key": 218, "keyctl": 219,
        "open_by_handle_at": 265, "clone": 220, "clone3": 435, "seccomp": 277,
    }),
}  # fmt: skip


def die_with_parent() -> None:
    """Let the system kill this process when the process that forked it ends. Linux only."""
    if sys.platform == "linux":
        _prctl(_PDEATHSIG, signal.SIGKILL)


def forget_secrets() -> None:
    """Remove environment variables whose names suggest a password, a token or a key."""
    for name in [name for name in os.environ if SECRET.search(name)]:
        del os.environ[name]


def close_connections() -> None:
    """Close the network connections of this process: those that the owner's function for samples left open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    os.dup2(nothing, int(name))
        except OSError:  # not a socket
            continue
    os.close(nothing)


def limit_cpu(seconds: float) -> None:
    """Kill this process (SIGXCPU) when it has used more than this CPU time, in seconds from now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = used.ru_utime + used.ru_stime + seconds + SPARE_SECONDS
    soft = math.ceil(most) if most < 2**31 else resource.RLIM_INFINITY
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def confine() -> str | None:
    """Give up what an ask does not need. Return what this system cannot refuse, as one sentence, or None."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return "this system has no filter of system calls for the worker: its work could use the network"
    try:
        _prctl(_NO_NEW_PRIVS, 1)
        _install(refusing(platform.machine()), _CALLS[platform.machine()][1]["seccomp"])
        _prctl(_DUMPABLE, 0)
    except OSError as error:
        return f"this system does not accept the worker's filter ({error.strerror}): its work could use the network"
    return None


def refusing(machine: str) -> bytes:
    """The filter for a kind of machine, as instructions of the classic Berkeley packet filter."""
    architecture, numbers = _CALLS[machine]
    refuse, missing = _returning(_ERROR | errno.EPERM), _returning(_ERROR | errno.ENOSYS)
    out = [_instruction(_LOAD, 0, 0, _ARCHITECTURE), _instruction(_EQUAL, 1, 0, architecture), missing,
           _instruction(_LOAD, 0, 0, _NUMBER)]  # fmt: skip
    if machine == "x86_64":  # the numbers of the x32 interface
        out += [_instruction(_AT_LEAST, 0, 1, 0x40000000), missing]
    for name in _REFUSED:
        if name in numbers:
            out += [_instruction(_EQUAL, 0, 1, numbers[name]), refuse]
    # A filter cannot read the arguments of clone3. Without it, the C library starts threads by clone.
    out += [_instruction(_EQUAL, 0, 1, numbers["clone3"]), missing]
    out += [_instruction(_EQUAL, 0, 4, numbers["clone"]), _instruction(_LOAD, 0, 0, _ARGUMENT),
            _instruction(_HAS_BITS, 0, 1, _THREAD), _returning(_ALLOW), refuse]  # fmt: skip
    return b"".join([*out, _returning(_ALLOW)])


def _instruction(code: int, yes: int, no: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _returning(value: int) -> bytes:
    return _instruction(_RETURN, 0, 0, value)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _install(instructions: bytes, number: int) -> None:
    """Install a filter for all threads of this process; an OSError if the system refuses."""
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(memory))
    library = ctypes.CDLL(None, use_errno=True)
    all_threads = 1
    result = library.syscall(ctypes.c_long(number), ctypes.c_long(1), ctypes.c_long(all_threads), ctypes.byref(program))
    if result != 0:  # positive: the id of a thread that has another filter
        code = ctypes.get_errno() or errno.ESRCH
        raise OSError(code, os.strerror(code))


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(*map(ctypes.c_ulong, (option, value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
