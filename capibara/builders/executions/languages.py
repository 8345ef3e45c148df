"""Finds the language of code: what the log declares, a Markdown fence, what parses, then words that are typical."""

from __future__ import annotations

import dataclasses
import enum
import re

from capibara.builders.executions import syntax

_ALIASES = {
    **dict.fromkeys(("py", "python3", "python2", "ipython", "ipython3", "cpython", "pycon"), "python"),
    **dict.fromkeys(("js", "node", "nodejs", "ecmascript", "jsx", "deno", "bun"), "javascript"),
    **dict.fromkeys(("ts", "tsx"), "typescript"),
    **dict.fromkeys(("postgres", "postgresql", "psql", "mysql", "sqlite", "sqlite3", "duckdb", "tsql", "plsql"), "sql"),
    **dict.fromkeys(("sh", "bash", "zsh", "console", "shell-session", "terminal"), "shell"),
    "rscript": "r",
}
_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+#.-]*)[^\n]*\n")
_CELL = re.compile(r"\s*%%(bash|sh|script|javascript|js|sql|R|perl|ruby|html)\b[^\n]*\n(.*)", re.DOTALL)
_SHEBANG = re.compile(r"#!\s*\S*?(?:/|env\s+)(python|node|bash|sh|zsh|deno)[\d.]*\b")
_COMMANDS = (
    "ls|cd|cat|echo|grep|pip3?|npm|npx|yarn|git|curl|wget|sudo|apt(?:-get)?|mkdir|rm|cp|mv|chmod|chown|find|awk|sed|tar|"
    "docker|kubectl|python3?|node|make|export|source|ps|kill|ssh|scp|head|tail|touch|which|uname|df|du"
)
# Words that are typical of a language, with their weight.
_TYPICAL: dict[str, tuple[tuple[re.Pattern[str], int], ...]] = {
    "python": (
        (re.compile(r"^[ \t]*(?:async )?def \w+\(.{0,300}\).{0,100}:[ \t]*(?:#.*)?$", re.MULTILINE), 4),
        (re.compile(r"^[ \t]*(?:from [\w.]+ import |import [\w.]+(?: as \w+)?[ \t]*(?:,|$|#))", re.MULTILINE), 3),
        (
            re.compile(
                r"^[ \t]*(?:if|elif|for|while|with|try|except|class|else)\b[^;{}\n]*:[ \t]*(?:#.*)?$", re.MULTILINE
            ),
            3,
        ),
        (re.compile(r"\b(?:print|len|range|isinstance|enumerate|sorted|zip)\("), 2),
        (re.compile(r"\b(?:self|None|True|False|elif|lambda|not in|is not|__\w+__)\b"), 2),
        (re.compile(r"[fr]\"|[fr]'|\"\"\"|\*\*\w"), 1),
    ),
    "javascript": (
        (re.compile(r"\b(?:const|let|var)\s+[\w{\[$]"), 3),
        (re.compile(r"=>|===|!==|\?\?|\?\."), 3),
        (re.compile(r"\bfunction\b\s{0,8}\*?\s{0,8}\w*\s{0,8}\("), 3),
        (re.compile(r"\b(?:console\.\w+|require|module\.exports|document\.|Promise|JSON\.\w+|Math\.\w+)"), 3),
        (re.compile(r"\b(?:null|undefined|typeof|new \w+\()|\bthis\."), 2),
        (re.compile(r";[ \t]*(?://.*)?$|\)\s*\{[ \t]*$|^[ \t]*\}[;,)]*[ \t]*$", re.MULTILINE), 1),
    ),
    "sql": (
        (
            re.compile(
                r"^[ \t]*(?:SELECT\b[\s\S]{0,2000}?\bFROM\b|WITH\s+\w+\s+AS\s*\()", re.IGNORECASE | re.MULTILINE
            ),
            5,
        ),
        (re.compile(r"^[ \t]*(?:INSERT\s+INTO|UPDATE\s+\S+\s+SET|DELETE\s+FROM)\b", re.IGNORECASE | re.MULTILINE), 5),
        (re.compile(r"^[ \t]*(?:CREATE|ALTER|DROP)\s+(?:TABLE|INDEX|VIEW|UNIQUE|TEMP\w*)\b", re.I | re.MULTILINE), 5),
        (re.compile(r"\b(?:GROUP BY|ORDER BY|LEFT JOIN|INNER JOIN|HAVING|UNION ALL|PARTITION BY)\b", re.IGNORECASE), 3),
        (re.compile(r"^[ \t]*SELECT\b", re.IGNORECASE | re.MULTILINE), 2),
    ),
    "typescript": (
        (re.compile(r"\b(?:interface|enum|namespace)\s+\w+\s*\{|\btype\s+\w+(?:<\w+>)?\s*="), 4),
        (re.compile(r"[\w)\]]\??\s*:\s*(?:string|number|boolean|any|void|unknown|never|Promise<)\b"), 4),
        (re.compile(r"\b(?:const|let|import|export)\b|=>"), 1),
    ),
    "shell": (
        (
            re.compile(rf"^[ \t]*(?:\$ |# )?(?:{_COMMANDS})(?:\s+(?:--?[A-Za-z]|[\w./~$\"'*]+)|[ \t]*$)", re.MULTILINE),
            3,
        ),
        (re.compile(r"\s\|\s*(?:grep|awk|sed|sort|uniq|wc|head|tail|xargs|cut|tee)\b|\s&&\s|2>&1|>/dev/null"), 4),
        (re.compile(r"\$\{?\w+\}?|\$\(|^[ \t]*(?:fi|done|esac|then|do)[ \t]*$", re.MULTILINE), 2),
        (re.compile(r"\s--?[a-z][\w-]*(?:[= ]|$)", re.MULTILINE), 1),
    ),
}
# One that is not closed goes to the end of its line, so that the time is linear.
_STRING = re.compile(r"(?<![\w\"'])[rbfu]{0,2}(\"|')(?:(?!\1)[^\\\n]|\\.)*+(?:\1|\\?$)", re.MULTILINE)
_CLEAN, _NEAR = 0.0, 0.15  # shares of errors: it parses; it nearly does
_MOST_BYTES = 1 << 16  # code that is parsed to find its language; longer code is judged by this much of it


