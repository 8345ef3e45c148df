"""The process in which chat templates run: foreign programs, with bounds on memory and time that nothing in them can lift.

`template_process` starts this file as a script, in an interpreter that sees the standard library and Jinja alone; it
answers one request after another on the socket that is its standard input. A request is JSON, an answer a letter and
JSON; each comes after its length in 8 bytes.

Jinja's sandbox keeps a template from Python's internals, but not from `10**10**9` or from text that doubles in a loop.
Here the kernel does: the address space has a limit, and a timer that counts processor time ends the process, within a
single instruction of the template as well.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

LENGTH_BYTES = 8
DONE, FAILS = b"D", b"F"  # what was asked for follows, or an error
# Unicode noncharacters, around a {% generation %} block.
BEGIN, END = "\ufdd1", "\ufdd2"
_SHOWN = "<template>"  # the file name that Jinja gives to a template's code
_LONGEST_MESSAGE = 2000
_OPEN_FILES = 16


def main(memory_bytes: int) -> None:
    """Answers requests until the socket is closed.

    Args:
      memory_bytes: of address space beyond what the interpreter has now.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that asks
    # The process that starts this one may ignore or block it (libtpu has it ignored), and that is inherited.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _warm_up()
    _limit(memory_bytes)
    connection, templates = socket.socket(fileno=0), Templates()
    while (request := _receive(connection)) is not None:
        # SIGPROF ends the process. While it waits for a request the timer stands still.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        answer, whole = _answer(templates, request)
        connection.sendall(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        if not whole:
            return


def _warm_up() -> None:
    """Loads what Jinja loads late, while files may be opened and there is no limit."""
    Templates().add("", "{{ [{'a': 1}] | tojson }}{% for i in [1] %}{{ loop.index }}{% endfor %}", "2024-07-26")


def _limit(memory_bytes: int) -> None:
    if sys.platform == "linux":  # others do not hold a process to it
        with open("/proc/self/statm", "rb") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    for no in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(no, (0, 0))


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """A request; None: nobody asks any more. The next one does not come before this has its answer."""
    got, size = bytearray(), None
    while size is None or len(got) < size:
        part = connection.recv(1 << 16)
        if not part:
            return None
        got += part
        if size is None and len(got) >= LENGTH_BYTES:
            size = LENGTH_BYTES + int.from_bytes(got[:LENGTH_BYTES], "big")
    return json.loads(got[LENGTH_BYTES:])


def _answer(templates: Templates, request: Mapping[str, Any]) -> tuple[bytes, bool]:
    """The answer, and whether the process may answer more."""
    try:
        if "source" in request:
            return DONE + _json(templates.add(**request["source"])), True
        shared, longest = request["shared"], request["longest"]
        return DONE + _json(
            [_render(templates, request["key"], shared | variables, longest) for variables in request["each"]]
        ), True
    except (MemoryError, RecursionError) as error:
        kind = "memory" if isinstance(error, MemoryError) else "depth"
        return FAILS + _json(_explained(kind, "", error)), False
    except Exception as error:  # whatever a foreign program does is its own mistake
        import jinja2

        kind = "syntax" if isinstance(error, jinja2.TemplateSyntaxError) else "error"
        return FAILS + _json(_explained(kind, str(error), error)), True


def _render(templates: Templates, key: str, variables: Mapping[str, Any], longest: int) -> str | dict[str, Any]:
    """The text, or an error."""
    try:
        text = templates.render(key, variables)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        return _explained("error", str(error), error)
    if len(text) > longest:
        return _explained("error", f"it writes {len(text)} characters, more than {longest}")
    return text


def _explained(kind: str, message: str, error: BaseException | None = None) -> dict[str, Any]:
    line = None if error is None else _line_of(error)
    return {"kind": kind, "message": message[:_LONGEST_MESSAGE] or type(error).__name__, "line": line}


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


class Templates:
    """Templates that were compiled, by their keys."""

    def __init__(self) -> None:
        self._environments: dict[str, Any] = {}
        self._compiled: dict[str, Any] = {}

    def add(self, key: str, text: str, date: str) -> list[str]:
        """Compiles a template; returns the names of the variables that it asks for."""
        import jinja2.meta

        if date not in self._environments:
            self._environments[date] = _environment(date)
        environment = self._environments[date]
        names = jinja2.meta.find_undeclared_variables(environment.parse(text))
        self._compiled[key] = environment.from_string(text)
        return sorted(names)

    def render(self, key: str, variables: Mapping[str, object]) -> str:
        """The text of the template with this key."""
        return self._compiled[key].render(variables)


def _environment(date: str) -> Any:
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_blocks(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    day = datetime.date.fromisoformat(date)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": day.strftime}
    return environment


def _generation_blocks() -> type:
    """The extension that puts marks around what is in {% generation %} ... {% endgeneration %}."""
    from jinja2 import ext, nodes

    class GenerationBlocks(ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
            return [begin, *body, end]

    return GenerationBlocks


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own would write < and > as escapes, for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _line_of(error: BaseException) -> int | None:
    """The line of the template that raised."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _SHOWN:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


if __name__ == "__main__":
    sys.path += sys.argv[2:]
    main(int(sys.argv[1]))
