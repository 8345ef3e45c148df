"""Parses Gin files, builds the configured objects, and saves and compares configurations.

Only this package imports gin.

A Gin file binds the fields of config dataclasses (`Trainer.seed = 1`), builds objects by reference
(`Trainer.optimizer = @Optimizer()`) and names values once with macros (`TRAIN_STEPS = 500`, then `%TRAIN_STEPS`).
Files come first, the command line last, so that `--gin.TRAIN_STEPS=1000` wins over a file.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import io
import os
import pathlib
import re
import tokenize
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import gin

if getattr(gin, "__file__", None) is None:
    raise ImportError("the gin library is missing: `import gin` found a folder named gin; run: pip install gin-config")

from capibara.config import record as gin_record
from capibara.config import search as gin_search
from capibara.config import t5x_macros
from capibara.config.literals import Literals, quoted
from capibara.config.search import defining_modules, find_file, search_folders, without_macros
from capibara.core import fields, user_modules
from capibara.core.exits import unwrap
from capibara.core.fields import did_you_mean
from capibara.core.types import AUTO, UserError
from gin import config as gin_config
from gin import config_parser

__all__ = [
    "Recorded",
    "Statement",
    "build",
    "changes",
    "check_used",
    "configurable",
    "diff",
    "find_file",
    "given_at",
    "imported_modules",
    "load_modules",
    "operative",
    "parse",
    "reset",
    "search_folders",
    "statements_of",
    "unused",
]

T = TypeVar("T")

in_scope = gin.config_scope  # a context in which `build` prefers the bindings of a scope to those without one

MODULE = {"capibara": "module"}  # metadata of a dataclass field whose value is a Python module to import

_MACRO = "gin.macro"
_BUILTINS = ("gin.macro", "gin.constant", "gin.singleton")

# (scope, complete selector, parameter) -> "file.gin:12", where it was bound last.
_bound_at: dict[tuple[str, str, str], str] = {}
_registered: set[str] = set()  # selectors that `configurable` registered, not those of other libraries


def configurable(cls: T) -> T:
    """Decorator that lets Gin files bind the fields of a dataclass, or the parameters of a function.

    Python code can construct the class as before. In both cases the fields of a dataclass are checked against their
    annotations before its own __post_init__ (see capibara.core.fields.check).
    """
    assert isinstance(cls, (type, types.FunctionType))
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        fields.check_on_creation(cls, _check, gin_search.other_owner)
    selector = f"{cls.__module__}.{cls.__name__}"
    _registered.add(selector)
    if selector in gin_config._REGISTRY and gin_config._REGISTRY[selector].wrapped is not cls:
        # The module was imported again (pytest, importlib.reload): the new definition takes the old one's place.
        gin_config._INVERSE_REGISTRY.pop(gin_config._REGISTRY[selector].wrapped, None)
        gin_config._REGISTRY.pop(selector)
    return gin.register(cls)


def _check(instance: Any) -> None:
    cls = type(instance)
    for field in dataclasses.fields(cls):
        if getattr(instance, field.name, None) is gin.REQUIRED:
            raise UserError(_has_no_value(cls.__name__, f"{cls.__module__}.{cls.__name__}", field.name))
    fields.check(instance)


def _has_no_value(name: str, selector: str, parameter: str) -> str:
    """The message for a parameter without a value; suggests the macro that it is bound to, if there is one."""
    for (_, bound), parameters in gin_config._CONFIG.items():
        macro = _macro_name(parameters.get(parameter)) if bound == selector else None
        if macro:
            return f"{name}.{parameter} has no value: set it with --gin.{macro}=VALUE"
    others = [bound.rpartition(".")[2] for (_, bound), names in gin_config._CONFIG.items() if parameter in names]
    if hint := gin_search.other_run(name, others):
        return f"{name}.{parameter} has no value, {hint}"
    return f"{name}.{parameter} has no value: bind it in a Gin file or with --gin.{name}.{parameter}=VALUE"


def _macro_name(value: object) -> str | None:
    if isinstance(value, gin_config.ConfigurableReference) and value.configurable.selector == _MACRO:
        return "/".join(value.scopes)
    return None


def build(cls: Callable[..., T], **overrides: object) -> T:
    """Creates an instance of a configurable from the parsed bindings; `overrides` win over them.

    Raises:
      UserError: a field of it, or of an object that it refers to, has no value or a wrong one.
    """
    try:
        return gin.get_configurable(cls)(**overrides)
    except Exception as error:
        original = unwrap(error)
        if isinstance(original, fields.FieldError):
            raise UserError(f"{original}{_origin(original)}") from None
        if isinstance(original, UserError):
            raise original from None
        if isinstance(original, RecursionError) and (message := _own_part()):
            raise UserError(message) from None
        if isinstance(original, TypeError) and (message := _missing_arguments(original)):
            raise UserError(message) from None
        raise


def _own_part() -> str | None:
    """The message for a class that is bound as a part of itself, if there is one."""
    for (scope, selector), parameters in gin_config._CONFIG.items():
        for parameter, value in parameters.items():
            for reference in gin_config.iterate_references([value]):
                if reference.configurable.selector == selector:
                    where = _bound_at.get((scope, selector, parameter), "")
                    if selector.rpartition(".")[2] == "macro":
                        return (
                            f"{where}: macros lead back to themselves, look at {scope} and {value}: bind another value"
                        )
                    name = f"{selector.rpartition('.')[2]}.{parameter}"
                    return f"{where}: {name} is an object of its own class, {value}, which never ends: bind another"
    return None


def _origin(error: fields.FieldError) -> str:
    for (scope, selector, parameter), where in _bound_at.items():
        if parameter == error.field and selector.rpartition(".")[2] == error.owner:
            value = gin_config._CONFIG.get((scope, selector), {}).get(parameter)
            if macro := _macro_name(value):
                return f" (from {macro}, {_bound_at.get((macro, _MACRO, 'value'), where)})"
            return f" ({where})"
    return ""


def _missing_arguments(error: TypeError) -> str | None:
    """Rewords Python's "missing N required arguments"; None: Gin did not make the call."""
    match = re.match(r"(\S+)\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.*)", str(error))
    called_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if called_in[-1:] == [fields.__file__]:  # which wraps the constructors
        called_in.pop()
    if not match or not called_in or called_in[-1] not in (gin_config.__file__, __file__):
        return None
    name = match[1].removesuffix(".__init__").rpartition(".")[2]
    parameter = re.findall(r"'(\w+)'", match[2])[0]
    selector = (gin_config._REGISTRY.matching_selectors(name) or [name])[0]
    return _has_no_value(name, selector, parameter)


