"""What xgrammar's grammars say of documents: groups of schema and tests on standard input, counts on standard output."""

from __future__ import annotations

import json
import statistics
import sys
import time

import xgrammar

BYTES = 256


def main() -> None:
    """Reads groups, writes counts."""
    spelled = [bytes([byte]) for byte in range(BYTES)] + [b"</s>"]
    about = xgrammar.TokenizerInfo(spelled, xgrammar.VocabType.RAW, vocab_size=BYTES + 1, stop_token_ids=[BYTES])
    compiler = xgrammar.GrammarCompiler(about)
    counts, took_s = dict.fromkeys(("schemas", "compiled", "right", "wrong", "missed"), 0), []
    for group in json.load(sys.stdin):
        counts["schemas"] += 1
        began_s = time.perf_counter()
        try:
            grammar = compiler.compile_json_schema(json.dumps(group["schema"]), any_whitespace=True)
        except Exception:
            continue
        took_s.append(time.perf_counter() - began_s)
        counts["compiled"] += 1
        for test in group["tests"]:
            matcher = xgrammar.GrammarMatcher(grammar)
            text = json.dumps(test["data"], ensure_ascii=False).encode("utf-8", "surrogatepass")
            allowed = all(matcher.accept_token(byte) for byte in text) and matcher.accept_token(BYTES)
            counts["right" if allowed == test["valid"] else "wrong" if allowed else "missed"] += 1
    print(json.dumps(counts | {"slowest_s": max(took_s), "median_s": statistics.median(took_s)}))


if __name__ == "__main__":
    main()
