#!/bin/sh
# transformers 5.24.0: MiniMax's lightning attention stores its decays in the checkpoint, rounded to the checkpoint's dtype.
#
# The decays are no parameters: they follow from the number of heads and of the layer. MiniMaxLightningAttention keeps them as
# persistent buffers (slope_rate, query_decay, key_decay, diagonal_decay), so that a checkpoint in bfloat16 holds them rounded,
# and from_pretrained puts these in the place of the exact ones, in whichever dtype the model is loaded.
#
# expected: a float32 model that is loaded from a bfloat16 checkpoint has the decays of the formula, since its weights are
#           those of the file; without the buffers' entries in the file it has
# seen:     the decays are those rounded to 8 bits, and the logits are others than with the same weights and exact decays
#
# Exits with 1 if transformers does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 safetensors
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)
TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
config = transformers.MiniMaxConfig(
    vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, num_local_experts=2, num_experts_per_tok=1, block_size=64,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    transformers.MiniMaxForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    stored = transformers.MiniMaxForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    file = pathlib.Path(folder, "model.safetensors")
    tensors = load_file(file)
    names = sorted({name.rpartition(".")[2] for name in tensors if name.endswith(TABLES)})
    save_file({name: x for name, x in tensors.items() if not name.endswith(TABLES)}, file, {"format": "pt"})
    exact = transformers.MiniMaxForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
layers = [model.model.layers[1].self_attn for model in (stored, exact)]
rounded, formula = (layer.query_decay.double() for layer in layers)
difference = ((rounded - formula).abs() / formula).max().item()
ids = torch.arange(192)[None] % 64
with torch.no_grad():
    logits = [model(input_ids=ids).logits for model in (stored, exact)]
change = ((logits[0] - logits[1]).norm() / logits[1].norm()).item()
same = all(torch.equal(a, b) for a, b in zip(stored.parameters(), exact.parameters()))
print("buffers in the file:", names)
print(f"equal parameters: {same}; largest relative difference of a decay {difference:.2%}, of the logits {change:.2e}")
sys.exit(0 if names and same and difference > 1e-3 and change > 1e-5 else 1)
PYTHON