def reset() -> None:
    """Clears all bindings; configurables stay registered."""
    gin.clear_config()
    _bound_at.clear()


# Parsing.


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
) -> list[pathlib.Path]:
    """Clears all bindings, then parses a recorded configuration, Gin files and bindings, in this order.

    Args:
      gin_files: names or paths, found in `search_folders`, as are the files that they include.
      bindings: "NAME = VALUE" each; a value that is not Gin (runs/x) is read as a string.
      search_paths: additional folders to search.
      recorded: a saved configuration, parsed first.

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
    for name in gin_files:
        parsing.file(name)
    from_files = {scope for scope, selector in gin_config._CONFIG if selector == _MACRO}
    for binding in bindings:
        parsing.statements(io.StringIO(quoted(binding)), "command line")
    parsing.check_macros(from_files)
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
    lines, found = text.splitlines(), []
    parser = _guard(lambda: config_parser.ConfigParser(text, Literals()), where, lines)
    while one := _guard(parser.parse_statement, where, lines):
        if isinstance(one, config_parser.IncludeStatement):
            found.append(Statement(include=one.filename))
        elif isinstance(one, config_parser.ImportStatement):
            found.append(Statement(module=one.module))
        elif isinstance(one, config_parser.BindingStatement):
            found.append(Statement(one.scope or "", one.selector, one.arg_name or "", one.value))
    return found


class _References(gin_config.ParserDelegate):
    """Gin's own references, with a better error for unknown names."""

    def __init__(self, lookup: Callable[[str, str], gin_config.Configurable]):
        super().__init__()
        self._lookup = lookup

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        self._lookup(scoped_configurable_name.rpartition("/")[2], f"@{scoped_configurable_name}")
        return super().configurable_reference(scoped_configurable_name, evaluate)


