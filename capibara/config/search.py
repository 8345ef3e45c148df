"""What `config` does without the Gin library: finds Gin files and the modules that define their names, words mistakes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from capibara.core import fields
from capibara.core.types import UserError
from capibara.storage import outputs

_MOST_HINTS = 3
_SHOWN = 400  # characters of a line that an error shows


def search_folders(search_paths: Sequence[str | os.PathLike] = ()) -> list[pathlib.Path]:
    """The folders in which Gin files are looked for, in order: here, `search_paths`, capibara's own."""
    package = pathlib.Path(__file__).resolve().parent.parent
    # The wheel carries gin/ inside the package; beside an installed package stands the gin library instead.
    own = package / "gin_files" if (package / "gin_files").is_dir() else package.parent / "gin"
    return [pathlib.Path(), *(pathlib.Path(path).expanduser() for path in search_paths), own]


def find_file(name: str | os.PathLike, folders: Sequence[pathlib.Path], where: str = "") -> pathlib.Path:
    """The first of `folders` that holds Gin file `name` (which may be absolute or contain folders).

    Of one in a bucket (gs://) it is a copy on this machine, beside copies of the Gin files beside it.

    Raises:
      UserError: none does; the message lists the folders and the nearest names in them.
    """
    if outputs.is_remote(name):
        return _copied(os.fspath(name))
    path = pathlib.Path(name).expanduser()
    for folder in folders:
        if (folder / path).is_file():
            return folder / path
    prefix = f"{where}: " if where else ""
    if any((folder / path).is_dir() for folder in folders):
        raise UserError(f"{prefix}{name} is a folder: name a Gin file in it")
    if path.is_absolute():
        folders = [path.parent]
    looked = ", ".join(dict.fromkeys(str(folder.resolve()) for folder in folders))
    choices = {
        str(found.relative_to(folder))
        for folder in folders
        for found in _gin_files(folder, folder == folders[-1] and not path.is_absolute())
    }
    names: dict[str, list[str]] = {}
    for choice in sorted(choices):
        names.setdefault(pathlib.Path(choice).name, []).append(choice)
    # A name with folders is a slip in the whole of it, or the file lies elsewhere.
    close = fields.nearest(str(path), choices) if path.name != str(path) else []
    close = [*close, *(choice for name in fields.nearest(path.name, names) for choice in names[name])]
    hint = f", did you mean {' or '.join(list(dict.fromkeys(close))[:_MOST_HINTS])}?" if close else ""
    raise UserError(f"{prefix}no Gin file {name} in {looked}{hint}")


def _copied(url: str) -> pathlib.Path:
    """A copy of a Gin file in a bucket, with those beside it, which it may include."""
    from capibara.storage import copies, remote

    folder = remote.address(url).rpartition("/")[0]
    found = remote.listed(f"{folder}/*.gin")
    names = [entry.url for entry in found]
    if remote.address(url) not in names:
        close = fields.nearest(remote.address(url), names)
        raise UserError(f"no Gin file {url}{f', did you mean {close[0]}?' if close else ''}")
    return pathlib.Path(copies.local_files(found)[names.index(remote.address(url))])


def _gin_files(folder: pathlib.Path, deep: bool) -> Iterable[pathlib.Path]:
    try:
        return list(folder.glob("**/*.gin" if deep else "*.gin"))
    except OSError:  # hints are not worth an error
        return []


@functools.cache
def defining_modules() -> dict[str, str]:
    """Name -> module of everything that capibara marks @configurable, read from the source without importing it."""
    marked = re.compile(r"^@(?:config\.)?configurable\n(?:@.*\n)*(?:class|def) (\w+)", re.MULTILINE)
    package = pathlib.Path(__file__).resolve().parent.parent
    modules = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        modules.update(dict.fromkeys(marked.findall(path.read_text(encoding="utf-8")), module))
    return modules


