#!/bin/sh
# llguidance 1.9.1: no limit bounds the time and memory of an intersection of regular expressions in Lark's notation.
#
#   expected: LLParserLimits with 1,000 of everything refuse what takes more
#   seen:     /(.*a.{30})*/ & /(.*b.{31})*/ & ... of four take 1 s and more than 100 MiB while they are compiled, and are no error; of
#             four with 60 more than 12 s, and of five with 20 too
#
# Exits with 1 if llguidance does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet llguidance==1.9.1
    PEER_PYTHON="$folder/venv/bin/python"
fi
"$PEER_PYTHON" - <<'PYTHON'
import importlib.metadata
import resource
import time

import llguidance

names = ("max_lexer_states", "max_grammar_size", "initial_lexer_fuel", "step_lexer_fuel")
limits = llguidance.LLParserLimits(**dict.fromkeys(names, 1000))


def compiled(count, letters):
    """CPU seconds, MiB, and whether it is an error."""
    parts = (f"/(.*{'abcd'[i]}.{{{i + letters}}})*/" for i in range(count))
    grammar = llguidance.LLMatcher.grammar_from_lark("start: T\nT: " + " & ".join(parts))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    took = time.process_time() - began
    return took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, matcher.is_error()


print("llguidance", importlib.metadata.version("llguidance"))
small, large = compiled(3, 10), compiled(4, 30)
for name, (took, mib, failed) in (("three of 10", small), ("four of 30", large)):
    print(f"{name}: {took:.2f} s, {mib} MiB, {'refused' if failed else 'compiled'}")
raise SystemExit(large[2] or large[0] < 20 * small[0] or large[1] < 50)
PYTHON
