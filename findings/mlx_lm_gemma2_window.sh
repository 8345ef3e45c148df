#!/bin/sh
# mlx-lm 0.32.2: Gemma 2's sliding window is not computed: every layer sees all tokens.
#
# Every second layer of Gemma 2 sees the last `sliding_window` tokens (4,096 in the published models).
#   expected: logits as transformers' at every position
#   seen:     transformers' logits up to the window, others after it, without a word
#
# Exits with 1 if mlx-lm does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import importlib.metadata
import pathlib
import sys
import tempfile

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "mlx", "mlx-lm")))
WINDOW = 16
config = transformers.Gemma2Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
for value in model.parameters():
    if value.ndim > 1:
        value.data.normal_(std=0.3)
tokens = [list(range(3, 3 + 3 * WINDOW))]
with torch.no_grad():
    logits = model(torch.tensor(tokens)).logits.numpy()[0]
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded, _ = load_model(pathlib.Path(folder))
    others = np.array(loaded(mx.array(tokens)).astype(mx.float32))[0]
differences = np.abs(others - logits).max(-1) / np.abs(logits).max()
inside, outside = differences[:WINDOW].max(), differences[WINDOW:].max()
print(f"relative difference of logits: {inside:.1e} at the first {WINDOW} tokens, {outside:.1e} after them")
sys.exit(0 if inside < 1e-4 and outside > 1e-2 else 1)
PYTHON
