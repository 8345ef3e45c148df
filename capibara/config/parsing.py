"""Parses Gin files, flags and records into bindings."""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import pathlib
import re
import tokenize
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import gin
from capibara.config import record as gin_record
from capibara.config import search as gin_search
from capibara.config import t5x_macros
from capibara.config.bound import value_of
from capibara.config.literals import Literals, quoted
from capibara.config.moved import selector_now
from capibara.config.registry import MACRO, MODULE, bound_at, macro_name, recorded_at, registered, reset
from capibara.config.search import defining_modules, find_file, search_folders
from capibara.core import fields, user_modules
from capibara.core.errors import unwrap
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from gin import config as gin_config
from gin import config_parser

T = TypeVar("T")

_BUILTINS = ("gin.macro", "gin.constant", "gin.singleton")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The configuration saved in a run folder, or by the files of a foreign model.

    It is untrusted: no module that it names is imported.

    It may bind parameters of capibara's own configurables, to plain values and to references to such configurables. It
    may also refer to configurables of modules that the user's own Gin files import, or, if it is trusted, of the modules
    that it names itself.

    Attributes:
      text: its content, as `record.of` wrote it.
      where: its path, for errors.
      trusted: the user trusts it (--trust_config): the modules that it names are imported.
    """

    text: str
    where: str
    trusted: bool = False


def parse(
    gin_files: Sequence[str | os.PathLike],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str | os.PathLike] = (),
    recorded: Recorded | None = None,
    *,
    of_readers: Collection[str] = (),
) -> list[pathlib.Path]:
    """Clears all bindings, then parses a recorded configuration, Gin files and bindings, in this order.

    Args:
      gin_files: names or paths, found in `search_folders`, as are the files that they include.
      bindings: "NAME = VALUE" each; a value that is not Gin (runs/x) is read as a string.
      search_paths: additional folders to search.
      recorded: a saved configuration, parsed first.
      of_readers: macros that the caller reads, and that no file needs to use.

    Returns:
      The files that were read, including included ones.

    Raises:
      UserError: a missing file, a syntax error, or an unknown configurable, parameter, macro or module; or a recorded
        configuration that does more than bind values.
    """
    reset()
    user_modules.search(".", *search_paths)
    parsing = _Parsing(search_folders(search_paths))
    if recorded is not None:
        for name in gin_files:  # they import modules to which the record may refer
            parsing.file(name)
        reset()
        parsing = _Parsing(search_folders(search_paths), {*parsing.imported})
        parsing.recorded(recorded)
        recorded_at.update(bound_at.values())
    for name in gin_files:
        parsing.file(name)
    from_files = {scope for scope, selector in gin_config._CONFIG if selector == MACRO}
    for binding in bindings:
        parsing.statements(io.StringIO(quoted(binding)), "command line")
    parsing.check_macros(from_files, of_readers)
    if recorded is not None and not recorded.trusted:
        parsing.check_modules(recorded)
    return parsing.read


def load_modules(gin_files: Sequence[str | os.PathLike], search_paths: Sequence[str | os.PathLike] = ()) -> None:
    """Executes the import statements of Gin files without binding anything, so that user models are registered.

    Raises:
      UserError: as `parse`.
    """
    if not gin_files:
        return
    user_modules.search(".", *search_paths)
    parsing = _Parsing(search_folders(search_paths))
    for name in gin_files:
        parsing.file(name)
    reset()


@dataclasses.dataclass(frozen=True)
class Statement:
    """A parsed statement of a Gin file: a binding (a macro where `parameter` is empty), an import or an include.

    Attributes:
      value: a literal; references and macros in it are Text ("@utils.DatasetConfig()", "%TRAIN_STEPS").
    """

    scope: str = ""
    owner: str = ""
    parameter: str = ""
    value: Any = None
    module: str | None = None
    include: str | None = None


def statements_of(text: str, where: str) -> list[Statement]:
    """Parses the text of a Gin file without importing, including or calling anything.

    Raises:
      UserError: a syntax error; the message names the line.
    """
    lines, result = text.splitlines(), []
    parser = _guard(lambda: config_parser.ConfigParser(text, Literals()), where, lines)
    while item := _guard(parser.parse_statement, where, lines):
        if isinstance(item, config_parser.IncludeStatement):
            result.append(Statement(include=item.filename))
        elif isinstance(item, config_parser.ImportStatement):
            result.append(Statement(module=item.module))
        elif isinstance(item, config_parser.BindingStatement):
            result.append(Statement(item.scope or "", item.selector, item.arg_name or "", item.value))
    return result


class _References(gin_config.ParserDelegate):
    """Gin's own references, with a better error for unknown names."""

    def __init__(self, lookup: Callable[[str, str], gin_config.Configurable]):
        super().__init__()
        self._lookup = lookup

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        scope, slash, selector = scoped_configurable_name.rpartition("/")
        result = self._lookup(selector, f"@{scoped_configurable_name}")
        return super().configurable_reference(f"{scope}{slash}{_known(selector, result)}", evaluate)


