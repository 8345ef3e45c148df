"""The file of what a model answered, one JSON line for each answer: with it an evaluation that was stopped goes on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

from capibara.core.multihost import hosts
from capibara.core.types import UserError
from capibara.storage import outputs

_BEGINS = b'{"predictions_of"'


class Predictions:
    """Lines in the order in which they are asked for; those that the file has already are taken from there.

    The first line tells the model. Every other has what was asked (`asked`: task, example, prompt, ...) and what came of it.
    Of several processes the first reads and writes the file, and tells the others what it has.

    Args:
      path: of the file; None: nothing is written.
      model: what it is of; as JSON values.

    Raises:
      UserError: the file is of another model, or no such file, or another process writes it.
    """

    def __init__(self, path: str | None, model: Mapping[str, Any]):
        self._path, self._number = path, 1
        self._old: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        if path is not None:
            self._old = hosts.of_first(lambda: self._opened(path, {"predictions_of": dict(model)}))

    def _opened(self, path: str, head: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines that the file has after its first."""
        with contextlib.ExitStack() as undo:
            try:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                file = undo.enter_context(open(path, "a", encoding="utf-8", errors="surrogatepass"))
                outputs.lock(file, f"--predictions={path}")  # before a line is taken for one that was cut off
                old = self._read(path, json.loads(json.dumps(head)))
            except OSError as error:
                raise UserError(
                    f"--predictions={path} cannot be written ({error.strerror}): name another file"
                ) from None
            undo.pop_all()
        self._file = file
        if not old:
            _write(file, head)
        return old[1:]

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def beginning(self, asked: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The lines on the first of what is asked that the file has; the others are to be made, and given to `add`.

        Raises:
          UserError: a line is of something else.
        """
        lines: list[dict[str, Any]] = []
        for one in asked:
            if (line := self.known(one)) is None:
                break
            lines.append(line)
        return lines

    def known(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the file has of the next line, if it goes so far; None: it is to be made, and given to `add`.

        Raises:
          UserError: the line is of something else.
        """
        if not self._old:
            return None
        line, self._number = self._old.pop(0), self._number + 1
        if any(line.get(key) != value for key, value in asked.items()):
            raise UserError(
                f"--predictions={self._path}: line {self._number} is not of what is asked there now: name another file"
            )
        return line

    def add(self, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the next line, and returns it."""
        line = {**asked, **answer}
        if self._file is not None:
            _write(self._file, line)
        return line

    def _read(self, path: str, head: dict[str, Any]) -> list[dict[str, Any]]:
        """The whole lines; one that was cut off is removed, once the file is known as one of ours."""
        with open(path, "rb+") as file:
            *lines, rest = file.read().split(b"\n")
            try:
                found = [json.loads(line) for line in lines]
            except (ValueError, RecursionError):
                found = []
            if lines:
                ours = found and all(isinstance(line, dict) for line in found) and "predictions_of" in found[0]
            else:
                ours = rest[: len(_BEGINS)] == _BEGINS[: len(rest)]  # not even the first line was written to its end
            if not ours:
                raise UserError(f"--predictions={path} is there already, and no file of predictions: name another")
            if found and found[0] != head:
                raise UserError(f"--predictions={path} is there already, of another model: name another file")
            file.truncate(sum(len(line) + 1 for line in lines))
        return found


def _write(file: IO[str], line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()
