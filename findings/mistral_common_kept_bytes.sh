#!/bin/sh
# mistral-common 1.13.1: decoding with special tokens kept writes bytes as <0x0A>, and spaces as U+2581.
#
# Its SentencePiece tokenizers (of Mistral 7B v0.2 and v0.3, and Mistral Large 2411) spell a line break as a byte's token.
#   expected: decode(ids, SpecialTokenPolicy.KEEP) is the text with the special tokens' names in it
#   seen:     a text of two lines is "one<0x0A>two" and spaces are U+2581; without special tokens (IGNORE) it is right, and so are
#             both with Tekken
#
# Exits with 1 if mistral-common does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet mistral-common==1.13.1 sentencepiece==0.2.3
    PEER_PYTHON="$folder/venv/bin/python"
fi
"$PEER_PYTHON" - <<'PYTHON'
import pathlib
import sys

import mistral_common
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

TEXT = "one line\ntwo"
data = pathlib.Path(mistral_common.__file__).parent / "data"
seen = {}
for name in ("mistral_instruct_tokenizer_240323.model.v3", "tekken_240911.json"):
    tokenizer = MistralTokenizer.from_file(str(data / name)).instruct_tokenizer.tokenizer
    ids = tokenizer.encode(TEXT, bos=False, eos=False)
    for policy in (SpecialTokenPolicy.IGNORE, SpecialTokenPolicy.KEEP):
        seen[name.split("_")[0], policy.name] = tokenizer.decode(ids, special_token_policy=policy)
print("mistral-common", mistral_common.__version__)
for (name, policy), text in seen.items():
    print(f"{name:8} {policy:6} {text!r}")
wrong = seen.pop(("mistral", "KEEP"))
sys.exit(not (set(seen.values()) == {TEXT} and wrong == "\u2581one\u2581line<0x0A>two"))
PYTHON
