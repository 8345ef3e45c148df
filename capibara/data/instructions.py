"""Turns files of conversations, also within an archive such as a package's sdist, into training and held-out lines."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from capibara.data import disk
from capibara.data.chat_formats import Conversation, read_conversation, read_preference
from capibara.types import UserError

_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip", ".whl")
_ENDINGS = (".json", ".jsonl")
TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "held_out.jsonl"


def prepare_instructions(
    files: Sequence[str],
    output: str,
    *,
    members: Sequence[str] = (),
    held_out: float = 0.1,
    report: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Writes `train.jsonl` and `held_out.jsonl` into the folder `output`, one conversation (or preference pair) a line.

    A hash of what is asked first says on which side a conversation is: it does not change sides when others are added,
    and no question is on both sides.

    Args:
      files: paths or globs of .json (a list) or .jsonl files, or of archives of these.
      output: a folder; files of these names in it are replaced.
      members: names (or patterns) of the files to take out of archives.
      held_out: the share held out.
      report: called with each line that tells what was done.

    Returns:
      How many lines there are in each of the two.

    Raises:
      UserError: a file cannot be read or holds something else, or one side would be empty.
    """
    if not 0 < held_out < 1:
        raise UserError(f"--held_out ({held_out}) must lie between 0 and 1: try 0.1")
    paths = disk.expand("--files", files)
    sides: tuple[list[str], list[str]] = ([], [])
    for path in paths:
        for name, content in _contents(path, members):
            lines = [_line(record, f"{name}:{number}") for number, record in _records(name, content)]
            for asked, line in lines:
                key = hashlib.blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                sides[int.from_bytes(key, "little") < held_out * 2.0**64].append(line)
            report(f"{name}: {len(lines)} conversations")
    if not all(sides):
        train, apart = map(len, sides)
        raise UserError(f"{train} conversations to train on and {apart} held out: give more, or another --held_out")
    for name, lines in zip((TRAIN_FILE, HELD_OUT_FILE), sides):
        path = os.path.join(output, name)
        try:
            os.makedirs(output, exist_ok=True)
            with open(f"{path}.part", "w", encoding="utf-8", errors="surrogatepass") as file:
                file.writelines(f"{line}\n" for line in lines)
            os.replace(f"{path}.part", path)
        except OSError as error:
            raise UserError(f"--output={output} cannot be written ({error.strerror}): name a folder of yours") from None
        report(f"wrote {path}: {len(lines)} lines")
    return len(sides[0]), len(sides[1])


def _line(record: Any, where: str) -> tuple[str, str]:
    """What is asked first, and the line of JSON."""
    if isinstance(record, dict) and "chosen" in record and "rejected" in record:
        pair = read_preference(record, where)
        shared, line = pair.chosen, {"chosen": pair.chosen.messages, "rejected": pair.rejected.messages}
    else:
        shared = read_conversation(record, where)
        line = {"messages": shared.messages}
    line |= {"tools": shared.tools} if shared.tools else {}
    return _asked(shared), json.dumps(line, ensure_ascii=False)


def _asked(conversation: Conversation) -> str:
    return next((message["content"] for message in conversation.messages if message["role"] != "system"), "")


def _records(name: str, content: bytes) -> Iterator[tuple[int, Any]]:
    """Records with their number, from 1: that of the line, or of the place in the list."""
    try:
        if name.endswith(".jsonl"):
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    yield number, json.loads(line)
            return
        records = json.loads(content)
    except ValueError as error:
        raise UserError(f"{name} is not JSON ({error})") from None
    if not isinstance(records, list):
        raise UserError(f"{name} must hold a list of conversations, not {type(records).__name__}")
    yield from enumerate(records, 1)


def _contents(path: str, members: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a file, or of the members of an archive."""
    if not path.endswith(_ARCHIVES):
        if not path.endswith(_ENDINGS):
            raise UserError(f"--files ({path!r}) must end in one of {', '.join((*_ENDINGS, *_ARCHIVES))}")
        with open(path, "rb") as file:
            yield path, file.read()
        return
    try:
        with _opened(path) as (names, read):
            known = ", ".join(sorted(os.path.basename(name) for name in names)) or "none"
            if not members:
                raise UserError(f"--members is not set: name some of the files of {path}: {known}")
            for member in members:
                found = [name for name in names if fnmatch.fnmatch(os.path.basename(name), member) or name == member]
                if not found:
                    raise UserError(f"--members ({member!r}) is none of the files of {path}: {known}")
                for name in found:
                    yield f"{path}/{name}", read(name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{path} cannot be read as an archive: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[list[str], Callable[[str], bytes]]]:
    """The names of an archive's JSON files, and what reads one."""
    if path.endswith((".zip", ".whl")):
        with zipfile.ZipFile(path) as archive:
            yield [name for name in archive.namelist() if name.endswith(_ENDINGS)], archive.read
    else:
        with tarfile.open(path) as archive:
            files = {one.name: one for one in archive.getmembers() if one.isfile() and one.name.endswith(_ENDINGS)}
            yield list(files), lambda name: archive.extractfile(files[name]).read()
