"""Explains code, errors and fixes in sentences, each of which is written only where facts support it.

The facts are the syntax tree, what was printed, and the traceback: a line is named only if the traceback's own text of it
is that of the code, and a cause only if the code has what the message speaks of.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from capibara.builders.executions.fixes import Fix
from capibara.builders.executions.reading import Execution
from capibara.builders.executions.runs import Run

_PHRASES = {
    "loop": "a loop",
    "comprehension": "a comprehension",
    "generator_expression": "a generator expression",
    "generator": "a generator",
    "lambda": "an anonymous function",
    "conditional": "a conditional",
    "match": "a choice between cases",
    "error_handling": "error handling",
    "context_manager": "a context manager",
    "async": "asynchronous code",
    "promise": "promises",
    "format_string": "formatted strings",
    "join": "a join",
    "aggregate": "an aggregate",
    "group_by": "groups",
    "having": "a condition on groups",
    "subquery": "a subquery",
    "common_table_expression": "a common table expression",
    "window_function": "a window function",
    "set_operation": "a set operation",
    "order_by": "an order",
    "transaction": "a transaction",
    "embedded_sql": "SQL in a string",
}
_MOST_CHANGED = 500  # lines that are compared one by one
_SHOWN = 200  # characters of a value or line that are quoted
_SEARCHED = 1000  # characters of a message or line in which a cause is looked for
_FRAME = re.compile(
    r"^[ \t]*(?:File \"(?P<file>[^\"\n]*)\", line (?P<line>\d{1,9})|Cell In\[\d+\], line (?P<cell>\d{1,9})|"
    r"File <ipython-input-[^>\n]*>:(?P<input>\d{1,9}))[^\n]*$",
    re.MULTILINE,
)
_ARROW = re.compile(r"^-+> ?(\d{1,9}) ?(.*)$", re.MULTILINE)
_OWN_FILE = re.compile(r"<[^>]*>|.*(?:ipykernel|ipython|cell|main|script|tmp)[^/]*", re.IGNORECASE)
_LAST = re.compile(r"^(?P<name>[A-Za-z_][\w.]*+)(?<=\w)(?::|$)", re.MULTILINE)


class Explanation(NamedTuple):
    """An explanation.

    Attributes:
      sentences: each rests on a fact of its own.
    """

    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The sentences as one paragraph."""
        return " ".join(self.sentences)


class Location(NamedTuple):
    """The line of the code that failed: its number, from 1, and its text without indentation."""

    number: int
    text: str


def of_code(run: Run) -> Explanation:
    """What code that passed defines, uses and shows; without sentences where nothing is known."""
    patterns, sentences = run.patterns, []
    functions = [name for name in patterns.functions if not name.startswith("__")]
    for names, item, many in ((patterns.classes, "class", "classes"), (functions, "function", "functions")):
        if names:
            sentences.append(f"It defines the {item if len(names) == 1 else many} {_names(names)}.")
    if patterns.counts.get("recursion"):
        sentences.append("A function calls itself.")
    if patterns.imports:
        noun = "module" if len(patterns.imports) == 1 else "modules"
        sentences.append(f"It imports the {noun} {_names(patterns.imports)}.")
    if patterns.tables:
        noun = "table" if len(patterns.tables) == 1 else "tables"
        sentences.append(f"It names the {noun} {_names(patterns.tables)}.")
    used = [phrase for name, phrase in _PHRASES.items() if patterns.counts.get(name)]
    if used:
        sentences.append(f"It uses {_listed(used)}.")
    if run.execution.passed and (shown := _shown(run.execution)):
        sentences.append(shown)
    return Explanation(tuple(sentences))


def _shown(execution: Execution) -> str | None:
    """What an execution displays, in a sentence."""
    if (value := execution.value) and "\n" not in value and len(value) <= _SHOWN:
        return f"Its value is `{value}`."
    printed = execution.stdout.rstrip("\n")
    if not printed.strip():
        return None
    lines = printed.split("\n")
    if len(lines) == 1 and len(printed) <= _SHOWN:
        return f"It prints `{printed}`."
    if len(lines) > 1 and lines[0].strip() and len(lines[0]) <= _SHOWN:
        return f"It prints {len(lines)} lines, the first of which is `{lines[0]}`."
    return None