def _lookup(selector: str, shown: str) -> gin_config.Configurable:
    try:
        found = gin_config._parse_context().get_configurable(selector)
        if found is None and (module := defining_modules().get(selector.rpartition(".")[2])):
            # A saved configuration names classes that the verb has not imported, such as a run's trackers in `infer`.
            importlib.import_module(module)
            found = gin_config._parse_context().get_configurable(selector)
    except KeyError:
        matches = sorted(gin_config._REGISTRY.matching_selectors(selector))
        raise UserError(f"{shown} may be any of {', '.join(matches)}: write the full name") from None
    except (NameError, AttributeError) as error:  # with `from __gin__ import dynamic_registration`
        raise UserError(f"{shown}: {error}") from None
    if found is None:
        if (where := user_modules.defined_in(selector)) is not None:
            raise UserError(f"{shown} is in {where}: mark it with @capibara.config.configurable")
        known = {name for name, _ in gin_config._REGISTRY.items() if name not in _BUILTINS}
        names = {name.rpartition(".")[2] for name in known} | {*defining_modules()}
        choices = known if "." in selector else names
        raise UserError(f"no configurable named {shown}{did_you_mean(selector, choices)}")
    return found


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
                module, where = _value_of(scope, selector, field.name)
                recorded = field.metadata == MODULE and where.startswith(f"{record.where}:")
                if recorded and isinstance(module, str) and not self._is_known(module):
                    raise UserError(
                        f"{where}: {wrapped.__name__}.{field.name} names the module {module}, which is not imported for "
                        f"a recorded configuration: pass --gin.{wrapped.__name__}.{field.name}={module}, or "
                        "--trust_config if you trust this folder"
                    )

    def _lookup(self, selector: str, shown: str) -> gin_config.Configurable:
        found = _lookup(selector, shown)
        if self._in_record and not self._is_data(found):
            raise UserError(
                f"{shown} is refused: a recorded configuration may only bind what a run of capibara records, and "
                f"{found.selector} is not part of that"
            )
        return found

    def _is_data(self, found: gin_config.Configurable) -> bool:
        """Whether a recorded configuration may refer to a configurable."""
        module = found.wrapped.__module__
        own = found.selector in _registered and not f"{module}.".startswith(gin_record.NEVER)
        return own or module.partition(".")[0] != "capibara" and self._is_known(module)

    def _is_known(self, module: str) -> bool:
        """Whether a module belongs to capibara, is imported by the user's own Gin files, or is trusted."""
        return any(f"{module}.".startswith(f"{known}.") for known in ("capibara", *self._known, *self.imported))

    def file(self, name: str | os.PathLike, where: str = "") -> None:
        beside = [self._open[-1].parent] if self._open else []
        path = find_file(name, [self._folders[0], *beside, *self._folders[1:]], where)
        if path.resolve() in [other.resolve() for other in self._open]:
            chain = " -> ".join(str(other) for other in [*self._open, path])
            raise UserError(f"{where}: files include each other: {chain}")
        self._open.append(path)
        self.read.append(path)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not a text file in UTF-8") from None
        try:
            self.statements(io.StringIO(text), str(path))
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
            bind(name, _MACRO, "value", statement.value, where)
        else:
            found = _located(where, self._lookup, statement.selector, statement.selector)
            known = gin_search.parameters_of(found.wrapped)
            if known is not None and statement.arg_name not in known:
                hint = gin_search.other_owner(found.wrapped, statement.arg_name, known)
                raise UserError(f"{where}: {found.name} has no parameter {statement.arg_name}{hint}")
            bind(statement.scope, found.selector, statement.arg_name, statement.value, where, statement.selector)

    def check_macros(self, from_files: set[str]) -> None:
        """Checks that each macro in use is defined, and each macro of the command line is used or defined in a file."""
        defined = {scope for scope, selector in gin_config._CONFIG if selector == _MACRO}
        used = set()
        for (scope, selector), parameters in gin_config._CONFIG.items():
            for parameter, value in parameters.items():
                for reference in gin_config.iterate_references([value]):
                    macro = _macro_name(reference)
                    if macro is None:
                        continue
                    used.add(macro)
                    if macro not in defined:
                        where = _bound_at.get((scope, selector, parameter), "")
                        close = fields.nearest(macro, defined)
                        hint = f"did you mean {close[0]}?" if close else f"give it with --gin.{macro}=VALUE"
                        raise UserError(f"{where}: %{macro} has no value: {hint}")
        taken = (defined - used) & t5x_macros.NAMES
        for macro in sorted(taken):
            self._take(macro)
        for macro in sorted(defined - from_files - used - taken):
            choices = {*from_files, *used}
            raise UserError(f"--gin.{macro}: no Gin file uses {macro}{did_you_mean(macro, choices, 'macros')}")

    def _take(self, macro: str) -> None:
        """Binds the field that a macro of T5X stands for, unless a file uses the macro."""
        value, where = _value_of(macro, _MACRO, "value")
        model, _ = _value_of("", "capibara.training.trainer.Trainer", "model")
        name = model.configurable.name if isinstance(model, gin_config.ConfigurableReference) else None
        follows = {key: _macro_name(gin_config._CONFIG.get(key[:2], {}).get(key[2])) for key in _bound_at}
        bound = t5x_macros.last_bindings(_bound_at, follows)
        for statement in _located(where, t5x_macros.statements, macro, value, name, bound):
            self.statements(io.StringIO(statement), f"{where}, {macro}")


