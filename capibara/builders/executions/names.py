"""The global names of Python code, and the modules that earlier cells of a session have imported for it."""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import symtable
import warnings
from collections.abc import Iterator, Mapping

from capibara.builders.executions import syntax

KNOWN = frozenset({*dir(builtins), "__name__", "__doc__", "__file__"})
_MOST_PARSED = 1 << 16  # characters of code that is parsed
_MOST_NAMES = 200  # that are remembered of a session
_FAILED_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The global names of Python code.

    Attributes:
      used: those that it reads.
      bound: those that it assigns, defines or imports.
      imported: those that it imports, and the top module that each comes from; of `import *` the names are unknown.
    """

    used: frozenset[str]
    bound: frozenset[str]
    imported: Mapping[str, str]


def of_code(code: str) -> Names | None:
    """The global names of Python code; None: it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the code
            top = symtable.symtable(code, "<cell>", "exec")
            imported = dict(_imported(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    used: set[str] = set()
    bound: set[str] = set()
    pending = [top]
    while pending:
        table = pending.pop()
        pending += table.get_children()
        for item in table.get_symbols():
            if table is top or item.is_global():
                used |= {item.get_name()} if item.is_referenced() else set()
                bound |= {item.get_name()} if item.is_assigned() or item.is_imported() or item.is_namespace() else set()
    return Names(used=frozenset(used), bound=frozenset(bound), imported=imported)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names that imports outside of functions and classes bind, with their top modules, in their order."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for name in node.names:
                module = name.name.partition(".")[0]
                yield name.asname or module, module
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module = node.module.partition(".")[0]
            yield from ((item.asname or item.name, module) for item in node.names if item.name != "*")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            pending += [*ast.iter_child_nodes(node)][::-1]


class EarlierImports:
    """Follows the sessions of a log: which names come from which modules.

    Args:
      sessions: so many are followed at once; the one that was used least recently is forgotten.
    """

    def __init__(self, sessions: int):
        self._most = sessions
        self._sessions: collections.OrderedDict[str, dict[str, str]] = collections.OrderedDict()

    def add(self, session: str, code: str, error: str | None) -> tuple[str, ...]:
        """Takes the next cell of a session.

        Args:
          session: its name.
          code: of the cell, in Python.
          error: the name of its error; None: it passed.

        Returns:
          The modules of the earlier cells' imports whose names the cell uses, sorted.
        """
        names = of_code(syntax.without_magics(code)) if len(code) <= _MOST_PARSED else None
        if names is None:
            return ()
        known = self._of(session)
        result = {known[name] for name in names.used - names.bound if name in known}
        if error is None:
            for name in names.bound & known.keys():
                del known[name]
        if error not in _FAILED_IMPORTS:
            for name, module in names.imported.items():
                if len(known) < _MOST_NAMES or name in known:
                    known[name] = module
        return tuple(sorted(result))

    def _of(self, session: str) -> dict[str, str]:
        result = self._sessions.setdefault(session, {})
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)
        return result