def of_failure(run: Run) -> Explanation:
    """Why code failed; without sentences where the traceback contradicts the error or the code."""
    failure = run.execution.failure
    if failure is None or not failure.name or not _agrees(failure.name, failure.traceback):
        return Explanation(())
    message = failure.value.strip().split("\n")[0]
    short = message if len(message) <= _SHOWN else f"{message[:_SHOWN]}..."
    raised = f"`{failure.name}: {short}`" if short else f"`{failure.name}`"
    location = locate(run.execution)
    if location is None:
        sentences = [f"The code fails with {raised}."]
    else:
        sentences = [f"The code fails with {raised} in line {location.number}, `{location.text[:_SHOWN]}`."]
    if cause := _cause(run, failure.name, message, location):
        sentences.append(cause)
    return Explanation(tuple(sentences))


def _agrees(name: str, traceback: str) -> bool:
    """Whether a traceback, if there is one, ends with the error."""
    if not traceback.strip():
        return True
    last = name.rpartition(".")[2]
    result = [match["name"].rpartition(".")[2] for match in _LAST.finditer(traceback)]
    return last in result[-3:] if result else last in traceback


def locate(execution: Execution) -> Location | None:
    """The last line of the code that the traceback names, and whose text there is that of the code."""
    failure = execution.failure
    if failure is None or not failure.traceback:
        return None
    lines = execution.code.split("\n")
    result: Location | None = None
    for number, text in _named_lines(failure.traceback):
        if not 1 <= number <= len(lines) or not (line := lines[number - 1].strip()):
            continue
        if text is None or text.strip() == line:
            result = Location(number, line)
    return result


def _named_lines(traceback: str) -> list[tuple[int, str | None]]:
    """The line numbers of a traceback, with the text that it shows for each; None: it shows none."""
    result: list[tuple[int, int, str | None]] = [
        (match.start(), int(match[1]), match[2]) for match in _ARROW.finditer(traceback)
    ]
    if not result:
        for match in _FRAME.finditer(traceback):
            number = int(match["line"] or match["cell"] or match["input"])
            begin = match.end() + 1
            end = traceback.find("\n", begin)
            text = traceback[begin : end if end >= 0 else None]
            is_shown = text.startswith("    ") and text.strip() != ""
            if not is_shown and match["file"] is not None and not _OWN_FILE.fullmatch(match["file"]):
                continue  # a line of a library, whose number says nothing about this code
            result.append((match.start(), number, text if is_shown else None))
    return [(number, text) for _, number, text in sorted(result)]


class _Facts(NamedTuple):
    """What a cause is checked against: the match of the message, the line that failed, the code, the run."""

    message: re.Match[str]
    line: str
    code: str
    run: Run


_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|#.*")


