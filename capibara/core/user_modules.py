"""The user's own modules: imports those that a Gin file or a flag names, and explains the errors that they raise.

Their folders are appended to sys.path only when such a module is requested: opening a downloaded file imports nothing
from its folder.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Collection, Iterator

from capibara.core.types import UserError

TRACEBACK = "CAPIBARA_TRACEBACK"  # environment variable: if it is set, an error of the user's code keeps its traceback
_OF_THE_DEVICES = ("JaxRuntimeError", "XlaRuntimeError")  # such as no memory, whoever computed
_LONGEST = 300  # characters of a library's message that are quoted
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_folders: list[str] = []
_roots: dict[str, str] = {}  # module that the user has named -> the file or folder with its code


def search(*folders: str | os.PathLike) -> None:
    """Sets the folders that are searched after sys.path."""
    _folders[:] = [os.path.abspath(os.path.expanduser(folder)) for folder in folders]


def add_folders() -> None:
    """Appends the folders to sys.path; call it when the user has named a module to import."""
    known = {*map(os.path.abspath, sys.path)}
    sys.path += [folder for folder in dict.fromkeys(_folders) if folder not in known]


def load(name: str) -> types.ModuleType:
    """Imports a module that the user has named.

    Raises:
      ModuleNotFoundError: there is no module of that name.
      UserError: it ends the process.
    """
    add_folders()
    is_loaded = name.partition(".")[0] in sys.modules
    try:
        module = importlib.import_module(name)
    except SystemExit as error:
        raise failed_import(error, name) from error
    note(name, is_loaded=is_loaded)
    return module


def note(name: str, *, is_loaded: bool) -> None:
    """Notes that the user has named a module, which is imported now: from then on `explained` knows its code.

    Args:
      name: of the module.
      is_loaded: whether its package was imported before: an installed one is then a library of capibara's.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or _below(file, _PACKAGE) or is_loaded and _is_installed(file):
        return
    is_package = os.path.basename(file) == "__init__.py"
    _roots[name] = os.path.abspath(file if _is_installed(file) and not is_package else os.path.dirname(file))


def _below(path: str, folder: str) -> bool:
    return os.path.abspath(path) == folder or os.path.abspath(path).startswith(folder + os.sep)


def _is_installed(path: str) -> bool:
    return any(_below(path, folder) for folder in _LIBRARIES)


def is_own(path: str) -> bool:
    """Whether a source file is the user's: of a module that the user has named, or beside one."""
    if _below(path, _PACKAGE):
        return False
    roots = [root for root in _roots.values() if _below(path, root)]
    return any(_is_installed(root) for root in roots) if _is_installed(path) else bool(roots)


def files_of(names: Collection[str]) -> list[str]:
    """The source files that modules of the user's need: their own, and those of imported modules beside or below them.

    Args:
      names: of imported modules; those that a package installs are omitted.
    """
    named = [file for name in names if (file := getattr(sys.modules.get(name), "__file__", None)) is not None]
    roots = {os.path.dirname(os.path.abspath(file)) for file in named if not _is_installed(file)}
    # A package's folder is that of its outermost part: what lies beside that can be imported, too.
    while inner := {root for root in roots if os.path.exists(os.path.join(root, "__init__.py"))}:
        roots = roots - inner | {os.path.dirname(root) for root in inner}
    loaded = [file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None)) is not None]
    is_own = [
        file for file in loaded if file.endswith(".py") and not _is_installed(file) and not _below(file, _PACKAGE)
    ]
    return sorted({os.path.abspath(file) for file in is_own if any(_below(file, root) for root in roots)})


def own_class(value: object) -> str | None:
    """The name of a class, or of the class of an object, if it is defined in the user's code; None: it is not."""
    cls = value if isinstance(value, type) else type(value)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__qualname__ if file is not None and is_own(file) else None


def explained(error: BaseException) -> UserError | None:
    """The one line for an error that the user's code raised, or that a call with wrong arguments of it raised.

    Returns:
      None: it is no error of the user's code, or one that capibara itself raised on purpose.
    """
    is_internal = type(error).__module__.partition(".")[0] == "capibara" or type(error).__name__ in _OF_THE_DEVICES
    if is_internal or isinstance(error, KeyboardInterrupt):
        return None
    if (where := _raised_in(error) or _called(error)) is None:
        return None
    return UserError(f"{where}: {said_by(error)}: mend it there; {TRACEBACK}=1 shows the whole traceback")


