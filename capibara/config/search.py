"""Finds Gin files and the modules that define configurables, and words errors; needs no gin library."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pathlib
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from capibara.core import fields, user_modules
from capibara.core.types import UserError
from capibara.storage import stores

STRUCTURED = (".yaml", ".yml", ".json", ".toml")
ENDINGS = (".gin", *STRUCTURED)  # of files that are parsed
_MOST_HINTS = 3
_SHOWN = 400  # characters of a line that an error shows


def search_folders(search_paths: Sequence[str | os.PathLike] = ()) -> list[pathlib.Path]:
    """The folders in which Gin files are searched, in order: the working directory, `search_paths`, capibara's gin/."""
    package = pathlib.Path(__file__).resolve().parent.parent
    # The wheel has gin/ inside the package: beside an installed package, gin/ is the gin library.
    folder = package / "gin_files" if (package / "gin_files").is_dir() else package.parent / "gin"
    return [pathlib.Path(), *(pathlib.Path(path).expanduser() for path in search_paths), folder]


def find_file(name: str | os.PathLike, folders: Sequence[pathlib.Path], where: str = "") -> pathlib.Path:
    """The path of the Gin file `name` (which may be absolute or contain folders) in the first folder that has it.

    A file in a bucket (gs://) is copied to this machine first, with the other Gin files of its folder.

    Raises:
      UserError: no folder has it; the message lists the folders and the most similar names.
    """
    if not stores.of(name).has_local_paths:
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
        str(result.relative_to(folder))
        for folder in folders
        for result in _gin_files(folder, folder == folders[-1] and not path.is_absolute())
    }
    names: dict[str, list[str]] = {}
    for choice in sorted(choices):
        names.setdefault(pathlib.Path(choice).name, []).append(choice)
    # For a name with folders: either it is misspelt, or the file is in another folder.
    close = fields.nearest(str(path), choices) if path.name != str(path) else []
    close = [*close, *(choice for name in fields.nearest(path.name, names) for choice in names[name])]
    hint = f", did you mean {' or '.join(list(dict.fromkeys(close))[:_MOST_HINTS])}?" if close else ""
    raise UserError(f"{prefix}no Gin file {name} in {looked}{hint}")


def _copied(url: str) -> pathlib.Path:
    """Copies a Gin file from a bucket, with the other Gin files of its folder, which it may include."""
    from capibara.storage import copies, remote

    folder = remote.address(url).rpartition("/")[0]
    result = remote.listed(f"{folder}/*.gin")
    names = [entry.url for entry in result]
    if remote.address(url) not in names:
        close = fields.nearest(remote.address(url), names)
        raise UserError(f"no Gin file {url}{f', did you mean {close[0]}?' if close else ''}")
    return pathlib.Path(copies.local_files(result)[names.index(remote.address(url))])


def _gin_files(folder: pathlib.Path, deep: bool) -> Iterable[pathlib.Path]:
    try:
        return list(folder.glob("**/*.gin" if deep else "*.gin"))
    except OSError:  # hints are not worth an error
        return []


@functools.cache
def defining_modules() -> dict[str, str]:
    """Name -> module of all @configurable classes and functions of capibara, found in the source without imports."""
    marked = re.compile(r"^@(?:config\.)?configurable\n(?:@.*\n)*(?:class|def) (\w+)", re.MULTILINE)
    package = pathlib.Path(__file__).resolve().parent.parent
    modules = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        modules.update(dict.fromkeys(marked.findall(path.read_text(encoding="utf-8")), module))
    return modules


def other_run(missing: str, bound: Iterable[str]) -> str:
    """A hint for an error about a model class without values; may be empty.

    If another model class has values, it suggests one of capibara's run files that builds that class.

    Args:
      missing: the class without values.
      bound: classes with values.
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
    """Refuses flags that bind a value without effect.

    Args:
      unread: bindings that no object has used: class, name ("Rope.scaling"), and file and line.
      built: classes of the objects that were built.
      known: all configurable classes.

    Returns:
      A line on each unused binding in the user's files. Those in capibara's own files are only for some runs.

    Raises:
      UserError: an unused binding is on the command line; the message says what would use it.
    """
    prefix, lines = f"{search_folders()[-1]}{os.sep}", []
    for cls, name, where in unread:
        if not cls.__module__.startswith("capibara.") or where.startswith(prefix):
            continue  # the user's own classes may be built later
        line = f"{name} is bound but nothing uses it{way_in(cls, built, known)}"
        if where.startswith("command line"):
            raise UserError(line)
        lines.append(f"{where}: {line}")
    return lines


def place_of_user(places: Sequence[str]) -> str | None:
    """The first place of bindings that is not in capibara's own Gin files; "": there is none at all, None: all are there."""
    shipped = search_folders()[-1].resolve()
    is_own = lambda place: shipped in pathlib.Path(place).resolve().parents and not place.startswith("command line")  # noqa: E731
    theirs = [place for place in places if not is_own(place)]
    return theirs[0] if theirs else None if places else ""


