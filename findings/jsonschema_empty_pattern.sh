#!/bin/sh
# jsonschema 4.26.0: an empty pattern of patternProperties does not count for additionalProperties.
#
#   expected: {"patternProperties": {"": {}}, "additionalProperties": false} matches {"a": 1}: every name has a match of the empty expression
#   seen:     it does not match; with the pattern "^" it does
#
# Exits with 1 if jsonschema does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet jsonschema==4.26.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
"$PEER_PYTHON" - <<'PYTHON'
import importlib.metadata

import jsonschema


def matches(pattern):
    schema = {"patternProperties": {pattern: {}}, "additionalProperties": False}
    return jsonschema.Draft202012Validator(schema).is_valid({"a": 1})


print("jsonschema", importlib.metadata.version("jsonschema"))
print("pattern '': ", "matches" if matches("") else "does not match")
print("pattern '^':", "matches" if matches("^") else "does not match")
raise SystemExit(0 if matches("^") and not matches("") else 1)
PYTHON