def _word(name: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _undefined(facts: _Facts) -> str | None:
    name = facts.message["name"]
    if not _word(name, facts.line or facts.code):
        return None
    assigned = re.search(
        rf"(?<![\w.]){re.escape(name)}\s*(?::[^=\n]{{1,200}})?=(?!=)|(?:def|class|import|as|for|function|const|let|var)\s+{re.escape(name)}\b",
        facts.code,
    )
    where = "is used before it has a value" if assigned else "is used, but this code does not define it"
    return f"The name `{name}` {where}."


def _missing_module(facts: _Facts) -> str | None:
    top = facts.message["name"].partition(".")[0]
    if top not in facts.run.patterns.imports:
        return None
    return f"The module `{top}` is imported, but it is not installed where the code ran."


def _if_in_line(pattern: str, sentence: str) -> Callable[[_Facts], str | None]:
    compiled = re.compile(pattern)

    def supported(facts: _Facts) -> str | None:
        if compiled.search(_STRING.sub("''", facts.line)) is None:
            return None
        return sentence.format(**facts.message.groupdict())

    return supported


def _attribute(facts: _Facts) -> str | None:
    name, kind = facts.message["name"], facts.message["kind"]
    if re.search(rf"\.\s*{re.escape(name)}(?!\w)", facts.line or facts.code) is None:
        return None
    return f"An object of the type `{kind}` has no attribute `{name}`."


def _operands(facts: _Facts) -> str | None:
    sign = facts.message["sign"].split()[0].rstrip(":=") or facts.message["sign"]
    if sign not in facts.line:
        return None
    return f"The operator `{sign}` was used on a value of type `{facts.message['one']}` and one of type `{facts.message['two']}`."


def _arguments(facts: _Facts) -> str | None:
    name = facts.message["name"].rpartition(".")[2]
    if name not in (*facts.run.patterns.calls, *facts.run.patterns.functions, *facts.run.patterns.classes):
        return None
    return f"The call of `{name}` does not have the arguments that it takes."


def _syntax(facts: _Facts) -> str | None:
    return "The code does not parse." if facts.run.error_share else None


def _table(facts: _Facts) -> str | None:
    name = facts.message["name"].rpartition(".")[2]
    if name not in facts.run.patterns.tables and not _word(name, facts.code):
        return None
    return f"The table `{name}` does not exist where the query ran."


def _column(facts: _Facts) -> str | None:
    name = facts.message["name"].rpartition(".")[2]
    return f"No table of the query has a column `{name}`." if _word(name, facts.code) else None


_NAME = r"[`'\"]?(?P<name>[\w.]+)[`'\"]?"
_Cause = tuple[str, re.Pattern[str], Callable[[_Facts], str | None]]
# The name of the error, its message, and what checks the cause and says it.
_CAUSES: tuple[_Cause, ...] = (
    ("NameError", re.compile(rf"name {_NAME} is not defined"), _undefined),
    ("ReferenceError", re.compile(r"(?P<name>[\w$]+) is not defined"), _undefined),
    ("UnboundLocalError", re.compile(rf"variable {_NAME}"), _undefined),
    ("ModuleNotFoundError", re.compile(rf"No module named {_NAME}"), _missing_module),
    ("ZeroDivisionError", re.compile(""), _if_in_line(r"/|%|divmod|\*\*|pow", "A divisor in this line is zero.")),
    ("IndexError", re.compile("out of range"), _if_in_line(r"\[|pop\(", "An index in this line is past the end of its sequence.")),
    ("KeyError", re.compile(r"(?P<key>.+)"), _if_in_line(r"\[|pop\(|remove\(", "The key {key} is not in the mapping.")),
    ("AttributeError", re.compile(r"'(?P<kind>[\w.]+)' object has no attribute '(?P<name>\w+)'"), _attribute),
    ("TypeError", re.compile(r"unsupported operand type\(s\) for (?P<sign>[^:]+): '(?P<one>[\w.]+)' and '(?P<two>[\w.]+)'"), _operands),
    ("TypeError", re.compile(r"(?P<name>[\w.]+)\(\) (?:missing|takes|got an unexpected)"), _arguments),
    ("TypeError", re.compile(r"'(?P<kind>[\w.]+)' object is not callable"), _if_in_line(r"\(", "A value of the type `{kind}` is called as if it were a function.")),
    ("TypeError", re.compile(r"'(?P<kind>[\w.]+)' object is not subscriptable"), _if_in_line(r"\[", "A value of the type `{kind}` has no items to index.")),
    ("TypeError", re.compile(r"'(?P<kind>[\w.]+)' object is not iterable"), _if_in_line(r"\bfor\b|\*|\(|=", "A value of the type `{kind}` cannot be iterated over.")),
    ("TypeError", re.compile(r"can only concatenate str \(not \"(?P<kind>[\w.]+)\"\) to str"), _if_in_line(r"\+", "A text is concatenated with a value of the type `{kind}`, which must be converted first.")),
    ("TypeError", re.compile(r"Cannot read propert(?:y|ies) of (?P<kind>undefined|null)"), _if_in_line(r"\.|\[", "A property is read of a value that is `{kind}`.")),
    ("ValueError", re.compile(r"invalid literal for int\(\) with base \d+: (?P<text>.+)"), _if_in_line(r"int\(|map\(", "The text {text} is no whole number.")),
    ("ValueError", re.compile(r"could not convert string to float: (?P<text>.+)"), _if_in_line(r"float\(|map\(", "The text {text} is no number.")),
    ("ValueError", re.compile(r"(?:too many|not enough) values to unpack"), _if_in_line(r",.*=|\bfor\b.*,", "The number of values does not match the number of names that they are unpacked to.")),
    ("FileNotFoundError", re.compile(r"No such file or directory: (?P<path>.+)"), _if_in_line(r"\(", "The file {path} does not exist where the code ran.")),
    ("AssertionError", re.compile(""), _if_in_line(r"^assert\b|\bassert ", "The condition of this assertion does not hold.")),
    ("RecursionError", re.compile("recursion"), lambda facts: "A function calls itself without an end." if facts.run.patterns.counts.get("recursion") else None),
    ("SyntaxError", re.compile(""), _syntax),
    ("IndentationError", re.compile(""), _syntax),
    ("", re.compile(rf"no such table: {_NAME}"), _table),
    ("", re.compile(rf"relation {_NAME} does not exist"), _table),
    ("", re.compile(rf"no such column: {_NAME}"), _column),
    ("", re.compile(rf"column {_NAME} does not exist"), _column),
)  # fmt: skip


def _cause(run: Run, name: str, message: str, location: Location | None) -> str | None:
    """The cause that the message states, if the code supports it."""
    short = name.rpartition(".")[2]
    if len(message) > _SEARCHED:
        return None
    for error, pattern, supported in _CAUSES:
        if error in ("", short) and (result := pattern.search(message)) is not None:
            line = location.text[:_SEARCHED] if location else ""
            return supported(_Facts(result, line, run.execution.code, run))
    return None


def of_fix(fix: Fix) -> Explanation:
    """What a fix changes: the failing line, an import or a definition; without sentences where the change is large."""
    before, after = fix.before, fix.after
    sentences = []
    failure = before.execution.failure
    added = [name for name in after.patterns.imports if name not in before.patterns.imports]
    if added:
        sentences.append(f"The fix imports {_names(added)}.")
    changes = _changed_lines(before.execution.code, after.execution.code)
    location = locate(before.execution)
    for number, old, new in changes:
        if location is not None and number == location.number and old and new and "\n" not in new:
            sentences.append(f"Line {number} becomes `{new.strip()[:_SHOWN]}`.")
    defined = [
        name
        for name in (*after.patterns.functions, *after.patterns.classes)
        if name not in (*before.patterns.functions, *before.patterns.classes)
    ]
    if defined and failure is not None and any(_word(name, failure.value) for name in defined):
        sentences.append(f"The fix defines {_names(defined)}.")
    if not sentences and len(changes) == 1 and changes[0][1] and changes[0][2] and "\n" not in changes[0][2]:
        number, old, new = changes[0]
        sentences.append(f"The fix changes line {number} from `{old.strip()[:_SHOWN]}` to `{new.strip()[:_SHOWN]}`.")
    if sentences:
        shown = _shown(after.execution)
        sentences.append("It then runs without an error." + (f" {shown}" if shown else ""))
    return Explanation(tuple(sentences))


def _changed_lines(before: str, after: str) -> list[tuple[int, str, str]]:
    """The changes as (number of the old line from 1, old line or "", new lines or ""), one for each old line.

    Without changes where more than _MOST_CHANGED lines lie between the first and the last one.
    """
    old, new = before.split("\n"), after.split("\n")
    first = len(os.path.commonprefix([old, new]))
    last = len(os.path.commonprefix([old[first:][::-1], new[first:][::-1]]))
    old_part, new_part = old[first : len(old) - last], new[first : len(new) - last]
    if max(len(old_part), len(new_part)) > _MOST_CHANGED:
        return []
    changes = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old_part, new_part, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        if j - i == m - k:
            changes += [(first + i + n + 1, old_part[i + n], new_part[k + n]) for n in range(j - i)]
        else:
            line = old_part[i] if j - i == 1 else ""
            changes.append((first + i + 1, line, "\n".join(new_part[k:m])))
    return changes


def _names(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[:6]]
    return _listed(shown + ([f"{len(names) - 6} more"] if len(names) > 6 else []))


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