def other_run(missing: str, bound: Iterable[str]) -> str:
    """The end of an error about a model of the class `missing` where one of `bound` was given; may be empty.

    The first of capibara's own runs that builds that one in place of the missing is the way out.
    """
    paths = sorted((search_folders()[-1] / "runs").glob("*.gin"))
    model = re.compile(r"^Trainer\.model = @(\w+)\(\)", re.MULTILINE)
    built = {path.name: model.findall(path.read_text(encoding="utf-8")) for path in paths}
    for name, classes in built.items():
        for other in classes if [missing] in built.values() else ():
            if other in bound and other != missing:
                return f"but {other} has one: use --gin_file=runs/{name}, which builds @{other}()"
    return ""


def check_used(unread: Iterable[tuple[Any, str, str]], built: Sequence[Any], known: Sequence[Any]) -> list[str]:
    """Refuses bindings of the command line that have no effect.

    Args:
      unread: bindings that nothing has read: class, name ("Rope.scaling"), and where they stand.
      built: classes of the objects that there are.
      known: all classes that could be.

    Returns:
      A line on each that stands in a file of the user's. Those of capibara's own are for some runs and not for others.

    Raises:
      UserError: one stands on the command line; says what would give it an effect.
    """
    own, lines = f"{search_folders()[-1]}{os.sep}", []
    for cls, name, where in unread:
        if not cls.__module__.startswith("capibara.") or where.startswith(own):
            continue  # what is the user's may be built at any time
        line = f"{name} is bound but nothing uses it{way_in(cls, built, known)}"
        if where.startswith("command line"):
            raise UserError(line)
        lines.append(f"{where}: {line}")
    return lines


def way_in(cls: Any, built: Sequence[Any], known: Sequence[Any]) -> str:
    """The end of a message about a class that nothing uses: ": add '--gin.DecoderConfig.rope=@Rope()'"; may be empty.

    Args:
      cls: the class.
      built: classes of the objects that there are.
      known: all classes that could be.
    """
    paths, seen = [(cls, "")], {cls}
    while paths and cls not in built:
        part, bindings = paths.pop(0)
        for owner, field in _fields_for(part, known):
            path = f" '--gin.{owner.__name__}.{field}=@{part.__name__}()'{bindings}"
            if owner in built:
                return f": add{path}"
            if owner not in seen:
                seen.add(owner)
                paths.append((owner, path))
    return ""


def _fields_for(part: Any, known: Sequence[Any]) -> Iterable[tuple[Any, str]]:
    """The classes with a field that takes an object of the class `part`, or None, each with that field's name."""
    for owner in known:
        if isinstance(owner, type) and dataclasses.is_dataclass(owner):
            for name, annotation in fields.annotations_of(owner).items():
                choices = typing.get_args(annotation) or (annotation,)
                bases = part.__mro__[:-1] if isinstance(part, type) else (part,)
                if typing.get_origin(annotation) is not tuple and any(base in choices for base in bases):
                    yield owner, name


def parameters_of(wrapped: Callable[..., Any]) -> list[str] | None:
    """The names that may be bound, None where any may (**kwargs)."""
    parameters = inspect.signature(wrapped).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


class Text(str):
    """A reference in a parsed value; prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def without_macros(value: Any, macros: Mapping[str, Any]) -> Any:
    """A parsed value with the macros' values in place of `Text("%NAME")`, by their names."""
    if isinstance(value, Text) and value.startswith("%") and value[1:] in macros:
        remaining = {name: other for name, other in macros.items() if name != value[1:]}
        return without_macros(macros[value[1:]], remaining)
    if isinstance(value, dict):
        return {without_macros(key, macros): without_macros(item, macros) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_macros(item, macros) for item in value)
    return value


def raise_syntax_error(error: Exception, name: str, lines: list[str]) -> NoReturn:
    """Raises a parser's error as a UserError of one line, with the text of the line that has it."""
    if isinstance(error, SyntaxError):
        reason, number = error.msg or "syntax error", error.lineno or 1
    else:
        reason, (number, _) = error.args
    number = max(1, min(number, len(lines) or 1))
    text = _short(lines[number - 1].strip() if lines else "")
    literal = re.search(r"Failed to parse token '(.*)'", reason)
    if literal:
        shown = _short(literal[1])
        reason = f'{shown} is not a value; if it is a string, quote it: "{shown}"'
    where = f"{name}:{number}" if name != "command line" else name
    raise UserError(f"{where}: {_short(reason.splitlines()[0].strip().rstrip('.'))} in: {text}") from None


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
