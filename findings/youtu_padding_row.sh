#!/bin/sh
# transformers 5.24.0: loading a Youtu model sets the stored embedding of its padding token to zeros.
#
# The class's own initialisation writes through `.data`, past the flag that protects what was read from a file.
#   expected: after save_pretrained and from_pretrained the embedding is as it was, as for a Llama
#   seen:     Youtu's row pad_token_id is all zeros, every other row as it was
#
# Exits with 1 if transformers does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import sys
import tempfile

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
PADDING = 3
SIZES = dict(
    vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
    pad_token_id=PADDING, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
LATENT = dict(kv_lora_rank=12, q_lora_rank=20, qk_rope_head_dim=8, v_head_dim=10, qk_nope_head_dim=6)


def changed(config):
    """The rows of the embedding that are others after a model was saved and loaded, and whether they are zeros."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(1 + torch.rand(table.shape))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    rows = (again != table).any(dim=1).nonzero().flatten().tolist()
    return rows, not rows or not again[rows].any().item()


found = {
    "youtu": changed(transformers.YoutuConfig(**SIZES, **LATENT)),
    "llama": changed(transformers.LlamaConfig(**SIZES)),
}
for name, (rows, zeros) in found.items():
    print(f"{name}: rows that loading has changed: {rows}{' (to zeros)' if rows and zeros else ''}")
sys.exit(0 if found == {"youtu": ([PADDING], True), "llama": ([], True)} else 1)
PYTHON