def _value_of(scope: str, selector: str, parameter: str) -> tuple[Any, str]:
    """A parameter's value with macros resolved, and where it is bound; "" if it is not bound."""
    value = gin_config._CONFIG.get((scope, selector), {}).get(parameter)
    where, seen = _bound_at.get((scope, selector, parameter), ""), set()
    while (macro := _macro_name(value)) and macro not in seen:
        seen.add(macro)
        where = _bound_at.get((macro, _MACRO, "value"), where)
        value = gin_config._CONFIG.get((macro, _MACRO), {}).get("value")
    return value, where


def bind(scope: str, selector: str, parameter: str, value: object, where: str, written: str = "") -> None:
    """Binds a parameter, as a statement of a Gin file does; `where` is the file and line for errors."""
    # `written` is the selector as written in the file: with dynamic registration Gin knows only that one.
    _located(where, gin.bind_parameter, (scope, written or selector, parameter), value)
    _bound_at.pop((scope, selector, parameter), None)  # keeps the order of the last bindings
    _bound_at[scope, selector, parameter] = where


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


# The operative configuration: what was used, saved with the run and compared when it is resumed.


def operative() -> str:
    """All parameters used so far, defaults included, as the text that a run records: only bindings, no imports.

    Parameters of functions that are passed as values (`Grpo.rewards = (@exact_answer,)`) count as used: they are called
    later.
    """
    _add_called_later()
    for (_, selector), parameters in gin_config._OPERATIVE_CONFIG.items():
        wrapped = gin_config._REGISTRY[selector].wrapped
        if isinstance(wrapped, type) and dataclasses.is_dataclass(wrapped):
            for field in dataclasses.fields(wrapped):
                # Gin leaves out defaults whose repr is not a literal; the value of an enum is one.
                if field.init and isinstance(field.default, enum.Enum):
                    parameters.setdefault(field.name, field.default.value)
    for parameters in gin_config._OPERATIVE_CONFIG.values():
        parameters.update({name: gin_record.literal(value) for name, value in parameters.items()})
    imports, modules = [*gin_config._IMPORTS], imported_modules()
    gin_config._IMPORTS.clear()  # a record has no imports: see record.py
    try:
        text = gin.operative_config_str(max_line_length=100)
    finally:
        gin_config._IMPORTS.update(imports)
    return gin_record.of(text, modules)


def imported_modules() -> set[str]:
    """The user's own modules that the parsed Gin files import."""
    return {one.module for one in gin_config._IMPORTS if one.module.partition(".")[0] not in ("capibara", "__gin__")}


def _add_called_later() -> None:
    """Marks the parameters of functions that are passed as values as used, as Gin does when they are called."""
    noted = gin_config._OPERATIVE_CONFIG
    waiting = [one for one in gin_config.iterate_references(noted) if not one.evaluate]
    while waiting:
        reference = waiting.pop()
        found, key = reference.configurable, ("/".join(reference.scopes), reference.configurable.selector)
        if key in noted:
            continue
        made_by = gin_config._find_class_construction_fn
        called = made_by(found.wrapped) if inspect.isclass(found.wrapped) else found.wrapped
        listed = (called, found.allowlist, found.denylist)
        with gin.config_scope(key[0] or None):
            bound = gin_config._get_bindings(found.selector)
        noted[key] = gin_config._get_default_configurable_parameter_values(*listed) | bound
        waiting += gin_config.iterate_references(bound)


def is_bound(name: str) -> bool:
    """Whether the parsed files or flags bind a class ("DecoderConfig") or a field ("Trainer.model")."""
    return bool(scopes(name))


