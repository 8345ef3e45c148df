"""What is known of a text: the languages of its code, what the code imports and uses, how deep it is nested."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence

from capibara.builders.executions import languages, patterns, syntax
from capibara.builders.routing.labelling.domains import Outcome
from capibara.builders.routing.labelling.records import Piece, PieceKind

_FENCED = re.compile(
    r"^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^ {0,3}\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE
)
_KNOWN = frozenset(
    {*syntax.GRAMMARS, "shell", "typescript", "java", "c", "cpp", "go", "rust", "ruby", "php", "r", "kotlin"}
)
_FENCED_CONFIDENCE = 0.95
_UNSURE = 0.6  # confidence below which a text without a fence or a declared language is prose
_MOST_PARSED = 1 << 16  # characters of code that are parsed
_MOST_WRONG = 0.5  # share of code that does not parse, above which its patterns say nothing
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """A piece of code.

    Attributes:
      text: the code.
      language: its language; None: unknown.
      confidence: of the language, from 0 to 1.
      imports: the modules that it imports.
      patterns: what it uses, such as "loop".
    """

    text: str
    language: str | None
    confidence: float
    imports: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a text.

    Attributes:
      text: the text.
      codes: its code, piece by piece.
      declared: the domain that its record names; None: none.
      outcome: of its run; None: it passed, or there is none.
      attempts: failing runs of which it speaks.
      earlier_imports: modules that earlier cells of its session import, and that its code uses.
    """

    text: str
    codes: tuple[Code, ...]
    declared: str | None = None
    outcome: Outcome | None = None
    attempts: int = 0
    earlier_imports: frozenset[str] = frozenset()

    @property
    def imports(self) -> frozenset[str]:
        """What its code imports, or earlier cells for it."""
        return self.earlier_imports.union(*(code.imports for code in self.codes))

    @property
    def patterns(self) -> frozenset[str]:
        """What its code uses."""
        return frozenset(name for code in self.codes for name in code.patterns)

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages of its code, sorted."""
        return tuple(sorted({code.language for code in self.codes if code.language is not None}))


def codes(pieces: Sequence[Piece], known: Collection[str]) -> tuple[Code, ...]:
    """The code in the pieces of a text.

    Args:
      pieces: the pieces.
      known: languages of the user's domains; a record may declare others, such as "en".

    Raises:
      UserError: tree-sitter or a grammar is not installed.
    """
    return tuple(code for piece in pieces for code in _of_piece(piece, known))


def _of_piece(piece: Piece, known: Collection[str]) -> Iterator[Code]:
    declared = None if piece.language is None else languages.canonical(piece.language)
    is_language = declared in _KNOWN or declared in known
    if piece.kind is PieceKind.CODE and (declared is None or is_language):
        yield _analysed(piece.text, declared, piece.confidence)
        return
    fenced = [(result[2], result[3]) for result in _FENCED.finditer(piece.text)]
    for name, text in fenced:
        if text.strip() and languages.canonical(name) not in ("text", "output", "plain"):
            yield _analysed(text, name or None, _FENCED_CONFIDENCE)
    if not fenced and piece.kind is not PieceKind.PROSE:
        whole = _analysed(piece.text, None, 1.0)
        if whole.language is not None and whole.confidence >= _UNSURE:
            yield whole


def _analysed(text: str, declared: str | None, most: float) -> Code:
    result = languages.detect(text, declared)
    name, confidence = result.name, min(result.confidence, most)
    parsed = syntax.parse(result.code, name) if name is not None and len(result.code) <= _MOST_PARSED else None
    if parsed is None or parsed.error_share > _MOST_WRONG:
        return Code(text=result.code, language=name, confidence=confidence)
    used = patterns.extract(parsed)
    return Code(
        text=result.code,
        language=name,
        confidence=confidence,
        imports=frozenset(used.imports),
        patterns=frozenset(used.counts),
    )


def nesting(code: str) -> int:
    """How deep code is nested: the most levels of its indentation, or of its brackets, whichever is more."""
    levels, deepest, depth = [0], 0, 0
    for line in code.expandtabs(4).splitlines():
        stripped = line.lstrip()
        if not stripped:
            continue
        if depth == 0:  # lines within brackets are indented for their looks
            indent = len(line) - len(stripped)
            while levels and levels[-1] > indent:
                levels.pop()
            if not levels or levels[-1] < indent:
                levels.append(indent)
        inside = depth
        for sign in _STRING.sub("", stripped):
            if sign in _OPEN:
                inside += 1
                deepest = max(deepest, inside)
            elif sign in _CLOSE:
                inside = max(0, inside - 1)
        depth = inside
        deepest = max(deepest, len(levels) - 1)
    return deepest
