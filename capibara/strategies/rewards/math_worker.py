"""The process in which math-verify reads formulas and compares them, with bounds on its memory.

`math_process` starts this file as a script. A request is a line of JSON on standard input, the answer a line on standard output.
SymPy evaluates what it reads, and some short formulas take for ever or all memory: the process that asks ends this one then.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import resource
import signal
import sys

MEMORY_BYTES = 2**31  # of address space
_RECORDS = 256  # answers of records whose formulas are remembered
_LATEX = re.compile(r"\$|\\boxed|\\\(|\\\[")
_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2}")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
_BOXED = re.compile(r"\\boxed\b")


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that asks
    import math_verify

    logging.disable(logging.CRITICAL)  # each formula that it does not read has a line
    latex, plain = math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()

    def read(text: str, *kinds: object) -> list:
        return math_verify.parse(text, [*kinds], parsing_timeout=None)

    @functools.lru_cache(maxsize=_RECORDS)
    def right(text: str) -> list:
        formula = formula_of(text)
        return [] if formula is None else read(formula, latex)

    right(r"$\frac{1}{2}$")  # loads what is loaded late, before there is a limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        expected, answer = right(request["right"]), request.get("answer")
        if answer is None:
            result = bool(expected)
        elif request["boxed"] and not _BOXED.search(answer):
            result = False
        else:
            predicted = read(answer, latex, plain)
            result = math_verify.verify(expected, predicted, timeout_seconds=None)
        print(json.dumps(result), flush=True)


def formula_of(text: str) -> str | None:
    """A record's answer as LaTeX; None: it has words outside of LaTeX, and could be read in several ways.

    math-verify 0.9.0 reads the first number alone of 2^{10}, 3:2 and 1.5e3 where they are not marked as LaTeX.
    """
    text = text.rpartition("####")[2].strip()  # GSM8K's solutions come before it
    if _LATEX.search(text):
        return text
    if (number := _SCIENTIFIC.fullmatch(text)) is not None:
        return rf"${number[1]} \cdot 10^{{{number[2]}}}$"
    if not text or (not _NUMBER.fullmatch(text) and _WORD.search(_COMMAND.sub(" ", text))):
        return None
    return f"${text}$"


if __name__ == "__main__":
    main()
