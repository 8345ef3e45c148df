#!/usr/bin/env bash
# Added tokens of a byte-level tokenizer (tokenizers 0.23.3) do not decode to their own text.
#
# ByteLevel spells the 256 bytes as 256 visible characters, among them most of Latin-1 ("é" is byte 0xE9). The text of an added
# token is not spelled so: it stands in the vocabulary as it is. Decoding cannot tell. Where every character of an added token
# is one of the 256, the decoder takes the characters for bytes; where one is not (a space, "ź", "東"), the text passes.
#
# Expected: decode(encode(text)) == text for a tokenizer that has the text as an added token, whether special or not.
# Seen: "Größe" -> "Gr\ufffd\ufffde", "été" -> "\ufffdt\ufffd", and the spelling "ÃŁ" becomes the letter "ß", while
# "Zürich café" and "Łódź" come back whole. Special tokens do the same with skip_special_tokens=False.
#
# Ends with 0 if that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 2> "$folder/pip.log" || {
  cat "$folder/pip.log" >&2; exit 2; }
"$folder/env/bin/python" - << 'PYTHON'
import sys
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EXPECTED = {
    "Größe": "Gr\ufffd\ufffde",
    "été": "\ufffdt\ufffd",
    "ÃŁ": "ß",
    "Zürich café": "Zürich café",
    "Łódź": "Łódź",
    "東京": "東京",
}
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
print("tokenizers", tokenizers.__version__)
same = True
for special in (False, True):
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    plain = {text: tokenizer.decode(tokenizer.encode(text).ids) for text in EXPECTED}
    same &= all(text == decoded for text, decoded in plain.items())  # as bytes, without added tokens, all come back
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in EXPECTED])
    for text, expected in EXPECTED.items():
        ids = tokenizer.encode(text).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        print(f"special={special} {text!r} -> {ids} -> {decoded!r}")
        same &= len(ids) == 1 and decoded == expected
sys.exit(not same)
PYTHON
