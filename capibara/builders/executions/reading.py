"""Reads logs of executed code: executions of E2B's code interpreter, results of its commands, and interactive sessions.

A record is a JSON object with the code that was run and what came of it. docs/execution_logs.md lists its fields.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capibara.builders.executions import sessions
from capibara.builders.files import fingerprints, reading
from capibara.builders.files.problems import Kind, Problems
from capibara.builders.redaction.redact import Json
from capibara.core import limits
from capibara.storage import packed

ENDINGS = (".jsonl", ".ndjson", ".json")
_NOT_E2B = "is no execution"
# Names of a field; the first one that a record has counts.
_CODE = ("code", "source_code", "cell", "input")
_COMMAND = ("command", "cmd")
_LANGUAGE = ("language", "lang", "kernel", "runtime")
_TIME = ("timestamp", "time", "started_at", "created_at", "ts")
_SESSION = ("session_id", "session", "sandbox_id", "sandboxID", "context_id")
_TASK = ("task", "prompt", "instruction", "question")
_NESTED = ("execution", "result", "output")
_OUTCOME = ("results", "logs", "error", "exit_code", "exitCode", "stdout", "stderr")
# Formats of a result that are text; of the others only the name is kept.
_TEXTS = ("text", "markdown", "latex", "json", "data")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SPAN = (0.0, 4_102_444_800.0)  # from 1970 to 2100, in seconds


class Form(enum.StrEnum):
    """Where an execution comes from.

    EXECUTION: a cell of a code interpreter.
    COMMAND: a command of a shell.
    SESSION: an example of an interactive session in a text, whose results the text states.
    """

    EXECUTION = "execution"
    COMMAND = "command"
    SESSION = "session"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that ended an execution.

    Attributes:
      name: such as "ValueError"; "" if there is none.
      value: the message.
      traceback: the traceback, without colours; "" if there is none.
    """

    name: str
    value: str
    traceback: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A value that an execution displayed.

    Attributes:
      texts: its forms that are text, by name: "text", "markdown", "latex", "json", "data".
      formats: the names of all its forms.
      is_main: whether it is the value of the cell.
    """

    texts: Mapping[str, str]
    formats: tuple[str, ...]
    is_main: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Code that was run, and what came of it.

    Attributes:
      path: the file of the log.
      line: its line, or number in a list, from 1.
      form: where it comes from.
      code: what was run.
      language: as the log declares it; None: it does not.
      stdout, stderr: what was printed.
      results: what was displayed.
      failure: the error; None: there was none.
      exit_code: of a command; None: unknown.
      execution_count: the number of the cell; None: unknown.
      time_s: when it ran, in seconds since 1970; None: unknown.
      session: names the sandbox or session it ran in; None: unknown.
      task: what the user asked for; None: unknown.
    """

    path: str
    line: int
    form: Form
    code: str
    language: str | None = None
    stdout: str = ""
    stderr: str = ""
    results: tuple[Result, ...] = ()
    failure: Failure | None = None
    exit_code: int | None = None
    execution_count: int | None = None
    time_s: float | None = None
    session: str | None = None
    task: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it ended without an error."""
        return self.failure is None and not self.exit_code

    @property
    def value(self) -> str | None:
        """The text of the cell's value; None: it has none."""
        main = [result for result in self.results if result.is_main and "text" in result.texts]
        return main[-1].texts["text"] if main else None


_FIELDS = ("code", "language", "stdout", "stderr", "session", "task")


def texts_of(execution: Execution) -> list[str]:
    """All texts of an execution, "" for those that it does not have; `with_texts` replaces them."""
    texts = [getattr(execution, name) or "" for name in _FIELDS]
    if execution.failure is not None:
        texts += [execution.failure.name, execution.failure.value, execution.failure.traceback]
    return texts + [text for result in execution.results for text in (*result.texts.values(), *result.formats)]


