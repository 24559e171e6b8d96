"""A child process for test_child: does what each message says."""

from __future__ import annotations

import os
import sys
import time

from hansa.plumbing.child import ParentConnection


def main() -> None:
    parent = ParentConnection()
    print("a print must not be taken for a message")
    parent.send({"pid": os.getpid(), "arguments": sys.argv[1:], "word": os.environ.get("WORD")})
    messages = parent.until_parent_ends() if "at-once" in sys.argv else parent
    for message in messages:
        if message["do"] == "echo":
            parent.send(message)
        elif message["do"] == "sleep":
            time.sleep(message["seconds"])
        elif message["do"] == "fail":
            sys.exit("no room")


if __name__ == "__main__":
    main()