def _known(selector: str, target: gin_config.Configurable) -> str:
    """The selector of a configurable by which Gin knows it: as it is written, or complete if it names an old module."""
    return selector if gin_config._parse_context().get_configurable(selector) is not None else target.selector


def _lookup(selector: str, shown: str) -> gin_config.Configurable:
    try:
        result = gin_config._parse_context().get_configurable(selector)
        if result is None and (module := defining_modules().get(selector.rpartition(".")[2])):
            # A saved configuration names classes that the verb has not imported, such as a run's trackers in `infer`.
            importlib.import_module(module)
            result = gin_config._parse_context().get_configurable(selector)
    except KeyError:
        matches = sorted(gin_config._REGISTRY.matching_selectors(selector))
        raise UserError(f"{shown} may be any of {', '.join(matches)}: write the full name") from None
    except (NameError, AttributeError) as error:  # with `from __gin__ import dynamic_registration`
        raise UserError(f"{shown}: {error}") from None
    if result is None and (now := selector_now(selector)) != selector:
        return _lookup(now, shown)
    if result is None:
        if (where := user_modules.defined_in(selector)) is not None:
            raise UserError(f"{shown} is in {where}: mark it with @capibara.config.configurable")
        known = {name for name, _ in gin_config._REGISTRY.items() if name not in _BUILTINS}
        names = {name.rpartition(".")[2] for name in known} | {*defining_modules()}
        choices = known if "." in selector else names
        hint = t5x_macros.of_t5x(selector) or did_you_mean(selector, choices)
        raise UserError(f"no configurable named {shown}{hint}")
    return result