def with_texts(execution: Execution, texts: Sequence[str]) -> Execution:
    """The execution with other texts, in the order of `texts_of`."""
    remaining = iter(texts)
    changed: dict[str, Any] = {name: next(remaining) or getattr(execution, name) for name in _FIELDS}
    if execution.failure is not None:
        changed["failure"] = Failure(name=next(remaining), value=next(remaining), traceback=next(remaining))
    changed["results"] = tuple(
        dataclasses.replace(
            result,
            texts={name: next(remaining) for name in result.texts},
            formats=tuple(next(remaining) for _ in result.formats),
        )
        for result in execution.results
    )
    return dataclasses.replace(execution, **changed)


class Malformed(ValueError):
    """A record that is no execution; the message is the reason."""


def read(path: str, problems: Problems) -> Iterator[Execution]:
    """The executions of a file, in its order.

    JSON (a list) and JSON lines hold records; the interactive sessions of any other text are read. What is malformed is
    counted in `problems` with its line, and skipped.

    Args:
      path: the file, plain or compressed by gzip or zstd.
      problems: counts what is skipped.
    """
    if not packed.plain_name(path).endswith(ENDINGS):
        yield from _of_text(path, problems)
        return
    for record in reading.records(path, problems):
        try:
            yield of_record(record.value, path, record.number)
        except Malformed as error:
            problems.add(path, record.number, Kind.MALFORMED, f"{_NOT_E2B}: {error}")


def _of_text(path: str, problems: Problems) -> Iterator[Execution]:
    for example in sessions.of_lines((line.number, line.text) for line in reading.lines(path, problems)):
        failure = None
        if example.error is not None:
            failure = Failure(name=example.error.name, value=example.error.value, traceback=example.error.traceback)
        yield Execution(
            path=path,
            line=example.line,
            form=Form.SESSION,
            code=example.code,
            language="python",
            stdout=example.output,
            failure=failure,
            session=f"{path}:{example.session}",
        )


def of_record(value: Mapping[str, Json], path: str, line: int) -> Execution:
    """The execution of a JSON object.

    Args:
      value: the record.
      path, line: where it is.

    Raises:
      Malformed: it has no code or no outcome, or a field of another form.
    """
    record = dict(value)
    for name in _NESTED:
        inner = _decoded(record.get(name))
        if isinstance(inner, Mapping) and any(key in inner for key in _OUTCOME):
            record = {**{key: item for key, item in record.items() if key != name}, **inner}
            break
    code, command = _first(record, _CODE), _first(record, _COMMAND)
    if code is None and command is None:
        raise Malformed("it has no code (code or command)")
    if not any(key in record for key in _OUTCOME):
        raise Malformed(f"it has no outcome ({', '.join(_OUTCOME)})")
    if not isinstance(result := command if code is None else code, str) or not result.strip():
        raise Malformed("its code must be a text that is not empty")
    logs = _decoded(record.get("logs"))
    if logs is not None and not isinstance(logs, Mapping):
        raise Malformed("logs must be an object with stdout and stderr")
    streams = logs or record
    execution = Execution(
        path=path,
        line=line,
        form=Form.EXECUTION if code is not None else Form.COMMAND,
        code=sessions.without_prompts(result.replace("\r\n", "\n")),
        language=_text(record, _LANGUAGE),
        stdout=_printed(streams.get("stdout"), "stdout"),
        stderr=_printed(streams.get("stderr"), "stderr"),
        results=_results(record.get("results")),
        failure=_failure(_decoded(record.get("error"))),
        exit_code=_whole_number(record, "exit_code" if "exit_code" in record else "exitCode"),
        execution_count=_whole_number(record, "execution_count"),
        time_s=time_of(_first(record, _TIME)),
        session=_text(record, _SESSION),
        task=_text(record, _TASK),
    )
    texts = texts_of(execution)
    clean = [_with_whole_characters(text) for text in texts]
    return execution if clean == texts else with_texts(execution, clean)


