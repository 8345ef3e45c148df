"""Runs a program with its output in a log, after all that wrote to the log before have ended.

The processes of a sweep that was killed save and end by themselves. A trial that is resumed must wait for that: its run
folder is theirs until then. It is run as a file and imports nothing of capibara, so that it starts at once.
"""

from __future__ import annotations

import fcntl
import os
import sys


def main() -> None:
    """Becomes the program that the arguments after the log's name are."""
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    # The lock belongs to the open file, so to all processes that inherit it as their output.
    fcntl.flock(log, fcntl.LOCK_EX)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
