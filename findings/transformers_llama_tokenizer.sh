#!/usr/bin/env bash
# The class that a tokenizer_config.json names decides what transformers 5.24.0 makes of one and the same tokenizer.json.
#
# AutoTokenizer passes a tokenizer.json on as it is where the class is PreTrainedTokenizerFast or not named. LlamaTokenizer takes
# vocabulary, merges and post-processor from the file, and makes its own normalizer and pre-tokenizer: the file's own are dropped.
# Folders of Llama 2 and its fine-tunes name that class.
#
# Expected: the ids of the tokenizers library for the tokenizer.json, and no beginning token with add_bos_token = false.
# Seen: after a special token in a text, LlamaTokenizer has one mark of a space less ("</s> c"); add_prefix_space of
# tokenizer_config.json is read by it and not by PreTrainedTokenizerFast; add_bos_token is read by neither.
#
# Ends with 0 if that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 2> "$folder/pip.log" || {
  cat "$folder/pip.log" >&2; exit 2; }
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - << 'PYTHON'
import json
import os
import sys
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)
vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
for token in (*"▁abcdefgh", "▁a"):
    vocab[token] = len(vocab)
made = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
made.add_special_tokens(["<unk>", "<s>", "</s>"])
made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
os.makedirs("model")
made.save("model/tokenizer.json")
names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEXT = "ab </s> c"
library = made.encode(TEXT).tokens
print("tokenizers           ", library)
one_less, no_prefix = ["<s>", "▁a", "b", "▁", "</s>", "▁", "c"], ["<s>", "a", "b", "▁", "</s>", "▁", "c"]
CASES = [
    ("PreTrainedTokenizerFast", {}, library),
    ("PreTrainedTokenizerFast", {"add_bos_token": False}, library),
    ("PreTrainedTokenizerFast", {"add_prefix_space": False}, library),
    ("LlamaTokenizer", {}, one_less),
    ("LlamaTokenizer", {"add_bos_token": False}, one_less),
    ("LlamaTokenizer", {"add_prefix_space": False}, no_prefix),
]
same = library == ["<s>", "▁a", "b", "▁", "</s>", "▁", "▁", "c"]
for name, changes, expected in CASES:
    with open("model/tokenizer_config.json", "w") as file:
        json.dump(names | changes | {"tokenizer_class": name}, file)
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(TEXT))
    print(name, changes, tokens)
    same &= tokens == expected
sys.exit(not same)
PYTHON