def shown_place(place: str) -> str:
    """A place for people: files of capibara by their names in gin/, others from the working directory, flags without their text."""
    if place.startswith("command line"):
        return "command line"
    path = pathlib.Path(place)
    for folder in (search_folders()[-1], pathlib.Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return place


def other_owner(cls: object, name: str, known: Iterable[str]) -> str:
    """The end of an error about a parameter that a class does not have: its own near ones, or a part of it that has it.

    Args:
      cls: the class, whose fields may hold objects with parameters of their own.
      name: what the user wrote.
      known: the parameters of the class.
    """
    if not fields.nearest(name, known):
        for part in _parts(cls):
            if name in {field.name for field in dataclasses.fields(part)}:
                return f": did you mean {part.__name__}.{name}?"
    return fields.did_you_mean(name, known, "its parameters")


def _parts(cls: object) -> Iterable[Any]:
    """The configurable classes of the objects that a dataclass, or a part of it, holds, nearest first."""
    waiting, seen = [cls], {cls}
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, type) or not dataclasses.is_dataclass(part):
            continue
        for annotation in fields.annotations_of(part).values():
            choices = (annotation, *typing.get_args(annotation))
            classes: list[Any] = [choice for choice in choices if isinstance(choice, type)]
            below: list[Any] = [sub for entry in classes for sub in type.__subclasses__(entry)]
            for item in [*classes, *below]:
                if dataclasses.is_dataclass(item) and item not in seen:
                    seen.add(item)
                    waiting.append(item)
                    yield item


def way_in(cls: Any, built: Sequence[Any], known: Sequence[Any]) -> str:
    """A hint for an unused class: ": add '--gin.DecoderConfig.rope=@Rope()'"; may be empty.

    Args:
      cls: the class.
      built: classes of the objects that were built.
      known: all configurable classes.
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


def _fields_for(part: object, known: Sequence[Any]) -> Iterable[tuple[Any, str]]:
    """The (class, field) pairs whose field accepts an object of the class `part`."""
    for owner in known:
        if isinstance(owner, type) and dataclasses.is_dataclass(owner):
            for name, annotation in fields.annotations_of(owner).items():
                choices = typing.get_args(annotation) or (annotation,)
                bases = part.__mro__[:-1] if isinstance(part, type) else (part,)
                if typing.get_origin(annotation) is not tuple and any(base in choices for base in bases):
                    yield owner, name


def parameters_of(wrapped: Callable[..., Any]) -> list[str] | None:
    """The parameters that may be bound; None: any (**kwargs)."""
    parameters = inspect.signature(wrapped).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


class Text(str):
    """A reference in a parsed value; prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def without_macros(value: object, macros: Mapping[str, Any]) -> Any:
    """Replaces each `Text("%NAME")` in a parsed value by the macro's value."""
    if isinstance(value, Text) and value.startswith("%") and value[1:] in macros:
        remaining = {name: other for name, other in macros.items() if name != value[1:]}
        return without_macros(macros[value[1:]], remaining)
    if isinstance(value, dict):
        return {without_macros(key, macros): without_macros(item, macros) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_macros(item, macros) for item in value)
    return value


def raise_syntax_error(error: Exception, name: str, lines: list[str]) -> NoReturn:
    """Raises a parser's error as a UserError of one line that quotes the line of the file."""
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


def import_module(name: str, execute: Callable[[], object], where: str) -> None:
    """Imports a module that a Gin file names.

    Args:
      name: of the module.
      execute: imports it.
      where: file and line of the statement, for errors.

    Raises:
      UserError: it is missing, or raises an error.
    """
    user_modules.add_folders()
    is_loaded = name.partition(".")[0] in sys.modules
    try:
        execute()
        user_modules.note(name, is_loaded=is_loaded)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{where}: importing {name} needs the module {error.name}, which is not installed"
            ) from None
        parent, _, _ = error.name.rpartition(".")
        path = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else None
        prefix = f"{parent}." if parent else ""
        choices = [prefix + module.name for module in pkgutil.iter_modules(path)]
        close = fields.nearest(error.name, choices)
        hint = f": did you mean {' or '.join(close)}?" if close else " (is its folder on PYTHONPATH?)"
        if f"{name}.".startswith("t5x."):
            hint = ": translate a file of T5X first, with capibara convert-config"
        raise UserError(f"{where}: no module named {error.name}{hint}") from None
    except (SyntaxError, ImportError) as error:
        if isinstance(error, SyntaxError) and not name.startswith("__gin__."):
            raise UserError(f"{where}: {user_modules.failed_import(error, name)}") from error
        raise UserError(f"{where}: {error.msg}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may end with sys.exit
        raise UserError(f"{where}: {user_modules.failed_import(error, name)}") from error
