"""The process from which worker processes are forked.

It is forked once, before the party has an event loop, a key in memory or a connection, and then only waits. So a new
worker starts in milliseconds with the modules and the samples already in memory, which all processes share, and a
killed worker costs little. It computes no gradient and never uses a GPU, after which it could not fork
(`plumbing.forking`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable

from hansa.net.party.confinement import die_with_parent
from hansa.plumbing.errors import RuntimeFailure
from hansa.plumbing.forking import check_fork

Serve = Callable[[socket.socket], None]
_ENDED = "the process that starts the party's workers ended; start the party again"


class Nursery:
    """Forks worker processes; each calls `serve` with a connection to this process, and exits when that returns."""

    def __init__(self, serve: Serve, device: str = "cpu") -> None:
        """A CannotFork if this process must not fork workers that train on `device`."""
        check_fork(
            "--data: the party forks its workers from the process that has read the samples, and this process must not",
            "let the function for samples use no GPU and compute no gradient, and return tensors on the CPU",
            gpu=device != "cpu",
        )
        self._connection, theirs = socket.socketpair()
        gc.freeze()  # collections in the children do not touch, and so copy, the pages of existing objects
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the children use no thread of this process
            self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _exit_after(lambda: _tend(theirs, serve))
        gc.unfreeze()
        theirs.close()

    def fork(self) -> tuple[int, socket.socket]:
        """Fork a worker; return its process id and the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._connection, [(0).to_bytes(8, "little")], [theirs.fileno()])
            except OSError:
                raise RuntimeFailure(_ENDED) from None
        return self._number(), ours

    def wait(self, worker: int) -> int:
        """Wait for the end of a worker; return its exit code, or minus the number of the signal that ended it."""
        try:
            self._connection.sendall(worker.to_bytes(8, "little"))
        except OSError:
            raise RuntimeFailure(_ENDED) from None
        return self._number()

    def _number(self) -> int:
        data = self._connection.recv(8, socket.MSG_WAITALL)
        if len(data) < 8:
            raise RuntimeFailure(_ENDED)
        return int.from_bytes(data, "little", signed=True)

    def close(self) -> None:
        """Kill the remaining workers and this process's child; return when they have ended."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.recv(1)  # returns at the end of the child
        self._connection.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _tend(connection: socket.socket, serve: Serve) -> None:
    """Fork workers and report how they ended, until the party's process closes the connection or ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the party's process ends its workers itself
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent()
    workers: set[int] = set()
    while True:
        data, received, _, _ = socket.recv_fds(connection, 8, 1)
        if len(data) < 8:
            break
        number = int.from_bytes(data, "little")
        if received:
            with socket.socket(fileno=received[0]) as theirs:
                number = os.fork()
                if number == 0:
                    connection.close()
                    _exit_after(lambda: _begin(theirs, serve))
            workers.add(number)
        else:
            workers.discard(number)
            number = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        connection.sendall(number.to_bytes(8, "little", signed=True))
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def _begin(connection: socket.socket, serve: Serve) -> None:
    die_with_parent()
    serve(connection)


def _exit_after(run: Callable[[], None]) -> None:
    """End this process after `run`, whatever happens: a forked process must not return into its parent's code."""
    code = 1
    try:
        run()
        code = 0
    except BaseException:  # the log is the only place to report it
        traceback.print_exc()
    finally:
        os._exit(code)