@contextlib.contextmanager
def attributed(action: str, *parts: object) -> Iterator[None]:
    """A context whose errors are the user's mistakes if a class of the user's takes part: JAX traces what it returned.

    Args:
      action: what is done, for the error.
      parts: classes, or objects of them; without one of the user's among them nothing is changed.

    Raises:
      UserError: it failed, and a class of the user's took part.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        classes = [name for part in parts if (name := own_class(part)) is not None]
        if isinstance(error, UserError) or not classes or explained(error) is not None:
            raise
        names = " and ".join(dict.fromkeys(classes))
        raise UserError(
            f"{action} with {names} fails: {said_by(error)}: mend {names}; {TRACEBACK}=1 shows the whole traceback"
        ) from error


def failed_import(error: BaseException, module: str) -> UserError:
    """The one line for an error while a module that the user has named was imported."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        where = f"{_shown(error.filename)}:{error.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        user_frames = [
            f for f in frames if not _below(f.filename, _PACKAGE) and not _is_installed(f.filename)
        ] or frames[-1:]
        where = f"{_shown(user_frames[-1].filename)}:{user_frames[-1].lineno}"
    return UserError(f"{module} cannot be imported: {where}: {said_by(error)}: mend it there")


def said_by(error: BaseException) -> str:
    """The type and the message of an error, on one line."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(message.split("\n--------------------")[0].split())
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'}".removesuffix(
        ": "
    )


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _raised_in(error: BaseException) -> str | None:
    """The innermost line of the user's code in a traceback."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        if is_own(frame.f_code.co_filename):
            return f"{_shown(frame.f_code.co_filename)}:{line}, {_qualified(frame.f_code)}"
    return None


def _qualified(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")


def _called(error: BaseException) -> str | None:
    """The class or function of the user's that a call did not fit, by Python's message."""
    if not isinstance(error, TypeError):
        return None
    message = str(error)
    call = re.match(r"([\w.]+)\(\) (?:takes|missing|got) ", message)
    abstract = re.match(r"Can't instantiate abstract class (\w+) with", message)
    for name in (match[1].split(".") for match in (call, abstract) if match):
        for result in _named(name[0]):
            owner = inspect.unwrap(getattr(result, name[-1], result) if len(name) > 1 else result)
            line = inspect.getsourcelines(owner)[1]
            return f"{_shown(inspect.getsourcefile(owner) or '')}:{line}, {'.'.join(name)}"
    return None


def defined_in(selector: str) -> str | None:
    """The file of the user's that defines the class or function; None: there is none.

    Args:
      selector: a name, or one with the last parts of its module's before it, as in Gin.
    """
    module, _, name = selector.rpartition(".")
    for result in _named(name):
        if not module or f".{result.__module__}".endswith(f".{module}"):
            return _shown(inspect.getsourcefile(result) or "")
    return None


def _named(name: str) -> Iterator[type | types.FunctionType]:
    """Classes and functions of this name in the user's modules, the last that was imported first."""
    for module in reversed([*sys.modules.values()]):
        file = getattr(module, "__file__", None)
        result = getattr(module, name, None) if isinstance(file, str) and is_own(file) else None
        if isinstance(result, (type, types.FunctionType)) and result.__module__ == module.__name__:
            yield result


def without_working_directory() -> None:
    """Removes the working directory from the head of sys.path, where `python -m capibara.VERB` puts it.

    Otherwise a file beside a downloaded model would be imported in place of a module of the same name. The directory stays
    if capibara itself can only be imported from there.
    """
    arguments = sys.orig_argv[1:]
    module = next(
        (arguments[at + 1] if arg == "-m" else arg[2:] for at, arg in enumerate(arguments[:-1]) if arg[:2] == "-m"), ""
    )
    if module.partition(".")[0] != "capibara" or sys.flags.safe_path or not sys.path:
        return
    if os.path.abspath(sys.path[0] or ".") == os.getcwd():
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        elsewhere = importlib.machinery.PathFinder.find_spec("capibara", sys.path[1:])
        if root != os.getcwd() or (elsewhere is not None and elsewhere.origin is not None):
            del sys.path[0]
