"""The file of a model's answers, one JSON line per answer, with which an interrupted evaluation resumes."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.multihost import hosts
from capibara.storage import outputs

_BEGINS = b'{"predictions_of"'


class Predictions:
    """Lines in the order of the requests; those that the file already has are reused.

    The first line describes the model. Every other line has a request (`asked`: task, example, prompt, ...) and its answer.
    With several processes, process 0 reads and writes the file and sends its content to the others.

    Args:
      path: the file; None: nothing is written.
      model: description of the model, as JSON values.
      flag: what names the file, for errors; None: --predictions.
      described: what `model` describes, for errors.

    Raises:
      UserError: the file is of another model, is not a file of predictions, or another process writes it.
    """

    def __init__(self, path: str | None, model: Mapping[str, Any], flag: str | None = None, described: str = "model"):
        self._flag, self._described, self._number = flag or f"--predictions={path}", described, 1
        self._old: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        if path is not None:
            self._old = hosts.of_first(lambda: self._opened(path, {"predictions_of": dict(model)}))

    def _opened(self, path: str, head: dict[str, Any]) -> list[dict[str, Any]]:
        """Opens the file; returns its lines after the first."""
        with contextlib.ExitStack() as undo:
            try:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                file = undo.enter_context(open(path, "a", encoding="utf-8", errors="surrogatepass"))
                outputs.lock(file, self._flag)  # first: a line that another process writes looks cut off
                old = self._read(path, json.loads(json.dumps(head)))
            except OSError as error:
                raise UserError(f"{self._flag} cannot be written ({error.strerror}): name another file") from None
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

    def beginning(self, requests: Iterable[Mapping[str, object]]) -> list[dict[str, Any]]:
        """The file's lines for the first of these requests; the caller must generate the others and `add` them.

        Raises:
          UserError: a line is of another request.
        """
        lines: list[dict[str, Any]] = []
        for request in requests:
            if (line := self.known(request)) is None:
                break
            lines.append(line)
        return lines

    def known(self, request: Mapping[str, object]) -> dict[str, Any] | None:
        """The file's line for the next request; None: the caller must generate it and `add` it.

        Raises:
          UserError: the line is of another request.
        """
        if not self._old:
            return None
        line, self._number = self._old.pop(0), self._number + 1
        if any(line.get(key) != value for key, value in request.items()):
            raise UserError(f"{self._flag}: line {self._number} is of another request than now: name another file")
        return line

    def numbers(self, line: Mapping[str, object], key: str, count: int) -> list[float]:
        """The numbers of an answer, in a list or one alone.

        Raises:
          UserError: they are no numbers, as of a line that was edited.
        """
        values: Any = line.get(key)
        numbers = values if isinstance(values, list) else [values]
        expected = "a number" if count == 1 else f"{count} numbers"
        if len(numbers) != count or not all(type(item) in (int, float) and not math.isnan(item) for item in numbers):
            raise UserError(
                f"{self._flag}: {key} of a line is {short(values)}, must be {expected}: remove the line and those after it"
            )
        return numbers

    def add(self, request: Mapping[str, object], answer: Mapping[str, object]) -> dict[str, Any]:
        """Writes the next line, and returns it."""
        line = {**request, **answer}
        if self._file is not None:
            _write(self._file, line)
        return line

    def _read(self, path: str, head: dict[str, Any]) -> list[dict[str, Any]]:
        """The complete lines; removes a last one that was cut off, if this is a file of predictions."""
        with open(path, "rb+") as file:
            *lines, rest = file.read().split(b"\n")
            try:
                result = [json.loads(line) for line in lines]
            except (ValueError, RecursionError):
                result = []
            if lines:
                ours = result and all(isinstance(line, dict) for line in result) and "predictions_of" in result[0]
            else:
                ours = rest[: len(_BEGINS)] == _BEGINS[: len(rest)]  # even the first line is incomplete
            if not ours:
                raise UserError(f"{self._flag} exists and is not a file of predictions: name another")
            if result and result[0] != head:
                raise UserError(f"{self._flag} exists and is of another {self._described}: name another file")
            file.truncate(sum(len(line) + 1 for line in lines))
        return result


def _write(file: IO[str], line: Mapping[str, object]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()
