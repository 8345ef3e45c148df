"""What a folder may hold that no source can read."""

import os
import pathlib
import socket


def add(folder: pathlib.Path, ending: str) -> None:
    """Adds a pipe, a socket and a link to nothing, whose names have this ending, and a link to a folder beside this one."""
    os.mkfifo(folder / f"pipe{ending}")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / f"socket{ending}"))
    (folder / f"link{ending}").symlink_to(folder.parent / "nothing")
    (folder.parent / "other").mkdir()
    (folder / "linked").symlink_to(folder.parent / "other")