class Source(enum.StrEnum):
    """How a language was found."""

    DECLARED = "declared"
    FENCE = "fence"
    PARSED = "parsed"
    HEURISTIC = "heuristic"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detected:
    """The language of code.

    Attributes:
      name: such as "python"; None: unknown.
      source: how it was found.
      confidence: from 0 to 1.
      code: the code without its fence or cell magic.
    """

    name: str | None
    source: Source
    confidence: float
    code: str


def canonical(name: str) -> str:
    """One name for each language: "python" for "py" and "Python3"."""
    lowered = name.strip().lower()
    return _ALIASES.get(lowered, lowered)


def detect(code: str, declared: str | None = None) -> Detected:
    """Finds the language of code.

    Declared: 1, or 0.7 where the code does not parse in it. A fence or the magic of a cell (`%%bash`) or the first line
    (`#!`): 0.95, or 0.65. Code that parses in one language only: 0.9, or 0.75 without its typical words; in several:
    0.5 to 0.9 by how typical its words are, and 0.4 for Python where they are typical of none. Code that parses in none:
    at most 0.6, by its words.

    Args:
      code: the code.
      declared: the language that a log declares; None: none.
    """
    fence = _fenced(code)
    named, inside = fence or ("", code)
    if not named and (cell := _CELL.fullmatch(inside)):
        named, inside = {"script": "shell"}.get(cell[1], cell[1]), cell[2]
    elif not named and (first := _SHEBANG.match(inside)):
        named = first[1]
    if declared and (name := canonical(declared)) not in ("text", "plain", "unknown", "auto"):
        is_other_cell = named and not fence and canonical(named) != name  # `%%bash` in a Python notebook
        if not is_other_cell:
            return _detected(name, Source.DECLARED, (1.0, 0.7), inside)
    if named and canonical(named) not in ("text", "plain", "output"):
        return _detected(canonical(named), Source.FENCE, (0.95, 0.65), inside)
    return _by_content(inside)


def _fenced(code: str) -> tuple[str, str] | None:
    """The name and the code of a Markdown fence; None: there is none around the code."""
    text = code.strip()
    begin = _FENCE.match(text)
    if begin is None or not text.endswith(begin[1]) or len(text) < begin.end() + len(begin[1]):
        return None
    return begin[2], text[begin.end() : -len(begin[1])].rstrip(" \t").removesuffix("\n")


def _detected(name: str, source: Source, confidences: tuple[float, float], code: str) -> Detected:
    parsed = syntax.parse(code[:_MOST_BYTES], name)
    confidence = confidences[parsed is not None and parsed.error_share > _NEAR]
    return Detected(name=name, source=source, confidence=confidence, code=code)


def _by_content(code: str) -> Detected:
    sample = code[:_MOST_BYTES]
    outside = _STRING.sub('""', sample)  # a string may quote another language
    evidence = {name: _evidence(outside, name) for name in _TYPICAL}
    shares = {}
    for name in syntax.GRAMMARS:
        parsed = syntax.parse(sample, name)
        shares[name] = 1.0 if parsed is None or not parsed.root.named_child_count else parsed.error_share
    clean = [name for name in syntax.GRAMMARS if shares[name] <= _CLEAN]
    best, second = sorted(evidence.values(), reverse=True)[:2]
    typical = max(evidence, key=lambda name: evidence[name])
    if best and typical not in clean and best >= 2 * max([evidence[name] for name in clean], default=0) + 2:
        clean = []  # `ls -la` is an expression of Python as well
    if len(clean) == 1:
        return _rounded(clean[0], Source.PARSED, 0.9 if evidence[clean[0]] else 0.75, code)
    if clean:
        best, second = sorted((evidence[name] for name in clean), reverse=True)[:2]
        if not best:
            return _rounded("python", Source.PARSED, 0.4, code)
        name = max(clean, key=lambda name: evidence[name])
        return _rounded(name, Source.PARSED, 0.5 + 0.4 * (best - second) / best, code)
    if best:
        confidence = 0.6 * (best - second) / best + (0.1 if shares.get(typical, 1.0) <= _NEAR else 0.0)
        return _rounded(typical, Source.HEURISTIC, min(0.6, max(0.1, confidence)), code)
    return _rounded(None, Source.UNKNOWN, 0.0, code)


def _rounded(name: str | None, source: Source, confidence: float, code: str) -> Detected:
    return Detected(name=name, source=source, confidence=round(confidence, 3), code=code)


def _evidence(code: str, language: str) -> int:
    """The weights of what is typical of a language, each counted up to three times."""
    return sum(weight * min(3, sum(1 for _ in result.finditer(code))) for result, weight in _TYPICAL[language])