def _with_whole_characters(text: str) -> str:
    """The text with U+FFFD for half a character, as a log has it that was cut within JSON in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _first(record: Mapping[str, Json], names: Sequence[str]) -> Json:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _decoded(value: Json) -> Json:
    """A value that E2B's `to_json` may have encoded once more."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "[", "n"):
        return value
    try:
        return limits.parse_json(value, finite=False)
    except ValueError:
        return value


def _text(record: Mapping[str, Json], names: Sequence[str]) -> str | None:
    value = _first(record, names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise Malformed(f"{'/'.join(names[:2])} must be a text")
    return str(value).strip() or None


def _whole_number(record: Mapping[str, Json], name: str) -> int | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise Malformed(f"{name} must be a whole number")
    return value


def _printed(value: Json, name: str) -> str:
    """A stream; E2B logs it in the pieces in which it arrived, and a piece may end within a word."""
    if value is None:
        return ""
    pieces = value if isinstance(value, list) else [value]
    texts = [piece.get("line") if isinstance(piece, Mapping) else piece for piece in pieces]
    if not all(isinstance(text, str) for text in texts):
        raise Malformed(f"{name} must be a text, or a list of texts")
    return _COLOUR.sub("", "".join(map(str, texts))).replace("\r\n", "\n")


def _results(value: Json) -> tuple[Result, ...]:
    value = _decoded(value)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise Malformed("results must be a list of objects")
    result = [_result(item) for item in value if isinstance(item, Mapping)]
    if not any(item.is_main for item in result):  # to_json omits it; the value is displayed last
        with_text = [number for number, item in enumerate(result) if "text" in item.texts]
        for number in with_text[-1:]:
            result[number] = dataclasses.replace(result[number], is_main=True)
    return tuple(result)


def _result(value: Mapping[str, Json]) -> Result:
    forms = {name: form for name, form in value.items() if form and name not in ("is_main_result", "extra", "type")}
    texts = {}
    for name in _TEXTS:
        form = forms.get(name)
        if isinstance(form, str):
            texts[name] = _COLOUR.sub("", form)
        elif isinstance(form, (Mapping, list)):
            texts[name] = _compact(form)
    return Result(texts=texts, formats=tuple(sorted(forms)), is_main=value.get("is_main_result") is True)


def _compact(value: Json) -> str:
    try:
        return fingerprints.canonical(value)
    except ValueError:
        raise Malformed("results have a number that JSON does not have") from None


def _failure(value: Json) -> Failure | None:
    if value is None or value == "" or value == {}:
        return None
    if isinstance(value, str):
        return Failure(name="", value=_COLOUR.sub("", value), traceback="")
    if not isinstance(value, Mapping):
        raise Malformed("error must be an object with name, value and traceback")
    parts: dict[str, str] = {}
    for name, others in (("name", "ename"), ("value", "evalue"), ("traceback", "traceback")):
        part = value.get(name, value.get(others))
        part = "\n".join(map(str, part)) if isinstance(part, list) else part
        if part is not None and not isinstance(part, str):
            raise Malformed(f"error.{name} must be a text")
        parts[name] = _COLOUR.sub("", part or "")
    if not any(parts.values()):
        raise Malformed("error has neither name, value nor traceback")
    return Failure(**parts)


def time_of(value: Json) -> float | None:
    """A time in seconds since 1970, of a number of seconds to nanoseconds or a text of ISO 8601; None: it is none.

    A text without a time zone is in UTC.
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            result = datetime.datetime.fromisoformat(value.strip())
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
        else:
            result = result if result.tzinfo else result.replace(tzinfo=datetime.UTC)
            return result.timestamp()
    if not isinstance(value, (int, float)) or not 0 <= value <= 1e9 * _SPAN[1]:
        return None
    for unit in (1.0, 1e3, 1e6, 1e9):
        if _SPAN[0] <= value / unit <= _SPAN[1]:
            return value / unit
    return None