def scopes(name: str) -> list[str]:
    """The scopes in which a class or field (as in `is_bound`) is bound: "qa" for qa/EvalTask.files, "" for no scope."""
    cls, _, parameter = name.partition(".")
    unset = {m: repr(v["value"]) == "%gin.REQUIRED" for (m, kind), v in gin_config._CONFIG.items() if kind == _MACRO}
    found = [(scope, v) for (scope, kind), v in gin_config._CONFIG.items() if kind.rpartition(".")[2] == cls]
    is_set = lambda v: not unset.get(_macro_name(v[parameter])) if parameter in v else v and not parameter  # noqa: E731
    return [scope for scope, v in found if is_set(v)]


def values_of(name: str) -> list[object]:
    """The values to which a field ("Trainer.steps") is bound in any scope, with macros resolved."""
    return [value for value, _ in _bindings(name)]


def given_at(name: str) -> str | None:
    """Where the user binds a field ("Trainer.steps"); "": nobody does, None: only capibara's own Gin files do."""
    return gin_search.place_of_user([where for _, where in _bindings(name)])


def _bindings(name: str) -> list[tuple[Any, str]]:
    cls, parameter = name.split(".")
    named = [at for at, bound in gin_config._CONFIG.items() if at[1].split(".")[-1] == cls and parameter in bound]
    return [_value_of(scope, selector, parameter) for scope, selector in named]


def unused() -> list[str]:
    """Bindings that no object built so far has used, as "Plan.tensor (file.gin:3)"; without macros."""
    return [f"{name} ({where})" for _, name, where in _unread()]


def check_used(later: Sequence[Callable[..., Any]] = ()) -> list[str]:
    """Applies `search.check_used` to all bindings, except those of functions that are called `later`.

    Call it when all configured objects are built.
    """
    built = [gin_config._REGISTRY[selector].wrapped for _, selector in gin_config._OPERATIVE_CONFIG]
    unread = [one for one in _unread() if one[0] not in map(inspect.unwrap, later)]
    return gin_search.check_used(unread, built, [found.wrapped for _, found in gin_config._REGISTRY.items()])


def _unread() -> list[tuple[Any, str, str]]:
    read = {(selector, name) for (_, selector), names in gin_config._OPERATIVE_CONFIG.items() for name in names}
    return [
        (gin_config._REGISTRY[selector].wrapped, f"{_minimal(scope, selector)}.{name}", where)
        for (scope, selector, name), where in _bound_at.items()
        if selector != _MACRO and (selector, name) not in read
    ]


def _minimal(scope: str, selector: str) -> str:
    return f"{scope}/" * bool(scope) + gin_config._REGISTRY.minimal_selector(selector)


def changes(old: str, new: str) -> dict[str, tuple[str | None, str | None]]:
    """Parameters whose values differ between two operative configurations, with macros resolved.

    Returns:
      {"Trainer.seed": ("0", "1")}, values as Gin text, None on the side where the parameter is not bound.
    """
    before, after = _values(old), _values(new)
    return {
        name: (before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }


def diff(old: str, new: str) -> list[str]:
    """`changes` as lines to print, "Trainer.seed: 0 -> 1", sorted by parameter."""
    return [
        f"{name}: {'(not set)' if was is None else was} -> {'(not set)' if now is None else now}"
        for name, (was, now) in changes(old, new).items()
    ]


def _values(text: str) -> Mapping[str, str]:
    """Parameter -> value as text, for a Gin file without includes."""
    statements = [
        statement
        for statement in config_parser.ConfigParser(text, Literals())
        if isinstance(statement, config_parser.BindingStatement)
    ]
    macros = {
        "/".join(filter(None, (statement.scope, statement.selector))): statement.value
        for statement in statements
        if not statement.arg_name
    }
    values = {}
    for statement in statements:
        if statement.arg_name:
            matches = gin_config._REGISTRY.matching_selectors(statement.selector)
            selector = _minimal("", matches[0]) if len(matches) == 1 else statement.selector
            name = f"{'/'.join(filter(None, (statement.scope, selector)))}.{statement.arg_name}"
            value = without_macros(statement.value, macros)
            values[name] = repr(
                _choice(matches[0], statement.arg_name) if value == AUTO and len(matches) == 1 else value
            )
    return values


def _choice(selector: str, parameter: str) -> object:
    """The value of a field that is not set, for comparison with records in which it is."""
    found = getattr(gin_config._REGISTRY[selector].wrapped, "__dataclass_fields__", {}).get(parameter)
    choice = AUTO if found is None else found.metadata.get("choice", AUTO)
    return choice.value if isinstance(choice, enum.Enum) else choice