class _Parsing:
    """The state of one call of `parse`.

    Attributes:
      read: all files that were read.
      imported: the modules that they import.
    """

    def __init__(self, folders: list[pathlib.Path], known: Iterable[str] = ()):
        self._folders, self._known = folders, {*known}
        self._in_record = False
        self.read: list[pathlib.Path] = []
        self.imported: list[str] = []
        self._open: list[pathlib.Path] = []  # the chain of includes, outermost first

    def recorded(self, record: Recorded) -> None:
        """Parses a recorded configuration."""
        gin_record.check_size(record.text, record.where)
        named = gin_record.modules_named(record.text)
        for module in named if record.trusted else ():
            try:
                user_modules.load(module)
            except ModuleNotFoundError as error:
                raise UserError(
                    f"{record.where} names the module {module}, and there is no {error.name}: put its folder on PYTHONPATH"
                ) from None
        self._known |= {*named} if record.trusted else set()
        self._in_record = True
        try:
            self.statements(io.StringIO(record.text), record.where)
        except UserError as error:
            missing = [module for module in named if module not in self._known]
            if missing and "no configurable named" in str(error):
                raise UserError(f"{error}; {gin_record.way_in(missing)}") from None
            raise
        finally:
            self._in_record = False
        gin_record.check_growth(record.where)

    def check_modules(self, record: Recorded) -> None:
        """Raises UserError if only the record names a foreign module that a field would import."""
        for scope, selector in [*gin_config._CONFIG]:
            wrapped = gin_config._REGISTRY[selector].wrapped if selector in gin_config._REGISTRY else None
            if not isinstance(wrapped, type) or not dataclasses.is_dataclass(wrapped):
                continue
            for field in dataclasses.fields(wrapped):
                module, where = value_of(scope, selector, field.name)
                recorded = field.metadata == MODULE and where.startswith(f"{record.where}:")
                if recorded and isinstance(module, str) and not self._is_known(module):
                    raise UserError(
                        f"{where}: {wrapped.__name__}.{field.name} names the module {module}, which is not imported for "
                        f"a recorded configuration: pass --gin.{wrapped.__name__}.{field.name}={module}, or "
                        "--trust_config if you trust this folder"
                    )

    def _lookup(self, selector: str, shown: str) -> gin_config.Configurable:
        result = _lookup(selector, shown)
        if self._in_record and not self._is_data(result):
            raise UserError(
                f"{shown} is refused: a recorded configuration may only bind what a run of capibara records, and "
                f"{result.selector} is not part of that"
            )
        return result

    def _is_data(self, target: gin_config.Configurable) -> bool:
        """Whether a recorded configuration may refer to a configurable."""
        module = target.wrapped.__module__
        is_of_training = not f"{module}.".startswith(gin_record.NEVER) or f"{module}.".startswith(gin_record.BUT)
        return (
            target.selector in registered
            and is_of_training
            or module.partition(".")[0] != "capibara"
            and self._is_known(module)
        )

    def _is_known(self, module: str) -> bool:
        """Whether a module belongs to capibara, is imported by the user's own Gin files, or is trusted."""
        return any(f"{module}.".startswith(f"{known}.") for known in ("capibara", *self._known, *self.imported))

    def file(self, name: str | os.PathLike, where: str = "") -> None:
        folders = [self._open[-1].parent] if self._open else []
        path = find_file(name, [self._folders[0], *folders, *self._folders[1:]], where)
        if path.resolve() in [other.resolve() for other in self._open]:
            chain = " -> ".join(str(other) for other in [*self._open, path])
            raise UserError(f"{where}: files include each other: {chain}")
        self._open.append(path)
        self.read.append(path)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not a text file in UTF-8") from None
        pieces = [text]
        if path.suffix in gin_search.STRUCTURED:
            from capibara.config import structured  # a YAML parser is a tenth of the time of `train --help`

            pieces = ["\n" * (line - 1) + statement + "\n" for line, statement in structured.statements(path, text)]
        try:
            for piece in pieces:
                self.statements(io.StringIO(piece), str(path))
        except UserError as error:
            missing = [module for module in gin_record.modules_named(text) if not self._is_known(module)]
            if missing and "no configurable named" in str(error):
                raise UserError(f"{error}; {gin_record.imports_before(missing)}") from None
            raise
        self._open.pop()

    def statements(self, source: io.StringIO, name: str) -> None:
        """Executes all statements of `source`; `name` is the file's name for errors."""
        lines = source.getvalue().splitlines()
        with gin_config._parse_scope() as context:
            parser = _guard(lambda: config_parser.ConfigParser(source, _References(self._lookup)), name, lines)
            while statement := _guard(parser.parse_statement, name, lines):
                line = statement.location.line_num
                where = f"{name}:{line}" if name != "command line" else f"{name}: {' '.join(lines)}"
                self._carry_out(statement, where, context)
            gin_config._IMPORTS.update(context.imports)

    def _carry_out(self, statement: Any, where: str, context: gin_config.ParseContext) -> None:
        if isinstance(statement, config_parser.IncludeStatement):
            if self._in_record:
                raise UserError(f"{where}: {gin_record.refused(f'include {statement.filename!r}')}")
            self.file(statement.filename, where)
        elif isinstance(statement, config_parser.ImportStatement):
            if self._in_record:
                raise UserError(f"{where}: {gin_record.refused(statement.format())}")
            self.imported.append(statement.module)
            gin_search.import_module(statement.module, lambda: context.process_import(statement), where)
        elif isinstance(statement, config_parser.BlockDeclaration):
            _located(where, self._lookup, statement.selector, statement.selector)
        elif not statement.arg_name:
            name = f"{statement.scope}/{statement.selector}" if statement.scope else statement.selector
            bind(name, MACRO, "value", statement.value, where)
        else:
            result = _located(where, self._lookup, statement.selector, statement.selector)
            known = gin_search.parameters_of(result.wrapped)
            if known is not None and statement.arg_name not in known:
                hint = gin_search.other_owner(result.wrapped, statement.arg_name, known)
                raise UserError(f"{where}: {result.name} has no parameter {statement.arg_name}{hint}")
            written = _known(statement.selector, result)
            bind(statement.scope, result.selector, statement.arg_name, statement.value, where, written)

    def check_macros(self, from_files: set[str], of_readers: Collection[str]) -> None:
        """Checks that each macro in use is defined, and each macro of the command line is used or defined in a file."""
        defined = {scope for scope, selector in gin_config._CONFIG if selector == MACRO}
        used = set()
        for (scope, selector), parameters in gin_config._CONFIG.items():
            for parameter, value in parameters.items():
                for reference in gin_config.iterate_references([value]):
                    macro = macro_name(reference)
                    if macro is None:
                        continue
                    used.add(macro)
                    if macro not in defined:
                        where = bound_at.get((scope, selector, parameter), "")
                        close = fields.nearest(macro, defined)
                        hint = f"did you mean {close[0]}?" if close else f"give it with --gin.{macro}=VALUE"
                        raise UserError(f"{where}: %{macro} has no value: {hint}")
        # T5X binds some of them, too, to objects.
        used |= {name for name in of_readers if isinstance(value_of(name, MACRO, "value")[0], str)}
        taken = (defined - used) & t5x_macros.NAMES
        for macro in sorted(taken):
            value, where = value_of(macro, MACRO, "value")
            if macro == "MODEL" and isinstance(value, str):
                raise UserError(
                    f"{where}: MODEL = {value!r} names a model, which train, finetune, plan and prove read: include its sizes"
                )
            self._take(macro)
        for macro in sorted(defined - from_files - used - taken):
            choices = {*from_files, *used}
            raise UserError(f"--gin.{macro}: no Gin file uses {macro}{did_you_mean(macro, choices, 'macros')}")

    def _take(self, macro: str) -> None:
        """Binds the field that a macro of T5X stands for, unless a file uses the macro."""
        value, where = value_of(macro, MACRO, "value")
        model, _ = value_of("", "capibara.training.trainer.Trainer", "model")
        name = model.configurable.name if isinstance(model, gin_config.ConfigurableReference) else None
        follows = {key: macro_name(gin_config._CONFIG.get(key[:2], {}).get(key[2])) for key in bound_at}
        bound = t5x_macros.last_bindings(bound_at, follows)
        for statement in _located(where, t5x_macros.statements, macro, value, name, bound):
            self.statements(io.StringIO(statement), f"{where}, {macro}")


