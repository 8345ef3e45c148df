#!/bin/sh
# pydantic_core 2.50.4: `from_json(..., allow_inf_nan=False)` reads a number that no float64 holds as infinity.
#
#   expected: ValueError, as for NaN and Infinity
#   seen:     1e400 is inf, which json.dumps writes as Infinity: no JSON
#
# Exits with 1 if pydantic_core does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet pydantic_core==2.50.4
    PEER_PYTHON="$folder/venv/bin/python"
fi
"$PEER_PYTHON" - <<'PYTHON'
import json

import pydantic_core


def read(text):
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return f"refused: {error}"


print("pydantic_core", pydantic_core.__version__)
seen = {text: read(text) for text in ("NaN", "Infinity", "1e400")}
for text, value in seen.items():
    print(text, "->", value if isinstance(value, str) else json.dumps(value))
refused = [isinstance(value, str) for value in seen.values()]
raise SystemExit(refused != [True, True, False] or json.dumps(seen["1e400"]) != "Infinity")
PYTHON
