#!/bin/sh
# transformers 5.24.0: an RWKV that has answered once in evaluation mode is saved with other weights, and batches generate other text.
#
# For float16, evaluation divides the output weights of each rescale_every layers by 2, in place, and the stream with them.
#   expected: save_pretrained writes the model that answers, and a row of a batch generates what it generates alone
#   seen:     the file has the divided weights, which are divided again when it is loaded; with a state, a step of several rows adds
#             [rows, 1, width] to [rows, width], so that each row reads the last tokens of all
# Beside these, a new model's time_first is 1 in all channels (torch.ones_like of what the paper begins with), and one of a single
# layer ends with a ZeroDivisionError.
#
# Exits with 1 if transformers does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - "$folder" <<'PYTHON'
import sys

import torch
from transformers import RwkvConfig, RwkvForCausalLM, logging

import transformers

logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
torch.manual_seed(0)
SIZES = dict(vocab_size=96, context_length=64, hidden_size=32, intermediate_size=48, rescale_every=2)
model = RwkvForCausalLM(RwkvConfig(**SIZES, num_hidden_layers=4))
starts = model.rwkv.blocks[0].attention.time_first.unique().tolist()
for parameter in model.parameters():
    parameter.data = torch.randn_like(parameter) * 0.4
tokens = torch.randint(3, 96, (2, 12))
seen = {}
with torch.no_grad():
    for name in ("before", "after"):
        if name == "after":
            answer = model.eval()(tokens, use_cache=False).logits
        model.save_pretrained(f"{sys.argv[1]}/{name}")
    for name in ("before", "after"):
        load = RwkvForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}").eval()
        seen[name] = float((load(tokens, use_cache=False).logits - answer).abs().max())
        print(f"saved {name} it has answered: logits of the loaded file differ by {seen[name]:.1e} of {float(answer.abs().max()):.1f}")
    options = dict(max_new_tokens=6, do_sample=False)
    together = model.generate(tokens[:, :8], **options)[:, 8:].tolist()
    alone = [model.generate(row[None, :8], **options)[0, 8:].tolist() for row in tokens]
print("generated together", together, "alone", alone)
try:
    RwkvForCausalLM(RwkvConfig(**SIZES, num_hidden_layers=1))
    of_one = "works"
except ZeroDivisionError:
    of_one = "ZeroDivisionError"
print("time_first of a new model", starts, "one layer", of_one)
as_described = seen["before"] < 1e-3 < seen["after"] and together != alone and starts == [1.0] and of_one != "works"
sys.exit(0 if as_described else 1)
PYTHON