def bind(scope: str, selector: str, parameter: str, value: object, where: str, written: str = "") -> None:
    """Binds a parameter, as a statement of a Gin file does; `where` is the file and line for errors."""
    # `written` is the selector as written in the file: with dynamic registration Gin knows only that one.
    _located(where, gin.bind_parameter, (scope, written or selector, parameter), value)
    bound_at.pop((scope, selector, parameter), None)  # keeps the order of the last bindings
    bound_at[scope, selector, parameter] = where


def _located(where: str, call: Callable[..., T], *args: Any) -> T:
    try:
        return call(*args)
    except ValueError as error:  # a UserError, or Gin's about lists of allowed parameters
        raise UserError(f"{where}: {str(unwrap(error)).splitlines()[0]}") from None


def _guard(parse_next: Callable[[], T], name: str, lines: list[str]) -> T:
    """Calls the parser and turns its errors into a UserError of one line with file and line number."""
    try:
        return parse_next()
    except (SyntaxError, tokenize.TokenError) as error:
        gin_search.raise_syntax_error(error, name, lines)
    except (RecursionError, MemoryError):
        raise UserError(f"{name}: a value is nested too deep to be read: write it flatter") from None
    except ValueError as error:
        match = re.search(r"line (\d+)\n", str(error).removeprefix(str(unwrap(error))))
        where = f"{name}:{match[1]}" if match and name != "command line" else name
        raise UserError(f"{where}: {str(unwrap(error)).splitlines()[0]}") from None
