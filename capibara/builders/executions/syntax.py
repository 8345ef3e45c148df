"""Parses code with tree-sitter: Python, JavaScript and SQL."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from capibara.core import extras

if TYPE_CHECKING:
    import tree_sitter

GRAMMARS = ("python", "javascript", "sql")
_MAGIC = re.compile(r"^[ \t]*(?:%{1,2}[A-Za-z]|!{1,2}[A-Za-z./~])[^\n]*", re.MULTILINE)
_WHY = "the parsing of code"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Syntax:
    """Parsed code.

    Attributes:
      language: one of GRAMMARS.
      source: what was parsed, in UTF-8.
      root: the tree.
      error_share: the part of its bytes, spaces excepted, that does not parse, from 0 to 1.
      magics: lines of IPython's own, such as `%matplotlib inline`; they are blank in `source`.
    """

    language: str
    source: bytes
    root: tree_sitter.Node
    error_share: float
    magics: int

    def captures(self, query: str) -> dict[str, list[tree_sitter.Node]]:
        """The nodes that a query of tree-sitter captures, by the name of the capture, in their order."""
        cursor = _compiled(self.language, query)
        result = cursor.captures(self.root)
        return {name: sorted(nodes, key=lambda node: node.start_byte) for name, nodes in result.items()}

    def text(self, node: tree_sitter.Node) -> str:
        """The code of a node."""
        return self.source[node.start_byte : node.end_byte].decode()


def parse(code: str, language: str) -> Syntax | None:
    """Parses code; None: there is no grammar for the language.

    Raises:
      UserError: tree-sitter or a grammar is not installed.
    """
    if language not in GRAMMARS:
        return None
    magics = 0
    if language == "python":
        code, magics = _MAGIC.subn(lambda result: " " * len(result[0]), code)
    source = code.encode("utf-8", "replace")
    root = _parser(language).parse(source).root_node
    size = len(b"".join(source.split()))
    wrong = sum(_errors(root, source)) if root.has_error else 0
    share = min(1.0, wrong / size) if size else 0.0
    return Syntax(language=language, source=source, root=root, error_share=share, magics=magics)


def without_magics(code: str) -> str:
    """Python code with `pass` for lines of IPython's own, such as `%matplotlib inline`, so that Python itself parses it."""
    return _MAGIC.sub(lambda result: f"{result[0][: -len(result[0].lstrip())]}pass", code)


def _errors(root: tree_sitter.Node, source: bytes) -> Iterator[int]:
    """The sizes of what does not parse, spaces excepted; a part that is missing counts as a byte."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node.is_missing:
            yield 1
        elif node.is_error:
            yield max(1, len(b"".join(source[node.start_byte : node.end_byte].split())))
        elif node.has_error:
            pending += node.children


@functools.cache
def grammar(language: str) -> tree_sitter.Language:
    """The grammar of a language.

    Raises:
      UserError: it is not installed.
    """
    library = extras.require("tree_sitter", extra="builders", why=_WHY)
    module = f"tree_sitter_{language}"
    extras.require(module, extra="builders", why=_WHY)
    return library.Language(importlib.import_module(module).language())


@functools.cache
def _parser(language: str) -> tree_sitter.Parser:
    return extras.require("tree_sitter", extra="builders", why=_WHY).Parser(grammar(language))


@functools.cache
def _compiled(language: str, query: str) -> tree_sitter.QueryCursor:
    library = extras.require("tree_sitter", extra="builders", why=_WHY)
    return library.QueryCursor(library.Query(grammar(language), query))
