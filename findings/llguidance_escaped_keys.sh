#!/bin/sh
# llguidance 1.9.1: an escaped property's name is taken for another name, so that a wrong document matches.
#
#   expected: {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}} refuses {"\u0061": 1}, whose key
#             is a; {"minProperties": 2} refuses {"a": 1, "a": 2}, which has one
#   seen:     both match; with json_allowed_escapes without u the first is refused
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


def matches(schema, text, **options):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens())), grammar, log_level=0)
    return matcher.validate_tokens(list(text)) == len(text) and matcher.consume_tokens(list(text)) and matcher.is_accepting()


print("llguidance", importlib.metadata.version("llguidance"))
named = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
cases = [
    (named, r'{"a":1}', {}),
    (named, r'{"\u0061":1}', {}),
    (named, r'{"\u0061":1}', {"json_allowed_escapes": 'nrbtf\\"'}),
    ({"type": "object", "minProperties": 2}, '{"a":1}', {}),
    ({"type": "object", "minProperties": 2}, '{"a":1,"a":2}', {}),
]
seen = [bool(matches(schema, text.encode(), **options)) for schema, text, options in cases]
for (schema, text, options), matched in zip(cases, seen):
    print(json.dumps(schema), "matches" if matched else "does not match", text, options or "")
raise SystemExit(seen != [False, True, False, False, True])
PYTHON
