"""The process of a tracker (`python -m hansa.track`): events from the run, replies to it. See `hansa.track.sinks`."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from hansa.core.plain_data import from_config
from hansa.plumbing.child import ParentConnection
from hansa.track.sinks import LocalSink, Undelivered

BUSY_SECONDS = 0.1  # of processor time between two reports that the process is busy


def report_busy(parent: ParentConnection) -> None:
    """Report to the run that this process computes, twice a second at most, for as long as the run listens."""
    reported = time.process_time()
    with contextlib.suppress(OSError):
        while True:
            time.sleep(0.5)
            if (spent := time.process_time()) - reported >= BUSY_SECONDS:
                parent.send({"busy": spent})
                reported = spent


def main() -> None:
    """Deliver events to a tracker until the run closes the connection or ends."""
    parent = ParentConnection()
    os.nice(10)  # where cores are few, the run goes first
    threading.Thread(target=report_busy, args=(parent,), daemon=True).start()
    tracker = from_config("tracker", parent.receive(), where="track")
    sink = LocalSink(tracker, lambda sentence: parent.send({"said": sentence}))
    for event in parent:
        try:
            state = sink.deliver(event)
        except Undelivered as error:
            parent.send({"trouble": str(error)})
        else:
            parent.send({"state": state})
    sink.close()


if __name__ == "__main__":
    main()
