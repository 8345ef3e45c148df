#!/bin/sh
# llguidance 1.9.1: integers of a JSON Schema become float64, so that a wrong document matches.
#
#   expected: {"const": 9007199254740993} matches 9007199254740993 alone, or is refused
#   seen:     it matches 9007199254740992 alone; {"minimum": 10 ** 20, "maximum": 10 ** 20 + 3} matches 9223372036854775807
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
import json

import llguidance


class Tokens:
    """A tokenizer with a token for each byte, and an end token."""

    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    special_token_ids, eos_token_id, bos_token_id = [256], 256, None

    def __call__(self, text):
        return list(text.encode())


def matches(schema, text):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens())), grammar, log_level=0)
    return matcher.validate_tokens(list(text)) == len(text) and matcher.consume_tokens(list(text)) and matcher.is_accepting()


print("llguidance", importlib.metadata.version("llguidance"))
between = {"type": "integer", "minimum": 10**20, "maximum": 10**20 + 3}
cases = [
    ({"const": 2**53 + 1}, 2**53 + 1),
    ({"const": 2**53 + 1}, 2**53),
    (between, 10**20 + 1),
    (between, 2**63 - 1),
]
seen = [bool(matches(schema, str(value).encode())) for schema, value in cases]
for (schema, value), matched in zip(cases, seen):
    print(json.dumps(schema), "matches" if matched else "does not match", value)
raise SystemExit(seen != [False, True, False, True])
PYTHON
